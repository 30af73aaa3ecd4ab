"""Shell completion, asked for as the scripts of bash, zsh and fish ask."""

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
    """`answer("bash", "grpo", "--vllm-mode", "")`: what is printed with the cursor in the last word, and 1 as the exit
    code where fish is to offer files."""

    def ask(shell: str, *words: str) -> str:
        line = ["aitrain", *words]
        for name, value in {
            "_AITRAIN_COMPLETE": f"complete_{shell}", "COMP_WORDS": "\n".join(line), "COMP_CWORD": str(len(words)),
            "_TYPER_COMPLETE_ARGS": " ".join(line), "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["aitrain"])
        for command in ("grpo", "plan"):  # imported again, as in a new process: only some shells get the help texts
            monkeypatch.delitem(sys.modules, f"aitrain.cli.{command}", raising=False)
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert not ended.value.code
        return capsys.readouterr().out

    return ask


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["gr"], ["grpo"]),
        (["env", "re"], ["rescore"]),
        (["env", "play", "my.py", "--policy", "ref"], ["reference"]),
        (["grpo", "--rl-top"], ["--rl-top-k", "--rl-top-p"]),
        (["grpo", "--no-merge"], ["--no-merge-adapter"]),
        (["grpo", "--lr", "1e-4", "--lr"], []),
        (["grpo", "--trl", "delta=2", "--trl"], ["--trl"]),
        (["grpo", "--vllm-mode", ""], ["colocate", "server"]),
        (["grpo", "--vllm-mode", "=", "co"], ["colocate"]),
        (["grpo", "--lr", "=", "1", "--vllm-mode", "=", ""], ["colocate", "server"]),
        (["grpo", "--config", ""], []),  # `complete -o default` then offers files
        (["show", ""], ["demo", "demo-2"]),
        (["grpo", "--help", "--weight"], ["--weight-decay"]),
        (["--version", "gr"], ["grpo"]),
    ],
    ids=" ".join,
)
def test_commands_options_values_and_runs_are_completed(
    answer: Answer, here: Path, words: list[str], offered: list[str]
) -> None:
    write(here, {"runs/demo/status.json": "{}", "runs/demo-2/status.json": "{}", "runs/other": None})
    assert answer("bash", *words).split() == offered


def test_zsh_and_fish_get_the_descriptions(answer: Answer) -> None:
    assert answer("fish", "grpo", "--weight") == "--weight-decay\tWeight decay.\n"
    assert answer("zsh", "grpo", "--weight") == """_arguments '*: :(("--weight-decay":"Weight decay."))'\n"""
    assert answer("zsh", "grpo", "--config", "") == "_files\n"
