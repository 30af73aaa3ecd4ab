"""Episodes that go on one by one, as with a vLLM server: the same episodes, without waiting for each other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from aitrain import RunFailed, TrainConfig
from aitrain.environment.contract import Case
from aitrain.environment.scoring import Host, host_of
from aitrain.training.chat import Chat, chat_for_episodes
from aitrain.training.episode_record import episode_record
from aitrain.training.generation import served
from aitrain.training.generation.served import Asking, Served
from aitrain.training.model import TINY
from aitrain.training.rollout import Episode, Limits, Rollout, Sampled
from tests.training.test_served import END, Fake, adapted, by

CASES = [Case(n, [{"role": "user", "content": f"say {n}:"}], {"prompt": ""}) for n in range(12)]
LIMITS = Limits(turns=4, answer_tokens=6, episode_tokens=60, context=512)
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
ENDS = [TOKENIZER.eos_token_id]


def said_to(prompt: list[int]) -> Sampled:
    """What this policy answers to a prompt, always the same: letters, mostly with an end."""
    drawn = random.Random(str(prompt))
    letters = TOKENIZER("".join(drawn.choices("abcdef", k=drawn.randint(1, 9))), add_special_tokens=False)["input_ids"]
    ids = [*letters, *ENDS]
    return Sampled(ids, [-0.1 * n for n in range(len(ids))])


def generate(prompts: list[list[int]], most: int, begun: Sequence[int], draws: Any) -> list[Sampled] | None:
    return [said_to(prompt).first(most) for prompt in prompts] or None


class Sometime:
    """A policy that answers each prompt by itself, after a while."""

    pushes = 0

    def answer(self, prompt: list[int], most: int, seed: int | None = None) -> tuple[list[int], list[float]]:
        time.sleep(random.uniform(0, 0.01))
        sampled = said_to(prompt).first(most)
        return sampled.ids, sampled.logprobs or []


class Talk:
    """Ends after as many turns as the case says; fails where it is told to."""

    def build_dataset(self) -> list[Any]:
        return []

    def episode(self, case_idx: int, seed: int) -> Generator[str | None, str, float]:
        said = yield None
        for turn in range(case_idx % 5):
            time.sleep(random.uniform(0, 0.01))
            if (case_idx, turn) == (8, 1):
                raise ValueError("no more")
            said += yield f" more {seed}? "
        return said.count("a") / len(said)


class Tools:
    """One that looks things up, for answers with an a."""

    def build_dataset(self) -> list[Any]:
        return []

    def start(self, case_idx: int) -> Any:
        return OneOf(case_idx)


class OneOf:
    def __init__(self, number: int) -> None:
        self.number, self.said = number, ""

    def step(self, reply: str) -> str | None:
        self.said += reply
        return None if len(self.said) > self.number else "go on "

    def score(self) -> float:
        return min(1.0, self.said.count("a") / 5)


def rollout_of(host: Host, asking: Callable[[], Any] | None, limits: Limits = LIMITS) -> Rollout:
    chat = chat_for_episodes(Chat(TOKENIZER), ["user"])
    return Rollout(host, chat, limits, generate, ENDS, nullcontext, asking)


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    knobs = {"rl_env_timeout": 20.0, **getattr(request, "param", {})}
    with closing(host_of(Talk(), TrainConfig(**knobs))) as made:
        yield made


def freely(host: Host, policy: Any = None) -> Callable[[], Any]:
    return lambda: Asking(policy or Sometime(), host.workers.wake)


def told(episodes: list[Episode]) -> list[Any]:
    """All of them but the time they took."""
    records = [replace(episode_record(episode, step=1, weight_version=0), seconds=0) for episode in episodes]
    tracks = [episode.track for episode in episodes]
    return [
        (record, track.prompt_ids, track.ids, track.mask, track.logprobs, track.stop)
        for record, track in zip(records, tracks, strict=True)
    ]


@pytest.mark.parametrize("limits", [LIMITS, Limits(2, 9), Limits(5, 3, 90), Limits(9, 9, None, 150)], ids=str)
@pytest.mark.parametrize("environment", [Talk, Tools])
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_the_episodes_are_those_of_rounds(environment: type, isolation: str, limits: Limits) -> None:
    with closing(host_of(environment(), TrainConfig(rl_env_isolation=isolation))) as host:
        seeds = range(len(CASES))
        together = rollout_of(host, None, limits).play(CASES, seeds)
        alone = rollout_of(host, freely(host), limits).play(CASES, seeds)
    assert told(alone) == told(together)
    assert len({episode.track.turns for episode in alone}) > 1


def test_an_episode_does_not_wait_for_another_one() -> None:
    """The first one's environment answers only when all others are over; in rounds it would never."""
    over = [threading.Event() for _ in CASES]

    class Last:
        def build_dataset(self) -> list[Any]:
            return []

        def episode(self, case_idx: int) -> Generator[str | None, str, float]:
            for turn in range(3):
                if case_idx == 0 and turn == 1:
                    assert all(event.wait(20) for event in over[1:])
                yield "more "
            over[case_idx].set()
            return 1.0

    with closing(host_of(Last(), TrainConfig(rl_env_timeout=60.0, rl_max_turns=8))) as host:
        episodes = rollout_of(host, freely(host), Limits(8, 6)).play(CASES, [0] * len(CASES))
    assert [episode.scored.score for episode in episodes] == [1.0] * len(CASES)


