"""Whatever stands in a file or behind a flag: an error that names the option, or a configuration that stays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import properties

few = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module", autouse=True)
def _built_once() -> Iterator[None]:
    with properties.built_once():
        yield


@few
@given(st.one_of(properties.mappings, properties.likely_mappings))
@example({"rl_env_config": '{"a": NaN, "b": -Infinity}'})
@example({"rl_env_config": {"a": math.nan, "b": -math.inf}})
@example({"rl_env_config": {"\x85": "a\x85b\x00\u2028\ufeff", "2020-01-01": "1e5", "null": "~"}})
@pytest.mark.slow
def test_any_mapping_is_taken_as_it_is_or_refused_by_name(mapping: dict[Any, Any]) -> None:
    properties.holds_for_a_file_of_options(mapping)


@few
@given(st.text())
@example("[" * properties.DEEP)
@example("rl_env_config: &x {a: *x}")
@example("? [a]\n: b")
@example("lr: " + "9" * 5000)
@example("lr: !!python/object:os.system x")
@example("\ufeffmodel: tiny")
@pytest.mark.slow
def test_any_text_is_a_file_of_options_or_refused(text: str) -> None:
    properties.holds_for_a_file(text)


@few
@given(st.sampled_from(properties.OPTIONS), properties.flag_values)
@example("rl_env_config", "[" * properties.DEEP)
@example("trl", "num_iterations=" + "[" * properties.DEEP)
@example("seed", "9" * 5000)
@example("project_name", "ab\udcff")
@example("output_dir", "\udcff")
@example("output_dir", "x" * 5000)
@example("rl_env", "x" * 5000 + ".py")
@example("rl_env", "~nobody-of-this-name/x.py")
@example("resume_from_checkpoint", "x" * 5000)
@example("max_steps", "1" + "0" * 300)
@pytest.mark.slow
def test_any_text_behind_a_flag_is_taken_or_refused_by_name(name: str, value: str) -> None:
    properties.holds_for_a_flag(name, value)
