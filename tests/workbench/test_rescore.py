"""`aitrain env rescore`: today's scorer on saved episodes, which are never guessed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.environment.contract import Case
from aitrain.environment.runner import EnvRunner
from aitrain.rollout.chat_format import ChatFormat
from aitrain.runs.records import RECORD, RolloutRecord
from aitrain.training.training_batch import episode_record
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.rescore import DIFFERENT, SavedEpisode, report, rescore
from tests.rollout.scripted import Letters, Limits, Scripted, play


def rows() -> list[Case]:
    """Rows whose answer is their number; a tuple shows whether the row or its JSON is scored."""
    return [
        Case(n, [{"role": "user", "content": f"{n}?"}], {"prompt": f"{n}?", "answer": str(n), "pair": (n, n)}, n)
        for n in range(4)
    ]


def number_of(text: str) -> str:
    """The number that the prompt asks for, with a space behind it in every second row."""
    number = text.partition("?")[0][-1]
    return f"{number}{' ' * (int(number) % 2)}$"


def second_try(text: str) -> str:
    """That number, after a wrong answer."""
    return number_of(text) if "wrong" in text else "x$"


def saved(
    environment: Any, answer: Callable[[str], str] = number_of, limits: Limits | None = None
) -> list[RolloutRecord]:
    """Records of episodes that were played, as they come back from the file."""
    chat = ChatFormat(Letters(), has_tool_calls=True)
    episodes = play(environment, Scripted(answer), limits, rows(), chat)
    lines = [json.dumps(episode_record(episode, 3, 2).to_json()) for episode in episodes]
    return [RECORD.validate_json(line) for line in lines]


def rescored(
    environment: Any, records: Sequence[RolloutRecord], of: Sequence[Case] | None = None
) -> list[SavedEpisode]:
    runner = EnvRunner(environment, TrainConfig(rl_max_turns=4))
    runner.offer(None, "the tokenizer")
    return list(rescore(OpenedEnvironment(runner, rows() if of is None else of), records))


class Exact:
    def score_episode(self, text: str, answer: str) -> float:
        return float(text == answer)


class Lenient(Exact):
    def score_episode(self, text: str, answer: str, pair: Any, tokenizer: object) -> float:
        assert tokenizer == "the tokenizer"
        assert isinstance(pair, tuple)  # the row itself, where the dataset still has it
        return float(text.strip() == answer)


def test_todays_scorer_is_applied_to_the_saved_answers() -> None:
    records = saved(Exact())
    before = [json.dumps(record.to_json()) for record in records]
    assert [(one.record.score, one.after, one.problem) for one in rescored(Exact(), records)] == [
        (1.0, 1.0, ""), (0.0, 0.0, ""),
    ] * 2  # fmt: skip
    found = rescored(Lenient(), records)
    assert [(one.after or 0) - (one.record.score or 0) for one in found] == [0.0, 1.0, 0.0, 1.0]
    assert not any(one.is_from_record for one in found)
    assert [json.dumps(record.to_json()) for record in records] == before


def test_a_case_that_the_dataset_has_no_more_is_scored_with_its_saved_row_unless_that_is_not_whole() -> None:
    records, others = saved(Exact()), [replace(case, row={**case.row, "answer": "?"}) for case in rows()]
    records[0].row["answer"] = "(left out: 200,000 characters)"
    left_out, *found = rescored(Exact(), records, of=others)
    assert [(one.change, one.is_from_record) for one in found] == [(0.0, True)] * 3
    assert "too long to be saved" in left_out.problem


def test_an_answer_after_a_thought_is_scored_again() -> None:
    records = saved(Exact())
    for record in records:
        record.messages[-1]["reasoning_content"] = "its number"
    assert [(one.after, one.problem) for one in rescored(Lenient(), records)] == [(1.0, "")] * 4


class Grouped(Exact):
    def score_group(self, texts: list[str], scores: list[float]) -> list[float]:
        return scores


def test_episodes_that_are_scored_as_a_group_are_refused() -> None:
    with pytest.raises(ConfigError, match="score_group"):
        rescored(Grouped(), saved(Exact()))


# -- several turns


class Hints:
    """Says what it is told to; the seed and the row decide what is right."""

    hint, right = "wrong", 1.0

    def episode(self, answer: str, seed: int) -> Any:
        reply = yield f"seed {seed}"
        for tries in range(3):
            if reply == answer:
                return self.right / (1 + tries)
            reply = yield self.hint
        return 0.0


class Doubled(Hints):
    right = 0.5


class Strict(Hints):
    def episode(self, answer: str, seed: int) -> Any:
        reply = yield f"seed {seed}"
        return float(reply == answer)


class Knows(Hints):
    def episode(self, answer: str, seed: int) -> Any:
        reply = yield f"today seed {seed}"
        yield {"x$": "known"}[reply]  # a KeyError for the answers to what was said then


class Fails(Hints):
    def episode(self, answer: str, seed: int) -> Any:
        yield f"seed {seed}"
        raise ValueError("no such city")


@pytest.mark.parametrize(
    ("then", "answer", "limits", "now", "expected"),
    [
        (Hints, second_try, None, Doubled, [(0.5, 0.25, ""), (0.0, 0.0, "")] * 2),
        (Hints, second_try, None, Strict, [(0.5, None, DIFFERENT), (0.0, None, DIFFERENT)] * 2),
        (Hints, number_of, None, Knows, [(1.0, None, DIFFERENT), (0.0, None, DIFFERENT)] * 2),
        (Hints, lambda _: "x$", Limits(2, 99), Hints, [(0.0, 0.0, "")] * 4),
        (Fails, lambda _: "x$", None, Hints, [(None, None, DIFFERENT)] * 4),
    ],
)
def test_an_episode_of_several_turns_is_replayed_and_scored_only_if_the_environment_answers_as_then(
    then: Any, answer: Any, limits: Limits | None, now: Any, expected: list[tuple[float | None, float | None, str]]
) -> None:
    found = rescored(now(), saved(then(), answer, limits))
    assert [(one.record.score, one.after, one.problem) for one in found] == expected


class Shop:
    """A tool that counts in one episode."""

    bought = 0

    def start(self) -> Shop:
        return Shop()

    def get_tools(self) -> list[Any]:
        return [self.buy]

    def buy(self, count: int) -> None:
        """Buy."""
        self.bought += count

    def step(self, reply: str) -> None:
        return None

    def score(self) -> float:
        return self.bought / 10


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ('{"name": "buy", "arguments": {"count": 7}}', (0.7, 0.7, "")),
        ('{"name": "buy", "arguments": {"count": 7', (0.0, None, DIFFERENT)),
    ],
)
def test_tools_run_again_in_a_replay_and_a_malformed_call_is_not_guessed(
    call: str, expected: tuple[float, float | None, str]
) -> None:
    records = saved(Shop(), lambda text: "done$" if text.count("$a:") > 1 else f"<tool_call>{call}</tool_call>$")
    assert [(one.record.score, one.after, one.problem) for one in rescored(Shop(), records)] == [expected] * 4


# -- the report


def test_each_environment_has_its_means_of_the_episodes_that_are_scored_before_and_now() -> None:
    scores = [("easy", 1.0, 0.0), ("easy", 1.0, 0.5), ("easy", None, 0.5), ("hard", 0.0, 0.5)]
    episodes = list[SavedEpisode]()
    for name, before, after in scores:
        record = RolloutRecord(step=3, eval_phase="after_greedy", score=before, environment=name)
        episodes.append(SavedEpisode(record, EnvRunner(Exact(), TrainConfig()), {}))
        episodes[-1].after = after
    found = report(episodes, 1)["phases"]
    assert {name: (one["mean_before"], one["mean_after"]) for name, one in found.items()} == {
        "held-out, after, greedy, easy": (1.0, 0.25), "held-out, after, greedy, hard": (0.0, 0.5),
    }  # fmt: skip
