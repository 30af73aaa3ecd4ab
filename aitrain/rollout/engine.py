"""The `Engine` protocol: the request for a completion, and the completion."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from aitrain.environment.seeds import SampleSeed
from aitrain.errors import AitrainError

FinishReason = Literal["stop", "length"]


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
    seed: SampleSeed | None = None
    """Seed of the sampling; None: the engine's own random numbers."""
    decoding: Decoding = Decoding.TRAINING
    index: int = 0
    """Index of the episode in its batch: a batching engine generates the rows in this order."""
    begun: int = 0
    """Number of tokens at the end of the prompt that belong to the same turn: a thought."""


@dataclass(frozen=True)
class Completion:
    """Sampled token ids, and their log-probabilities if the engine computes them."""

    ids: list[int]
    logprobs: list[float] | None = None
    finish_reason: FinishReason = "stop"
    """"stop": the policy ended it, "length": it was cut off."""
    weight_version: int = 0
    """Optimizer steps that the sampling weights had done."""

    def first(self, count: int) -> Completion:
        """Its first `count` tokens."""
        if len(self.ids) <= count:
            return self
        logprobs = None if self.logprobs is None else self.logprobs[:count]
        return Completion(self.ids[:count], logprobs, "length", self.weight_version)


Leave = Callable[[], None]
"""Called once by an episode that will request no more completions."""


class OutOfRepliesError(AitrainError):
    """An engine has no further completion, such as a script after its last line; this ends the episode like a limit."""


class Engine(Protocol):
    """Samples token ids after token ids, with one version of the policy's weights."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion.

        Raises:
            RunFailed: the engine is gone.
            OutOfRepliesError: it has no further completion.
        """

    def batch(self, episodes: int) -> AbstractAsyncContextManager[Leave]:
        """Context of episodes that are played together. A batching engine generates when all of them that have not left
        wait for it."""
