"""The arguments of `aitrain env` that name an environment."""

from __future__ import annotations

import pytest

from aitrain.cli.env import checked
from aitrain.cli.flags import Flag
from aitrain.errors import ConfigError


def test_keywords_are_json_where_it_parses_and_text_elsewhere_and_win_over_the_json_object() -> None:
    given = ["size=100", "levels=[1, 2]", "deep=true", 'text="7"', "zip=007", "empty=", "a=b=c"]
    flags: dict[str, Flag] = {"rl_env": "envs.arithmetic", "rl_env_config": '{"size": 1, "seed": 2}'}
    assert checked(flags, given).rl_env_config == {
        "size": 100, "seed": 2, "levels": [1, 2], "deep": True, "text": "7", "zip": "007", "empty": "", "a": "b=c",
    }  # fmt: skip

    for keyword in ("size", "=3"):
        with pytest.raises(ConfigError, match="write KEY=VALUE"):
            checked(flags, [keyword])
