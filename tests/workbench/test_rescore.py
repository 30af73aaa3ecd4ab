"""`aitrain env rescore`: today's scorer on saved episodes, which are never changed and never guessed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from aitrain import TrainConfig
from aitrain.environment.contract import Case
from aitrain.errors import EnvironmentFailed, RunFailed
from aitrain.rollout.limits import Limits
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.training.episode_record import episode_record
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.rescore import RescoredEpisode, Rescorer
from aitrain.workbench.rescore_report import RescoreReport
from tests.rollout.scripted import Scripted, play


def rows(count: int = 4) -> list[Case]:
    """Rows whose answer is their number; a tuple shows whether the row or its JSON is scored."""
    return [
        Case(n, [{"role": "user", "content": f"{n}?"}], {"prompt": f"{n}?", "answer": str(n), "pair": (n, n)}, n)
        for n in range(count)
    ]


def saved(environment: Any, answer: Callable[[str], str], limits: Limits | None = None) -> list[RolloutRecord]:
    """Records of episodes that were played, as they come back from the file."""
    episodes = play(environment, Scripted(answer), limits, rows())
    lines = [json.dumps(episode_record(episode, 3, 2).to_json()) for episode in episodes]
    return [RolloutRecord.from_json(json.loads(line)) for line in lines]


def rescored(
    environment: Any, records: Sequence[RolloutRecord], of: Sequence[Case] | None = None, **options: Any
) -> list[RescoredEpisode]:
    opened = OpenedEnvironment(environment, rows() if of is None else of)
    return list(Rescorer(opened, TrainConfig(**options), "the tokenizer").rescore(records))


class Exact:
    def build_dataset(self) -> list[Any]:
        return []

    def score_episode(self, text: str, answer: str) -> float:
        return float(text == answer)


class Lenient(Exact):
    def score_episode(self, text: str, answer: str, pair: Any, tokenizer: object) -> float:
        assert tokenizer == "the tokenizer"
        assert isinstance(pair, tuple)  # the row itself, where the dataset still has it
        return float(text.strip() == answer)


class Hints:
    """Says what it is told to; the seed and the row decide what is right."""

    hint, right = "wrong", 1.0

    def build_dataset(self) -> list[Any]:
        return []

    def episode(self, answer: str, seed: int) -> Any:
        reply = yield f"seed {seed}"
        for tries in range(3):
            if reply == answer:
                return self.right / (1 + tries)
            reply = yield self.hint
        return 0.0


class Counter:
    """Tools that share an episode's state."""

    def build_dataset(self) -> list[Any]:
        return []

    def start(self) -> Any:
        return Counting()


class Counting:
    worth = 10

    def __init__(self) -> None:
        self.count = 0

    def get_tools(self) -> list[Any]:
        return [self.add]

    def add(self, number: int) -> int:
        """Add."""
        self.count += number
        return self.count

    def step(self, reply: str) -> None:
        return None

    def score(self) -> float:
        return self.count / self.worth


def number_of(text: str) -> str:
    """The number that the prompt asks for, with a space behind it in every second row."""
    number = text.partition("?")[0][-1]
    return f"{number}{' ' * (int(number) % 2)}$"


def test_the_same_scorer_gives_the_same_scores() -> None:
    found = rescored(Exact(), saved(Exact(), number_of))
    assert [(one.before, one.after, one.problem) for one in found] == [(1.0, 1.0, ""), (0.0, 0.0, "")] * 2


def test_another_scorer_is_applied_to_the_saved_answers() -> None:
    found = rescored(Lenient(), saved(Exact(), number_of))
    assert [one.change for one in found] == [0.0, 1.0, 0.0, 1.0]
    assert not any(one.is_from_record for one in found)


def test_a_case_that_the_dataset_has_no_more_is_scored_with_its_saved_row() -> None:
    other = [replace(case, row={**case.row, "answer": "?"}) for case in rows()]
    found = rescored(Exact(), saved(Exact(), number_of), of=other)
    assert [one.change for one in found] == [0.0] * 4
    assert all(one.is_from_record for one in found)


def test_a_column_that_was_too_long_to_be_saved_is_not_guessed() -> None:
    records = [
        replace(record, row={**record.row, "answer": "(left out: 200,000 characters)"})
        for record in saved(Exact(), number_of)
    ]
    assert {one.problem for one in rescored(Exact(), records)} == {
        "a column was too long to be saved, and the row is not in today's dataset"
    }


