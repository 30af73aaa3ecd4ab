"""Draws data_flow.svg and step.svg from their .dot files with Graphviz's `dot`, for light and dark pages."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

SOURCES = [Path(__file__).with_name(name) for name in ("data_flow.dot", "step.dot")]
STYLE = "svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}"


def digest(source: Path) -> str:
    """Identifies the text that a drawing was made from."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


def draw(source: Path) -> None:
    """Write the drawing beside its source."""
    drawn = subprocess.run(["dot", "-Tsvg", str(source)], capture_output=True, text=True, check=True).stdout
    svg = re.sub(r"<!--.*?-->\n?", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    svg = svg.replace('fill="white"', 'fill="none"')
    svg = re.sub(r'="black"', '="currentColor"', svg)
    svg = svg.replace("<text ", '<text fill="currentColor" ')
    svg = svg.replace(">", f">\n<!-- {source.name} {digest(source)} -->\n<style>{STYLE}</style>", 1)
    source.with_suffix(".svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    for each in SOURCES:
        draw(each)
