"""`aitrain env play`: episodes turn by turn, by scripted policies, in this process."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from aitrain import Score, TrainConfig
from aitrain.environment.contract import Case
from aitrain.environment.runner import EnvRunner
from aitrain.errors import ConfigError
from aitrain.jobs.env_terminal import chat_of
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.play import play
from aitrain.workbench.show import show
from tests.rehearsal import call


def cases(count: int = 3) -> list[Case]:
    prompts = [[{"role": "user", "content": f"{n}?"}] for n in range(count)]
    return [Case(f"c{n}", prompt, {"prompt": prompt, "answer": str(n)}, n) for n, prompt in enumerate(prompts)]


class OneTurn:
    def score_episode(self, text: str, answer: str) -> Score:
        return Score(float(text == answer), metrics={"length": len(text)})

    def reference(self, case_idx: str) -> str:
        return case_idx[1:]


class Talk:
    def episode(self, answer: str, seed: int) -> Any:
        reply = yield f"seed {seed}"
        while reply != answer:
            reply = yield "\x1b[31mno\x1b[0m"
        return 1.0


class Add:
    def get_tools(self) -> list[Any]:
        return [self.add]

    def add(self, first: int, second: int) -> int:
        """Add."""
        return first + second

    def score_episode(self, text: str, completion: list[Any]) -> float:
        assert completion[1]["role"] == "tool"
        return float(text == "5")


def played(environment: Any, turns: int = 3, **options: Any) -> str:
    opened = OpenedEnvironment(EnvRunner(environment, TrainConfig(rl_max_turns=turns)), cases())
    with redirect_stdout(io.StringIO()) as out:
        play(opened, mock.Mock(), **options)
    return out.getvalue()


def test_the_prompt_the_answer_the_score_and_the_metrics_are_shown() -> None:
    lines = played(OneTurn(), case="c1", policy="reference").splitlines()
    assert lines == [
        "OneTurn, case 1 (case_idx c1) of 3, seed 0",
        "    user: 1?",
        "    assistant: 1",
        "-- the environment ended the episode (done, 1 turn) ----------------------------",
        "score 1.000",
        "      env/length 1",
    ]


@pytest.mark.parametrize(
    ("environment", "said", "shown"),
    [
        (
            Talk(), ["5", "0"],
            ["user: 0?\n    \n    seed 7\n", "user: \\x1b[31mno\\x1b[0m\n", "(done, 2 turns)", "score 1.000"],
        ),
        (Talk(), ["no"], ["there is no further answer (out_of_replies, 1 turn)", "score 0.000"]),
        (Talk(), ['["several\\nlines", "0"]'], ["score 1.000"]),
        (Talk(), ["no"] * 4, ["the episode has had --rl-max-turns answers (max_turns, 3 turns)"]),
        (
            Add(), [call("add", first=2, second=3), "5"],
            ["-> add({\"first\": 2, \"second\": 3})\n    tool add: 5\n", "score 1.000"],
        ),
    ],
)  # fmt: skip
def test_turns_are_shown_up_to_the_end_of_the_episode(
    environment: Any, said: list[str], shown: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "replies.txt"
    file.write_text("\n".join(said))
    text = played(environment, policy="script", script=str(file), seed=7)
    assert all(part in text for part in shown), text
    assert "\x1b" not in text  # text of an environment cannot move the cursor


# -- aitrain env show


def shown(environment: Any, count: int = 3, **options: Any) -> str:
    config = TrainConfig(model="tiny")
    with redirect_stdout(io.StringIO()) as out:
        show(OpenedEnvironment(EnvRunner(environment, config), cases(count)), chat_of(config), **options)
    return out.getvalue()


def test_tools_and_what_the_environment_says_first_are_part_of_the_prompt() -> None:
    text = shown(Add(), count=10)
    assert '{"type": "function", "function": {"name": "add"' in text
    assert [line.split(" (")[0] for line in text.splitlines() if line.startswith("--")] == [
        "-- case 0", "-- case 4", "-- case 9",
    ]  # fmt: skip
    assert "0?\n\nseed 0<|im_end|>" in shown(Talk(), case="0")
    with pytest.raises(ConfigError, match="rows are numbered from 0 to 2"):
        shown(Talk(), case="7")
