"""Thinking models: what a template offers, thoughts with a budget, thoughts kept between turns, and answers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.rollout.message_format import MessageFormat
from aitrain.rollout.thinking import offered_thinking
from aitrain.training.chat_templates import chat_format
from aitrain.training.dataset import shown_episodes
from aitrain.training.training_batch import episode_metrics, episode_record
from tests.finished_runs import Talk
from tests.rollout.scripted import assistant, user
from tests.training.scripted_policy import played
from tests.training.test_rollout import Speaks, speaks  # noqa: F401

SMOL = """\
{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{%- if '/no_think' in messages[0].content %}{%- set enable_thinking = false %}{%- endif %}
{%- set silence = '' if enable_thinking else '<think>\\n\\n</think>\\n' %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (silence if message.role == 'assistant' else '') }}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + silence }}{%- endif %}"""
"""Behaves as SmolLM3's template does."""


class Sums:
    """One turn: right is 42 and nothing else."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, str, str]] = []

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [user("40 + 2 =")]} for _ in range(8)]

    def score_episode(self, completion: Any, text: str, thought: str) -> float:
        self.seen.append((completion, text, thought))
        return float(text == "42")


class SumsWithThoughts(Sums):
    """Asks for all that was said."""

    sees_thoughts = True


CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


class SumsWithTool(SumsWithThoughts):
    """Right is a thought of a call, and 42."""

    def get_tools(self) -> list[Any]:
        return [self.add]

    def add(self) -> str:
        """Add them."""
        return "43"

    def score_episode(self, text: str) -> float:  # type: ignore[override]
        return float(text.removeprefix("<think>") == f"\n{CALL}\n</think>\n\n42")


class Apart(SumsWithThoughts):
    """Asks for an answer that is not trained, and for one that is: right is the same."""

    score_episode: Any = None

    async def rollout(self, endpoint: Any) -> float:
        said = [await endpoint.chat([user("40 + 2 =")], trained=trained) for trained in (False, True)]
        return float(said[0] == said[1])


class Adds(SumsWithTool):
    """Right is 42, without a thought."""

    sees_thoughts = False
    score_episode = Sums.score_episode


def template(speaks: Speaks, name: str) -> Any:  # noqa: F811
    """A tokenizer with a template of TRL's, or with SMOL."""
    tokenizer = speaks("qwen3" if name == "smol" else name)
    if name == "smol":
        tokenizer.chat_template = SMOL
    return tokenizer


def thinks(thought: str = "forty and two") -> Callable[[str], str]:
    """Thinks, and answers; where its thought has ended, it only answers."""

    def said(given: str) -> str:
        last = given.rsplit("assistant\n", 1)[1]
        if "</think>" in last:
            return "42<|im_end|>"
        return f"{'' if '<think>' in last else '<think>'}\n{thought}\n</think>\n\n42<|im_end|>"

    return said


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("qwen3", "on off N"),
        ("smol", "on off N"),
        ("gptoss", "on low medium high N"),
        ("qwen3_8", "on off low medium N"),  # high is called xhigh, and the default
        ("gemma4", "on off N"),
        ("deepseek_r1_distill", "on N"),
        ("qwen2_5", ""),
    ],
)
def test_what_a_template_offers_is_found_by_rendering_it(speaks: Speaks, name: str, offered: str) -> None:  # noqa: F811
    tokenizer = template(speaks, name)
    chat = chat_format(tokenizer, TrainConfig())
    assert list(offered_thinking(chat)) == [word.replace("N", "a number of tokens") for word in offered.split()]
    for value in ("on", "off", "low", 99):
        if ("N" if value == 99 else value) in offered.split():
            chat_format(tokenizer, TrainConfig(thinking=value))
        else:
            with pytest.raises(ConfigError, match=f"thinking: {value} is not known"):
                chat_format(tokenizer, TrainConfig(thinking=value))


def test_off_works_in_chats_and_is_refused_with_prompts_that_are_strings(speaks: Speaks) -> None:  # noqa: F811
    for name in ("qwen3", "smol"):
        chat = chat_format(template(speaks, name), TrainConfig(thinking="off"))
        assert chat.prompt_text([user("hi")]).rstrip().endswith("<think>\n\n</think>")
    for thinking in ("off", 9):
        with pytest.raises(ConfigError, match="prompts are strings"):
            shown_episodes(Sums(), replace(chat, thinking=thinking), False)
    with pytest.raises(ConfigError, match="thinking: must be"):  # <think> has up to 7 tokens
        TrainConfig(thinking=6)
    episode, _ = played(Sums(), template(speaks, "qwen3"), thinks(), thinking="off")
    assert (episode.result.score, episode.trajectory.thoughts) == (1.0, [0])


