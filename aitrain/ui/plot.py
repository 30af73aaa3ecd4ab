"""Curves drawn with block characters, or with ASCII where the terminal cannot show those."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*%@"
LEAST_SPAN = 0.1
"""Minimum range of a sparkline's height, so that noise does not look like a change."""


def curve(values: Sequence[float], width: int = 60, height: int = 5, ramp: str = BLOCKS) -> list[str]:
    """Draw values as `height` lines, averaged into at most `width` columns. The axis covers 0 to 1 and all values."""
    columns = averaged(values, width) if values else []
    low, high = min([0.0, *columns]), max([1.0, *columns])
    bar = "|" if ramp == ASCII else "│"
    margin, lines = max(len(f"{low:.1f}"), len(f"{high:.1f}")), []
    for row in reversed(range(height)):
        filled = (min(max((value - low) / (high - low) * height - row, 0.0), 1.0) for value in columns)
        label = {height - 1: f"{high:.1f}", 0: f"{low:.1f}"}.get(row, "")
        lines.append(f"{label:>{margin}} {bar}" + "".join(ramp[round(share * (len(ramp) - 1))] for share in filled))
    return lines


def sparkline(values: Sequence[float], width: int, ramp: str = BLOCKS) -> str:
    """Draw values on one line from the lowest to the highest, averaged into at most `width` columns."""
    if not values or width < 1:
        return ""
    columns = averaged(values, width)
    low, high = min(columns), max(columns)
    span, blocks = max(high - low, LEAST_SPAN), ramp[1:]
    return "".join(blocks[round((value - low) / span * (len(blocks) - 1))] for value in columns)


def averaged(values: Sequence[float], width: int) -> list[float]:
    """Means of neighbouring values, at most `width` of them."""
    count = max(1, min(width, len(values)))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
