"""The environment's side of many episodes at the same time: whatever fails there is missing data, never a 0, and never
ends the run by itself."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from aitrain.environment.call_policy import CallPolicy, CopyPlan, Tell
from aitrain.environment.contract import Case, Completion, level_of
from aitrain.environment.dialogue import Dialogue, Move, Opening, Reply, dialogue_for
from aitrain.environment.failures import CallFailed, Failure
from aitrain.environment.isolation import Isolation, Seat
from aitrain.environment.judging import Bounds, Scored
from aitrain.environment.seeds import EpisodeSeeds, current_seeds
from aitrain.environment.tools import Tools
from aitrain.environment.watching import Watch
from aitrain.environment.workers import Call, Calls, Meanwhile, Outcome, Workers
from aitrain.errors import EnvironmentFailed
from aitrain.machine import usable_cores
from aitrain.options.train import TrainConfig

PATIENCE = 3
"""Batches in a row with too many failures, after which a run is given up."""

THREADS = 64
PROCESSES_PER_CORE = 4

REPEATABLE = ("raised", "timed_out", "crashed", "server")
"""Failures of a call, which might go better the next time; a wrong score is the same one again."""


class Side(Protocol):
    """A dialogue, here or in another process."""

    def open(self, words: dict[str, Any]) -> Opening: ...
    def answer(self, reply: Reply) -> Move: ...
    def score(self, words: dict[str, Any]) -> Scored: ...
    def close(self) -> None: ...


@dataclass
class Play:
    """The environment's side of one episode under way."""

    case: Case
    seed: int
    side: Side | None = None
    """None where nothing lives between the calls: `score_episode` without tools."""
    opening: Opening = field(default_factory=Opening)
    seconds: float = 0.0
    """How long the environment took, over all calls."""
    failure: Failure | None = None
    sampling: EpisodeSeeds | None = None
    """What completions are sampled with; None: with the engine's own random numbers."""

    def note(self, outcome: Outcome, place: str) -> None:
        """What came of a call; `place` is where it was, if it cannot say so itself."""
        self.seconds += outcome.seconds
        if outcome.failure is not None:
            self.failure = replace(outcome.failure, place=outcome.failure.place or place)


