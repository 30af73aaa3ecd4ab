"""`--json`: a run's events as lines that programs read, and errors as one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aitrain.events import Event, Note, Step, decode, encode
from aitrain.runs.records import RECORD, MetricsLine
from tests.conftest import Run

ARITHMETIC = ["--model", "tiny", "--rl-env", "envs.arithmetic", "--rl-max-new-tokens", "4", "--rl-kl-coef", "0"]


@pytest.mark.parametrize("event", [Note("two\nlines, ä"), Step(1, 2, None, 0.5), Step(1, 2, 0.5, 0.5, seconds=9.5)])
def test_an_event_arrives_as_it_was_sent_on_one_line(event: Event) -> None:
    assert encode(event).count("\n") == 1
    assert decode(encode(event)) == event


@pytest.mark.parametrize("line", ["", "Downloading 10%", "[1, 2]", '{"event": "Other"}', '{"event": "Step"}'])
def test_what_a_library_prints_between_is_no_event(line: str) -> None:
    assert decode(line) is None


def test_every_line_of_a_run_is_an_event_and_the_last_one_is_the_result(aitrain_grpo: Run, here: Path) -> None:
    done = aitrain_grpo(*ARITHMETIC, "--max-steps", "1", "--eval-cases", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert None not in map(decode, done.stdout.splitlines())
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [line["event"] for line in lines]
    assert kinds[0] == "RunStarted"
    assert kinds[-2:] == ["Ended", "RunResult"]
    assert {"Phase", "Step", "Evaluated"} <= set(kinds)
    folder = here / lines[0]["folder"]
    assert lines[-1]["result"] == json.loads((folder / "result.json").read_text())

    for parse, pattern in ((RECORD.validate_json, "rollouts/*.jsonl"), (MetricsLine.from_json, "metrics.jsonl")):
        files = folder.glob(pattern)
        records = [parse(line) for file in files for line in file.read_bytes().splitlines()]
        assert records
        assert all(record.step >= 0 for record in records)
