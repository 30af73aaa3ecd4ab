"""Rollout files are read as they are: half written, damaged, rewritten, of any size."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs import json_values
from aitrain.runs import rollout_index as reading
from aitrain.runs.json_values import as_text
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.rollout_record import RolloutRecord, read_rollouts
from aitrain.ui.cases import case_rows
from aitrain.ui.episodes import Limit, Query, episode, find, page_of
from aitrain.ui.page_sample import MOST_BYTES, MOST_EPISODES, choose
from tests.ui.conftest import record, said, write_run


def read(folder: Path) -> RolloutIndex:
    rollouts = RolloutIndex(folder / "rollouts")
    rollouts.refresh()
    return rollouts


@pytest.mark.slow
def test_every_episode_of_a_real_run_is_read_where_it_lies(real_run: Path) -> None:
    rollouts = read(real_run)
    records = list(read_rollouts(real_run / "rollouts" / "rank0.jsonl"))
    assert [rollouts.record(entry) for entry in rollouts.entries] == records
    assert [entry.score for entry in rollouts.entries] == [one.score for one in records]
    assert rollouts.damaged == 0


def test_a_half_written_line_waits_until_it_is_whole(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record(step=1)])
    file = folder / "rollouts" / "rank0.jsonl"
    whole = json.dumps(record(step=2)).encode() + b"\n"
    with file.open("ab") as stream:
        stream.write(whole[:40])
    rollouts = read(folder)
    assert [entry.step for entry in rollouts.entries] == [1]
    with file.open("ab") as stream:
        stream.write(whole[40:])
    rollouts.refresh()
    assert [entry.step for entry in rollouts.entries] == [1, 2]
    assert rollouts.damaged == 0


def test_new_lines_are_read_without_reading_the_old_ones_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, [record(step=step) for step in range(5)])
    rollouts = read(folder)
    parsed: list[bytes] = []
    parse = reading.parse_object
    monkeypatch.setattr(reading, "parse_object", lambda line: parsed.append(line) or parse(line))
    with (folder / "rollouts" / "rank0.jsonl").open("a") as stream:
        stream.write(json.dumps(record(step=9)) + "\n")
    write_run(tmp_path / "elsewhere", [record(step=7)])
    os.rename(tmp_path / "elsewhere" / "rollouts" / "rank0.jsonl", folder / "rollouts" / "rank1.jsonl")
    rollouts.refresh()
    assert [entry.step for entry in rollouts.entries] == [0, 1, 2, 3, 4, 9, 7]
    assert len(parsed) == 2
    assert rollouts.record(rollouts.entries[-1]).step == 7


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    """As a resumed run does with what it had recorded after its checkpoint."""
    folder = write_run(tmp_path, [record(step=step) for step in range(5)])
    rollouts = read(folder)
    file = folder / "rollouts" / "rank0.jsonl"
    for count in (2, 8):  # less than was read, and more
        other = write_run(tmp_path / f"other{count}", [record(step=10 + step) for step in range(count)])
        os.replace(other / "rollouts" / "rank0.jsonl", file)
        rollouts.refresh()
        assert [entry.step for entry in rollouts.entries] == [10 + step for step in range(count)]


@pytest.mark.parametrize(
    "line",
    [b"not json\n", b'{"step": 1, \n', b"[1, 2]\n", b"[" * 100_000 + b"\n", b"\x00\xff\xfe\n", b"9" * 9000 + b"\n"],
    ids=["words", "half", "a list", "deep", "binary", "a huge number"],
)  # fmt: skip
def test_a_line_that_is_no_record_is_counted_and_the_rest_is_read(line: bytes, tmp_path: Path) -> None:
    rollouts = read(write_run(tmp_path, [record(step=1), line, b"\n", record(step=3)]))
    assert [entry.step for entry in rollouts.entries] == [1, 3]
    assert rollouts.damaged == 1


def test_a_line_that_is_too_long_is_skipped_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reading, json_values):
        monkeypatch.setattr(module, "LONGEST_LINE", 2000)
    rollouts = read(write_run(tmp_path, [record(step=1), said("x" * 5000), record(step=3)]))
    assert [entry.step for entry in rollouts.entries] == [1, 3]
    assert [rollouts.record(entry).step for entry in rollouts.entries] == [1, 3]
    assert rollouts.damaged == 1


def test_bytes_that_are_no_utf_8_are_shown_as_replacement_characters(tmp_path: Path) -> None:
    line = json.dumps(said("AB")).encode().replace(b"AB", b"A\xff\xc3B") + b"\n"
    rollouts = read(write_run(tmp_path, [line]))
    assert episode(rollouts, 0)["said"][0]["text"] == "A\ufffd\ufffdB"


@pytest.mark.parametrize("wrong", [None, "word", [], {}, True, float("nan"), 10**400], ids=repr)
def test_fields_of_a_wrong_type_are_taken_for_missing(wrong: Any, tmp_path: Path) -> None:
    names = [
        "step",
        "group",
        "score",
        "metrics",
        "stop",
        "turns",
        "tokens",
        "seconds",
        "advantage",
        "prompt",
        "messages",
    ]
    rollouts = read(write_run(tmp_path, [dict.fromkeys(names, wrong) | {"case_idx": 4}]))
    (entry,) = rollouts.entries
    assert (entry.step, entry.score, entry.advantage, entry.case) == (0, None, None, "4")
    json.dumps(episode(rollouts, 0), allow_nan=False)
    json.dumps(page_of(rollouts, find(rollouts, Query()), 0), allow_nan=False)


def test_an_episode_has_its_row_its_tools_and_the_weight_versions_of_its_turns(tmp_path: Path) -> None:
    row = {"answer": 2, "hints": ["carry"] * 40, "text": "x" * 50}
    tool = {"type": "function", "function": {"name": "add"}}
    messages = [{"role": role, "content": "?"} for role in ("user", "assistant", "user", "assistant")]
    turns = [{"tokens": 2, "weight_version": version} for version in (3, 4)]
    records = [
        record(row=row, tools=[tool], messages=messages, turns=turns),
        record(row={str(n): n for n in range(200)}),
    ]
    rollouts = read(write_run(tmp_path, records))
    shown = episode(rollouts, 0, Limit(40, 10, 10))
    assert shown["row"][0] == {"name": "answer", "text": "2"}
    assert shown["row"][1]["text"].startswith('[\n  "carry",\n  "carry"')
    assert shown["row"][2] == {"name": "text", "text": "x" * 40, "length": 50}
    assert shown["tools"][0]["name"] == "add"
    assert [message.get("weight_version") for message in shown["said"]] == [3, None, 4]
    many = episode(rollouts, 1)
    assert (len(many["row"]), many["columns"], many["tools"]) == (100, 200, [])
    assert "weight_version" not in many["said"][0]


def test_links_in_a_rollouts_folder_are_not_followed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [record()])
    elsewhere = write_run(tmp_path / "elsewhere", [record(), record()]) / "rollouts" / "rank0.jsonl"
    (folder / "rollouts" / "linked.jsonl").symlink_to(elsewhere)
    assert len(read(folder).entries) == 1


def test_what_was_asked_is_told_from_what_was_said() -> None:
    prompt = [{"role": "system", "content": "Book."}, {"role": "user", "content": "Hi"}]
    call = {"type": "function", "function": {"name": "find", "arguments": {"city": "Brom"}}}
    answers = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "find", "content": "[]"},
    ]
    asked, following = RolloutRecord.from_json(record(prompt=prompt, messages=[*prompt, *answers])).transcript()
    assert [message.text for message in asked] == ["Book.", "Hi"]
    assert following[0].calls == (("find", '{"city": "Brom"}'),)
    assert (following[1].role, following[1].name, following[1].text) == ("tool", "find", "[]")


def test_content_in_parts_is_their_text() -> None:
    assert as_text([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "a\nb"
    assert as_text([{"type": "image", "url": "x"}]) == '[{"type": "image", "url": "x"}]'


# -- finding


def steps(rollouts: RolloutIndex, **query: Any) -> list[int]:
    return [rollouts.entries[number].step for number in find(rollouts, Query(**query)).numbers]


@pytest.fixture
def some(tmp_path: Path) -> RolloutIndex:
    error = {"kind": "raised", "place": "score_episode", "message": "ValueError: too late"}
    call = [{"function": {"name": "look", "arguments": {"where": "Überall"}}}]
    return read(
        write_run(
            tmp_path,
            [
                said("Grüße, 'you'", step=1, score=0.25, case_idx="a"),
                said('a "quoted"\nline', step=2, score=0.75, case_idx="b", stop="max_turns"),
                record(step=3, score=None, error=error, stop="env_error"),
                record(step=4, messages=[{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": call}]),
                said("kept", step=5, eval_phase="before_sampled", score=0.0, case_idx="b"),
            ],
        )
    )


def test_episodes_are_found_by_what_they_are(some: RolloutIndex) -> None:
    assert steps(some, eval_phase="training") == [1, 2, 3, 4]
    assert steps(some, eval_phase="held-out") == steps(some, eval_phase="before_sampled") == [5]
    assert steps(some, case="b") == [2, 5]
    assert steps(some, low=0.2, high=0.8) == [1, 2]
    assert steps(some, high=0.3) == [1, 5]
    assert steps(some, failure="any") == steps(some, failure="raised") == steps(some, stop="env_error") == [3]
    assert steps(some, step=2) == [2]


def test_episodes_are_found_by_what_was_said_in_them(some: RolloutIndex) -> None:
    assert steps(some, text="grüße, 'YOU'") == [1]
    assert steps(some, text='a "quoted"\nline') == [2]
    assert steps(some, text="TOO late") == [3]
    assert steps(some, text="überall") == []  # only a to z are the same in upper and lower case
    assert steps(some, text="Überall") == steps(some, text="look") == [4]
    assert steps(some, text="1 + 1") == [1, 2, 3, 5]
    assert steps(some, text="kept", case="a") == []


def test_names_of_fields_are_not_what_was_said(some: RolloutIndex) -> None:
    assert steps(some, text="advantage") == steps(some, text="role") == steps(some, text="max_turns") == []


def test_text_is_found_in_files_that_write_ascii_only(tmp_path: Path) -> None:
    line = json.dumps(said("Grüße"), ensure_ascii=True).encode() + b"\n"
    assert steps(read(write_run(tmp_path, [line])), text="Grüße") == [1]


def test_groups_stay_together_in_every_order(tmp_path: Path) -> None:
    scores = {0: [1.0, 0.0], 1: [0.5, 0.5], 2: [0.25, 0.0], 3: [None, None]}
    records = [record(group=group, score=score, tokens=group) for group, both in scores.items() for score in both]
    rollouts = read(write_run(tmp_path, records))

    def groups(order: str) -> list[int]:
        return [rollouts.entries[number].group for number in find(rollouts, Query(order=order)).numbers]

    assert groups("training") == [0, 0, 1, 1, 2, 2, 3, 3]
    assert groups("lowest") == [2, 2, 0, 0, 1, 1, 3, 3]
    assert groups("highest") == [0, 0, 1, 1, 2, 2, 3, 3]
    assert groups("mixed") == [0, 0, 2, 2, 1, 1, 3, 3]
    assert groups("longest") == [3, 3, 2, 2, 1, 1, 0, 0]


def test_a_page_of_a_list_ends_between_two_groups(tmp_path: Path) -> None:
    records = [record(group=number // 8, case_idx=number) for number in range(24)]
    rollouts = read(write_run(tmp_path, records))
    found = find(rollouts, Query())
    first = page_of(rollouts, found, 0, size=10)
    assert (len(first["rows"]), first["next"], first["total"]) == (16, 16, 24)
    assert page_of(rollouts, found, first["next"], size=10)["next"] is None


# -- cases and samples


def test_a_case_has_the_mean_of_its_first_and_of_its_last_group(tmp_path: Path) -> None:
    records = [
        record(step=1, group=3, case_idx=7, score=0.0),
        record(step=1, group=3, case_idx=7, score=1.0),
        record(step=4, group=1, case_idx=7, score=1.0),
        record(step=4, group=1, case_idx=7, score=None, error={"kind": "raised"}),
        record(step=0, eval_phase="before_sampled", case_idx=7, score=0.0),
        record(step=4, eval_phase="after_sampled", case_idx=7, score=1.0),
        record(step=4, eval_phase="after_greedy", case_idx=7, score=0.0),
    ]
    training, held_out = case_rows(read(write_run(tmp_path, records)))
    assert (training.first, training.last, training.episodes, training.failed) == (0.5, 1.0, 4, 1)
    assert training.variance == pytest.approx(2 / 9)
    assert (held_out.first, held_out.last, held_out.episodes, held_out.is_held_out) == (0.0, 1.0, 2, True)
    assert held_out.variance == 0.25


def test_a_small_run_is_shown_whole(real_run: Path) -> None:
    entries = read(real_run).entries
    assert choose(entries) == list(range(len(entries)))


def test_of_a_large_run_whole_groups_are_chosen_that_tell_most(tmp_path: Path) -> None:
    records = [
        record(step=step, group=group, score=(step % 50) / 100, case_idx=group)
        for step in range(1, 201)
        for group in range(4)
        for _ in range(8)
    ]
    for one in records[3200:3208]:
        one["score"] = 1.0
    records[1600] |= {"score": None, "error": {"kind": "raised"}}
    entries = read(write_run(tmp_path, records)).entries
    chosen = choose(entries)
    assert len(chosen) <= MOST_EPISODES
    assert sum(entries[number].length for number in chosen) <= MOST_BYTES
    groups = {(entries[number].step, entries[number].group) for number in chosen}
    assert len(chosen) == 8 * len(groups)
    assert {(1, 0), (200, 0), (101, 0), (51, 0)} <= groups  # first, last, best, failed
    assert len({step for step, _ in groups}) > 60