@pytest.mark.parametrize("host", [{"rl_env_timeout": 0.3}], indirect=True)
def test_an_environment_that_hangs_takes_one_episode_with_it(host: Host) -> None:
    class Hangs(Talk):
        def episode(self, case_idx: int, seed: int) -> Generator[str | None, str, float]:
            yield None
            while case_idx == 5:
                time.sleep(0.01)
            return 1.0

    host.environment = Hangs()
    episodes = rollout_of(host, freely(host)).play(CASES, [0] * len(CASES))
    assert [episode.stop for episode in episodes].count("env_timeout") == 1
    assert episodes[5].stop == "env_timeout"
    assert [episode.scored.score for episode in episodes[:5]] == [1.0] * 5


def test_both_clocks_run_while_some_wait_for_the_policy_and_some_for_their_environment(host: Host) -> None:
    class Slow(Talk):
        def episode(self, case_idx: int, seed: int) -> Generator[str | None, str, float]:
            for _ in range(2):
                yield "more "
                time.sleep(0.02)
            return 1.0

    class Slower(Sometime):
        def answer(self, prompt: list[int], most: int, seed: int | None = None) -> Any:
            time.sleep(0.02)
            return super().answer(prompt, most)

    host.environment = Slow()
    rollout = rollout_of(host, freely(host, Slower()))
    rollout.watch.on_step_begin(None, None, None)
    rollout.play(CASES, [0] * len(CASES))
    rollout.watch.on_step_end(None, None, None)
    times = rollout.watch.take()
    assert times["time/generate"] >= 0.04
    assert times["time/environment"] >= 0.02


def test_a_policy_that_fails_ends_the_rollout_and_the_next_one_begins_anew(host: Host) -> None:
    class Fails(Sometime):
        def answer(self, prompt: list[int], most: int, seed: int | None = None) -> Any:
            raise RunFailed("the server is gone")

    with pytest.raises(RunFailed, match="the server is gone"):
        rollout_of(host, freely(host, Fails())).play(CASES, [0] * len(CASES))
    seeds = [0] * len(CASES)
    assert told(rollout_of(host, freely(host)).play(CASES, seeds)) == told(rollout_of(host, None).play(CASES, seeds))


def test_no_episode_at_all(host: Host) -> None:
    assert rollout_of(host, freely(host)).play([], []) == []


# -- by HTTP


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(served, "PAUSE_SECONDS", 0.05)
    server = Fake()
    yield server
    server.stop()


def answers_of(engine: Served, prompts: list[list[int]]) -> dict[int, Any]:
    """All of them, by number, taken as they come."""
    news = threading.Semaphore(0)
    asking = Asking(engine, news.release)
    for number, prompt in enumerate(prompts):
        asking.ask(number, prompt, 3 + number)
    answers: dict[int, Any] = {}
    while asking.waiting:
        news.acquire()
        answers.update(asking.answered())
    return answers


def test_each_prompt_is_a_request_with_its_own_limit(fake: Fake) -> None:
    answers = answers_of(by(fake, longest=20), [[n] * 15 for n in range(1, 9)])
    assert answers == {n: ([15 * (n + 1), END], [0.0, -0.5]) for n in range(8)}
    assert sorted(body["max_tokens"] for body in fake.bodies("/v1/completions")) == [3, 4, 5, 5, 5, 5, 5, 5]


def test_a_server_that_dies_among_them_gets_the_weights_once_and_what_waited_is_asked_again(
    fake: Fake, tmp_path: Any
) -> None:
    torch.manual_seed(0)
    engine = by(fake, served.AdapterSync(adapted(), tmp_path / "sync"))
    engine.sync_weights()
    fake.troubles = [lambda _: None, lambda fake: fake.dies(0.3), lambda _: None]  # type: ignore[func-returns-value, list-item]
    answers = answers_of(engine, [[n] for n in range(20)])
    assert {n: ids for n, (ids, _) in answers.items()} == {n: [n, END] for n in range(20)}
    assert engine.restarts == 1
    assert engine.sync.holds(engine.server, 1)


def test_a_server_that_is_gone_for_good_is_said(fake: Fake) -> None:
    engine = by(fake, patience=0.3)
    fake.stop()
    with pytest.raises(RunFailed, match="is gone, and was not back"):
        answers_of(engine, [[1], [2]])
    fake.start()
