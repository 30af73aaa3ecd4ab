"""Draws data_flow.svg from data_flow.dot with Graphviz's `dot`, for light and dark pages."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("data_flow.dot")
STYLE = "svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}"


def digest() -> str:
    """Identifies the text that a drawing was made from."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def main() -> None:
    """Write the drawing beside its source."""
    drawn = subprocess.run(["dot", "-Tsvg", str(SOURCE)], capture_output=True, text=True, check=True).stdout
    svg = re.sub(r"<!--.*?-->\n?", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    svg = svg.replace('fill="white"', 'fill="none"')
    svg = re.sub(r'="black"', '="currentColor"', svg)
    svg = svg.replace("<text ", '<text fill="currentColor" ')
    svg = svg.replace(">", f">\n<!-- data_flow.dot {digest()} -->\n<style>{STYLE}</style>", 1)
    SOURCE.with_suffix(".svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
