"""Tables for notebooks: plain HTML in which all text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a line of titles."""
    body = "".join(_row("td", row) for row in rows)
    return f"<table><thead>{_row('th', head)}</thead><tbody>{body}</tbody></table>"


def html_line(text: str) -> str:
    """A line of text."""
    return f"<div>{escape(text)}</div>"


def _row(tag: str, cells: Sequence[str]) -> str:
    style = "text-align:left;vertical-align:top;white-space:pre-wrap"
    return "<tr>" + "".join(f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell in cells) + "</tr>"
