"""`aitrain show`: a run in the terminal, and that nothing in it is a command to the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import json_lines, run_in_process, write
from tests.runs.scorings import interval
from tests.ui.conftest import record

EVIL = "\x1b[2J\x1b]0;pwned\x07\x9b31m\r over\u202e txt \x00\x08\u2066"


def said(step: int, group: int, case: Any, score: float | None, **more: Any) -> dict[str, Any]:
    if score is None:
        more |= {"error": {"kind": "raised", "place": "score_episode", "message": f"no {EVIL}"}, "stop": "env_error"}
    text = f"it is {EVIL}" + " word" * 40
    messages = [{"role": "user", "content": f"say {case}:"}, {"role": "assistant", "content": text}]
    more |= {"messages": messages, "row": {"word": EVIL}, "metrics": {f"m{EVIL}": 1.0}}
    return record(step=step, group=group, case_idx=case, score=score, **more)


RECORDS = [
    said(0, 0, "h1", 0.1, eval_phase="before_sampled"),
    *(said(1, n // 2, n // 2, score) for n, score in enumerate([0.25, 0.75, 1.0, None])),
    said(2, 0, 7, 0.5),
    said(2, 0, 0, 0.0),
    said(2, 1, "h1", 0.9, eval_phase="after_sampled"),
    said(2, 1, "h2", 0.3, eval_phase="after_sampled"),
]


@pytest.fixture
def run(here: Path) -> Path:
    """A run named `mine` in runs/, whose model and environment mean harm."""
    row = {"before": interval(0.1, 0.0, 0.2), "after": interval(0.6, 0.5, 0.7), "change": interval(0.5, 0.3, 0.7)}
    result = {"steps": 2, "seconds": 61.0, "train_cases": 8, "eval_cases": 2, "scores": {"sampled": row}}
    metrics = [{"step": n, "reward": 0.25 * n} for n in (1, 2)]
    environment = {"class": f"Env{EVIL}", "module": "mine"}
    files = {
        "config.yaml": "model: tiny\n",
        "status.json": json.dumps({"status": "finished", "step": 2}),
        "result.json": json.dumps(result),
        "environment.json": json.dumps(environment),
        "metrics.jsonl": json_lines(metrics),
        "rollouts/rank0.jsonl": json_lines(RECORDS),
    }
    write(here / "runs" / "mine", dict(files))
    return here / "runs" / "mine"


def shown(arguments: str) -> str:
    """What the command writes, in this process."""
    code, out, err = run_in_process(f"show mine {arguments}")
    assert code == 0, err
    return out


def test_a_run_is_its_scores_its_curve_and_what_its_episodes_came_to(run: Path) -> None:
    text = shown("")
    assert text.startswith("mine  finished  2 steps in 1m 01s\n")
    assert re.search(r"sampled +0\.100 \[.*\] +0\.600 \[.*\] +\+0\.500 \[", text)
    assert "reward    ▁█  0.25 to 0.50" in text
    assert "9 episodes, 3 of them held out; ended: done 8, env_error 1" in text
    assert "failures: 1 of 9 episodes (raised 1)" in text


def test_an_eval_has_episodes_and_no_steps(run: Path) -> None:
    status = {"status": "finished", "job": "eval", "step": 9}
    write(run, {"status.json": json.dumps(status), "result.json": json.dumps({"seconds": 61.0})})
    assert shown("").startswith("mine  finished  9 episodes in ")


def test_a_run_that_failed_says_why_and_how_it_is_continued(run: Path) -> None:
    write(run, {"status.json": json.dumps({"status": "failed", "reason": f"no {EVIL}"}), "metrics.jsonl": ""})
    write(run, {"config.yaml": "rl_env: envs.arithmetic\n", "checkpoints/checkpoint-2/manifest.json": "{}"})
    text = shown("")
    assert "\nfailed: no \\x1b[2J" in text
    assert text.endswith("\n  aitrain grpo --config runs/mine/config.yaml --resume\n")


@pytest.mark.parametrize(
    ("arguments", "scores"),
    [
        ("--worst --limit 3", ["0.000", "0.100", "0.250"]),
        ("--worst --failed", ["-"]),
        ("--case 0", ["0.250", "0.750", "0.000"]),
    ],
)
def test_options_choose_among_the_episodes(run: Path, arguments: str, scores: list[str]) -> None:
    plain = shown(arguments)
    assert re.findall(r"^  score (\S+)", plain, re.MULTILINE) == scores
    assert plain.replace("\n", "").isprintable()  # whatever was said, the terminal gets no command
    assert r"\x1b[2J\x1b]0;pwned\x07\x9b31m\r over\u202e txt \x00\x08\u2066" in plain
    as_json = json.loads(shown(f"{arguments} --json"))
    assert [one["score"] for one in as_json] == [None if score == "-" else float(score) for score in scores]
