"""How a command shows its error: a line on standard error, or an event on standard output for programs."""

from __future__ import annotations

import sys

from aitrain.events import Failed, encode
from aitrain.redaction import redact
from aitrain.ui.escape_controls import escape_controls


def show_error(message: str, code: int, as_json: bool = False, warnings: str = "") -> int:
    """Show the error of a command, without secrets; returns its exit code."""
    if as_json:
        sys.stdout.write(encode(Failed(message, code, warnings=warnings)))
    else:
        shown = escape_controls(redact(message))
        print(shown if message.startswith("Usage:") else f"aitrain: {shown}", file=sys.stderr)
    return code
