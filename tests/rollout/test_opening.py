"""Episodes that the environment begins, on a scripted engine: what is shown, what is trained, what is remembered."""

from __future__ import annotations

from typing import Any

from aitrain.environment.contract import Case
from aitrain.rollout.limits import Limits
from aitrain.training.training_batch import episode_record
from tests.rollout.scripted import Scripted, cases, play, text

SYSTEM = {"role": "system", "content": "s"}


class Spoken:
    """Says its number first, and that it was right."""

    def __init__(self, number: int) -> None:
        self.number, self.said = number, list[str]()

    def opening(self) -> str:
        return f"{self.number}!"

    def step(self, reply: str) -> str | None:
        self.said.append(reply)
        return "more" if len(self.said) == 1 else None

    def score(self) -> float:
        return float(len(self.said) == 2)


class Speaks:
    def build_dataset(self) -> list[Any]:
        return []

    def start(self, case_idx: int, seed: int) -> Any:
        return Spoken(case_idx)


def of(*prompts: Any) -> list[Case]:
    return [Case(number, prompt, {"word": "x"}, number) for number, prompt in enumerate(prompts)]


def test_the_opening_is_in_the_prompt_and_not_among_the_trained_tokens() -> None:
    silent, joined, strings = [
        play(Speaks(), Scripted(lambda _: "x$"), of=of(prompt))[0]
        for prompt in ([], [SYSTEM, {"role": "user", "content": "q"}], "q ")
    ]

    assert text(silent.trajectory.prompt_ids) == "u:0!$a:"
    assert text(joined.trajectory.prompt_ids) == "s:s$u:q\n\n0!$a:"
    assert text(strings.trajectory.prompt_ids) == "q 0!"
    for trajectory in (silent.trajectory, joined.trajectory):
        assert text(trajectory.ids) == "x$u:more$a:x$"
        assert text([token for token, own in zip(trajectory.ids, trajectory.mask, strict=True) if own]) == "x$x$"
    assert strings.result.score == 1.0
    asked, said = episode_record(silent, 1, 0).transcript()
    assert [message.text for message in (*asked, *said)] == ["0!", "x", "more", "x"]


def test_a_prompt_that_leaves_no_room_is_dropped_and_no_failure() -> None:
    class Wordy(Spoken):
        def opening(self) -> str:
            return "y" * (100 if self.number == 1 else 1)

        def score(self) -> float:
            assert self.number != 1
            return 0.5

    class Long(Speaks):
        def start(self, case_idx: int, seed: int) -> Any:
            return Wordy(case_idx)

    episodes = play(Long(), Scripted(lambda _: "x$"), Limits(9, 9, context=40), of=cases(3))

    assert [(episode.stop, episode.result.score) for episode in episodes] == [
        ("done", 0.5), ("no_room", None), ("done", 0.5)
    ]  # fmt: skip
    assert episodes[1].too_long == len("u:1?\n\n$a:") + 100
    assert episodes[1].result.failure is None
    assert sum(episodes[1].trajectory.mask) == 0


def test_episodes_at_once_limits_how_many_are_open() -> None:
    """The others begin when these have been closed."""
    open_now, most = set[int](), list[int]()

    class Counted(Speaks):
        concurrent = True

        def start(self, case_idx: int, seed: int) -> Any:
            open_now.add(case_idx)
            most.append(len(open_now))

            one = Spoken(case_idx)
            one.close = lambda: open_now.discard(case_idx)  # type: ignore[attr-defined]
            return one

    episodes = play(Counted(), Scripted(lambda _: "x$"), of=cases(5), rl_env_episodes=2)
    assert max(most) == 2
    assert [(episode.case.case_idx, episode.result.score) for episode in episodes] == [(n, 1.0) for n in range(5)]
