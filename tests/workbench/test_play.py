"""`aitrain env play`: episodes turn by turn, by scripted policies, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aitrain import Score, TrainConfig
from aitrain.cli.env_play import env_play
from aitrain.environment.contract import Case
from aitrain.environment.session import ResetResult
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.jobs.tiny_tokenizer import TinyTokenizer
from aitrain.rollout.chat_format import ChatFormat
from aitrain.workbench.model_view import ModelView
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.person import Person, written
from aitrain.workbench.play import PlayOptions, play, read_script
from aitrain.workbench.player import Conversation

VIEW = ModelView(ChatFormat(TinyTokenizer()), "tiny", tokenizer="the tokenizer")


def cases(count: int = 3, chat: bool = True) -> list[Case]:
    prompts: list[Any] = [[{"role": "user", "content": f"{n}?"}] if chat else f"{n}? " for n in range(count)]
    return [Case(f"c{n}", prompt, {"prompt": prompt, "answer": str(n)}, n) for n, prompt in enumerate(prompts)]


class OneTurn:
    def score_episode(self, text: str, answer: str) -> Score:
        return Score(float(text == answer), metrics={"length": len(text)})

    def reference(self, case_idx: str) -> str | None:
        return case_idx[1:] if case_idx != "c2" else None


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


def played(
    environment: Any, capsys: pytest.CaptureFixture[str], of: list[Case] | None = None, turns: int = 9, **options: Any
) -> str:
    config = TrainConfig(rl_max_turns=turns)
    play(OpenedEnvironment(environment, of or cases()), config, VIEW, PlayOptions(**options))
    return capsys.readouterr().out


def replies(folder: Path, *texts: str) -> str:
    (folder / "replies.txt").write_text("\n".join(texts))
    return str(folder / "replies.txt")


def test_the_rendered_prompt_the_answer_the_score_and_the_metrics_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = played(OneTurn(), capsys, case="1", policy="reference").splitlines()
    assert lines == [
        "OneTurn, case 1 of 3 (case_idx c1), seed 0; template and tokens of tiny",
        "-- turn 1: the model gets 21 tokens --------------------------------------------",
        "<|im_start|>user",
        "1?<|im_end|>",
        "<|im_start|>assistant",
        "-- reference answers -----------------------------------------------------------",
        "1",
        "-- the environment ended the episode (done, 1 turn) ----------------------------",
        "score 1.000",
        "      env/length 1",
    ]


def test_a_string_prompt_is_shown_without_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    lines = played(OneTurn(), capsys, cases(chat=False), policy="empty").splitlines()
    assert lines[1:5] == [lines[1], "0? ", lines[3], ""]
    assert "score 0.000" in lines


def test_several_turns_are_shown_as_the_model_gets_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = replies(tmp_path, "5", "1")
    shown = played(Talk(), capsys, case="c1", policy="script", script=script, seed=7)
    assert "1?\n\nseed 7<|im_end|>\n<|im_start|>assistant\n" in shown
    assert "<|im_end|>\n<|im_start|>user\n\\x1b[31mno\\x1b[0m<|im_end|>\n<|im_start|>assistant\n" in shown
    assert "(done, 2 turns)" in shown
    assert "\x1b" not in shown  # text of an environment cannot move the cursor


def test_a_script_that_ends_is_scored_as_an_unfinished_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = played(Talk(), capsys, policy="script", script=replies(tmp_path, "no"))
    assert "there is no further answer (out_of_replies, 1 turn)" in shown
    assert "score 0.000" in shown


def test_the_limit_of_turns_ends_an_episode(capsys: pytest.CaptureFixture[str]) -> None:
    shown = played(Talk(), capsys, policy="junk", turns=2)
    assert "the limit of turns ended the episode (max_turns, 2 turns)" in shown


def test_tool_calls_are_run_and_their_results_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"first": 2, "second": 3}}</tool_call>'
    shown = played(Add(), capsys, policy="script", script=replies(tmp_path, call, "5"))
    assert '-> add {"first": 2, "second": 3}' in shown
    assert "<|im_start|>tool\n5<|im_end|>" in shown
    assert "score 1.000" in shown


def test_a_score_of_none_is_called_unscored(capsys: pytest.CaptureFixture[str]) -> None:
    class Unscored:
        def score_episode(self, tokenizer: object) -> None:
            assert tokenizer == "the tokenizer"

    assert "unscored" in played(Unscored(), capsys, policy="empty")


def test_an_environment_that_speaks_last_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    class Farewell:
        def get_tools(self) -> list[Any]:
            return [self.leave]

        def leave(self) -> Any:
            """Leave."""
            from aitrain import ToolResult

            return ToolResult("good-bye", done=True)

        def score_episode(self) -> float:
            return 0.5

        def reference(self, case_idx: str) -> list[str]:
            return ['<tool_call>{"name": "leave"}</tool_call>']

    shown = played(Farewell(), capsys, policy="reference")
    assert "-- the environment says ---" in shown
    assert "good-bye" in shown


# -- what goes wrong


def test_a_failure_names_the_case_and_the_line() -> None:
    class Broken:
        def score_episode(self) -> float:
            raise ValueError("no such city")

    with pytest.raises(EnvironmentFailed, match="score_episode of case c0 raised: ValueError: no such city") as failed:
        play(OpenedEnvironment(Broken(), cases()), TrainConfig(), VIEW, PlayOptions(policy="empty"))
    assert "test_play.py, line" in str(failed.value)


def test_a_score_out_of_range_is_a_failure() -> None:
    class Percent:
        def score_episode(self) -> float:
            return 80.0

    with pytest.raises(EnvironmentFailed, match="--rl-score-range"):
        play(OpenedEnvironment(Percent(), cases()), TrainConfig(), VIEW, PlayOptions(policy="empty"))


def test_a_case_is_a_row_number_or_a_name_and_another_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "case 2 of 3 (case_idx c2)" in played(OneTurn(), capsys, case="c2", policy="empty")
    with pytest.raises(ConfigError, match="rows are numbered from 0 to 2"):
        played(OneTurn(), capsys, case="3", policy="empty")


@pytest.mark.parametrize(("environment", "case"), [(OneTurn(), "2"), (Talk(), "0")])
def test_without_a_reference_the_policy_says_how_to_give_one(environment: Any, case: str) -> None:
    options = PlayOptions(case=case, policy="reference")
    with pytest.raises(ConfigError, match=r"Give it a method reference\(self, case_idx\)"):
        play(OpenedEnvironment(environment, cases()), TrainConfig(), VIEW, options)


def test_leaving_the_debugger_is_no_failure_of_the_environment() -> None:
    class Debugged:
        def score_episode(self) -> float:
            import bdb

            raise bdb.BdbQuit

    with pytest.raises(KeyboardInterrupt):
        play(OpenedEnvironment(Debugged(), cases()), TrainConfig(), VIEW, PlayOptions(policy="empty"))


def test_scripts_are_lines_or_a_json_list(tmp_path: Path) -> None:
    file = tmp_path / "replies"
    file.write_text("one\n\ntwo\n")
    assert read_script(file).replies == ("one", "", "two")
    file.write_text('["several\\nlines", ""]')
    assert read_script(file).replies == ("several\nlines", "")
    for wrong in ("[1]", "[not json"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="JSON list"):
            read_script(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_script(tmp_path / "missing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "scrpt"}, "Did you mean script?"),
        ({"policy": "script"}, "belong together"),
        ({"file": Path("x")}, "belong together"),
        ({"policy": "model"}, "name it with --model"),
        ({"policy": "empty", "model": "tiny"}, "leave one of the two out"),
        ({"keywords": ["case=1"]}, "Arithmetic does not take case. Did you mean cases?"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_is_started(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        env_play("envs.arithmetic", **{"case": "0", **options})
    assert message in str(refused.value)


# -- what a person types


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("85", "85"),
        ("tool add first=2 second=3", '<tool_call>{"name": "add", "arguments": {"first": 2, "second": 3}}</tool_call>'),
        ("tool say text='two words'", '<tool_call>{"name": "say", "arguments": {"text": "two words"}}</tool_call>'),
        ("tool leave", '<tool_call>{"name": "leave", "arguments": {}}</tool_call>'),
        ('{"name": "leave"}', '<tool_call>{"name": "leave"}</tool_call>'),
        ('{"city": "Arla"}', '{"city": "Arla"}'),
        ("{not json", "{not json"),
        ("so:\ntool leave", 'so:\n<tool_call>{"name": "leave", "arguments": {}}</tool_call>'),
    ],
)
def test_calls_may_be_typed_in_short(typed: str, answer: str) -> None:
    assert written(typed) == answer


@pytest.mark.parametrize("typed", ["tool", "tool add 3", "tool add =3", "tool add text='open"])
def test_a_call_that_cannot_be_read_is_explained(typed: str) -> None:
    with pytest.raises(ValueError, match="tool"):
        written(typed)


def test_an_answer_ends_with_an_empty_line_or_with_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["two", "lines", "", "", '"""', "with", "", "empty ones", '"""', "last"])

    def read(_: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    person, conversation = Person(lambda _: None), Conversation(cases()[0], ResetResult())
    answers = [person(conversation) for _ in range(5)]
    assert [answer and answer.text for answer in answers] == ["two\nlines", "", "with\n\nempty ones", "last", None]


class OwnLoop:
    """Runs its own loop, with a second conversation that is not trained."""

    async def rollout(self, answer: str, endpoint: Any) -> float:
        messages = [{"role": "user", "content": "first?"}]
        first = await endpoint.chat(messages)
        beside = await endpoint.chat([{"role": "user", "content": "what do you think?"}], trained=False)
        await endpoint.chat([*messages, first, {"role": "user", "content": f"you thought {beside['content']}"}])
        return 0.5


def test_an_environment_with_its_own_loop_is_played_and_its_other_conversations_are_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = played(OwnLoop(), capsys, policy="junk")
    assert "-- the environment asks in another conversation, which is not trained" in shown
    assert "what do you think?" in shown
    assert "you thought qwzx" in shown
    assert "(done, 2 turns)" in shown
    assert "score 0.500" in shown
