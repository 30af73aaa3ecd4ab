"""Runs the environment's side of episodes in a run with several environments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from aitrain.environment.call_policy import Notify
from aitrain.environment.contract import Case, Transcript
from aitrain.environment.runner import EnvRunner, EnvSession
from aitrain.environment.score_parsing import ScoreResult
from aitrain.environment.seeds import EpisodeSeeds
from aitrain.environment.session import AssistantTurn, EnvResponse, Message
from aitrain.options.train import TrainConfig

T = TypeVar("T")


@dataclass
class MixedRunner:
    """Has a runner for each environment, with its kind, isolation and options, and gives each episode to that of its
    case. Its own options are those of the run: of what environments require, the largest."""

    parts: dict[str, EnvRunner]
    config: TrainConfig
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    notify: Notify = lambda _: None
    on_call_end: Callable[[], None] = lambda: None
    on_messages: Callable[[EnvSession, Sequence[Message]], None] = lambda _, __: None

    def __post_init__(self) -> None:
        for name, part in self.parts.items():
            part.around, part.on_call_end = (lambda: self.around()), (lambda: self.on_call_end())
            part.notify = partial(self._note, name)
            part.on_messages = lambda session, messages: self.on_messages(session, messages)

    def _note(self, name: str, text: str) -> None:
        self.notify(f"{name}: {text}")

    @property
    def label(self) -> str:
        """Names of the environments."""
        return ", ".join(self.parts)

    def part_of(self, case: Case) -> EnvRunner:
        """The runner of a case."""
        return self.parts[case.env]

    @property
    def running_calls(self) -> int:
        """Number of running calls of all environments."""
        return sum(part.running_calls for part in self.parts.values())

    @property
    def has_sessions(self) -> bool:
        """Whether episodes of any environment have calls before their score."""
        return any(part.has_sessions for part in self.parts.values())

    @property
    def scores_groups(self) -> bool:
        """Whether any environment scores the episodes of a group together."""
        return any(part.scores_groups for part in self.parts.values())

    @property
    def episodes_at_once(self) -> int | None:
        """Number of episodes that every environment can play at the same time; None: any."""
        return min((most for part in self.parts.values() if (most := part.episodes_at_once)), default=None)

    @property
    def may_play_alone(self) -> bool:
        """Whether there may be episodes that cannot run beside others."""
        return any(part.may_play_alone for part in self.parts.values())

    def offer(self, model: Any, tokenizer: Any) -> None:
        """Set the arguments `model` and `tokenizer` of every `score_episode`."""
        for part in self.parts.values():
            part.offer(model, tokenizer)

    # -- an episode, from its beginning to its end

    async def open(
        self, cases: Sequence[Case], seeds: Sequence[int], sampling: Sequence[EpisodeSeeds | None] | None = None
    ) -> list[EnvSession]:
        """Open a session for each case; one that cannot be opened has a failure."""
        given = sampling or [None] * len(cases)

        async def opened(part: EnvRunner, places: list[int]) -> list[EnvSession]:
            return await part.open(*([column[place] for place in places] for column in (cases, seeds, given)))  # type: ignore[arg-type]

        return await self._each(cases, opened)

    async def respond(self, one: EnvSession, turn: AssistantTurn) -> EnvResponse:
        """What the environment does after a turn of the policy; an episode that fails is over."""
        return await self.part_of(one.case).respond(one, turn)

    async def score(self, sessions: Sequence[EnvSession], transcripts: Sequence[Transcript]) -> list[ScoreResult]:
        """The score of each episode, in their order; None for those that failed, here or earlier."""

        async def scored(part: EnvRunner, places: list[int]) -> list[ScoreResult]:
            return await part.score([sessions[place] for place in places], [transcripts[place] for place in places])

        return await self._each([one.case for one in sessions], scored)

    async def end(self, sessions: Sequence[EnvSession]) -> None:
        """Close the sessions, also those that failed, except those that still hang."""

        async def ended(part: EnvRunner, places: list[int]) -> list[None]:
            await part.end([sessions[place] for place in places])
            return [None] * len(places)

        await self._each([one.case for one in sessions], ended)

    async def _each(self, cases: Sequence[Case], call: Callable[[EnvRunner, list[int]], Awaitable[list[T]]]) -> list[T]:
        """What a call returns for each case, made at the same time by the environments that have any of them."""
        places: dict[str, list[int]] = {}
        for place, case in enumerate(cases):
            places.setdefault(case.env, []).append(place)
        returned = await asyncio.gather(*(call(self.parts[name], own) for name, own in places.items()))
        found = {
            place: value
            for own, values in zip(places.values(), returned, strict=True)
            for place, value in zip(own, values, strict=True)
        }
        return [found[place] for place in range(len(cases))]

    def close(self) -> None:
        """Close every environment, and end its threads and processes."""
        with ExitStack() as stack:
            for part in self.parts.values():
                stack.callback(part.close)


Runner: TypeAlias = EnvRunner | MixedRunner
"""The runner of a run: of its only environment, or of several."""
