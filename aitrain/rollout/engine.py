"""What samples, and what is sampled: the base class of engines, with the request for a completion and the completion;
the trajectory, an episode as token ids; and the clock of a rollout.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise

from aitrain.environment.seeds import SampleSeed
from aitrain.errors import AitrainError
from aitrain.rollout.end_of_turn import EndOfTurn


class Decoding(Enum):
    """How tokens are chosen."""

    TRAINING = "training"
    """Sampled; transformers draws with torch's generator, as plain TRL does."""
    SEEDED = "seeded"
    """Sampled with each request's own seed, on every engine."""
    GREEDY = "greedy"
    """The likeliest token."""


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample: at most `max_tokens` tokens after `prompt_ids`."""

    prompt_ids: list[int]
    max_tokens: int
    seed: SampleSeed
    decoding: Decoding = Decoding.TRAINING
    index: int = 0
    """Index of the episode in its batch, in whose order a batching engine generates the rows; negative without one."""
    begun: int = 0
    """Number of tokens at the end of the prompt that belong to the completion: they were sampled earlier."""

    @property
    def begun_ids(self) -> list[int]:
        """The tokens of the completion that were sampled earlier."""
        return self.prompt_ids[len(self.prompt_ids) - self.begun :]

    def after(self, ids: list[int]) -> GenerationRequest:
        """The request for what follows after further tokens of the completion."""
        seed = replace(self.seed, position=self.seed.position + len(ids))
        left, begun = self.max_tokens - len(ids), self.begun + len(ids)
        return replace(self, prompt_ids=self.prompt_ids + ids, max_tokens=left, seed=seed, begun=begun)


@dataclass(frozen=True)
class Completion:
    """Sampled token ids, and their log-probabilities if the engine computes them."""

    ids: list[int]
    logprobs: list[float] | None = None
    is_cut: bool = False
    """Whether it was cut off, and not ended by the policy."""


Leave = Callable[[], None]
"""Called once by an episode that will request no more completions."""


class OutOfRepliesError(AitrainError):
    """An engine has no further completion, such as a script after its last line; this ends the episode like a limit."""


class Engine(ABC):
    """Samples token ids after token ids, with one version of the policy's weights."""

    end: EndOfTurn
    """What ends its completions."""
    weight_version: int | None = None
    """Optimizer steps of the loaded weights; None if none were loaded, or the policy's have changed since."""

    @cached_property
    def clock(self) -> RolloutClock:
        """The clock of its rollouts."""
        return RolloutClock()

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion.

        Raises:
            RunFailed: the engine is gone.
            OutOfRepliesError: it has no further completion.
        """

    def batch(self, episodes: int) -> AbstractAsyncContextManager[Leave]:
        """Context of episodes that are played together. A batching engine generates when all of them that have not left
        wait for it; here each request is independent of the others."""
        return nullcontext(lambda: None)

    async def load_weights(self, version: int) -> None:
        """Load the policy's weights, which have done `version` optimizer steps, unless the engine has this version.
        Every rank must call this, while nothing is sampled."""
        if self.weight_version != version:
            await self.sync_weights(version)
            self.weight_version = version

    async def sync_weights(self, version: int) -> None:  # noqa: B027  # some engines have nothing to sync
        """Get the policy's weights; no-op for an engine that generates with the policy itself, or with no other."""


# -- the trajectory


@dataclass(eq=False)
class Trajectory:
    """Token ids of one episode. `ids`, `mask` and `logprobs` have one entry for each token after the prompt; the mask
    is 1 for tokens that the policy sampled and 0 for the environment's."""

    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    """Where each turn of the policy begins in `ids`."""
    thoughts: list[int] = field(default_factory=list)
    """Sampled tokens of each turn's thought: all of the turn's if it ends inside the thought. Empty if the model has no
    thoughts."""
    ended_by_policy: bool = False
    """Whether the policy ended its last completion, which was then not cut off."""
    stop: str | None = None
    """Why the episode ended, one of STOPS; None while it continues."""

    def append_completion(self, completion: Completion, continues_turn: bool = False) -> None:
        """Append a completion, whose tokens are trained."""
        if not continues_turn:
            self.turns.append(len(self.ids))
        self.ids += completion.ids
        self.mask += [1] * len(completion.ids)
        self.logprobs += completion.logprobs or [0.0] * len(completion.ids)
        self.ended_by_policy = not completion.is_cut

    def append_env_tokens(self, ids: list[int]) -> None:
        """Append tokens that the policy did not sample, which are not trained."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    @property
    def context(self) -> list[int]:
        """All token ids so far."""
        return self.prompt_ids + self.ids

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.mask)

    @property
    def turn_lengths(self) -> list[int]:
        """Number of sampled tokens of each turn."""
        return [sum(self.mask[start:end]) for start, end in pairwise([*self.turns, len(self.ids)])]


# -- the clock

PARTS = ("generate", "environment")


class RolloutClock:
    """Seconds in which each part ran at least once.

    With a server, some episodes wait for the server while others wait for their environments, so that the sum of the
    parts may exceed the elapsed time.
    """

    def __init__(self) -> None:
        self._total = dict.fromkeys(PARTS, 0.0)
        self._running = Counter[str]()
        self._since = dict[str, float]()

    @contextmanager
    def running(self, part: str) -> Iterator[None]:
        """Run the clock of a part in this context."""
        if not self._running[part]:
            self._since[part] = time.monotonic()
        self._running[part] += 1
        try:
            yield
        finally:
            self._running[part] -= 1
            if not self._running[part]:
                self._total[part] += time.monotonic() - self._since[part]

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last call."""
        taken, self._total = self._total, dict.fromkeys(PARTS, 0.0)
        return taken
