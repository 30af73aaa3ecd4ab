"""Seconds as text, such as `1m 18s`."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`8s`, `3m 05s`, `2h 10m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