def test_a_failed_score_is_missing_before_and_a_score_now() -> None:
    class Raises(Exact):
        def score_episode(self, text: str) -> float:
            raise ValueError("no such city")

    records = saved(Raises(), number_of)
    assert [record.stop for record in records] == ["env_error"] * 4
    assert [(one.before, one.after) for one in rescored(Exact(), records)] == [(None, 1.0), (None, 0.0)] * 2
    assert "no such city" in rescored(Raises(), records)[0].failure


class Longest(Exact):
    """The longest answer of a group is the best one."""

    def score_group(self, texts: list[str], scores: list[float]) -> list[float]:
        return [score * (len(text) == max(map(len, texts))) for text, score in zip(texts, scores, strict=True)]


def test_episodes_that_are_scored_as_a_group_are_scored_as_one_again() -> None:
    first, other, failed, alone = saved(Exact(), number_of)
    together = [replace(record, group=0) for record in (first, other)]
    apart = [replace(record, group=1) for record in (replace(failed, messages=failed.messages[:1]), alone)]
    found = rescored(Longest(), [*together, *apart])
    assert [(one.before, one.after) for one in found[:2]] == [(1.0, 0.0), (0.0, 0.0)]
    assert [one.problem for one in found[2:]] == [
        "it has no answer",
        "another episode of its group could not be scored, and score_group compares them",
    ]


# -- several turns


def test_an_episode_of_several_turns_is_replayed_with_its_seed() -> None:
    def answer(text: str) -> str:
        return number_of(text) if "wrong" in text else "x$"

    records = saved(Hints(), answer)
    assert {record.score for record in records} == {0.5, 0.0}

    class Doubled(Hints):
        right = 0.5

    found = rescored(Doubled(), records)
    assert [one.problem for one in found] == [""] * 4
    assert [one.after for one in found] == [0.25, 0.0, 0.25, 0.0]


def test_an_episode_in_which_the_environment_answers_differently_is_not_scored() -> None:
    class Kinder(Hints):
        hint = "nearly"

    records = saved(Hints(), lambda text: number_of(text) if "wrong" in text else "x$")
    assert {one.problem for one in rescored(Kinder(), records)} == {"the environment answered differently"}


def test_an_episode_that_would_end_earlier_or_later_is_not_scored() -> None:
    class Strict(Hints):
        def episode(self, answer: str, seed: int) -> Any:
            reply = yield f"seed {seed}"
            return float(reply == answer)

    records = saved(Hints(), lambda text: number_of(text) if "wrong" in text else "x$")
    assert {one.problem for one in rescored(Strict(), records)} == {"the environment answered differently"}
    ended = saved(Strict(), lambda text: "x$")
    assert {one.problem for one in rescored(Hints(), ended)} == {"the environment answered differently"}


def test_an_episode_that_a_limit_ended_is_scored_as_an_unfinished_one() -> None:
    records = saved(Hints(), lambda text: "x$", Limits(2, 99))
    assert {record.stop for record in records} == {"max_turns"}
    found = rescored(Hints(), records, rl_max_turns=2)
    assert [(one.before, one.after, one.problem) for one in found] == [(0.0, 0.0, "")] * 4


def test_an_episode_that_a_failure_cut_off_is_not_scored() -> None:
    class Fails(Hints):
        def episode(self, answer: str, seed: int) -> Any:
            yield f"seed {seed}"
            raise ValueError("no such city")

    records = saved(Fails(), lambda text: "x$")
    assert {one.problem for one in rescored(Hints(), records)} == {"a failure of the environment had cut it off"}


