"""Shell completion, asked for as the script of bash asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from aitrain.cli import main
from tests.conftest import write


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("env re", "rescore"),
        ("grpo --rl-top", "--rl-top-k --rl-top-p"),
        ("grpo --no-merge", "--no-merge-adapter"),
        ("grpo --vllm-mode ", "colocate server"),
        ("grpo --config ", ""),  # `complete -o default` then offers files
        ("show ", "demo demo-2"),
    ],
)
def test_commands_options_values_and_runs_are_completed(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    offered: str,
) -> None:
    write(here, {"runs/demo/status.json": "{}", "runs/demo-2/status.json": "{}", "runs/other": None})
    monkeypatch.setenv("_AITRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(["aitrain", *words.split(" ")]))
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" "))))
    monkeypatch.setattr("sys.argv", ["aitrain"])
    with pytest.raises(SystemExit):
        main.main()
    assert capsys.readouterr().out.split() == offered.split()
