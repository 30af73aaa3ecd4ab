"""The arguments of `aitrain env` that name an environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from aitrain.cli.env_arguments import env_options
from aitrain.errors import ConfigError


def test_keywords_are_json_where_it_parses_and_text_elsewhere() -> None:
    given = ["size=100", "name=chain_sum", "levels=[1, 2]", "deep=true", 'text="7"', "zip=007", "empty=", "a=b=c"]
    assert env_options("my.py", None, given)["rl_env_config"] == {
        "size": 100,
        "name": "chain_sum",
        "levels": [1, 2],
        "deep": True,
        "text": "7",
        "zip": "007",
        "empty": "",
        "a": "b=c",
    }


def test_a_keyword_wins_over_the_json_object(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"size": 1, "seed": 2}')
    assert env_options("my.py", f"@{file}", ["size=3"]) == {"rl_env": "my.py", "rl_env_config": {"size": 3, "seed": 2}}


def test_without_keywords_there_is_no_configuration() -> None:
    assert env_options("envs.gsm8k") == {"rl_env": "envs.gsm8k"}


@pytest.mark.parametrize("keyword", ["size", "=3", " =3"])
def test_a_keyword_without_a_name_or_a_value_is_refused_with_an_example(keyword: str) -> None:
    with pytest.raises(ConfigError, match="write KEY=VALUE, as in -E size=100"):
        env_options("my.py", None, [keyword])


def test_a_configuration_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a JSON object"):
        env_options("my.py", "[1]")
