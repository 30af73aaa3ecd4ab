"""Runs the environment's side of many episodes at the same time. A call that fails is missing data, never a score of
0, and does not end the run by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from aitrain import activity
from aitrain.environment.call_policy import CallPolicy, Notify, PolicyCall
from aitrain.environment.closing import close_environment
from aitrain.environment.contract import Case, Transcript
from aitrain.environment.env_traits import EnvTraits
from aitrain.environment.remote_session import NoModel, StoredTokenizer, remote_session
from aitrain.environment.rollout_session import session_for
from aitrain.environment.score_parsing import Bounds, ScoreResult
from aitrain.environment.seeds import EpisodeSeeds, current_seeds
from aitrain.environment.served_environment import CONCURRENT_CALLS, ServedEnvironment
from aitrain.environment.session import AssistantTurn, EnvResponse, Message, ResetResult, SessionLike
from aitrain.environment.tools import Tools
from aitrain.errors import EnvironmentFailed
from aitrain.execution.deadline_pool import DeadlinePool
from aitrain.execution.deadline_thread import GRACE
from aitrain.execution.failure import Failure
from aitrain.execution.processes import ProcessPool
from aitrain.execution.task import Outcome, is_abandoned
from aitrain.machine import usable_cores
from aitrain.options.train import TrainConfig

THREADS = 64
PROCESSES_PER_CORE = 4

REPEATABLE = ("raised", "timed_out", "crashed", "server")
"""Kinds of failures that are retried; a wrong score would be returned again."""

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
    session: SessionLike | None = None
    """None if nothing is kept between the calls: `score_episode` without tools."""
    reset: ResetResult = field(default_factory=ResetResult)
    seconds: float = 0.0
    """Seconds of all calls together."""
    failure: Failure | None = None
    hangs: bool = False
    """Whether its last call was abandoned and is still running."""

    def note(self, outcome: Outcome[object], place: str) -> None:
        """Add the time and the failure of a call; `place` is the method that was called, unless the failure has one."""
        self.seconds += outcome.seconds
        self.hangs = outcome.is_running
        if outcome.failure is not None:
            self.failure = replace(outcome.failure, place=outcome.failure.place or place)


@dataclass
class EnvRunner(EnvTraits):
    """Runs the environment's side of episodes: concurrent calls, each with a deadline, in threads or processes."""

    environment: Any
    config: TrainConfig
    processes: ProcessPool | None = None
    given: dict[str, Any] = field(default_factory=dict)
    """The arguments `model` and `tokenizer` of `score_episode`, see `offer`."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context of each call, such as torch.no_grad, which applies to a single thread."""
    notify: Notify = lambda _: None
    """Shows the user a note, such as how calls run that write to the environment."""
    on_call_end: Callable[[], None] = lambda: None
    """Called on the event loop after each call."""
    on_messages: Callable[[EnvSession, Sequence[Message]], None] = lambda _, __: None
    """Called with what the environment says in an episode, such as to show it."""

    _shown: set[str] = field(default_factory=set)
    _calls: int = 0
    _phase: ExitStack = field(default_factory=ExitStack)  # the process's activity while there are calls

    @cached_property
    def policy(self) -> CallPolicy:
        """How calls run, by what they write; read it after build_dataset, which sets attributes too."""
        by_episode = self.kind != "score_episode" or _has_tools(self.environment)
        in_processes = self.processes is not None or isinstance(self.environment, ServedEnvironment)
        return CallPolicy(self.environment, self.kind, by_episode, in_processes, self.notify)

    @cached_property
    def pool(self) -> DeadlinePool:
        """The threads that make the calls."""
        return DeadlinePool(_max_calls(self), self.config.rl_env_timeout)

    @property
    def running_calls(self) -> int:
        """Number of running calls, without those that wait for a thread, or for others to end."""
        return min(self._calls, _max_calls(self)) - self.policy.waiting_calls

    def offer(self, model: Any, tokenizer: Any) -> None:
        """Set the arguments `model` and `tokenizer` of `score_episode`; worker processes get the tokenizer only."""
        if self.processes is None:
            self.given = {"model": model, "tokenizer": tokenizer}
        elif self.kind == "score_episode":
            absent = model if isinstance(model, NoModel) else NoModel()
            self.given = {"model": absent, "tokenizer": StoredTokenizer.of(tokenizer)}

    @property
    def may_play_alone(self) -> bool:
        """Whether there may be episodes that cannot run beside others."""
        is_served = isinstance(self.environment, ServedEnvironment)
        return self.policy.by_episode and (is_served or not self.policy.is_free)

    @property
    def plays_alone(self) -> bool:
        """Whether the next episode is to run while no other does."""
        return self.policy.by_episode and self.policy.is_serial

    # -- an episode, from its beginning to its end

    async def open(
        self, cases: Sequence[Case], seeds: Sequence[int], sampling: Sequence[EpisodeSeeds | None] | None = None
    ) -> list[EnvSession]:
        """Open a session for each case; one that cannot be opened has a failure."""
        sessions = [EnvSession(*each) for each in zip(cases, seeds, sampling or [None] * len(cases), strict=True)]
        if self.policy.by_episode:
            self.policy.begin_batch()
        if self.has_sessions:
            opened = await self._repeat(
                sessions, [partial(self.open_session, one.case, one.seed) for one in sessions], self.kind
            )
            for one, result in zip(sessions, opened, strict=True):
                one.session, one.reset = result or (None, ResetResult())
                _show_once(one.reset.note, self._shown, self.notify)
                self.on_messages(one, one.reset.messages)
        return sessions

    def open_session(self, case: Case, seed: int, bounds: Bounds | None = None) -> tuple[SessionLike, ResetResult]:
        """A new session for each attempt: one that was abandoned may still be running. Without `bounds` of scores,
        those of the options."""
        session = _new_session(self, case, bounds)
        try:
            reset = session.open(case.arguments(seed=seed))
        except BaseException:
            session.close()
            raise
        if is_abandoned():
            session.close()  # the call has timed out, and its result is discarded
        return session, reset

    async def respond(self, one: EnvSession, turn: AssistantTurn) -> EnvResponse:
        """What the environment does after a turn of the policy; an episode that fails is over."""
        if one.session is None:
            return EnvResponse(is_over=True)
        place = "step" if self.kind == "start" else self.kind  # where a call that hangs or crashes is
        if turn.calls and self.kind != "rollout" and not one.reset.takes_calls:
            place = f"the tool {' or '.join(dict.fromkeys(call.name for call in turn.calls))}"
        response = await self._call(one, partial(one.session.respond, turn), place) or EnvResponse(is_over=True)
        _show_once(response.note, self._shown, self.notify)
        self.on_messages(one, response.messages)
        return response

    async def score(self, sessions: Sequence[EnvSession], transcripts: Sequence[Transcript]) -> list[ScoreResult]:
        """The score of each episode, in their order; None for those that failed, here or earlier."""
        alive = [(one, text) for one, text in zip(sessions, transcripts, strict=True) if one.failure is None]
        jobs = [partial(self.score_session, one.session, text) for one, text in alive]
        place = "score" if self.kind == "start" else self.kind
        if not self.policy.by_episode:
            self.policy.begin_batch()
        scored = await self._repeat([one for one, _ in alive], jobs, place)
        results: dict[EnvSession, ScoreResult] = {}
        for (one, _), result in zip(alive, scored, strict=True):
            results[one] = result or ScoreResult(None)
            if results[one].failure is not None:
                one.failure = replace(results[one].failure, place=place)  # type: ignore[type-var]
        if (failure := self.policy.end_batch()) is not None:
            for one, _ in alive:
                one.failure, results[one] = one.failure or replace(failure, place=place), ScoreResult(None)
        return [replace(results.get(one, ScoreResult(None)), failure=one.failure) for one in sessions]

    def score_session(
        self, session: SessionLike | None, transcript: Transcript, bounds: Bounds | None = None
    ) -> ScoreResult:
        """The score of an episode; without a session, of one that has no other call."""
        arguments = {**transcript.arguments(), **self.given} if self.kind == "score_episode" else {}
        if session is not None:
            return session.score(arguments)
        with closing(_new_session(self, transcript.case, bounds)) as alone:
            return alone.score(arguments)

    async def end(self, sessions: Sequence[EnvSession]) -> None:
        """Close the sessions, also those that failed, except those that still hang (a process that hung was ended)."""
        left = [one.session for one in sessions if one.session is not None and (self.processes or not one.hangs)]
        await asyncio.gather(*(self.call(session.close) for session in left))
        if sessions:
            self.policy.end_episodes()

    # -- calls

    async def _repeat(
        self, sessions: Sequence[EnvSession], jobs: Sequence[Callable[[], T]], place: str
    ) -> list[T | None]:
        """Make the calls, and retry those that failed."""
        values = await self._call_all(sessions, jobs, place)
        tries = 0
        while again := await _to_try_again(sessions, tries, self.config.rl_env_retries):
            tries += 1
            retried = await self._call_all([sessions[n] for n in again], [jobs[n] for n in again], place)
            for number, value in zip(again, retried, strict=True):
                values[number] = value
        return values

    async def _call_all(
        self, sessions: Sequence[EnvSession], jobs: Sequence[Callable[[], T]], place: str
    ) -> list[T | None]:
        left, values = list(zip(sessions, jobs, strict=True)), list[T | None]()
        while left and self.policy.is_serial:  # until it is known that they may run together
            values.append(await self._call(*left.pop(0), place))
            self.policy.refresh()
        return [*values, *await asyncio.gather(*(self._call(one, job, place) for one, job in left))]

    async def _call(self, one: EnvSession, job: Callable[[], T], place: str) -> T | None:
        if not self._calls:
            self._phase.enter_context(activity.own.waiting("waiting for the environment", self.pool.timeout + GRACE))
        self._calls += 1
        one.failure = None  # of an earlier try

        def in_thread() -> T:
            current_seeds.set(one.sampling)
            with self.around():
                return job()

        try:
            outcome = await self.call(in_thread)
        finally:
            self._calls -= 1
            if not self._calls:
                self._phase.close()
        one.note(outcome, place)
        self.on_call_end()
        return outcome.value

    async def call(self, job: Callable[[], T], timeout: float | None = None) -> Outcome[T]:
        """The outcome of one call, which waits for its turn."""
        loop = asyncio.get_running_loop()
        self.policy.on_wait = partial(loop.call_soon_threadsafe, self.on_call_end)
        turn = PolicyCall(self.policy)
        outcome = await self.pool.call(partial(turn.run, job), timeout)
        if outcome.is_running:
            turn.end()
        return outcome

    def close(self) -> None:
        """Close the environment, here and in its processes, and end the threads and processes."""
        close_environment(self.environment, self.pool, self.processes, self.notify)
        self.pool.close()
        if self.processes is not None:
            self.processes.close()
        if isinstance(stored := self.given.get("tokenizer"), StoredTokenizer):
            stored.file.unlink(missing_ok=True)


