"""Shell completion, asked for as the scripts of bash, zsh and fish ask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aitrain.cli import completion, main
from tests.conftest import write

BASH = shutil.which("bash")


def answer(shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **asked: str) -> str:
    """What `aitrain` prints, and 1 as its exit code where fish is to offer files."""
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_AITRAIN_COMPLETE", f"complete_{shell}")
    monkeypatch.setattr(sys, "argv", ["aitrain"])
    for command in ("grpo", "plan"):  # imported again, as in a new process: only some shells get the help texts
        monkeypatch.delitem(sys.modules, f"aitrain.cli.{command}", raising=False)
    with pytest.raises(SystemExit) as ended:
        main.main()
    printed = capsys.readouterr().out
    return printed if ended.value.code == 0 else f"exit code {ended.value.code}"


@pytest.fixture
def bash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bash:
    return Bash(monkeypatch, capsys)


class Bash:
    """`bash("grpo", "--vllm-mode", "")`: the words as bash splits them, the cursor in the last one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *words: str) -> list[str]:
        asked = {"COMP_WORDS": "\n".join(["aitrain", *words]), "COMP_CWORD": str(len(words))}
        return answer("bash", self.monkeypatch, self.capsys, **asked).split()


def test_commands_are_completed(bash: Bash) -> None:
    assert bash("") == list(main.COMMANDS)
    assert bash("gr") == ["grpo"]
    assert bash("data", "gs") == ["gsm8k"]
    assert bash("env", "re") == ["rescore"]
    assert bash("env", "play", "my.py", "--policy", "ref") == ["reference"]


def test_options_are_completed_with_both_forms_of_a_switch(bash: Bash) -> None:
    assert bash("grpo", "--rl-top") == ["--rl-top-k", "--rl-top-p"]
    assert bash("grpo", "--no-merge") == ["--no-merge-adapter"]
    assert bash("plan", "--mea") == ["--measure"]
    assert bash("--vers") == ["--version"]


def test_an_option_that_was_given_is_not_offered_again_but_trl_is(bash: Bash) -> None:
    assert "--lr" not in bash("grpo", "--lr", "1e-4", "--l")
    assert bash("grpo", "--trl", "delta=2", "--trl") == ["--trl"]


@pytest.mark.parametrize(
    "words",
    [("--vllm-mode", ""), ("--vllm-mode", "="), ("--vllm-mode", "=", ""), ("--lr", "=", "1", "--vllm-mode", "=", "")],
    ids=" ".join,
)
def test_the_values_of_a_choice_are_completed_after_a_space_and_after_an_equals_sign(
    bash: Bash, words: tuple[str, ...]
) -> None:
    assert bash("grpo", *words) == ["colocate", "server"]
    assert bash("grpo", "--vllm-mode", "=", "co") == ["colocate"]


@pytest.mark.parametrize("words", [("grpo", "--config", ""), ("grpo", "--rl-env", "my"), ("view", "")], ids=" ".join)
def test_where_a_file_may_stand_the_shell_offers_its_own(
    bash: Bash, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert bash(*words) == []  # `complete -o default` then offers files
    line = " ".join(["aitrain", *words])
    assert answer("zsh", monkeypatch, capsys, _TYPER_COMPLETE_ARGS=line) == "_files\n"
    asked = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "is-args"}
    assert answer("fish", monkeypatch, capsys, **asked) == "exit code 1"


def test_runs_are_completed_by_name(bash: Bash, here: Path) -> None:
    write(here, {"runs/demo/status.json": "{}", "runs/demo-2/status.json": "{}", "runs/other": None})
    assert bash("show", "") == ["demo", "demo-2"]
    assert bash("view", "demo-") == ["demo-2"]


def test_zsh_and_fish_get_the_descriptions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As they are: Typer's own would take square brackets for markup, and load Rich to look for them."""
    asked = {"_TYPER_COMPLETE_ARGS": "aitrain grpo --weight", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert answer("fish", monkeypatch, capsys, **asked) == "--weight-decay\tWeight decay.\n"
    assert answer("zsh", monkeypatch, capsys, **asked) == """_arguments '*: :(("--weight-decay":"Weight decay."))'\n"""
    item = completion.CompletionItem("--x", help="a [b]: 'c'")
    assert completion.Fish.format_completion(object.__new__(completion.Fish), item) == "--x\ta [b]: 'c'"
    assert completion.Zsh.format_completion(object.__new__(completion.Zsh), item) == "\"--x\":\"a [b]\\\\: ''c''\""


def test_completing_a_line_with_help_or_version_prints_neither(bash: Bash) -> None:
    assert bash("grpo", "--help", "--weight") == ["--weight-decay"]
    assert bash("--version", "gr") == ["grpo"]


def test_completion_needs_neither_rich_nor_anything_heavy() -> None:
    code = (
        "import sys\nfrom aitrain.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('LOADED', *sorted({'rich', 'torch', 'transformers', 'trl', 'numpy'} & set(sys.modules)))"
    )
    asked = {"_AITRAIN_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "aitrain grpo --"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "LOADED", done.stdout[-300:] + done.stderr


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_bash_itself_completes_with_the_script(tmp_path: Path) -> None:
    script = subprocess.run(
        [sys.executable, "-c", "from aitrain.cli import completion; print(completion.script('bash'))"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    write(tmp_path, {"aitrain": f'#!/bin/sh\nexec {sys.executable} -m aitrain "$@"\n', "script.sh": script})
    (tmp_path / "aitrain").chmod(0o755)
    asked = (
        f"source {tmp_path}/script.sh; complete -p aitrain >&2\n"
        "COMP_WORDS=(aitrain grpo --rl-loss-type = da); COMP_CWORD=4; _aitrain_completion aitrain\n"
        'echo "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([str(BASH), "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "dapo\n"
    assert "-o default -F _aitrain_completion" in done.stderr


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_script_is_installed_where_the_shell_looks(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(completion, "_get_shell_name", lambda: shell)
    monkeypatch.setattr(sys, "argv", ["aitrain", "--install-completion"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    (written,) = (path for path in tmp_path.rglob("*") if path.is_file() and "complete_" in path.read_text())
    assert str(written) in capsys.readouterr().out

    monkeypatch.setattr(sys, "argv", ["aitrain", "--show-completion"])
    with pytest.raises(SystemExit):
        main.main()
    assert capsys.readouterr().out.strip() == written.read_text().strip()


def test_another_shell_is_refused_with_the_ones_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(completion, "_get_shell_name", lambda: None)
    monkeypatch.setenv("SHELL", "/bin/dash")
    monkeypatch.setattr(sys, "argv", ["aitrain", "--show-completion"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert "dash" in capsys.readouterr().err
