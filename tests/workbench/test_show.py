"""`aitrain env show`: sample cases as the model sees them."""

from __future__ import annotations

from typing import Any

import pytest

from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.show import show
from tests.workbench.test_play import VIEW, Add, OneTurn, Talk, cases


def shown(environment: Any, capsys: pytest.CaptureFixture[str], count: int = 3, **options: Any) -> str:
    opened = OpenedEnvironment(environment, cases(count), options.pop("held_out", ()))
    show(opened, VIEW, **options)
    return capsys.readouterr().out


def test_a_case_is_rendered_with_its_tokens_columns_and_reference(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(OneTurn(), capsys, case="1")
    assert "cases     3\n" in text
    assert "columns   prompt (list), answer (str)\n" in text
    assert "tokens    21 in each prompt (tiny, 3 cases)\n" in text
    assert text.endswith(
        "-- case 1 (case_idx c1): 21 tokens ---------------------------------------------\n"
        "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\nanswer: 1\nreference: 1\n"
    )


def test_tools_are_shown_as_calls_and_in_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(Add(), capsys)
    assert "tools     add(first: integer, second: integer)\n" in text
    assert '{"type": "function", "function": {"name": "add"' in text


def test_what_the_environment_says_first_is_part_of_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(Talk(), capsys, case="0")
    assert "episode   several turns (episode)\n" in text
    assert "0?\n\nseed 0<|im_end|>" in text
    assert "reference: none" in text


def test_samples_are_spread_over_the_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(OneTurn(), capsys, count=10)
    assert [line.split(" (")[0] for line in text.splitlines() if line.startswith("--")] == [
        "-- case 0", "-- case 3", "-- case 6",
    ]  # fmt: skip


def test_a_reference_that_knows_no_held_out_cases_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    class Trained(OneTurn):
        def reference(self, case_idx: str) -> str:
            return ["0"][int(case_idx[1:])]

    text = shown(Trained(), capsys, count=1, held_out=cases(2)[1:], case="1")
    assert "held out" in text
    assert "reference raised: IndexError" in text


def test_wrong_cases_and_broken_beginnings_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def episode(self, case_idx: str) -> Any:
            raise ValueError("no such city")
            yield

    with pytest.raises(ConfigError, match="there is no case 7"):
        shown(OneTurn(), capsys, case="7")
    with pytest.raises(EnvironmentFailed, match="episode of case c0 raised: ValueError: no such city"):
        shown(Broken(), capsys)