async def _to_try_again(sessions: Sequence[EnvSession], tries: int, asked: int | None) -> list[int]:
    """Numbers of the sessions whose call is to be tried again, after a pause if it failed because of a service."""
    failed = [(number, one.failure) for number, one in enumerate(sessions) if one.failure is not None]
    again = [(number, failure) for number, failure in failed if tries < _most_tries(failure, asked)]
    if any(failure.kind == "server" for _, failure in again):
        await asyncio.sleep(PAUSES[min(tries, len(PAUSES) - 1)])
    return [number for number, _ in again]


def _most_tries(failure: Failure, asked: int | None) -> int:
    """How often a call that failed is tried again: as asked; else twice if the own code of a `score_episode` (which has
    a trace: judges and served environments try again themselves) could not reach a service."""
    is_own = failure.kind == "server" and failure.place == "score_episode" and failure.trace
    most = (len(PAUSES) if is_own else 0) if asked is None else asked
    return most if failure.kind in REPEATABLE else 0


def _max_calls(runner: EnvRunner) -> int:
    """Calls that are made at the same time."""
    default = THREADS if runner.processes is None else PROCESSES_PER_CORE * usable_cores()
    default = CONCURRENT_CALLS if isinstance(runner.environment, ServedEnvironment) else default
    return min(runner.config.env_calls or default, runner.config.rl_env_episodes or default)


def _new_session(runner: EnvRunner, case: Case, bounds: Bounds | None) -> SessionLike:
    bounds = bounds or runner.config.score_bounds
    if runner.processes is None:
        return session_for(runner.policy.object_for(), bounds, case)
    return remote_session(runner.processes, runner.policy.by_episode, bounds)


def _show_once(note: str, shown: set[str], notify: Notify) -> None:
    """Show a session's note, unless it was shown before."""
    if note and note not in shown:
        shown.add(note)
        notify(note)


def _has_tools(environment: object) -> bool:
    """Whether `score_episode` is not the only call of an episode."""
    try:
        return len(Tools.of(environment)) > 0
    except EnvironmentFailed:
        return True  # each episode fails with it


def start_runner(environment: Any, config: TrainConfig, close: Sequence[int] = ()) -> EnvRunner:
    """Make the runner of an environment; worker processes are forked from here, and close these file descriptors."""
    is_isolated = config.rl_env_isolation == "process"
    return EnvRunner(environment, config, ProcessPool.start(environment, close) if is_isolated else None)
