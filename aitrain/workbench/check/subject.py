"""The environment under check: its cases, the sample that is played, what its reference earns, played episodes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from aitrain.environment.contract import Case, env_kind, named_by
from aitrain.execution.user_code import describe_error
from aitrain.options.train import TrainConfig
from aitrain.workbench.check.finding import Scale
from aitrain.workbench.check.replies import core_of
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.player import Play, PlayedEpisode, Player, Policy, Script, reference_of

SAMPLE = 16
"""Cases that are played."""
SLOW_SAMPLE = 4
"""Cases that are played if one episode takes longer than SLOW_SECONDS."""
SLOW_SECONDS = 0.5


NO_MODEL = "env check has no model"


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
class Subject:
    """An environment under check; checks play episodes with it and do not call it otherwise."""

    opened: OpenedEnvironment
    config: TrainConfig
    tokenizer: Any = None
    limit: int = SAMPLE
    """Maximum number of cases that are played."""
    budget: float = math.inf
    """Seconds that all checks may take; see `is_late`."""
    is_serial: bool = False
    """Whether episodes are played one after another, as they disturb each other."""
    model: ModelGuard = field(default_factory=ModelGuard)
    episodes: list[PlayedEpisode] = field(default_factory=list)
    """The episodes that were played, in their order, without those played `again`."""
    notes: list[str] = field(default_factory=list)
    """What aitrain said about how the environment's calls run."""
    reference_errors: dict[int, str] = field(default_factory=dict)
    """What `reference` raised, by the number of the case."""
    _references: dict[int, Script | None] = field(default_factory=dict)
    _start: float = field(default_factory=time.monotonic)
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

    @property
    def is_late(self) -> bool:
        """Whether the budget is used up: what is not checked yet is left out."""
        return time.monotonic() - self._start > self.budget

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
    def sees_the_case(self) -> bool:
        """Whether the scoring method asks for anything of the case, so that its score can depend on it."""
        names = named_by(getattr(self.environment, self.kind))
        own = {"completion", "text", "model", "tokenizer", "seed"}
        return names is None or not set(names) <= own

    # -- playing

    def play(self, pairs: Iterable[tuple[Case, Policy]], seed: int = 0, again: bool = False) -> list[PlayedEpisode]:
        """Play the policies on the cases, all at the same time; episodes that were played before are taken from
        there, unless `again`."""
        wanted = [Play(case, policy, seed) for case, policy in pairs]
        new = list({_key(play): play for play in wanted if again or _key(play) not in self._cache}.values())
        if again:
            new = wanted
        played = [self.player.play([play])[0] for play in new] if self.is_serial else self.player.play(new)
        if again:
            return played
        self.episodes += played
        self._cache.update({_key(episode.play): episode for episode in played})
        return [self._cache[_key(play)] for play in wanted]

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