@dataclass
class Host:
    """Runs the environment's side of episodes: many calls at a time, each with a deadline, in threads or processes."""

    environment: Any
    config: TrainConfig
    isolation: Isolation | None = None
    given: dict[str, Any] = field(default_factory=dict)
    """What `score_episode` may use of the model's side: `model` and `tokenizer`, see `offer`."""
    meanwhile: Meanwhile | None = None
    """What the waiting thread does, such as generating for environments that ask the model themselves."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What each call in a thread is made within, such as torch.no_grad, which is a thread's own."""
    tell: Tell = lambda _: None
    """Where the user is told, once, how calls run that write to the environment."""

    _watch: Watch | None = None

    @cached_property
    def policy(self) -> CallPolicy:
        """How calls run, by what they write; asked for when the dataset is built, as that sets attributes, too."""
        return CallPolicy(self.environment, self._level, self._by_episode, self.isolation is not None, self.tell)

    @cached_property
    def _by_episode(self) -> bool:
        """Whether an episode has calls between which others run: not where there is nothing but `score_episode`."""
        if self._level != "score_episode":
            return True
        try:
            return len(Tools.of(self.environment)) > 0
        except EnvironmentFailed:
            return True  # each episode will say so

    @cached_property
    def _level(self) -> str:
        return level_of(self.environment)

    @cached_property
    def workers(self) -> Workers:
        """The threads that make the calls."""
        unset = THREADS if self.isolation is None else PROCESSES_PER_CORE * usable_cores()
        return Workers(self.config.rl_env_workers or unset, self.config.rl_env_timeout)

    def offer(self, model: Any, tokenizer: Any) -> None:
        """Let `score_episode` use them; in processes of its own it gets the tokenizer only."""
        if self.isolation is None:
            self.given = {"model": model, "tokenizer": tokenizer}
        elif self._level == "score_episode":
            handle, name = tempfile.mkstemp(prefix="aitrain-tokenizer-")
            with os.fdopen(handle, "wb") as file:
                pickle.dump(tokenizer, file)
            self.given = {"model": NoModel(), "tokenizer": StoredTokenizer(Path(name))}

    @cached_property
    def lives_between_calls(self) -> bool:
        """Whether episodes have more to say than a score."""
        return self._level != "score_episode" or hasattr(self.environment, "get_tools")

    def begin(self, cases: Sequence[Case], seeds: Sequence[int]) -> list[Play]:
        """Open an episode for each case; one that cannot be opened comes back with its failure."""
        plays = [Play(case, seed) for case, seed in zip(cases, seeds, strict=True)]
        self._watch = self.policy.watch() if self.policy.by_episode else None
        if self.lives_between_calls:
            opened = self._repeat(plays, [partial(self._open, play) for play in plays], self._level)
            for play, result in zip(plays, opened, strict=True):
                play.side, play.opening = result or (None, Opening())
        return plays

    def _open(self, play: Play) -> tuple[Side, Opening]:
        """A side of its own for each attempt: one that was given up may still be running."""
        side = self._new_side()
        try:
            return side, side.open(play.case.words(play.seed))
        except BaseException:
            side.close()
            raise

    def _new_side(self) -> Side:
        if self.isolation is None:
            return dialogue_for(self.policy.object_for(), self.config.score_bounds)
        make = partial(_dialogue_in_process, self.policy.remote_plan, self.config.score_bounds)
        return _Remote(self.isolation.lease(make))

    def answer(self, plays: Sequence[Play], replies: Sequence[Reply]) -> list[Move]:
        """What the environment does after each answer; a failed episode is over."""
        if not self.lives_between_calls:
            return [Move(is_over=True)] * len(plays)
        sides = [play.side for play in plays if play.side is not None]
        jobs = [partial(side.answer, reply) for side, reply in zip(sides, replies, strict=True)]
        moves = self._call(plays, jobs, [self.place_of(reply) for reply in replies])
        return [move or Move(is_over=True) for move in moves]

    @contextmanager
    def answering(self) -> Iterator[Answering]:
        """What the environment does after answers that come one by one."""
        with self.workers.taking() as calls:
            yield Answering(self, calls)

    def place_of(self, reply: Reply) -> str:
        """Where a call that hangs or crashes is: it cannot say so itself."""
        if reply.calls:
            return f"the tool {' or '.join(dict.fromkeys(call.name for call in reply.calls))}"
        return "step" if self._level == "start" else self._level

    def score(self, plays: Sequence[Play], completions: Sequence[Completion]) -> list[Scored]:
        """What each episode is worth; None for those that failed, now or before."""
        alive = [(play, words) for play, words in zip(plays, completions, strict=True) if play.failure is None]
        jobs = [partial(self._score, play, completion) for play, completion in alive]
        place = "score" if self._level == "start" else self._level
        scored = self._score_all([play for play, _ in alive], jobs, place)
        for (play, _), result in zip(alive, scored, strict=True):
            if result is not None and result.failure is not None:
                play.failure = replace(result.failure, place=place)
        by_play = {id(play): result for (play, _), result in zip(alive, scored, strict=True)}
        return [replace(by_play.get(id(play)) or Scored(None), failure=play.failure) for play in plays]

    def _score_all(self, plays: list[Play], jobs: Sequence[Callable[[], Scored]], place: str) -> list[Any]:
        """Under watch where each call is an episode of its own and runs in this process."""
        if self.policy.by_episode or self.policy.in_processes:
            return self._repeat(plays, jobs, place)
        watch = self.policy.watch()
        with watch.noting():
            scored = self._repeat(plays, jobs, place)
        if not self.policy.after_calls(watch):
            return scored
        watch.restore()
        for play in plays:
            play.failure = None
        return self._repeat(plays, jobs, place)

    def _score(self, play: Play, completion: Completion) -> Scored:
        words = {**completion.words(), **self.given} if self._level == "score_episode" else {}
        if play.side is not None:
            return play.side.score(words)
        side = self._new_side()
        try:
            return side.score(words)
        finally:
            side.close()

    def end(self, plays: Sequence[Play]) -> None:
        """Let go of the episodes, also of those that failed, but for those that still hang."""
        left = [play.side for play in plays if play.side is not None and not self._hangs(play)]
        self.workers.run([side.close for side in left])
        if self._watch is not None:
            self.policy.after_episodes(self._watch)

    def _hangs(self, play: Play) -> bool:
        """In a thread, that is: a process that hung has been ended."""
        return self.isolation is None and play.failure is not None and play.failure.kind == "timed_out"

    def _repeat(self, plays: Sequence[Play], jobs: Sequence[Callable[[], Any]], place: str) -> list[Any]:
        """Make the calls, and those that failed again, as often as the option says."""
        values = self._call(plays, jobs, [place] * len(plays))
        for _ in range(self.config.rl_env_retries):
            again = [n for n, play in enumerate(plays) if play.failure and play.failure.kind in REPEATABLE]
            for number in again:
                plays[number].failure = None
            retried = self._call([plays[n] for n in again], [jobs[n] for n in again], [place] * len(again))
            for number, value in zip(again, retried, strict=True):
                values[number] = value
        return values

    def _call(self, plays: Sequence[Play], jobs: Sequence[Callable[[], Any]], places: Sequence[str]) -> list[Any]:
        calls = [partial(self.within, play, job) for play, job in zip(plays, jobs, strict=True)]
        batches = [[call] for call in calls] if self.policy.is_serial else [calls]
        outcomes = [outcome for batch in batches for outcome in self.workers.run(batch, self.meanwhile)]
        for play, outcome, place in zip(plays, outcomes, places, strict=True):
            play.note(outcome, place)
        return [outcome.value for outcome in outcomes]

    def within(self, play: Play, job: Callable[[], Any]) -> Any:
        """Make a call of an episode as calls are made in a thread."""
        current_seeds.set(play.sampling)
        with self.around():
            return job()

    def close(self) -> None:
        """End the threads and processes."""
        self.workers.close()
        if self.isolation is not None:
            self.isolation.close()
        stored = self.given.get("tokenizer")
        if isinstance(stored, StoredTokenizer):
            stored.file.unlink(missing_ok=True)


