"""The environment under check: its cases, the sample that is played, what its reference earns, played episodes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from aitrain.environment.contract import Case, env_kind, named_by
from aitrain.errors import AitrainError
from aitrain.execution.user_code import describe_error
from aitrain.options.train import TrainConfig
from aitrain.workbench.check.finding import NO_TIME, PASS, Scale
from aitrain.workbench.check.replies import core_of, text_of
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.player import JUNK, JUNK_TEXT, Play, PlayedEpisode, Player, Policy, Script, reference_of

SAMPLE = 16
"""Cases that are played."""
SLOW_SAMPLE = 4
"""Cases that are played if one episode takes longer than SLOW_SECONDS."""
SLOW_SECONDS = 0.5


AT_ONCE, FEW = 64, 8
"""Episodes that are played at the same time; fewer if they are slow, down to FEW."""
PATIENT = 2.5
"""Seconds that episodes at the same time may take together, if they share one processor."""
HANGING = 16
"""Calls that hang in threads from which nothing more is checked: they slow down all others."""

NO_MODEL = "env check has no model"


class NotCheckedError(AitrainError):
    """A check could not run, or not to its end; the message says why."""


class ModelGuard:
    """The `model` argument of `score_episode` during checks: remembers what was used of it, and raises."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.used.append(name)
        raise AttributeError(f"{NO_MODEL}, so there is no model.{name}")


@dataclass
class CheckClock:
    """The time that checks may take."""

    budget: float = math.inf
    """Seconds of all checks together."""
    check_seconds: float = math.inf
    """Seconds of one check."""
    _start: float = field(default_factory=time.monotonic)
    _check_end: float = math.inf

    def begin_check(self) -> None:
        """Begin the time of one check."""
        self._check_end = time.monotonic() + self.check_seconds

    @property
    def seconds_left(self) -> float:
        """Seconds that the running check may still take."""
        return min(self._check_end, self._start + self.budget) - time.monotonic()

    def check(self) -> None:
        """Stop a check whose time is over.

        Raises:
            NotCheckedError: it is.
        """
        now = time.monotonic()
        if now > self._start + self.budget:
            raise NotCheckedError(NO_TIME)
        if now > self._check_end:
            raise NotCheckedError(f"took longer than {self.check_seconds:g} seconds")


