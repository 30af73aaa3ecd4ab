"""A program that reads only messages can repair what they are about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from aitrain.environment.contract import check_methods
from aitrain.errors import EnvironmentFailed
from aitrain.execution.user_code import failure_message
from benchmarks.repair import COMMANDS, Outcome, Setup, apply_rule, repair, setups
from tests.conftest import Run

SHORT = ("misspelt method, parameter and name", "scores outside of the range")


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.slow
def test_a_broken_run_is_repaired_with_at_most_five_commands(name: str, here: Path, aitrain_grpo: Run) -> None:
    def run(arguments: Sequence[str], folder: Path) -> str:
        return aitrain_grpo(*arguments[1:]).stdout

    outcome = repair(setups()[name], run, here)
    assert outcome.trained, outcome.messages
    assert 1 < outcome.commands <= COMMANDS


def test_a_message_that_says_nothing_to_do_ends_the_repair(here: Path) -> None:
    failed = json.dumps({"event": "Failed", "message": "something went wrong", "exit_code": 1})
    assert repair(setups()["syntax error"], lambda *_: failed, here) == Outcome(False, ["something went wrong"])


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("unknown option --rl-top. Did you mean --rl-top-p?\nSee aitrain grpo --help", "--rl-top-p 1 --lr 1"),
        ("rl_x: no\nUse --batch-size 4, or --rl-prompts-per-step 5.", "--rl-top 1 --lr 1 --batch-size 4"),
        ("lr: contradicts rl_top\nLeave it out.", "--rl-top 1"),
    ],
)
def test_a_rule_changes_the_command_line(message: str, arguments: str) -> None:
    setup = Setup.of("--rl-top 1 --lr 1")
    assert apply_rule(setup, message)
    assert setup.arguments == arguments.split()


# -- the messages that it needs


class Misspelt:
    def build_datasets(self) -> list[dict[str, str]]:
        return []

    def score_epsiode(self, completion: str) -> float:
        return 0.0


def test_a_misspelt_method_is_named() -> None:
    with pytest.raises(EnvironmentFailed, match=r"It has build_datasets\. Did you mean build_dataset\?"):
        check_methods(Misspelt())
    misspelt = type("Env", (Misspelt,), {"build_dataset": Misspelt.build_datasets})
    with pytest.raises(EnvironmentFailed, match=r"to 1\. It has score_epsiode\. Did you mean score_episode\?"):
        check_methods(misspelt())


def test_a_misspelt_name_of_the_users_code_is_answered_with_the_nearest() -> None:
    def advice(code: str) -> str:
        with pytest.raises((NameError, AttributeError)) as caught:
            exec(f"def score(answer):\n    return {code}\nscore('x')", {})
        return failure_message("score_episode raised", caught.value).splitlines()[-1]

    assert advice("anwser") == "Did you mean answer?"
    assert advice("sroted(answer)") == "Did you mean sorted?"
    assert advice("answer.stirp()") == "Did you mean strip?"
    assert "Did you mean" not in advice("nothing_like_it")