@dataclass
class Answering:
    """Episodes whose environment answers as soon as the model did; each has at most one call under way."""

    host: Host
    calls: Calls
    _asked: dict[Call, tuple[Play, str]] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """How many have not answered yet."""
        return len(self._asked)

    def ask(self, play: Play, reply: Reply) -> None:
        """Let the environment go on with what the model said."""
        assert play.side is not None, "an episode without one ends with its first answer"
        call = self.calls.make(partial(self.host.within, play, partial(play.side.answer, reply)))
        self._asked[call] = play, self.host.place_of(reply)

    def answered(self) -> list[tuple[Play, Move]]:
        """Wait for news, which may be none of ours (`Workers.wake`): what the environment did; a failed one is over."""
        moves = []
        for call in self.calls.ended():
            play, place = self._asked.pop(call)
            play.note(call.outcome, place)
            moves.append((play, call.outcome.value or Move(is_over=True)))
        return moves


def host_of(environment: Any, config: TrainConfig, close: Sequence[int] = ()) -> Host:
    """The environment's side as the options say; processes are forked now, and close these file descriptors."""
    is_isolated = config.rl_env_isolation == "process"
    return Host(environment, config, Isolation.start(environment, close) if is_isolated else None)


@dataclass(frozen=True)
class _Remote:
    """A dialogue in another process."""

    seat: Seat

    def open(self, words: dict[str, Any]) -> Opening:
        opening: Opening = self.seat.call("open", words)
        return opening

    def answer(self, reply: Reply) -> Move:
        move: Move = self.seat.call("answer", reply)
        return move

    def score(self, words: dict[str, Any]) -> Scored:
        scored: Scored = self.seat.call("score", words)
        return scored

    def close(self) -> None:
        with suppress(CallFailed):
            self.seat.call("close")
        self.seat.free()


