"""Seeds of sampled completions: each follows from its episode's seed, so that what is sampled depends neither on the
process that plays the episode nor on the episodes beside it."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass


def derived_seed(*names: object) -> int:
    """The seed of 62 bits that follows from these names."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


@dataclass(frozen=True)
class SampleSeed:
    """What the random numbers of one completion follow from: a seed, and how many tokens it has sampled before."""

    seed: int
    position: int = 0

    @property
    def request_seed(self) -> int:
        """For an engine that takes one seed a completion. At position 0 it is the seed itself: consecutive seeds of one
        prompt make a single request for several completions (see served.py)."""
        return self.seed if self.position == 0 else derived_seed(self.seed, self.position)

    def token_seed(self, step: int) -> int:
        """For the token that comes `step` tokens after the position."""
        return derived_seed(self.seed, "token", self.position + step)


@dataclass(eq=False)
class EpisodeSeeds:
    """The sampling seed of one episode, and those of the `model.generate` calls that its environment makes."""

    seed: int
    calls: int = 0

    def next_call(self) -> int:
        """The seed of the next such call."""
        self.calls += 1
        return derived_seed(self.seed, "call", self.calls)


current_seeds: ContextVar[EpisodeSeeds | None] = ContextVar("current_seeds", default=None)
"""Those of the episode that the calling code plays; None: it samples with the engine's own random numbers."""
