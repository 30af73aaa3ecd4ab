"""Rollout files are read as they are: half written, damaged, rewritten, of any size."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs import json_values
from aitrain.runs.records import read_rollouts
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.ui.episodes import MOST_EPISODES, Query, choose, episode, find, page_of
from tests.ui.conftest import read, record, said, write_run


def steps_of(rollouts: RolloutIndex) -> list[int]:
    return [entry.step for entry in rollouts.entries]


def test_a_file_that_grows_is_read_on_and_one_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    """As a resumed run does with what it had recorded after its checkpoint."""
    folder = write_run(tmp_path, [record(step=1)])
    file = folder / "rollouts" / "rank0.jsonl"
    whole = json.dumps(record(step=2)).encode() + b"\n"
    rollouts = read(folder)
    for part, steps in ((whole[:40], [1]), (whole[40:], [1, 2])):
        with file.open("ab") as stream:
            stream.write(part)
        rollouts.refresh()
        assert (steps_of(rollouts), rollouts.damaged) == (steps, 0)
    for count in (1, 8):  # less than was read, and more
        other = write_run(tmp_path / f"other{count}", [record(step=10 + step) for step in range(count)])
        os.replace(other / "rollouts" / "rank0.jsonl", file)
        rollouts.refresh()
        assert steps_of(rollouts) == [10 + step for step in range(count)]
    (folder / "rollouts" / "rank1.jsonl").write_bytes(whole)
    rollouts.refresh()
    assert steps_of(rollouts)[8:] == [2]


def test_lines_that_are_no_record_are_counted_and_the_rest_is_read_up_to_an_endless_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [b"not json\n", b'{"step": 1, \n', b"[1, 2]\n", b"[" * 1000 + b"\n", b"\x00\xff\xfe\n", b"9" * 900 + b"\n"]
    monkeypatch.setattr(json_values, "LONGEST_LINE", 2000)
    bad_utf_8 = json.dumps(said("AB", step=3)).encode().replace(b"AB", b"A\xff\xc3B") + b"\n"
    lines = [record(step=1), *wrong, bad_utf_8, b"\n", record(step=3), said("x" * 5000), record(step=5)]
    rollouts = read(write_run(tmp_path, lines))
    assert steps_of(rollouts) == [1, 3]
    assert rollouts.damaged == len(wrong) + 1


@pytest.mark.parametrize("wrong", ["word", [1], {"a": 1}, 10**400, math.nan], ids=repr)
def test_a_record_with_a_score_that_is_no_finite_number_is_damaged(wrong: Any, tmp_path: Path) -> None:
    records = [record(score=wrong), record(metrics={"tries": wrong}), record(score=0.5)]
    rollouts = read(write_run(tmp_path, records))
    assert ([entry.score for entry in rollouts.entries], rollouts.damaged) == ([0.5], 2)
    assert list(read_rollouts(tmp_path)) == [rollouts.record(rollouts.entries[0])]


def test_an_episode_has_its_row_its_tools_and_the_prompt_of_its_group(tmp_path: Path) -> None:
    row = {"answer": 2, "text": "x" * 50}
    first = record(row=row, tools=[{"function": {"name": "add"}}])
    first["rendered_prompt"] = "<user>1 + 1"
    rollouts = read(write_run(tmp_path, [first, record(), record(group=2)]))
    shown, same, other = (episode(rollouts, entry) for entry in rollouts.entries)
    assert shown["row"] == [{"name": "answer", "text": "2"}, {"name": "text", "text": "x" * 50}]
    assert shown["tools"][0]["name"] == "add"
    assert shown["rendered"] == same["rendered"] == "<user>1 + 1"
    assert other["rendered"] == ""


# -- finding

CALL = [{"function": {"name": "look", "arguments": {"where": "Überall"}}}]
EPISODES = [
    said("Grüße, 'you'", step=1, score=0.25, case_idx="a"),
    said('a "quoted"\nline', step=2, score=0.75, case_idx="b", stop="max_turns"),
    record(step=3, score=None, stop="env_error", error={"kind": "raised", "place": "score", "message": "too late"}),
    record(step=4, messages=[{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": CALL}]),
    said("kept", step=5, eval_phase="before_sampled", score=0.0, case_idx="b"),
    json.dumps(said("Straße", step=6), ensure_ascii=True).encode() + b"\n",
]


@pytest.mark.parametrize(
    ("query", "steps"),
    [
        ({"eval_phase": "training"}, [1, 2, 3, 4, 6]), ({"eval_phase": "held-out"}, [5]),
        ({"eval_phase": "before_sampled"}, [5]), ({"case": "b"}, [2, 5]), ({"low": 0.25, "high": 0.75}, [1, 2]),
        ({"failure": "any"}, [3]), ({"failure": "raised"}, [3]), ({"stop": "env_error"}, [3]),
        ({"step": 2}, [2]), ({"text": "grüße, 'YOU'"}, [1]), ({"text": 'a "quoted"\nline'}, [2]),
        ({"text": "TOO late"}, [3]), ({"text": "Überall"}, [4]), ({"text": "straße"}, [6]),
        ({"text": "1 + 1"}, [1, 2, 3, 5, 6]), ({"text": "kept", "case": "a"}, []),
        ({"text": "advantage"}, []), ({"text": "max_turns"}, []),  # names of fields are not what was said
    ],
    ids=str,
)  # fmt: skip
def test_episodes_are_found_by_what_they_are_and_what_was_said(
    tmp_path: Path, query: dict[str, Any], steps: list[int]
) -> None:
    rollouts = read(write_run(tmp_path, EPISODES))
    assert [entry.step for entry in find(rollouts, Query(**query))] == steps


def test_groups_stay_together_on_every_page(tmp_path: Path) -> None:
    rollouts = read(write_run(tmp_path, [record(group=number % 4) for number in range(8)]))
    found = find(rollouts, Query())
    assert [entry.group for entry in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    first = page_of(rollouts, found, 0, size=3)
    assert (len(first["rows"]), first["next"], first["total"]) == (4, 4, 8)
    assert page_of(rollouts, found, 4, size=3)["next"] is None


def test_of_a_large_run_whole_groups_of_all_its_steps_are_chosen(tmp_path: Path) -> None:
    places = [(step, group) for step in range(1, 201) for group in range(4) for _ in range(8)]
    records = [record(step=step, group=group, score=(step % 50) / 100, case_idx=group) for step, group in places]
    entries = read(write_run(tmp_path, records)).entries
    chosen = choose(entries)
    groups = {(entry.step, entry.group) for entry in chosen}
    assert len(chosen) == 8 * len(groups) <= MOST_EPISODES
    steps = sorted({step for step, _ in groups})
    assert (steps[0], steps[-1]) == (1, 200)
    assert max(after - before for before, after in pairwise(steps)) < 5
