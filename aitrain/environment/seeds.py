"""Seeds of sampled completions, derived from the episode's seed: samples depend neither on the process that plays the
episode nor on other episodes."""

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass


def derived_seed(*names: object) -> int:
    """A 62-bit seed derived from names."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


@dataclass(frozen=True)
class SampleSeed:
    """Seed of one completion: the episode's seed, and the number of tokens sampled before."""

    seed: int
    position: int = 0

    @property
    def request_seed(self) -> int:
        """Seed for an engine that takes one per completion; at position 0 it is the seed itself."""
        return self.seed if self.position == 0 else derived_seed(self.seed, self.position)

    def token_seed(self, step: int) -> int:
        """Seed of the token `step` tokens after the position."""
        return derived_seed(self.seed, "token", self.position + step)


@dataclass(eq=False)
class EpisodeSeeds:
    """Sampling seed of one episode, and the seeds of its environment's `model.generate` calls derived from it."""

    seed: int
    calls: int = 0

    def next_call(self) -> int:
        """Seed of the environment's next call."""
        self.calls += 1
        return derived_seed(self.seed, "call", self.calls)


current_seeds: ContextVar[EpisodeSeeds | None] = ContextVar("current_seeds", default=None)
"""Seeds of the current episode; None: the engine's own random numbers are used."""
