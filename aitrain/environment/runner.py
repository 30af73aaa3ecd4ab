"""Runs the environment's side of many episodes at the same time. A call that fails is missing data, never a score of
0, and does not end the run by itself."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self, TypeAlias, TypeVar, cast

from aitrain import activity
from aitrain.environment.call_policy import CallPolicy, Notify
from aitrain.environment.contract import (
    Case,
    ScoreResult,
    Transcript,
    env_kind,
    scores_groups,
)
from aitrain.environment.rollout_session import is_served, session_for
from aitrain.environment.seeds import EpisodeSeeds, current_seeds
from aitrain.environment.session import AssistantTurn, EnvResponse, Group, Session
from aitrain.errors import EnvironmentFailed
from aitrain.execution.deadline_pool import GRACE, DeadlinePool
from aitrain.execution.failure import Failure
from aitrain.execution.processes import ProcessPool
from aitrain.execution.task import Outcome, is_abandoned
from aitrain.machine import usable_cores
from aitrain.options.train import TrainConfig

# -- model and tokenizer where there is none


class AbsentModelError(EnvironmentFailed, AttributeError):
    """The environment uses a model that is not there. For `hasattr`, and `getattr` with a default, it has nothing."""


class AbsentModel:
    """In the place of a model, or of a tokenizer, that is not there, such as behind an API; every use raises."""

    def __init__(
        self, what: str = "model", why: str = "it is not in this process: use --rl-env-isolation thread"
    ) -> None:
        self._what, self._why = what, why
        self.used = set[str]()
        """What of it was asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.used.add(name)
        kind = AbsentModelError if self._what == "model" else EnvironmentFailed
        raise kind(f"The environment uses the {self._what} ({self._what}.{name}): {self._why}.")

    def __call__(self, *arguments: object, **keywords: object) -> Any:
        """The tokenizer's own call."""
        return self.call


THREADS, SERVED_CALLS = 64, 256
"""Calls at the same time, unless --rl-env-workers says how many; those of a server only wait."""
PROCESSES_PER_CORE = 4

PAUSES = (0.5, 2.0)
"""Seconds before a call is tried again that failed because of a service."""

T = TypeVar("T")


@dataclass(eq=False)
class EnvSession:
    """The environment's side of one episode, with the time and the failure of its calls."""

    case: Case
    seed: int
    sampling: EpisodeSeeds | None = None
    """Seeds of the completions; None: the engine's own random numbers."""
    session: Session | None = None
    """None if nothing is kept between the calls: `score_episode` without tools."""
    reset: EnvResponse = field(default_factory=EnvResponse)
    """The first response."""
    seconds: float = 0.0
    """Seconds of all calls together."""
    hangs: bool = False
    """Whether its last call was abandoned and is still running."""
    result: ScoreResult = field(default_factory=lambda: ScoreResult(None))

    @property
    def failure(self) -> Failure | None:
        """Why its last call failed."""
        return self.result.failure


S = TypeVar("S", bound=EnvSession)


