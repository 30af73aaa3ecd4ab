"""Base class of engines that generate one batch at a time: rounds, in which every live episode gets its next
completion."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator

from aitrain import activity
from aitrain.engines.sampling import Sampling
from aitrain.environment.seeds import SampleSeed
from aitrain.errors import RunFailed
from aitrain.rollout.engine import Completion, Decoding, FinishReason, GenerationRequest, Leave, RolloutClock
from aitrain.rollout.limits import EndOfTurn


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch."""

    prompt_ids: list[int]
    begun: int = 0
    """Number of tokens at the end of the prompt that belong to the completion: an earlier round generated them."""
    seed: SampleSeed | None = None
    number: int = -1
    """The episode that it belongs to in its batch; negative for rows of no batch."""

    @property
    def begun_ids(self) -> list[int]:
        """The tokens that earlier rounds generated."""
        return self.prompt_ids[len(self.prompt_ids) - self.begun :]

    def after(self, ids: list[int]) -> BatchRow:
        """The row with further tokens of its completion."""
        seed = self.seed and replace(self.seed, position=self.seed.position + len(ids))
        return BatchRow(self.prompt_ids + ids, self.begun + len(ids), seed, self.number)


@dataclass(eq=False)
class _Waiting:
    """A request, what was generated for it so far, and how many tokens may follow."""

    request: GenerationRequest
    row: BatchRow
    room: int
    result: asyncio.Future[Completion]
    logprobs: list[float]


Largest = Callable[[int, int], tuple[int, int]]
"""Returns the largest numbers of rows and tokens over the ranks that share an engine; a collective call."""


class BatchingEngine(ABC):
    """Generates a batch when every live episode waits for it; on several ranks together if they share the engine.

    No row is generated beyond the context, which some models do not support. A padded batch stops where its longest row
    reaches the context; shorter rows continue in the next round.
    """

    sampling: Sampling = Sampling()
    """How `generate` samples."""
    seeds_training = True
    """Whether training samples with the seeds of its rows."""
    is_padded = True
    """Whether all rows are padded to the longest one, which then limits the new tokens of all."""
    weight_version: int | None = None
    """Optimizer steps that the loaded weights have done; None: the policy's weights were not loaded yet."""

    def __init__(self, end: EndOfTurn, context: int | None = None, largest: Largest | None = None) -> None:
        self.end, self.context, self.largest = end, context, largest
        self.clock = RolloutClock()
        self._waiting: list[_Waiting] = []
        self._live = 0

    @property
    def is_shared(self) -> bool:
        """Whether several ranks generate together, so that each must take part in every generation."""
        return self.largest is not None

    def load_weights(self, version: int) -> None:
        """Load the policy's weights; `version` is their number of optimizer steps. Every rank must call this."""
        self.weight_version = version

    @abstractmethod
    def sample(self, rows: list[BatchRow], sampling: Sampling, max_tokens: int) -> list[Completion]:
        """One completion of at most `max_tokens` tokens for each row, with its own seed if all have one."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion, in the next round."""
        prompt, room = request.prompt_ids, request.max_tokens
        if self.context is not None:
            room = min(room, self.context - len(prompt))
        if room < 1:
            return Completion([], [], "length")
        row = BatchRow(prompt, seed=request.seed, number=request.index)
        waiting = _Waiting(request, row, room, asyncio.get_running_loop().create_future(), [])
        self._waiting.append(waiting)
        self._generate_if_all_wait()
        return await waiting.result

    @asynccontextmanager
    async def batch(self, episodes: int) -> AsyncIterator[Leave]:
        """Context of episodes that are played together; it ends when the episodes of all ranks have ended."""
        self._live, self._waiting = episodes, []
        yield self._leave
        while self._round():  # of ranks whose episodes have not ended
            pass

    def _leave(self) -> None:
        self._live -= 1
        self._generate_if_all_wait()

    def _generate_if_all_wait(self) -> None:
        while True:
            # those of cancelled episodes are done
            waiting = self._waiting = [one for one in self._waiting if not one.result.done()]
            if not waiting or len(waiting) < self._live:
                return
            try:
                self._round()
            except Exception as error:
                for one in waiting:
                    if not one.result.done():
                        one.result.set_exception(error)

    def _round(self) -> bool:
        """One batch of the rows that wait; False if no rank has one."""
        waiting, self._waiting = sorted(self._waiting, key=lambda one: one.request.index), []
        max_tokens = max((one.room for one in waiting), default=1)
        if self.is_padded and self.context is not None and waiting:
            longest = max(len(one.row.prompt_ids) for one in waiting)
            max_tokens = min(max_tokens, self.context - longest)
        count = len(waiting)
        if self.largest is not None:
            count, max_tokens = self.largest(count, max_tokens)
        if not count:
            return False
        filler = [BatchRow([self.end.eos_ids[0]], seed=SampleSeed(0))] * (count - len(waiting))
        decoding = waiting[0].request.decoding if waiting else Decoding.TRAINING
        rows, sampling = [one.row for one in waiting] + filler, self.sampling
        if decoding is Decoding.GREEDY:
            sampling = sampling.greedy
        if decoding is Decoding.TRAINING and not self.seeds_training:
            rows = [replace(row, seed=None) for row in rows]
        with self.clock.running("generate"), activity.own.doing("generating"):
            completions = self.sample(rows, sampling, max_tokens)
        if len(completions) < count:
            raise RunFailed(f"The engine returned {len(completions)} completions of {count}.\nSee train.log.")
        for one, completion in zip(waiting, completions, strict=False):
            kept = completion.ids[: one.room]
            activity.own.add_tokens(len(kept))
            one.logprobs += [0.0] * len(kept) if completion.logprobs is None else completion.logprobs[: one.room]
            one.row = one.row.after(kept)
            one.room -= len(kept)
            ids = one.row.begun_ids
            is_ended = self.end.is_reached(ids)
            if is_ended or not one.room or len(completion.ids) < max_tokens:
                reason: FinishReason = "stop" if is_ended else "length"
                one.result.set_result(Completion(ids, one.logprobs, reason))
            else:
                self._waiting.append(one)
        return True


def largest_over_ranks(accelerator: Accelerator, rows: int, max_tokens: int) -> tuple[int, int]:
    """The largest numbers of rows and tokens over all ranks. Every rank must call this."""
    own = torch.tensor([[rows, max_tokens]], device=accelerator.device)
    rows, max_tokens = accelerator.gather(own).max(dim=0).values.tolist()
    return rows, max_tokens
