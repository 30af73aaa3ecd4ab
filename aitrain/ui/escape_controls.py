"""Escapes control characters in text of models and environments before a terminal shows it."""

from __future__ import annotations

import unicodedata

HARMLESS = "\n\t\u200c\u200d"
"""Line ends and tabs; and what joins and parts letters and emojis, which some scripts need."""
INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of characters that move the cursor, turn the writing around, or cannot be encoded."""


def escape_controls(text: str) -> str:
    r"""The text with all that a terminal would obey, or not show, written out: an escape becomes `\x1b`."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(_written_out(character) for character in text)


def _written_out(character: str) -> str:
    if character in HARMLESS or unicodedata.category(character) not in INVISIBLE:
        return character
    return ascii(character)[1:-1]
