"""Draws reward.png, the curve of rewards and held-out scores, if matplotlib is installed."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from aitrain.runs.metrics_line import read_metrics
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder, write_bytes
from aitrain.ui.summary import curves, held_out_curve

WINDOW = 20
"""The thick line is a moving mean over 1/WINDOW of the steps."""


def draw_curve(folder: RunFolder, rollouts: RolloutIndex) -> Path | None:
    """Draw reward and held-out score over the steps; returns None without matplotlib, or with fewer than two steps. A
    picture that is newer than the metrics and the result is kept."""
    drawn = curves(read_metrics(folder.metrics))
    rewards = drawn["series"].get("reward")
    if find_spec("matplotlib") is None or rewards is None or len(rewards) < 2:
        return None
    picture = folder.path / "reward.png"
    if _is_newer(picture, folder.metrics, folder.result):
        return picture
    from matplotlib.figure import Figure  # here, because it is an extra; without pyplot, which keeps state and windows

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    values = [float("nan") if value is None else value for value in rewards]
    half = max(1, len(values) // WINDOW // 2)
    windows = [[v for v in values[max(0, n - half) : n + half + 1] if v == v] for n in range(len(values))]
    smooth = [sum(window) / len(window) if window else float("nan") for window in windows]
    axes.plot(drawn["step"], values, color="#2f6fde", alpha=0.3, linewidth=1)
    axes.plot(drawn["step"], smooth, color="#2f6fde", linewidth=2, label="reward")
    held_out = [
        (point["step"], point["sampled"]["mean"]) for point in held_out_curve(folder, rollouts) if point["sampled"]
    ]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o--", color="#d1690e", markersize=5, label="held-out score")
    axes.set(xlabel="step", ylabel="score", title=folder.path.name)
    if all(0.0 <= reward <= 1.0 for reward in rewards if reward is not None):
        axes.set_ylim(-0.02, 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    image = BytesIO()
    figure.savefig(image, format="png", dpi=160)
    write_bytes(picture, image.getvalue(), durable=False)
    return picture


def _is_newer(picture: Path, *others: Path) -> bool:
    try:
        return all(picture.stat().st_mtime_ns > other.stat().st_mtime_ns for other in others)
    except FileNotFoundError:
        return False
