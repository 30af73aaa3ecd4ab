"""Shell completion, asked for as the script of bash asks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aitrain.cli import main
from tests.conftest import write

Answer = Callable[..., str]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Answer:
    """`answer("grpo", "--vllm-mode", "")`: what is printed with the cursor in the last word."""

    def ask(*words: str) -> str:
        line = ["aitrain", *words]
        asked = {"COMP_WORDS": "\n".join(line), "COMP_CWORD": str(len(words))}
        for name, value in {"_AITRAIN_COMPLETE": "complete_bash", **asked}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["aitrain"])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert not ended.value.code
        return capsys.readouterr().out

    return ask


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["env", "re"], ["rescore"]),
        (["grpo", "--rl-top"], ["--rl-top-k", "--rl-top-p"]),
        (["grpo", "--no-merge"], ["--no-merge-adapter"]),
        (["grpo", "--vllm-mode", ""], ["colocate", "server"]),
        (["grpo", "--vllm-mode", "=", "co"], ["colocate"]),
        (["grpo", "--config", ""], []),  # `complete -o default` then offers files
        (["show", ""], ["demo", "demo-2"]),
    ],
    ids=" ".join,
)
def test_commands_options_values_and_runs_are_completed(
    answer: Answer, here: Path, words: list[str], offered: list[str]
) -> None:
    write(here, {"runs/demo/status.json": "{}", "runs/demo-2/status.json": "{}", "runs/other": None})
    assert answer(*words).split() == offered
