"""A run in the terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from aitrain import redaction
from aitrain.events import Ended, Evaluated, Event, Note, Phase, Step
from aitrain.runs.held_out import ScoreTable
from aitrain.runs.result import Result
from aitrain.ui.output import escape_controls
from aitrain.ui.overview import Overview
from aitrain.ui.terminal import Screen, run_texts
from tests.conftest import json_lines, write
from tests.runs.scorings import interval
from tests.screens import Terminal

TIMES = {"step": 0.6, "optimize": 0.3, "generate": 0.25, "environment": 0.05}
STEPS = [Step(n, 9, n / 10, 90 - 10 * n, 0.125, 0.03, 0.0, 1234.5, TIMES) for n in range(1, 10)]
RUN: list[Event] = [Phase("loading"), Note("2 dropped"), Evaluated("before", 0.25, 0.1), *STEPS]


def watched(events: list[Event], width: int = 80) -> Terminal:
    """A terminal in which these events were shown, by a screen that leaves its block, as the run has not ended."""
    shown = Terminal(width)
    with Screen(shown.console()) as screen:
        screen.start()
        for event in events:
            screen(event)
    return shown


# -- while it runs


def test_a_run_under_way_is_a_few_lines_that_are_drawn_over_and_no_wider_than_the_terminal() -> None:
    assert watched(RUN).shown == [
        "! 2 dropped",
        "step      9/9  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  0s left",
        "reward    0.900  ▁▂▃▄▅▅▆▇█  0.10 to 0.90",
        "held-out  0.250 before",
        "groups    12% flat (all scores equal)",
        "episodes  3% truncated  0% failed",
        "speed     1,234 tokens/s  0.60s a step",
        "          generate 0.25s  environment 0.05s  optimize 0.30s",
    ]
    assert max(map(len, watched(RUN, width=20).shown)) <= 20


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext ~", "plain\n\ttext ~"),
        ("\x1b[31m\x07\b\x7f\x00\r\n", r"\x1b[31m\x07\x08\x7f\x00\r" + "\n"),
        ("\x9b\u202e\u2066\u200b\ufeff\u2028\U000e0041\udcff", r"\x9b\u202e\u2066\u200b\ufeff\u2028\U000e0041\udcff"),
    ],
)  # fmt: skip
def test_what_a_terminal_would_obey_is_written_out(text: str, shown: str) -> None:
    assert escape_controls(text) == shown
    for event in (Note(text), Phase(text)):
        assert shown.splitlines()[0] in watched([Note("stays"), event]).shown[1]


# -- where nothing can be drawn over


def test_in_a_pipe_there_are_few_lines_and_no_control_characters() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, highlight=False)) as screen:
        for event in [*RUN, Ended("finished", 9)]:
            screen(event)
    assert out.getvalue().splitlines() == [
        "loading",
        "! 2 dropped",
        "held-out score before: 0.250 sampled, 0.100 greedy",
        "step 1/9  1m 20s left  reward 0.100  groups 12% flat (all scores equal)  episodes 3% truncated  0% failed"
        "  speed 1,234 tokens/s  0.60s a step  generate 0.25s  environment 0.05s  optimize 0.30s",
    ]


# -- logs


def test_a_log_that_is_too_large_keeps_its_beginning_and_its_end_with_what_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redaction, "MOST_LOG", 1000)
    monkeypatch.setattr(redaction, "KEPT_LOG", 100)
    path = tmp_path / "train.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"".join(b"line %d\n" % number for number in range(1000)))
        redaction.cut(str(path))
        log.write(b"the end\n")

    said = path.read_text()
    assert said.startswith("line 0\nline 1\n")
    assert said.endswith("line 998\nline 999\nthe end\n")
    assert len(said) < 400


# -- when it is over


def test_the_result_is_a_table_a_curve_the_verdict_what_is_where_and_what_to_do_next(tmp_path: Path) -> None:
    lines = [{"step": n, "reward": n / 9} for n in range(1, 10)]
    files = {
        "metrics.jsonl": json_lines(lines),
        "config.yaml": "rl_env: x.py\nlr: 3.0e-4\n",
        "rollouts/rank0.jsonl": "",
    }
    write(tmp_path, {**files, "model/adapter_config.json": ""})
    before, after, change = interval(0.5, 0.4, 0.6), interval(0.25, 0.15, 0.35), interval(-0.25, -0.375, -0.125)
    change["p_value"] = 0.01
    scores: ScoreTable = {"sampled": {"before": before, "after": after, "change": change}}
    made = replace(
        Result(tmp_path, "finished", 9, 61.0, 0.5, 0.25, 0.1, None), scores=scores, verdict="worse",
        failures={"exception": 7, "timeout": 1}, episodes=4_000,
    )  # fmt: skip
    made.write()
    shown = Terminal(300, 60)
    for line in run_texts(Overview(tmp_path)):
        shown.console().print(line)

    text = "\n".join(shown.shown)
    for part in (
        "sampled   0.500 [0.400, 0.600]  0.250 [0.150, 0.350]  -0.250 [-0.375, -0.125]",
        "worse: -0.250 [-0.375, -0.125] over 64 cases",
        "█",
        f"model: {tmp_path}/model",
        "failures: 8 of 4,000 episodes (exception 7, timeout 1)",
        f"aitrain compare {tmp_path}",
    ):
        assert part in text