@pytest.fixture
def with_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template of the scripted model can write tool calls."""
    from aitrain.rollout.chat_format import NoTemplateSupport

    monkeypatch.setattr(NoTemplateSupport, "has_tool_calls", True)


@pytest.mark.usefixtures("with_tools")
def test_tools_run_again_in_a_replay_and_malformed_calls_do_not() -> None:
    calls = [
        '<tool_call>{"name": "add", "arguments": {"number": 3}}</tool_call>$',
        '<tool_call>{"name": "add", "arguments": {"number": 3</tool_call>$',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>$',
        '<tool_call>{"name": "add", "arguments": {"number": 4}}</tool_call>$',
        "done$",
    ]
    records = saved(Counter(), lambda text: calls[text.count("$a:") - 1])
    assert {record.score for record in records} == {0.7}
    assert records[0].metrics == {}
    found = rescored(Counter(), records)
    assert [(one.after, one.problem) for one in found] == [(0.7, "")] * 4


def test_an_episode_without_an_answer_is_not_scored() -> None:
    record = replace(saved(Exact(), number_of)[0], messages=[{"role": "user", "content": "0?"}])
    assert rescored(Exact(), [record])[0].problem == "it has no answer"


# -- the report


def episode(before: float | None, after: float | None, problem: str = "", **more: Any) -> RescoredEpisode:
    return RescoredEpisode(3, more.pop("eval_phase", ""), 7, "seven", before, after, problem, **more)


def text_of(report: RescoreReport) -> str:
    console = Console(width=80, highlight=False)
    with console.capture() as captured:
        report.show(console)
    return captured.get()


def test_the_report_compares_what_was_scored_both_times_and_counts_the_rest() -> None:
    episodes = [
        episode(0.0, 1.0, prompt="Why?", answer="\x1b[2Jbecause"),
        episode(1.0, 1.0),
        episode(None, 0.5),
        episode(1.0, None, failure="score_episode raised: ValueError"),
        episode(1.0, None, "the environment answered differently"),
        episode(0.5, 0.5, eval_phase="before_sampled"),
    ]
    report = RescoreReport(most=2).add_all(episodes)
    training = report.to_json()["phases"]["training"]  # type: ignore[index]
    assert training == {
        "episodes": 5, "compared": 2, "mean_before": 0.5, "mean_after": 1.0, "changed": 3, "unscored_before": 1,
        "unscored_after": 1,
    }  # fmt: skip
    text = text_of(report)
    assert "training                          5         2     0.500     1.000         3" in text
    assert "held-out, before, sampled         1         1     0.500     0.500         0" in text
    assert "unscored: 1 before, 1 now" in text
    assert "not scored again: 1\n  1: the environment answered differently" in text
    assert "-- step 3, case 7 (case_idx seven): none -> 0.500 ---" in text
    assert "\x1b[2J" not in text
    report.check()


def test_held_out_scores_of_several_environments_are_weighted_as_those_of_the_run_are() -> None:
    scores = [("easy", 1.0, 0.0), ("easy", 1.0, 0.0), ("hard", 0.0, 0.5), ("hard", 0.0, None)]
    episodes = [episode(before, after, eval_phase=phase, environment=env)
                for phase in ("", "after_greedy") for env, before, after in scores]  # fmt: skip
    report = RescoreReport(1, {"easy": 0.25, "hard": 0.75}).add_all(episodes)
    phases: Any = report.to_json()["phases"]
    held_out, training = phases["after_greedy"], phases["training"]
    assert (held_out["mean_before"], held_out["mean_after"]) == (0.25, 0.375)
    assert (training["mean_before"], training["mean_after"]) == pytest.approx((2 / 3, 1 / 6))
    assert {name: part["mean_after"] for name, part in held_out["environments"].items()} == {"easy": 0.0, "hard": 0.5}
    text = text_of(report)
    assert "held-out, after, greedy               4         3     0.250     0.375         4" in text
    assert "held-out, after, greedy, hard         2         1     0.000     0.500         2" in text
    assert "-- step 3, hard, case 7 (case_idx seven): 0.000 -> none ---" in text
    alone = RescoreReport(1, {"": 1.0}).add_all(episodes).to_json()["phases"]
    assert "environments" not in alone["training"]  # type: ignore[index,operator]


def test_the_most_changed_episodes_are_found_among_many() -> None:
    changes = [episode(0.0, number / 1000, answer=str(number)) for number in range(1000)]
    report = RescoreReport(most=3).add_all(changes)
    assert [one.answer for one in report.most_changed] == ["999", "998", "997"]


def test_a_rescoring_without_a_single_score_is_an_error() -> None:
    with pytest.raises(EnvironmentFailed, match="None of 1 episodes could be scored again; 1 failed:\nit raised"):
        RescoreReport(1).add_all([episode(1.0, None, failure="it raised")]).check()
    with pytest.raises(RunFailed, match="could be scored again: it has no answer"):
        RescoreReport(1).add_all([episode(1.0, None, "it has no answer")]).check()


def test_the_files_of_the_run_stay_as_they_are(tmp_path: Path) -> None:
    record = saved(Exact(), number_of)[0]
    before = json.dumps(record.to_json())
    rescored(Lenient(), [record])
    assert json.dumps(record.to_json()) == before
