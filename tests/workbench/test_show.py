"""`aitrain env show`: sample cases as the model sees them."""

from __future__ import annotations

from typing import Any

import pytest

from aitrain.errors import ConfigError
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.show import show
from tests.workbench.test_play import VIEW, Add, Talk, cases


def shown(environment: Any, capsys: pytest.CaptureFixture[str], count: int = 3, **options: Any) -> str:
    show(OpenedEnvironment(environment, cases(count), ()), VIEW, **options)
    return capsys.readouterr().out


def test_tools_and_what_the_environment_says_first_are_part_of_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(Add(), capsys, count=10)
    assert "tools     add(first: integer, second: integer)\n" in text
    assert '{"type": "function", "function": {"name": "add"' in text
    assert [line.split(" (")[0] for line in text.splitlines() if line.startswith("--")] == [
        "-- case 0", "-- case 3", "-- case 6",
    ]  # fmt: skip
    assert "0?\n\nseed 0<|im_end|>" in shown(Talk(), capsys, case="0")
    with pytest.raises(ConfigError, match="there is no case 7"):
        shown(Talk(), capsys, case="7")
