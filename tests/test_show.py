"""`aitrain show`: a run in the terminal, and that nothing in it is a command to the terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write
from tests.screens import Terminal

EVIL = "\x1b[2J\x1b]0;pwned\x07\x9b31m\r over\u202e txt \x00\x08\u2066"
SGR = re.compile(r"\x1b\[[\d;]*m")


def record(step: int, group: int, case: Any, score: float | None, **more: Any) -> dict[str, Any]:
    error = {"kind": "raised", "place": "score_episode", "message": f"no {EVIL}"} if score is None else None
    return {
        "schema": 2, "step": step, "weight_version": 0, "group": group, "advantage": 0.5, "row_number": None,
        "case_idx": case, "row": {"word": EVIL}, "seed": 1, "prompt": f"say {case}:", "tools": [],
        "messages": [{"role": "user", "content": f"say {case}:"},
                     {"role": "assistant", "content": f"it is {EVIL}" + " word" * 40}],
        "completion": f"it is {EVIL}", "turns": [{"tokens": 3, "weight_version": 0}], "tokens": 3, "score": score,
        "metrics": {f"m{EVIL}": 1.0}, "stop": "env_error" if error else "done", "error": error, "seconds": 0.5,
    } | more  # fmt: skip


RECORDS = [
    record(0, 0, "h1", 0.1, eval_phase="before_sampled"),
    *(record(1, n // 2, n // 2, score) for n, score in enumerate([0.25, 0.75, 1.0, None])),
    record(2, 0, 7, 0.5),
    record(2, 0, 0, 0.0),
    record(2, 1, "h1", 0.9, eval_phase="after_sampled"),
    record(2, 1, "h2", 0.3, eval_phase="after_sampled"),
]


@pytest.fixture
def run(here: Path) -> Path:
    """A run named `mine` in runs/, whose model and environment mean harm."""
    metrics = [{"step": n, "reward": 0.25 * n} for n in (1, 2)]
    environment = {"class": f"Env{EVIL}", "module": "mine"}
    files = {
        "config.yaml": "model: tiny\n",
        "status.json": json.dumps({"status": "finished", "step": 2}),
        "result.json": json.dumps({"steps": 2, "seconds": 61.0, "train_cases": 8, "eval_cases": 2}),
        "environment.json": json.dumps(environment),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in metrics),
        "rollouts/rank0.jsonl": "".join(json.dumps(line) + "\n" for line in RECORDS),
    }
    write(here / "runs" / "mine", dict(files))
    return here / "runs" / "mine"


def show(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aitrain", "show", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def shown(*arguments: str) -> str:
    done = show(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def at_a_terminal(*arguments: str, **variables: str) -> str:
    """What the command writes where its standard output is a terminal of 80 columns."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "aitrain", "show", *arguments]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **variables}
    with subprocess.Popen(command, stdout=slave, stdin=slave, stderr=slave, env=environment) as child:
        os.close(slave)
        written = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not piece:
                break
            written += piece
        assert child.wait() == 0, written
    os.close(master)
    return written.decode()


def test_a_run_is_its_scores_its_curve_and_what_its_episodes_came_to(run: Path) -> None:
    text = shown("mine")
    assert text.startswith("mine  finished  2 steps in 1m 01s\n")
    assert re.search(r"sampled +0\.100 \[.*\] +0\.600 \[.*\] +\+0\.800 \[", text)
    assert "reward, 0.250 in the first step, 0.500 in the last" in text
    assert "9 episodes, 3 of them held out; ended: done 8, env_error 1" in text
    assert "failed: raised 1" in text
    assert shown(str(run)).splitlines()[:-1] == text.splitlines()[:-1]


def test_a_step_is_shown_group_by_group(run: Path) -> None:
    lines = shown("mine", "--step", "1").splitlines()
    headings = [line for line in lines if line.startswith("step")]
    assert headings == ["step 1, group 0, case 0  0.250  0.750", "step 1, group 1, case 1  1.000  -"]
    assert sum("user: say" in line for line in lines) == 2
    assert sum(line.startswith("  score") for line in lines) == 4
    assert "  score 0.250  advantage +0.50, done, 3 tokens, environment 0.50s" in lines[3]


def test_the_row_and_the_tools_of_a_case_are_shown_once_and_cut(here: Path) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("find", f"book{EVIL}")]
    short, long = {"word": "oak", "answer": 2}, {"text": "x" * 1000}
    turns = [{"tokens": 3, "weight_version": version} for version in (0, 1)]
    records = [record(1, 0, 0, 0.5, row=short, tools=tools, turns=turns), record(1, 0, 0, 0.5, row=short, tools=tools)]
    records += [record(1, 1, 1, 0.5, row=long), record(1, 2, 2, 0.5, row={})]
    write(here / "runs" / "mine", {"rollouts/rank0.jsonl": "".join(json.dumps(line) + "\n" for line in records)})
    lines = shown("mine", "--step", "1").splitlines()
    rows = [line for line in lines if line.startswith("  row: ")]
    assert rows[0] == '  row: {"word": "oak", "answer": 2}'
    assert rows[1].startswith('  row: {"text": "xxx')
    assert rows[1].endswith("xxx… (1,012 characters, all of them with --json)")
    assert len(rows) == 2
    (named,) = (line for line in lines if line.startswith("  tools: "))
    assert named.startswith("  tools: find, book\\x1b[2J")
    assert ["weight versions 0, 1" in line for line in lines if line.startswith("  score")] == [
        True,
        False,
        False,
        False,
    ]


