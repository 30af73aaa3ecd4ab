"""Base class of engines that generate one batch at a time: rounds, in which every live episode gets its next
completion."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from aitrain import activity
from aitrain.engines.sampling import Sampling
from aitrain.environment.seeds import SampleSeed
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.engine import Completion, Decoding, Engine, GenerationRequest, Leave


@dataclass(eq=False)
class _Waiting:
    """A request for what is left of a completion."""

    request: GenerationRequest
    result: asyncio.Future[Completion]
    logprobs: list[float]


class BatchingEngine(Engine):
    """Generates a batch when every live episode waits for it; on several ranks together if they share the engine.

    No row is generated beyond the context, which some models do not support, and which requests keep within. A padded
    batch stops where its longest row reaches the context; shorter rows continue in the next round.
    """

    sampling: Sampling = Sampling()
    """How `generate` samples."""
    is_padded = True
    """Whether all rows are padded to the longest one, which then limits the new tokens of all."""

    def __init__(self, end: EndOfTurn, context: int | None = None, shared_by: Accelerator | None = None) -> None:
        """`shared_by`: the ranks that generate together, so that each must take part in every generation."""
        self.end, self.context, self.shared_by = end, context, shared_by
        self._waiting: list[_Waiting] = []
        self._live = 0

    @abstractmethod
    def sample(self, rows: list[GenerationRequest], sampling: Sampling, max_tokens: int) -> list[Completion]:
        """One completion of at most `max_tokens` tokens for each row, whatever its own limit."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion, in the next round."""
        waiting = _Waiting(request, asyncio.get_running_loop().create_future(), [])
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
            self._waiting = [one for one in self._waiting if not one.result.done()]
            if not self._waiting or len(self._waiting) < self._live:
                return
            self._round()  # what it raises ends the episode that waits last, and with it the rollout

    def _round(self) -> bool:
        """One batch of the rows that wait; False if no rank has one."""
        waiting, self._waiting = sorted(self._waiting, key=lambda one: one.request.index), []
        rows = [one.request for one in waiting]
        decoding = rows[0].decoding if rows else Decoding.TRAINING
        filler = GenerationRequest([self.end.eos_ids[0]], 1, SampleSeed(0), decoding, index=-1)
        longest = max(len(row.prompt_ids) for row in (*rows, filler))
        max_tokens = max(row.max_tokens for row in (*rows, filler))
        count, longest, max_tokens = self._over_ranks(len(rows), longest, max_tokens)
        if not count:
            return False
        if self.is_padded and self.context is not None:
            max_tokens = min(max_tokens, self.context - longest)
        rows += [filler] * (count - len(rows))
        sampling = self.sampling.greedy if decoding is Decoding.GREEDY else self.sampling
        with self.clock.running("generate"), activity.own.doing("generating"):
            completions = self.sample(rows, sampling, max_tokens)
        for one, completion in zip(waiting, completions[: len(waiting)], strict=True):
            kept = completion.ids[: one.request.max_tokens]
            activity.own.add_tokens(len(kept))
            one.logprobs += [0.0] * len(kept) if completion.logprobs is None else completion.logprobs[: len(kept)]
            one.request = one.request.after(kept)
            ids = one.request.begun_ids
            is_ended = self.end.is_reached(ids)
            if is_ended or not one.request.max_tokens or len(completion.ids) < max_tokens:
                one.result.set_result(Completion(ids, one.logprobs, not is_ended))
            else:
                self._waiting.append(one)
        return True

    def _over_ranks(self, *numbers: int) -> list[int]:
        """The largest of each number over the ranks that share the engine, each of which must call this."""
        if self.shared_by is None:
            return list(numbers)
        own = torch.tensor([numbers], device=self.shared_by.device)
        largest: list[int] = self.shared_by.gather(own).max(dim=0).values.tolist()
        return largest
