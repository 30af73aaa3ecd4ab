"""Draws reward.png, the curve of rewards and held-out scores, if matplotlib is installed."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from aitrain.runs.run_folder import write_bytes
from aitrain.ui.dashboard import averaged
from aitrain.ui.overview import Overview

POINTS = 40
"""Points of the thick line, each the mean of neighbouring steps."""


def draw_curve(overview: Overview) -> Path | None:
    """Draw reward and held-out score over the steps; returns None without matplotlib, or with fewer than two steps."""
    run, (steps, series) = overview.run, overview.curves
    rewards = series.get("reward", [])
    if find_spec("matplotlib") is None or len(overview.rewards) < 2:
        return None
    from matplotlib.figure import Figure  # here, because it is an extra; without pyplot, which keeps state and windows

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    known = [(step, reward) for step, reward in zip(steps, rewards, strict=True) if reward is not None]
    smooth = zip(*(averaged(values, POINTS) for values in zip(*known, strict=True)), strict=True)
    axes.plot(*zip(*known, strict=True), color="#2f6fde", alpha=0.3, linewidth=1)
    axes.plot(*zip(*smooth, strict=True), color="#2f6fde", linewidth=2, label="reward")
    if held_out := [(point.step, point.sampled["mean"]) for point in overview.held_out if point.sampled]:
        axes.plot(*zip(*held_out, strict=True), "o--", color="#d1690e", markersize=5, label="held-out score")
    axes.set(xlabel="step", ylabel="score", title=run.path.name)
    if all(0.0 <= reward <= 1.0 for reward in overview.rewards):
        axes.set_ylim(-0.02, 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    image = BytesIO()
    figure.savefig(image, format="png", dpi=160)
    picture = run.path / "reward.png"
    write_bytes(picture, image.getvalue(), durable=False)
    return picture
