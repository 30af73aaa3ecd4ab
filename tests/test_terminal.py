"""A run in the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from aitrain.events import Ended, Evaluated, Note, Phase, Step
from aitrain.report.terminal import Screen, curve, duration, show_result, step_line
from aitrain.run_folder import Result

RUN = [
    Phase("loading"),
    Note("2 dropped"),
    Evaluated("before", 0.25, 0.1),
    *(Step(n, 9, 0.5, 9 - n) for n in range(1, 10)),
]


def shown(terminal: bool) -> str:
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=terminal, width=80, highlight=False))
    for event in [*RUN, Ended("finished", 9)]:
        screen(event)
    return out.getvalue()


def test_in_a_terminal_the_steps_share_one_line() -> None:
    text = shown(terminal=True)
    assert "step 3/9" in text
    assert text.count("\n") == 2  # the note and the held-out score stay
    assert text.endswith("\r\x1b[2K")


def test_in_a_pipe_there_are_few_lines_and_no_control_characters() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines == [
        "loading",
        "! 2 dropped",
        "held-out score before: 0.250 sampled, 0.100 greedy",
        "step 9/9   reward 0.500   0s left",
    ]


def test_a_step_without_a_score_says_so() -> None:
    assert step_line(Step(1, 2, None, 75)) == "step 1/2   reward -   1m 15s left"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m 00s"), (125, "2m 05s"), (7800, "2h 10m")])
def test_durations_read_like_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_curve_is_as_high_as_its_values() -> None:
    lines = curve([0.0, 0.5, 1.0], height=2)
    assert [line[5:] for line in lines] == ["  █", " ██"]
    assert lines[0].startswith("1.0 │")
    assert lines[-1].startswith("0.0 │")


def test_a_long_curve_is_averaged_into_its_width() -> None:
    assert {len(line) for line in curve([0.3] * 1000, width=60)} == {65}


def test_the_result_is_a_table_a_curve_and_the_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "reward": n / 9}) + "\n" for n in range(1, 10))
    )
    out = io.StringIO()
    show_result(Result(tmp_path, "finished", 9, 61.0, 0.25, 0.9, 0.1, None), Console(file=out, width=80))
    text = out.getvalue()
    assert "sampled          0.250  0.900" in text
    assert "greedy           0.100      -" in text
    assert "9 steps in 1m 01s" in text
    assert "█" in text
    assert f"run folder: {tmp_path}" in text.replace("\n", "")
