"""Escapes control characters in text of models and environments before a terminal shows it."""

from __future__ import annotations

import unicodedata

HARMLESS = "\n\t\u200c\u200d"
"""Line ends, tabs, and the zero-width joiner and non-joiner, which some scripts and emojis need."""
INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that move the cursor, change the direction of text, or cannot be encoded."""


def escape_controls(text: str) -> str:
    r"""The text with control and invisible characters escaped: an escape becomes `\x1b`."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(_written_out(character) for character in text)


def _written_out(character: str) -> str:
    if character in HARMLESS or unicodedata.category(character) not in INVISIBLE:
        return character
    return ascii(character)[1:-1]