def test_a_case_is_followed_over_the_run(run: Path) -> None:
    text = shown("mine", "--case", "h1")
    assert re.findall("^step.*$", text, re.MULTILINE) == [
        "step 0, before, sampled, case h1  ",
        "step 2, after, sampled, case h1  ",
    ]


@pytest.mark.parametrize(
    ("arguments", "scores"),
    [
        (["--worst"], ["0.300", "0.900"]),  # of the newest scoring of held-out cases
        (["--worst", "--step", "2"], ["0.000", "0.500"]),
        (["--worst", "--limit", "1"], ["0.300"]),
        (["--failed"], ["-"]),
        (["--case", "0"], ["0.250", "0.750", "0.000"]),
        (["--case", "0", "--step", "2"], ["0.000"]),
    ],
    ids=" ".join,
)
def test_options_choose_among_the_episodes(run: Path, arguments: list[str], scores: list[str]) -> None:
    assert re.findall(r"^  score (\S+)", shown("mine", *arguments), re.MULTILINE) == scores
    as_json = json.loads(shown("mine", *arguments, "--json"))
    assert [one["score"] for one in as_json] == [None if score == "-" else float(score) for score in scores]


def test_json_holds_the_run_and_whole_records(run: Path) -> None:
    assert json.loads(shown("mine", "--json"))["scores"]["sampled"]["after"]["mean"] == 0.6
    text = shown("mine", "--step", "1", "--json")
    assert json.loads(text) == RECORDS[1:5]
    assert text.replace("\n", "").isascii()
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize("arguments", [[], ["--step", "1"], ["--failed"], ["--case", "h1"]], ids=" ".join)
@pytest.mark.slow
def test_nothing_that_was_said_is_a_command_to_the_terminal(run: Path, arguments: list[str]) -> None:
    plain = shown("mine", *arguments)
    assert plain.replace("\n", "").isprintable()
    coloured = at_a_terminal("mine", *arguments, PAGER="cat", NO_COLOR="", FORCE_COLOR="1")
    left = SGR.sub("", coloured)
    assert left != coloured
    assert left.replace("\r\n", "").isprintable()
    assert r"\x1b[2J\x1b]0;pwned\x07\x9b31m\r over\u202e txt \x00\x08\u2066" in plain


def test_in_a_terminal_what_was_said_is_indented_and_wrapped(run: Path) -> None:
    screen = Terminal(80, 60)
    screen.write(at_a_terminal("mine", "--step", "2", PAGER="cat").replace("\r\n", "\n"))
    said = [line for line in screen.shown if "it is" in line or "word word" in line]
    assert len(said) > 2 * 3
    assert all(line.startswith("    ") for line in said)


def test_a_pager_that_is_left_ends_it_without_a_word(run: Path) -> None:
    lines = SGR.sub("", at_a_terminal("mine", "--step", "1", PAGER="head -n 2")).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1, group 0")


@pytest.mark.parametrize("pager", ["", "no-such-pager --really"])
def test_without_a_pager_all_is_printed(run: Path, pager: str) -> None:
    assert "failed: raised 1" in at_a_terminal("mine", PAGER=pager)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mone"], "There is no run, folder or file mone. Did you mean mine?\nList the runs with: aitrain runs"),
        (["runs"], "runs is not a run folder\nList the runs in it with: aitrain runs runs"),
        (["mine", "--step", "9"], "step: there are no rollouts of step 9: it has rollouts of steps 1 to 2"),
        (["mine", "--case", "99"], "case: there is no episode of case 99"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_what_is_not_there_is_said(run: Path, arguments: list[str], message: str) -> None:
    done = show(*arguments)
    assert (done.returncode, done.stderr) == (2, f"aitrain: {message}\n")


@pytest.mark.slow
def test_a_run_that_has_nothing_yet_is_shown_as_it_is(here: Path) -> None:
    write(here / "runs" / "new", {"config.yaml": "model: tiny\n"})
    text = shown("new")
    assert "no held-out cases were scored" in text
    assert "0 episodes" in text
    assert shown("new", "--failed") == "There are no such episodes.\n"
    assert shown("new", "--failed", "--json") == "[]\n"


def test_damaged_lines_are_counted_and_the_rest_is_shown(run: Path) -> None:
    with (run / "rollouts" / "rank0.jsonl").open("a") as file:
        file.write("{not json}\n")
    assert "1 lines of the rollout files are damaged" in shown("mine")
