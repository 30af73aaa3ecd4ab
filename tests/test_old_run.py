"""A run folder from before records had a schema: everything that reads run folders reads it as it was read then.

tests/data/old_run is a real one, of tests/environments/dictionary_lookup.py, without its model and the contents of its
checkpoint.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs.checkpoint import read_manifest, rewind
from aitrain.runs.metrics_line import read_metrics
from aitrain.runs.result import Result
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.rollout_record import SCHEMA, RolloutRecord, read_rollouts
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.run_list import look
from aitrain.ui.report_writer import ReportWriter, page_data
from aitrain.ui.run_registry import RunRegistry
from aitrain.ui.summary import scores

OLD_RUN = Path(__file__).parent / "data" / "old_run"


@pytest.fixture
def run(here: Path) -> RunFolder:
    """A copy of the old run in runs/, with its environment beside."""
    shutil.copytree(OLD_RUN, here / "runs" / "old_run")
    shutil.copy(Path(__file__).parent / "environments" / "dictionary_lookup.py", here)
    return RunFolder(here / "runs" / "old_run")


@pytest.fixture
def rollouts(run: RunFolder) -> RolloutIndex:
    found = RolloutIndex(run.rollouts)
    found.refresh()
    return found


def records(run: RunFolder) -> Iterator[RolloutRecord]:
    return read_rollouts(run.rollouts / "rank0.jsonl")


def aitrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "aitrain", *arguments], capture_output=True, text=True, check=False)


def test_its_records_have_no_schema_and_the_names_of_then(run: RunFolder) -> None:
    raw = [json.loads(line) for line in (run.rollouts / "rank0.jsonl").read_text().splitlines()]
    assert len(raw) == 30
    assert all("schema" not in one and type(one["row"]) is int and type(one["turns"]) is int for one in raw)
    assert {name for one in raw for name in one} >= {"policy_step", "sample", "when", "group", "advantage"}


def test_every_record_is_read_with_all_that_it_says(run: RunFolder) -> None:
    raw = [json.loads(line) for line in (run.rollouts / "rank0.jsonl").read_text().splitlines()]
    for record, old in zip(records(run), raw, strict=True):
        assert (record.weight_version, record.row_number, len(record.turns)) == (
            old["policy_step"],
            old["row"],
            old["turns"],
        )
        same = ("step", "case_idx", "seed", "prompt", "messages", "completion", "tokens", "score", "metrics", "stop")
        assert all(getattr(record, name) == old[name] for name in (*same, "seconds"))
        assert (record.eval_phase, record.sample) == (old.get("when", ""), old.get("sample"))
        assert (record.group, record.advantage) == (old.get("group"), old.get("advantage"))
        assert (record.error and record.error.message) == (old["error"] and old["error"]["message"])


def test_its_metrics_are_read(run: RunFolder) -> None:
    lines = list(read_metrics(run.metrics))
    assert [(line.step, line.is_scoring) for line in lines] == [(1, False), (2, True), (2, False), (3, False)]
    assert lines[1].eval_score == pytest.approx(0.7083, abs=1e-4)
    assert (lines[1].eval_cases, lines[1].eval_samples) == (2, 2)
    assert lines[3].reward == pytest.approx(0.7619, abs=1e-4)
    assert lines[3].values["env/tries"] == 2.0
    assert len(Result.read(run.path).history) == 4


def test_aitrain_show_shows_it(run: RunFolder) -> None:
    text = aitrain("show", "old_run").stdout
    assert text.startswith("old_run  finished  3 steps in 13s\ntiny, DictionaryLookup, 4 cases, 2 held out\n")
    assert "sampled   0.542 [0.109, 0.919]  0.789 [0.397, 0.955]  +0.247 [-0.850, +1.000]" in text
    assert "reward, 0.833 in the first step, 0.762 in the last" in text
    assert "30 episodes, 18 of them held out; ended: max_tokens 21, done 7, env_error 2\nfailed: raised 2" in text


def test_aitrain_show_shows_its_episodes(run: RunFolder) -> None:
    text = aitrain("show", "old_run", "--failed").stdout
    assert text.startswith("step 2, group 0, case 1  -  -\n    user: What is a birch? One word.\n")
    assert "score -  advantage +0.00, env_error, 2 turns, 24 tokens" in text
    assert '-> look_up({"word": "oak"})\n    tool look_up: tree' in text
    assert "ValueError: no tree today" in text
    assert aitrain("show", "old_run", "--case", "5").stdout.count("case 5") == 6


def test_aitrain_show_prints_its_records_in_the_present_format(run: RunFolder) -> None:
    shown = json.loads(aitrain("show", "old_run", "--step", "2", "--json").stdout)
    wanted = [record for record in records(run) if record.step == 2 and not record.eval_phase]
    assert shown == [record.to_json() for record in wanted]
    assert {(one["schema"], one["weight_version"]) for one in shown} == {(SCHEMA, 1)}


def test_aitrain_runs_lists_it(run: RunFolder) -> None:
    (line,) = json.loads(aitrain("runs", "--json").stdout)
    assert (line["status"], line["step"], line["steps"]) == ("finished", 3, 3)
    assert (line["score_before"], line["score_after"]) == pytest.approx((0.5417, 0.7887), abs=1e-4)
    assert (line["reward_first"], line["reward_last"]) == pytest.approx((0.8333, 0.7619), abs=1e-4)
    assert look(run.path).name == "old_run"


def ready(registry: RunRegistry) -> Any:
    (opened,) = registry.runs().values()
    while not opened.summary()["is_ready"]:
        pass
    return opened


def test_aitrain_view_answers_with_it(run: RunFolder) -> None:
    opened = ready(RunRegistry([run.path]))
    shown = opened.summary()
    assert (shown["status"], shown["episodes"]["all"], shown["episodes"]["failures"]) == ("finished", 30, {"raised": 2})
    assert [point["step"] for point in shown["held_out"]] == [0, 2, 3]
    assert shown["curves"]["step"] == [1, 2, 3]
    assert "schema" not in shown["curves"]["series"]
    assert shown["environment"]["class"] == "DictionaryLookup"
    assert opened.source() == []
    assert {row["case"] for row in opened.cases()["rows"]} == {"0", "1", "2", "3", "4", "5"}


def test_its_report_can_be_written_again(run: RunFolder, rollouts: RolloutIndex) -> None:
    ReportWriter(run).finish(lambda event: pytest.fail(str(event)))
    assert run.report.stat().st_size > 100_000
    data: Any = page_data(run, rollouts)
    assert len(data["episodes"]) == 30
    failed = next(one for one in data["episodes"] if one["failure"])
    assert (failed["case"], failed["turns"], failed["error"]["place"]) == ("1", 2, "episode")
    assert failed["said"][0]["calls"] == [["look_up", '{"word": "oak"}']]


def test_its_scores_follow_from_its_records(run: RunFolder, rollouts: RolloutIndex) -> None:
    recorded = scores(run, rollouts)
    run.result.unlink()
    computed = scores(run, rollouts)
    for decoding, row in recorded.items():
        for when in ("before", "after", "change"):
            assert computed[decoding][when]["mean"] == pytest.approx(row[when]["mean"])


def test_what_came_after_its_checkpoint_is_forgotten_and_no_more(run: RunFolder) -> None:
    before = [(record.step, record.eval_phase) for record in records(run)]
    rewind(run, read_manifest(run.checkpoints / "checkpoint-2"))
    stay = [(step, when) for step, when in before if step <= 2 and not when.startswith("after")]
    assert [(record.step, record.eval_phase) for record in records(run)] == stay
    assert [line.step for line in read_metrics(run.metrics)] == [1, 2, 2]


def test_a_run_cannot_go_on_from_its_checkpoint_without_the_checkpoints_files(run: RunFolder) -> None:
    done = aitrain("grpo", "--config", str(run.config), "--resume", "--max-steps", "5")
    assert done.returncode == 2, done.stderr
    assert "there is no complete checkpoint in runs/old_run/checkpoints" in done.stderr
    assert "checkpoint-2 is skipped: chat_template.jinja is missing" in done.stderr