@dataclass
class Subject:
    """An environment under check; checks play episodes with it and do not call it otherwise."""

    opened: OpenedEnvironment
    config: TrainConfig
    tokenizer: Any = None
    limit: int = SAMPLE
    """Maximum number of cases that are played."""
    clock: CheckClock = field(default_factory=CheckClock)
    is_serial: bool = False
    """Whether episodes are played one after another, as they disturb each other."""
    model: ModelGuard = field(default_factory=ModelGuard)
    episodes: list[PlayedEpisode] = field(default_factory=list)
    """The episodes that were played, in their order, without those played `again`."""
    notes: list[str] = field(default_factory=list)
    """What aitrain said about how the environment's calls run."""
    unseeded: Sequence[str] = ()
    """Lines of the environment that make random generators without a seed, see unseeded_generators."""
    reference_errors: dict[int, str] = field(default_factory=dict)
    """What `reference` raised, by the number of the case."""
    _references: dict[int, Script | None] = field(default_factory=dict)
    _first_seconds: float | None = None
    """Seconds of the first episode, which is played alone."""
    _cache: dict[tuple[int, Policy, int], PlayedEpisode] = field(default_factory=dict)

    @property
    def environment(self) -> Any:
        """The constructed environment."""
        return self.opened.environment

    @property
    def cases(self) -> Sequence[Case]:
        """The training cases."""
        return self.opened.cases

    @cached_property
    def kind(self) -> str:
        """score_episode, episode, start or rollout."""
        return env_kind(self.environment)

    @cached_property
    def player(self) -> Player:
        """Plays the episodes, with the concurrency of a run."""
        player = Player(self.environment, self.config)
        player.runner.notify = self.notes.append
        player.runner.offer(self.model, self.tokenizer)
        return player

    def check_time(self) -> None:
        """Stop a check whose time is over.

        Raises:
            NotCheckedError: it is, or too many calls hang.
        """
        self.clock.check()
        hanging = self.player.runner.pool.abandoned if "player" in self.__dict__ else 0
        if hanging >= HANGING:
            raise NotCheckedError(f"{hanging} calls of earlier checks hang")

    # -- cases and references

    @cached_property
    def chosen(self) -> list[Case]:
        """Cases spread evenly over the dataset, for checks that play nothing."""
        return spread(self.cases, self.limit)

    @cached_property
    def sample(self) -> list[Case]:
        """Cases that are played: spread evenly over the dataset; few of them if episodes are slow."""
        chosen = self.chosen
        first = self.play_one(chosen[0], self.reference(chosen[0]) or Script(("",)))
        return spread(chosen, SLOW_SAMPLE) if first.seconds > SLOW_SECONDS else chosen

    def reference(self, case: Case) -> Script | None:
        """The reference's replies to a case; None if there is none, or it raised (see `reference_errors`)."""
        if case.number not in self._references:
            self._references[case.number] = None
            try:
                self._references[case.number] = reference_of(self.environment, case)
            except Exception as error:
                self.reference_errors[case.number] = describe_error(error)
        return self._references[case.number]

    def core(self, case: Case) -> str | None:
        """The answer in the reference's last reply, without its format; None without a reference."""
        script = self.reference(case)
        return core_of(script.replies[-1]) if script and script.replies else None

    @cached_property
    def answered(self) -> list[tuple[Case, str]]:
        """The cases of the sample whose reference is a single reply that earns something, with that reply."""
        single = [
            (case, script.replies[0])
            for case in self.sample
            if (script := self.reference(case)) is not None and len(script.replies) == 1
        ]
        return [(case, reply) for case, reply in single if self.scale(case).full is not None]

    @cached_property
    def decided(self) -> list[tuple[Case, Script]]:
        """The cases of the sample whose reference's last reply decides the score, with the reference: those of a single
        reply, and conversations that earn less with a meaningless last one. A tool call is no answer."""
        single = [(case, Script((reply,))) for case, reply in self.answered]
        several = [
            (case, script)
            for case in self.sample
            if (script := self.reference(case)) and len(script.replies) > 1 and "<tool_call>" not in script.replies[-1]
        ]
        without = self.play((case, script.ending_in(JUNK_TEXT)) for case, script in several)
        pairs = zip(several, without, strict=True)
        shares = [(pair, self.share(episode)) for pair, episode in pairs if self.scale(pair[0]).full is not None]
        return single + [pair for pair, share in shares if (share or 0.0) < PASS]

    def asked(self, case: Case) -> str:
        """What the policy is asked first, as one text: the prompt, and what the environment says first."""
        if self.kind == "score_episode":
            return text_of(case.prompt or "")
        return text_of(self.play_one(case, JUNK).conversation.prompt or "")

    @cached_property
    def sees_the_case(self) -> bool:
        """Whether the scoring method asks for anything of the case, so that its score can depend on it."""
        names = named_by(getattr(self.environment, self.kind))
        own = {"completion", "text", "model", "tokenizer", "seed"}
        return names is None or not set(names) <= own

    # -- playing

    def play(self, pairs: Iterable[tuple[Case, Policy]], seed: int = 0, again: bool = False) -> list[PlayedEpisode]:
        """Play the policies on the cases, many at the same time; episodes that were played before are taken from
        there, unless `again`.

        Raises:
            NotCheckedError: the time of the check is over.
        """
        wanted = [Play(case, policy, seed) for case, policy in pairs]
        new = list({_key(play): play for play in wanted if again or _key(play) not in self._cache}.values())
        if again:
            new = wanted
        played: list[PlayedEpisode] = []
        while len(played) < len(new):
            self.check_time()
            some = self.player.play(new[len(played) : len(played) + self._at_once])
            played += some
            if self._first_seconds is None:
                self._first_seconds = some[0].seconds
            if not again:
                self.episodes += some
                self._cache.update({_key(episode.play): episode for episode in some})
        return played if again else [self._cache[_key(play)] for play in wanted]

    @property
    def _at_once(self) -> int:
        """Number of episodes to play at the same time: code that computes has one processor for all threads, and must
        not miss its deadline because of the others."""
        if self.is_serial or self._first_seconds is None:
            return 1
        return int(min(AT_ONCE, max(FEW, PATIENT / max(self._first_seconds, 1e-6))))

    def play_together(self, pairs: Iterable[tuple[Case, Policy]]) -> list[PlayedEpisode]:
        """Play episodes all at the same time, as a step does, also those that were played before.

        Raises:
            NotCheckedError: the time of the check is over.
        """
        if self.is_serial:
            return self.play(pairs, again=True)
        self.check_time()
        return self.player.play([Play(case, policy) for case, policy in pairs])

    def play_one(self, case: Case, policy: Policy, seed: int = 0, again: bool = False) -> PlayedEpisode:
        """Play one episode."""
        return self.play([(case, policy)], seed, again)[0]

    # -- scores

    def scale(self, case: Case) -> Scale:
        """What scores of this case are measured against: the reference's score, or without one the highest score of
        the range. A score of 0 earns nothing, or the lowest score if the range has no 0."""
        low, high = self.config.score_bounds
        script = self.reference(case)
        earned = self.play_one(case, script).score if script else None
        full = earned if script else (high if math.isfinite(high) else None)
        zero = 0.0 if low <= 0.0 < (full or 0.0) else low
        return Scale(
            zero, full if full is not None and math.isfinite(zero) and full > zero else None, script is not None
        )

    def share(self, episode: PlayedEpisode) -> float | None:
        """The score of an episode as a share of what the reference earns in its case."""
        return self.scale(episode.play.case).share(episode.score)

    def close(self) -> None:
        """End the environment's threads and processes."""
        if "player" in self.__dict__:
            self.player.close()


def spread(cases: Sequence[Case], count: int) -> list[Case]:
    """At most `count` cases, spread evenly over all."""
    step = max(1.0, len(cases) / count)
    return [cases[int(number * step)] for number in range(min(count, len(cases)))]


def _key(play: Play) -> tuple[int, Policy, int]:
    return play.case.number, play.policy, play.seed