def test_scores_see_the_answer_only_unless_the_environment_asks_for_all(speaks: Speaks) -> None:  # noqa: F811
    for name in ("qwen3", "smol", "qwen3_6"):
        environment, tokenizer = Sums(), template(speaks, name)
        episode, _ = played(environment, tokenizer, thinks())
        assert environment.seen == [([assistant("42")], "42", "forty and two")]
        record = episode_record(episode, 1, 0)
        assert record.messages[-1] == {"role": "assistant", "content": "42", "reasoning_content": "forty and two"}
        assert (record.completion, record.score) == ("42", 1.0)
        whole = SumsWithThoughts()
        played(whole, tokenizer, thinks())
        assert whole.seen[0][1].removeprefix("<think>") == "\nforty and two\n</think>\n\n42"
        assert played(Apart(), tokenizer, thinks())[0].result.score == 1.0


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6"])
def test_thoughts_that_are_asked_for_come_with_tools_too_whose_calls_are_not_those_in_thoughts(
    speaks: Speaks, name: str  # noqa: F811
) -> None:  # fmt: skip
    episode, _ = played(SumsWithTool(), template(speaks, name), thinks(thought=CALL), "tool")
    assert (episode.result.score, episode.tool_calls) == (1.0, 0)


def test_thoughts_of_an_address_are_put_between_tags_where_they_are_asked_for() -> None:
    chat = MessageFormat(keeps_thoughts=True)
    message = {"role": "assistant", "content": "42", "reasoning_content": "so"}
    turn = chat.read(chat.completion_ids(message), [], ())
    assert turn.message == {"role": "assistant", "content": "<think>\nso\n</think>\n\n42"}


def test_a_model_without_thoughts_is_read_as_a_whole(speaks: Speaks) -> None:  # noqa: F811
    environment = Sums()
    episode, _ = played(environment, template(speaks, "qwen2_5"), thinks())
    assert environment.seen[0][1] == "<think>\nforty and two\n</think>\n\n42"
    assert not any("thinking" in name for name in episode_metrics(episode))


@pytest.mark.parametrize("name", ["qwen3", "smol", "qwen3_6"])
def test_a_thought_that_reaches_its_budget_is_ended_by_tokens_that_are_not_trained(
    speaks: Speaks, name: str  # noqa: F811
) -> None:  # fmt: skip
    environment, tokenizer = Sums(), template(speaks, name)
    episode, requests = played(environment, tokenizer, thinks(thought="and " * 40), thinking=20)
    trajectory, ending = episode.trajectory, tokenizer.encode("\n</think>\n\n", add_special_tokens=False)

    assert trajectory.mask == [1] * 20 + [0] * len(ending) + [1] * (len(trajectory.ids) - 20 - len(ending))
    assert trajectory.ids[20 : 20 + len(ending)] == ending
    assert [value != 0 for value in trajectory.logprobs] == list(map(bool, trajectory.mask))
    assert episode.result.score == 1.0
    # one turn, of two completions
    assert trajectory.turns == [0]
    assert [(request.seed.seed, request.seed.position) for request in requests] == [(100, 0), (100, 20)]
    assert [request.max_tokens for request in requests] == [20, 200 - 20 - len(ending)]
    metrics = episode_metrics(episode)
    assert (metrics["thinking/tokens"], metrics["turns"]) == (20, 1)
    assert metrics["thinking/answer_tokens"] == len(trajectory.ids) - 20 - len(ending)


def test_a_thought_within_its_budget_is_left_alone_and_its_answer_goes_on(speaks: Speaks) -> None:  # noqa: F811
    environment, tokenizer = Sums(), template(speaks, "qwen3")
    long = "42 and all that comes after it"

    def said(given: str) -> str:
        last = given.rsplit("assistant\n", 1)[1]
        return f"<think>\nso\n</think>\n\n{long}<|im_end|>"[len(last) :]

    episode, _ = played(environment, tokenizer, said, thinking=24)
    assert all(episode.trajectory.mask)
    assert environment.seen[0][1:] == (long, "so")


def test_a_thought_that_does_not_end_is_no_answer(speaks: Speaks) -> None:  # noqa: F811
    for name in ("qwen3", "qwen3_6"):
        environment = Sums()
        episode, _ = played(environment, template(speaks, name), thinks(thought="42 " * 99))
        record = episode_record(episode, 1, 0)
        assert environment.seen[0][0] == [assistant("")]
        assert (record.completion, record.score, record.stop) == ("", 0.0, "max_tokens")
        assert record.messages[-1]["reasoning_content"].startswith("42 42")
        metrics = episode_metrics(episode)
        assert (metrics["thinking/without_answer"], metrics["thinking/answer_tokens"]) == (1.0, 0.0)


@pytest.mark.parametrize("name", ["qwen3", "smol"])
def test_thoughts_are_kept_between_turns(speaks: Speaks, name: str) -> None:  # noqa: F811
    tokenizer = template(speaks, name)
    episode, _ = played(Talk(), tokenizer, thinks(), "user")
    assert episode.result.score == 1.0
    written = tokenizer.decode(episode.trajectory.prompt_ids + episode.trajectory.ids)
    assert written.count("<think>\nforty and two\n</think>\n\n42") == 3


def test_a_call_of_gpt_oss_after_a_thought_is_run_and_the_header_of_an_answer_is_no_part_of_it(
    speaks: Speaks,  # noqa: F811
) -> None:
    call = "to=functions.add<|channel|>commentary json<|message|>{}<|call|>"

    def said(given: str) -> str:
        thought = f"<|channel|>analysis<|message|>so<|end|><|start|>assistant {call}"
        return f"{'<|channel|>final<|message|>42' if 'to=assistant' in given else thought}<|im_end|>"

    episode, _ = played(Adds(), template(speaks, "gptoss"), said, "tool")
    assert (episode.result.score, episode.tool_calls) == (1.0, 1)
