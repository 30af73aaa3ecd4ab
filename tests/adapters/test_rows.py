"""Rows in others' formats become cases; what is wrong is told with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, EnvironmentFailed
from aitrain.environment.adapters.rows import RowSource
from tests.conftest import write

pytestmark = pytest.mark.usefixtures("here")
MESSAGES = [{"role": "user", "content": "1 + 1?"}]


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def cases(*rows: Any, **settings: Any) -> list[dict[str, Any]]:
    write(Path.cwd(), {"rows.jsonl": lines(*rows)})
    return RowSource("rows.jsonl", **settings).cases()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1 + 1?"}, {"prompt": "1 + 1?"}),
        ({"prompt": MESSAGES, "solution": "2"}, {"prompt": MESSAGES, "solution": "2"}),
        (
            {"data_source": "sums", "prompt": MESSAGES, "reward_model": {"style": "rule", "ground_truth": "2"}},
            {"prompt": MESSAGES, "ground_truth": "2", "data_source": "sums"},
        ),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": "2"}]},
            {"prompt": MESSAGES, "answer": "2"},
        ),
        ({"messages": MESSAGES}, {"prompt": MESSAGES}),
        ({"question": "1 + 1?", "answer": "2"}, {"prompt": MESSAGES, "answer": "2"}),
        ({"problem": "1 + 1?", "solution": "2"}, {"prompt": MESSAGES, "solution": "2"}),
    ],
    ids=["string", "messages", "verl", "openai", "openai-without-answer", "question", "problem"],
)
def test_rows_in_each_form_become_cases(row: dict[str, Any], expected: dict[str, Any]) -> None:
    (case,) = cases(row)
    assert {name: case.get(name) for name in expected} == expected


def test_columns_are_copied_under_the_names_that_functions_expect() -> None:
    (case,) = cases(
        {"q": "1 + 1?", "info": {"truth": {"value": "2"}}}, columns={"question": "q", "solution": "info.truth.value"}
    )
    assert case["prompt"] == MESSAGES
    assert case["solution"] == "2"


def test_parquet_is_read_as_json_lines_are() -> None:
    table = pytest.importorskip("pyarrow")
    rows = [{"data_source": "sums", "prompt": MESSAGES, "reward_model": {"ground_truth": "2"}}]
    import pyarrow.parquet

    pyarrow.parquet.write_table(table.Table.from_pylist(rows), "rows.parquet")
    assert RowSource("rows.parquet").cases() == cases(*rows)


def test_a_json_file_may_hold_a_list() -> None:
    write(Path.cwd(), {"rows.json": json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=2)})
    assert [case["prompt"] for case in RowSource("rows.json").cases()] == ["a", "b"]
    write(Path.cwd(), {"rows.json": '[{"prompt": "a"},'})
    with pytest.raises(EnvironmentFailed, match=r"rows\.json: not JSON"):
        RowSource("rows.json").cases()


def test_files_are_mixed_by_their_ratios_and_always_in_the_same_way() -> None:
    write(Path.cwd(), {name: lines(*({"prompt": f"{name}{i}"} for i in range(10))) for name in ("a.jsonl", "b.jsonl")})
    source = RowSource({"a.jsonl": 0.5, "b.jsonl": 2})
    found = [case["prompt"] for case in source.cases()]
    assert found[:5] == [f"a.jsonl{i}" for i in (0, 2, 4, 6, 8)]
    assert sorted(found[5:]) == sorted([f"b.jsonl{i}" for i in range(10)] * 2)
    assert [case["prompt"] for case in source.cases()] == found


def test_size_takes_the_first_rows_and_a_seed_shuffles_them_before() -> None:
    rows = [{"prompt": str(number)} for number in range(20)]
    assert [case["prompt"] for case in cases(*rows, size=3)] == ["0", "1", "2"]
    shuffled = [case["prompt"] for case in cases(*rows, size=3, seed=1)]
    assert shuffled != ["0", "1", "2"]
    assert [case["prompt"] for case in cases(*rows, size=3, seed=1)] == shuffled
    assert [case["prompt"] for case in cases(*rows, size=3, seed=2)] != shuffled


def test_a_system_prompt_replaces_the_rows_own() -> None:
    own = [{"role": "system", "content": "Own."}, *MESSAGES]
    for row in ({"prompt": own}, {"prompt": MESSAGES}, {"prompt": "1 + 1?"}):
        (case,) = cases(row, system="Be short.")
        assert case["prompt"] == [{"role": "system", "content": "Be short."}, *MESSAGES]


def test_solved_rows_stand_before_each_question_and_are_not_asked() -> None:
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(3)]
    found = cases(*rows, few_shot=1, size=2)
    assert [case["answer"] for case in found] == ["2", "3"]
    assert [message["content"] for message in found[0]["prompt"]] == ["0 + 1?", "1", "1 + 1?"]


def test_solved_rows_come_after_the_system_prompt_and_before_the_whole_conversation() -> None:
    talk = [{"role": "system", "content": "Add."}, *MESSAGES, {"role": "assistant", "content": "2"}]
    talk.append({"role": "user", "content": "And 1?"})
    (found,) = cases({"question": "0 + 1?", "answer": "1"}, {"prompt": talk}, few_shot=1)
    assert [message["content"] for message in found["prompt"]] == ["Add.", "0 + 1?", "1", "1 + 1?", "2", "And 1?"]


def test_files_of_windows_are_read_with_mark_and_line_ends() -> None:
    text = lines({"prompt": "é"}, {"prompt": "b"}).replace("\n", "\r\n").encode("utf-8-sig")
    Path("rows.jsonl").write_bytes(text)
    assert [case["prompt"] for case in RowSource("rows.jsonl").cases()] == ["é", "b"]
    Path("rows.json").write_bytes(json.dumps([{"prompt": "a"}], indent=2).replace("\n", "\r\n").encode("utf-8-sig"))
    assert [case["prompt"] for case in RowSource("rows.json").cases()] == ["a"]


def test_messages_and_truths_that_are_written_as_json_text_are_unpacked() -> None:
    (case,) = cases({"prompt": json.dumps(MESSAGES), "reward_model": '{"ground_truth": "2"}'})
    assert (case["prompt"], case["ground_truth"]) == (MESSAGES, "2")
    for text in ('{"a": 1} is JSON?', "[{x}]", '[{"a": 1}]'):
        assert cases({"prompt": text})[0]["prompt"] == text


def test_a_parquet_file_of_verl_that_pandas_wrote_has_lists_and_numbers_of_python() -> None:
    pandas, numpy = pytest.importorskip("pandas"), pytest.importorskip("numpy")
    row = {"prompt": numpy.array(MESSAGES), "reward_model": {"ground_truth": numpy.array(["2", "two"])}}
    pandas.DataFrame([{**row, "extra_info": {"index": numpy.int64(3)}}]).to_parquet("rows.parquet")
    (case,) = RowSource("rows.parquet").cases()
    assert (case["prompt"], case["ground_truth"], case["extra_info"]) == (MESSAGES, ["2", "two"], {"index": 3})


def test_solved_rows_need_answers() -> None:
    with pytest.raises(EnvironmentFailed, match="few_shot needs a column `answer`"):
        cases({"prompt": "a"}, {"prompt": "b"}, few_shot=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a"}\n\n{"prompt": \n', ["rows.jsonl, line 3", "not JSON"]),
        ('{"prompt": "a"}\n[1]\n', ["rows.jsonl, line 2", "an object"]),
        ('{"prompt": "a"}\n{"text": "b", "label": 1}\n', ["rows.jsonl, line 2", "no prompt", "text, label", "columns"]),
        ('{"prompt": []}\n', ["rows.jsonl, line 1", "no prompt"]),
        ('{"prompt": ["a"]}\n', ["rows.jsonl, line 1", "no prompt"]),
        ("", ["no rows", "rows.jsonl"]),
    ],
)
def test_a_wrong_row_is_told_with_file_and_line(text: str, words: list[str]) -> None:
    write(Path.cwd(), {"rows.jsonl": text})
    with pytest.raises(EnvironmentFailed) as caught:
        RowSource("rows.jsonl").cases()
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_missing_column_is_told_with_those_that_are_there() -> None:
    with pytest.raises(EnvironmentFailed, match=r"line 1: there is no column info.truth \(there are: prompt, info\)"):
        cases({"prompt": "a", "info": {}}, columns={"answer": "info.truth"})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("row.jsonl", ["no file row.jsonl", "Did you mean rows.jsonl?"]),
        ({"rows.jsonl": 0}, ["ratio of rows.jsonl must be a positive number"]),
        ({"rows.jsonl": -1}, ["ratio of rows.jsonl must be a positive number"]),
    ],
)
def test_what_cannot_be_read_is_refused_before_it_is(data: Any, words: list[str]) -> None:
    write(Path.cwd(), {"rows.jsonl": lines({"prompt": "a"})})
    with pytest.raises(ConfigError) as caught:
        RowSource(data).check()
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_data_set_of_the_hub_is_named_with_its_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(path: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((path, config, split))
        return datasets.Dataset.from_list([{"question": "1 + 1?", "answer": "2"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in ("openai/gsm8k:main", "openai/gsm8k"):
        (case,) = RowSource(name, split="test").cases()
        assert (case["prompt"], case["answer"]) == (MESSAGES, "2")
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", None, "test")]
