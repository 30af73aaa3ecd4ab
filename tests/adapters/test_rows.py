"""Rows in others' formats become cases; what is wrong is told with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aitrain import EnvironmentFailed
from aitrain.environment.adapters.rows import RowSource
from tests.conftest import json_lines, write
from tests.rollout.scripted import assistant, user

pytestmark = pytest.mark.usefixtures("here")
MESSAGES = [user("1 + 1?")]
OWN_SYSTEM = {"role": "system", "content": "Own."}


def cases(*rows: Any, **settings: Any) -> list[dict[str, Any]]:
    write(Path.cwd(), {"rows.jsonl": json_lines(rows)})
    return RowSource("", score_range="any", data="rows.jsonl", **settings).cases()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"data_source": "sums", "prompt": MESSAGES, "reward_model": {"style": "rule", "ground_truth": "2"}},
            {"prompt": MESSAGES, "ground_truth": "2", "data_source": "sums"},
        ),
        ({"messages": [*MESSAGES, assistant("2")]}, {"prompt": MESSAGES, "answer": "2"}),
        ({"problem": "1 + 1?", "solution": "2"}, {"prompt": MESSAGES, "solution": "2"}),
        ({"problem": "1 + 1?", "messages": 3}, {"prompt": MESSAGES, "messages": 3}),
        (
            {"prompt": json.dumps(MESSAGES), "reward_model": '{"ground_truth": "2"}'},
            {"prompt": MESSAGES, "ground_truth": "2"},
        ),
    ],
)
def test_rows_in_each_form_become_cases(row: dict[str, Any], expected: dict[str, Any]) -> None:
    (case,) = cases(row)
    assert {name: case.get(name) for name in expected} == expected
    (short,) = cases(row, system="Be short.")
    assert short["prompt"] == [{"role": "system", "content": "Be short."}, *MESSAGES]  # in place of its own


def test_columns_are_copied_under_the_names_that_functions_expect() -> None:
    (case,) = cases({"q": "1 + 1?", "info": {"truth": "2"}}, columns={"question": "q", "solution": "info.truth"})
    assert (case["prompt"], case["solution"]) == (MESSAGES, "2")


def test_a_parquet_file_of_verl_that_pandas_wrote_has_lists_and_numbers_of_python() -> None:
    pandas, numpy = pytest.importorskip("pandas"), pytest.importorskip("numpy")
    row = {"prompt": numpy.array(MESSAGES), "reward_model": {"ground_truth": numpy.array(["2", "two"])}}
    pandas.DataFrame([{**row, "extra_info": {"index": numpy.int64(3)}}]).to_parquet("rows.parquet")
    (case,) = RowSource("", score_range="any", data="rows.parquet").cases()
    assert (case["prompt"], case["ground_truth"], case["extra_info"]) == (MESSAGES, ["2", "two"], {"index": 3})


def test_a_json_file_may_hold_a_list_and_files_of_windows_are_read() -> None:
    listed = json.dumps([{"prompt": "é"}, {"prompt": "b"}], indent=2)
    lines = json_lines([{"prompt": "é"}, {"prompt": "b"}])
    for name, text in (("rows.json", listed), ("rows.jsonl", lines), ("rows.CSV", "prompt,n\né,1\nb,2\n")):
        Path(name).write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
        assert [case["prompt"] for case in RowSource("", score_range="any", data=name).cases()] == ["é", "b"]


def test_size_takes_the_first_rows_and_a_seed_shuffles_them_before() -> None:
    rows = [{"prompt": str(number)} for number in range(20)]
    first, *seeded = ([case["prompt"] for case in cases(*rows, size=3, seed=seed)] for seed in (None, 1, 1, 2))
    assert first == ["0", "1", "2"]
    assert seeded[0] == seeded[1]
    assert first != seeded[0] != seeded[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a"}\n\n{"prompt": \n', "rows.jsonl, line 3 cannot be read: JSONDecodeError"),
        ('{"prompt": "a"}\n{"text": "b", "label": 1}\n', "rows.jsonl, line 2: no prompt (it has: text, label)"),
        ("", "no rows in rows.jsonl"),
        ("prompt,n\n1, or 2?,3\n", "row 0 has more cells than the header"),
        ("prompt,n,n\na,1,2\n", "two columns have the same name: prompt, n, n"),
    ],
)
def test_a_wrong_row_is_told_with_file_and_line(text: str, words: str) -> None:
    name = "rows.csv" if text.startswith("prompt") else "rows.jsonl"
    write(Path.cwd(), {name: text})
    with pytest.raises(EnvironmentFailed) as caught:
        RowSource("", score_range="any", data=name).cases()
    assert words in str(caught.value)
