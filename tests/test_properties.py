"""Whatever stands in a file or behind a flag: an error that names the option, or a configuration that comes back the
same when it is written and read; never a traceback."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aitrain import ConfigError, TrainConfig
from aitrain.cli import main
from aitrain.options.reading import resolve
from aitrain.options.section import Option, options_of
from aitrain.options.yaml_text import read_yaml, write_yaml
from tests.conftest import run_in_process

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("here")]
few = settings(
    max_examples=200, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip

OPTIONS = {option.name: option for option in options_of(TrainConfig)}
WORDS = ["true", "no", "1e-5", "-1", "0x1F", "1_000", ".inf", "nan", "~", "@", "@/", "a,b", "{}", "[]", "auto"]
"""What programs read in more than one way."""

texts = st.one_of(
    st.text(max_size=20), st.sampled_from(WORDS), st.from_regex(r"[-+]?[0-9]{1,30}(\.[0-9]*)?", fullmatch=True)
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(0, 64), st.floats(), st.floats(0, 1), texts,
    st.dates(), st.binary(max_size=4),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.one_of(texts, scalars), inner, max_size=3)),
    max_leaves=6,
)
mappings = st.dictionaries(st.one_of(st.sampled_from([*OPTIONS]), texts, scalars), values, max_size=4)


def likely(option: Option) -> st.SearchStrategy[Any]:
    """Values of which many are of the right kind, so that many configurations are taken."""
    usual = [True, False, None, 1, 2**40, 0.5, "adamw_torch", "1e3", "2020-01-01", {"a": "1e3"}]
    return st.sampled_from([option.default, *option.choices, *usual])


likely_mappings = st.lists(st.sampled_from([*OPTIONS]), unique=True, max_size=3).flatmap(
    lambda chosen: st.fixed_dictionaries({name: likely(OPTIONS[name]) for name in chosen})
)


def as_yaml(mapping: dict[Any, Any]) -> str:
    try:
        return yaml.safe_dump(mapping, allow_unicode=True)
    except (yaml.YAMLError, TypeError):  # keys that cannot be written
        return repr(mapping)


def keys_of(text: str) -> list[str]:
    """The keys of a YAML text as YAML reads them: 0E0 is the number 0.0."""
    try:
        read = read_yaml(text)
    except ValueError:
        return []
    return [str(key) for key in read] if isinstance(read, dict) else []


@few
@given(st.one_of(st.text(), mappings.map(as_yaml), likely_mappings.map(as_yaml)))
@example(as_yaml({"rl_env_config": '{"a": NaN, "b": -Infinity}'}))
@example(as_yaml({"rl_env_config": {"a": math.nan, "b": -math.inf}}))
@example(
    as_yaml({"rl_env_config": {"date": "2024-11-20", "number": "1e-6", "no": "no", "off": False, "list": ["é\n:#"]}})
)
@example(as_yaml({"project_name": "1e5", "save_total_limit": None, "eval_strategy": "no", "trl": {"min_p": 1e-7}}))
@example(as_yaml({"rl_env_config": {"\x85": "a\x85b\x00\u2028\ufeff", "2020-01-01": "1e5", "null": "~"}}))
@example("[" * 5000)
@example("rl_env_config: &x {a: *x}")
@example("? [a]\n: b")
@example("lr: " + "9" * 5000)
@example("lr: !!python/object:os.system x")
@example("\ufeffmodel: tiny")
def test_any_file_of_options_is_taken_as_it_is_or_refused_by_name(text: str) -> None:
    file = Path("options.yaml")
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        config = resolve(TrainConfig, file)
    except ConfigError as error:
        message = str(error)
        names = [file.name, *OPTIONS, *keys_of(text)]
        assert len(message.splitlines()) <= 5, message
        assert "Traceback" not in message
        assert any(name[:8] in message or repr(name[:8])[1:-1] in message for name in names), message
        return
    file.write_text(write_yaml(config.written()), encoding="utf-8")
    again = resolve(TrainConfig, file)
    assert repr(again.written()) == repr(config.written())  # repr: NaN is not equal to itself


@few
@given(st.sampled_from([*OPTIONS]), st.one_of(texts, st.text(st.characters(exclude_characters="\0")), values.map(str)))
@example("rl_env_config", "[" * 5000)
@example("trl", "num_iterations=" + "[" * 5000)
@example("seed", "9" * 5000)
@example("project_name", "ab\udcff")
@example("output_dir", "\udcff")
@example("output_dir", "x" * 5000)
@example("rl_env", "x" * 5000 + ".py")
@example("rl_env", "~nobody-of-this-name/x.py")
@example("resume_from_checkpoint", "x" * 5000)
@example("max_steps", "1" + "0" * 300)
def test_any_text_behind_a_flag_is_taken_or_refused_by_name(name: str, value: str) -> None:
    flag = "--" + name.replace("_", "-")
    given_flag = flag if OPTIONS[name].is_switch else f"{flag}={value}"
    with mock.patch.object(main, "app", COMMANDS):
        code, out, err = run_in_process("plan --model tiny --rl-env envs.arithmetic", given_flag)
    assert code in (0, 2, 3), (code, err)
    if code == 0:
        assert "batch        " in out
        return
    assert len(err.splitlines()) <= 6, err
    assert "Traceback" not in err
    assert flag in err or any(option in err for option in OPTIONS), err


COMMANDS = typer.main.get_command(main.app)
"""Made once: Typer makes its commands anew for each call, which takes longer than all the rest."""