@dataclass(eq=False)
class EnvRunner:
    """Runs the environment's side of episodes: concurrent calls, each with a deadline, in threads or processes."""

    environment: Any
    config: TrainConfig
    processes: ProcessPool | None = None
    is_watched: bool = True
    """Whether calls in threads run one after another if they change something; False: the user takes care."""
    given: dict[str, Any] = field(default_factory=dict)
    """The arguments `model` and `tokenizer` of `score_episode`, see `offer`."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context of each call, such as torch.no_grad, which applies to a single thread."""
    notify: Notify = lambda _: None
    """Shows the user a note, such as how calls run that write to the environment."""

    _calls: int = 0
    _in_order: asyncio.Lock = field(default_factory=asyncio.Lock)

    # -- what is known before it is played

    @property
    def parts(self) -> dict[str, Self]:
        """The runners of all environments of the run by their names, as in MixedRunner: itself."""
        return {"": self}

    def part_of(self, case: Case) -> Self:
        """The runner of a case, as in MixedRunner: itself."""
        return self

    @property
    def label(self) -> str:
        """Name of the environment's class."""
        return type(self.environment).__qualname__

    @cached_property
    def kind(self) -> str:
        """Which of ENV_KINDS the environment has."""
        return env_kind(self.environment)

    @cached_property
    def has_sessions(self) -> bool:
        """Whether an episode has calls before its score: `episode`, `start` or tools."""
        return self.kind != "score_episode" or hasattr(self.environment, "get_tools")

    @property
    def sees_thoughts(self) -> bool:
        """Whether the environment is given the model's thoughts as a part of its answers."""
        return getattr(self.environment, "sees_thoughts", False) is True

    @property
    def scores_groups(self) -> bool:
        """Whether the episodes of a group are scored together."""
        return scores_groups(self.environment)

    @property
    def episodes_at_once(self) -> int | None:
        """Number of episodes that may be played at the same time; None: any."""
        return self.config.rl_env_episodes if self.has_sessions else None

    @cached_property
    def policy(self) -> CallPolicy:
        """How calls run, by what they write; read it after build_dataset, which sets attributes too."""
        is_watched = self.is_watched and self.processes is None and not is_served(self.environment)
        return CallPolicy(self.environment, self.has_sessions, is_watched, self.notify)

    @cached_property
    def pool(self) -> DeadlinePool:
        """The threads that make the calls, as many as calls are made at the same time."""
        default = SERVED_CALLS if is_served(self.environment) else THREADS
        default = default if self.processes is None else PROCESSES_PER_CORE * usable_cores()
        most = min(self.config.env_calls or default, self.config.rl_env_episodes or default)
        return DeadlinePool(most, self.config.rl_env_timeout)

    @property
    def running_calls(self) -> int:
        """Number of running calls, without those that wait for a thread."""
        return min(self._calls, self.pool.max_calls)

    @property
    def plays_alone(self) -> bool:
        """Whether the next episode is to run while no other does."""
        return self.policy.by_episode and self.policy.is_serial

    def offer(self, model: Any, tokenizer: Any) -> None:
        """Set the arguments `model` and `tokenizer` of `score_episode`, which worker processes do not get."""
        if self.processes is not None:
            model = model if isinstance(model, AbsentModel) else AbsentModel()
            tokenizer = AbsentModel("tokenizer", "keep that of build_dataset, or use --rl-env-isolation thread")
        self.given = {"model": model, "tokenizer": tokenizer}

    # -- an episode, from its beginning to its end

    async def open(self, sessions: Sequence[EnvSession]) -> None:
        """Open the sessions; one that cannot be opened has a failure."""
        if self.has_sessions:
            self.policy.begin_batch()
            place = "get_tools" if self.kind == "score_episode" else self.kind
            opened = await self._make(lambda one: self.open_session(one.case, one.seed), sessions, place)
            for one, result in zip(sessions, opened, strict=True):
                one.session, one.reset = result or (None, EnvResponse())

    def open_session(self, case: Case, seed: int) -> tuple[Session, EnvResponse]:
        """A new session for each attempt: one that was abandoned may still be running."""
        session = self._new_session(case)
        try:
            reset = session.open(case.arguments(seed=seed))
        except BaseException:
            session.close()
            raise
        if is_abandoned():
            session.close()  # the call has timed out, and its result is discarded
        return session, reset

    def _new_session(self, case: Case, plays: bool = True) -> Session:
        """A session that plays an episode, or else scores a group, in which all groups share what the environment
        keeps."""
        if self.processes is None:
            return session_for(self.policy.object_for() if plays else self.environment, case)
        worker = self.processes.lease()
        worker.is_spent = plays and self.has_sessions and getattr(self.environment, "concurrent", False) is not True
        return cast(Session, worker)

    async def respond(self, one: EnvSession, turn: AssistantTurn) -> EnvResponse:
        """What the environment does after a turn of the policy; an episode that fails is over."""
        if one.session is None:
            return EnvResponse(is_over=True)
        place = {"start": "step", "score_episode": "a tool"}.get(self.kind, self.kind)
        return await self._call(one, partial(one.session.respond, turn), place) or EnvResponse(is_over=True)

    async def score(self, transcripts: Mapping[EnvSession, Transcript]) -> None:
        """Score each episode; the score of those that failed, here or earlier, is None."""
        scored = [one for one in transcripts if one.failure is None]
        place = "score" if self.kind == "start" else self.kind
        if not self.has_sessions:
            self.policy.begin_batch()
        results = await self._make(lambda one: self.score_session(one.session, transcripts[one]), scored, place)
        late = self.policy.end_batch()
        for one, result in zip(scored, results, strict=True):
            if result is not None:
                one.result = self._checked(result, place, late)

    def _checked(self, result: ScoreResult, place: str, late: Failure | None = None) -> ScoreResult:
        """The result in the range of the run, or its failure, which has its place."""
        result = result.in_range(self.config.score_bounds)
        failure = result.failure or late
        return result if failure is None else ScoreResult(None, failure=replace(failure, place=place))

    def score_session(self, session: Session | None, transcript: Transcript) -> ScoreResult:
        """The score of an episode; without a session, of one that has no other call."""
        arguments: dict[str, Any] = {"completion": transcript.content}
        if self.kind == "score_episode":
            arguments = {**transcript.arguments(), **self.given}
        if session is not None:
            return session.score(arguments)
        with closing(self._new_session(transcript.case)) as alone:
            return alone.score(arguments)

    async def score_group(self, group: Group) -> list[ScoreResult]:
        """The results of a group's episodes, with the metrics of both scorings. If the call fails, all of them have the
        failure; an episode that failed before keeps its own."""
        one, place = EnvSession(group.case, 0), "score_group"
        results = await self._call(one, partial(self.score_members, group), place) or [one.result] * len(group.members)
        merged = list[ScoreResult]()
        for own, result in zip((member.result for member in group.members), results, strict=True):
            checked = self._checked(result, place)
            merged.append(own if own.failure else replace(checked, metrics={**own.metrics, **checked.metrics}))
        return merged

    def score_members(self, group: Group) -> list[ScoreResult]:
        """What `score_group` returns for each member of a group."""
        with closing(self._new_session(group.case, plays=False)) as session:
            return session.score_group(group)

    async def end(self, sessions: Sequence[EnvSession]) -> None:
        """Close the sessions, also those that failed, except those that still hang (a process that hung was ended)."""
        left = [(one.session, one) for one in sessions if one.session and (self.processes or not one.hangs)]
        await asyncio.gather(*(self.call(session.close, episode=one) for session, one in left))
        if sessions:
            self.policy.end_episodes()

    # -- calls

    async def _make(self, job: Callable[[EnvSession], T], sessions: Iterable[EnvSession], place: str) -> list[T | None]:
        """The values of a call for each session, at the same time, or one after another while it is not known that
        they may run together."""
        pending, values = deque(sessions), list[T | None]()

        def call(one: EnvSession) -> Coroutine[Any, Any, T | None]:
            return self._call(one, partial(job, one), place)

        async with self._in_order:  # an eval may score beside a rollout that is played ahead
            while pending and self.policy.is_serial:
                values.append(await call(pending.popleft()))
        return [*values, *await asyncio.gather(*map(call, pending))]

    async def _call(self, one: EnvSession, job: Callable[[], T], place: str) -> T | None:
        """The value of a call, whose time and failure are noted; `place` is the method.

        A call is made again, twice, where the user's own code (which has a trace: judges and served environments try
        again themselves) could not reach a service. In a session only scores are asked for again, and not those of
        code that was to return the score of a cut episode, and raised: it has ended, and would say nothing.
        Calls of `score_group` are not under the policy: they may compare with what earlier ones left."""
        may_repeat = one.session is None or place in ("score", "score_episode")
        call = self.pool.call if place == "score_group" else partial(self.call, episode=one)

        def in_thread() -> T:
            current_seeds.set(one.sampling)
            with self.around():
                return job()

        for pause in (*PAUSES, None):
            self._calls += 1
            try:
                with activity.own.waiting("waiting for the environment", self.pool.timeout + GRACE):
                    outcome: Outcome[T] = await call(in_thread)
            finally:
                self._calls -= 1
            one.seconds += outcome.seconds
            one.hangs = outcome.is_running
            failure = outcome.failure and replace(outcome.failure, place=place)
            one.result = ScoreResult(None, failure=failure)  # without the failure of an earlier try
            if failure is None or failure.kind != "server" or not failure.trace or not may_repeat or pause is None:
                break
            await asyncio.sleep(pause)
        return outcome.value

    async def call(self, job: Callable[[], T], timeout: float | None = None, episode: object = None) -> Outcome[T]:
        """The outcome of one call of an episode."""
        return await self.pool.call(partial(self.policy.run, job, episode), timeout)

    def close(self) -> None:
        """Close the environment, here and in its processes, each within the deadline of a call, and end the processes.
        A failure is shown and changes nothing else: the run is over."""
        workers = [] if self.processes is None else self.processes.free
        if callable(getattr(self.environment, "close", None)):
            closers = [self.environment.close, *(worker.close_environment for worker in workers)]
            failures = [outcome.failure for outcome in self.pool.call_all(closers) if outcome.failure is not None]
            if failures:
                self.notify(f"{type(self.environment).__name__}.close {failures[0].message}")
        if self.processes is not None:
            self.processes.close()


