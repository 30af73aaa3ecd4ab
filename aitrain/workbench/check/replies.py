"""Replies that are derived from a reference or from a prompt: its bare answer, other answers in its format, ..."""

from __future__ import annotations

import re

_WRAPPED = (
    re.compile(r"<(\w+)>\s*((?:(?!</?\1>).)+?)\s*</\1>\s*\Z", re.DOTALL),
    re.compile(r"(\\boxed)\{((?:[^{}]|\{[^{}]*\})*)\}[^\w]*\Z"),
    re.compile(r"(####)\s*(.+?)\s*\Z", re.DOTALL),
    re.compile(r"(?i)\b(answer(?: is)?)\s*[:=]?\s+([^\n]+?)\.?\s*\Z"),
)
"""Formats of an answer at the end of a reply; group 2 is the answer."""


def core_of(reply: str) -> str:
    """The answer in a reply, without tags, marks and what leads to it; the whole reply if it has no known format."""
    for pattern in _WRAPPED:
        found = pattern.search(reply)
        if found and found[2].strip():
            return found[2].strip()
    return reply.strip()