def _dialogue_in_process(plan: CopyPlan | None, bounds: Bounds, environment: Any) -> Dialogue:
    """In a process that plays several episodes one after another: where they write to it, each on a copy."""
    return dialogue_for(environment if plan is None else plan.copy_of(environment), bounds)


# -- the model's side, as processes without a model see it


@dataclass(frozen=True)
class NoModel:
    """Stands for the model where the environment runs in processes of its own."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model is not in this process, so there is no model.{name}: use --rl-env-isolation thread"
        )


@dataclass(frozen=True)
class StoredTokenizer:
    """Stands for the tokenizer there: read from a file of ours when it is first used."""

    file: Path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_stored(self.file), name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The tokenizer's own call."""
        return _stored(self.file)(*arguments, **keywords)

    def __len__(self) -> int:
        return len(_stored(self.file))


_STORED: dict[Path, Any] = {}


def _stored(file: Path) -> Any:
    if file not in _STORED:
        _STORED[file] = pickle.loads(file.read_bytes())
    return _STORED[file]


# -- over a whole run


@dataclass
class FailureCount:
    """Failures over a whole run: what to tell the user once, and when to give up."""

    most: float = 1.0
    """Share of a batch that may fail (rl_max_failed)."""
    told: set[str] = field(default_factory=set)
    batches: int = 0
    scored: int = 0
    empty_batches: int = 0
    bad_batches: int = 0

    def first_of_each(self, failures: Sequence[tuple[str, str]]) -> list[str]:
        """Of (kind, message) pairs, the messages of kinds that have not been told in this run."""
        news = {kind: message for kind, message in reversed(failures) if kind not in self.told}
        self.told |= set(news)
        return list(news.values())

    def after_batch(self, scores: int, failures: int, episodes: int) -> None:
        """Note a batch, counted over all processes.

        Raises:
            EnvironmentFailed: nothing could be scored, or too much failed, for the third batch in a row.
        """
        self.batches += 1
        self.scored += scores
        self.bad_batches = self.bad_batches + 1 if failures > self.most * episodes else 0
        is_empty = not scores and (failures or not self.scored)
        self.empty_batches = self.empty_batches + 1 if is_empty else 0
        if self.empty_batches >= PATIENCE:
            raise EnvironmentFailed(self._nothing_to_learn_from(f"{PATIENCE} batches in a row"))
        if self.bad_batches >= PATIENCE:
            raise EnvironmentFailed(
                f"More than {self.most:.0%} of the episodes failed in {PATIENCE} batches in a row (--rl-max-failed),"
                f" {failures} of {episodes} in the last one.\n"
                "The first failure of each kind is shown above; all of them are in rollouts/."
            )

    def after_run(self) -> None:
        """A run in which nothing was scored has learned nothing.

        Raises:
            EnvironmentFailed: it is one.
        """
        if self.batches and not self.scored:
            raise EnvironmentFailed(self._nothing_to_learn_from("the whole run"))

    def _nothing_to_learn_from(self, where: str) -> str:
        if self.told:
            return (
                f"The environment failed on every episode of {where}: there is nothing to learn from.\n"
                "The first failure is shown above; all of them are in rollouts/."
            )
        return (
            f"The environment returned None for every episode of {where}: there is nothing to learn from.\n"
            "Is a `return` missing? None means that an episode cannot be scored."
        )
