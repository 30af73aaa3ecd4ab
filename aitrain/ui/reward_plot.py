"""Draws reward.png, the curve of rewards and held-out scores, if matplotlib is installed."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from aitrain.runs.run_folder import write_bytes
from aitrain.ui.overview import Overview

WINDOW = 20
"""The thick line is a moving mean over 1/WINDOW of the steps."""


def draw_curve(overview: Overview) -> Path | None:
    """Draw reward and held-out score over the steps; returns None without matplotlib, or with fewer than two steps. A
    picture that is newer than the metrics and the result is kept."""
    run, (steps, series) = overview.run, overview.curves
    rewards = series.get("reward", [])
    if find_spec("matplotlib") is None or len(rewards) < 2:
        return None
    picture = run.path / "reward.png"
    sources = [path.stat().st_mtime_ns for path in (run.metrics, run.result) if path.exists()]
    if picture.exists() and len(sources) == 2 and picture.stat().st_mtime_ns > max(sources):
        return picture
    from matplotlib.figure import Figure  # here, because it is an extra; without pyplot, which keeps state and windows

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    values = [float("nan") if value is None else value for value in rewards]
    half = max(1, len(values) // WINDOW // 2)
    windows = [[v for v in values[max(0, n - half) : n + half + 1] if v == v] for n in range(len(values))]
    smooth = [sum(window) / len(window) if window else float("nan") for window in windows]
    axes.plot(steps, values, color="#2f6fde", alpha=0.3, linewidth=1)
    axes.plot(steps, smooth, color="#2f6fde", linewidth=2, label="reward")
    if held_out := [(point.step, point.sampled["mean"]) for point in overview.held_out if point.sampled]:
        axes.plot(*zip(*held_out, strict=True), "o--", color="#d1690e", markersize=5, label="held-out score")
    axes.set(xlabel="step", ylabel="score", title=run.path.name)
    if all(0.0 <= reward <= 1.0 for reward in overview.rewards):
        axes.set_ylim(-0.02, 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    image = BytesIO()
    figure.savefig(image, format="png", dpi=160)
    write_bytes(picture, image.getvalue(), durable=False)
    return picture