def start_runner(environment: Any, config: TrainConfig) -> EnvRunner:
    """Make the runner of an environment; worker processes are forked from here."""
    processes = ProcessPool(environment, session_for) if config.rl_env_isolation == "process" else None
    return EnvRunner(environment, config, processes)


# -- several environments


@dataclass
class MixedRunner:
    """The runners of several environments by their names, each with its kind, isolation and options. Its own options
    are those of the run: of what environments require, the largest."""

    parts: dict[str, EnvRunner]
    config: TrainConfig

    @property
    def label(self) -> str:
        """Names of the environments."""
        return ", ".join(self.parts)

    def part_of(self, case: Case) -> EnvRunner:
        """The runner of a case."""
        return self.parts[case.env]

    def close(self) -> None:
        """Close every environment, and end its threads and processes."""
        for part in self.parts.values():
            part.close()


Runner: TypeAlias = EnvRunner | MixedRunner
"""The runner of a run: of its only environment, or of several."""


async def call_parts(
    runner: Runner, call: Callable[[EnvRunner, list[S]], Awaitable[None]], episodes: Iterable[S]
) -> None:
    """Make a call of each environment with its episodes: at the same time, unless the calls of one run alone."""
    by_part = dict[EnvRunner, list[S]]()
    for one in episodes:
        by_part.setdefault(runner.part_of(one.case), []).append(one)
    waiting = [call(part, own) for part, own in by_part.items()]
    if any(part.policy.is_serial for part in by_part):
        for each in waiting:
            await each
    else:
        await asyncio.gather(*waiting)
