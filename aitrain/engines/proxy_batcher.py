"""Answers `model.generate` calls from many threads by an engine: in few batches if it generates a batch at a time, each
by itself if it is a server.

An environment that generates with the policy gets a `ModelProxy` instead of the model. Only the thread of the event
loop uses the model.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from aitrain import activity
from aitrain.engines.batching import BatchingEngine
from aitrain.engines.hf import HFEngine
from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import evaluation_mode, use_device
from aitrain.engines.server import VLLMServerEngine
from aitrain.environment.runner import Runner
from aitrain.environment.seeds import SampleSeed, current_seeds, derived_seed
from aitrain.execution.task import is_abandoned, paused
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.engine import Completion, Decoding, GenerationRequest

SHORTEST_WINDOW, FIRST_WINDOW = 0.01, 0.05
"""Seconds to wait for further calls; the first one until the duration of a generation is known."""

POLL = 0.002
"""Seconds between two looks whether other threads can still call."""

GENERATING = "generating for the environment"

ENGINE_SETTINGS = {
    "max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "num_beams", "num_return_sequences",
    "eos_token_id", "pad_token_id", "bos_token_id", "use_cache", "cache_implementation", "disable_compile",
    "transformers_version",
}  # fmt: skip
"""Settings of `generate` that an engine supports, or can ignore. The model itself generates for calls with others."""
_SETTINGS = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
"""All settings; a model's generation_config may have further entries, which change nothing."""


def offer_model(
    runner: Runner,
    model: PreTrainedModel,
    tokenizer: Any,
    engine: BatchingEngine | VLLMServerEngine | None = None,
    refusal: str = "",
) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Give a runner's environment the model, whose calls are batched; returns the context in which it may score.
    `refusal` says why the model itself cannot be called."""
    batcher = ProxyBatcher(model, tokenizer, engine, refusal, runner.config.share_prefixes)
    parts, device = list(runner.parts.values()), model.device

    def in_thread() -> AbstractContextManager[None]:
        use_device(device)
        return torch.no_grad()

    for part in parts:
        part.around = in_thread
        part.offer(batcher.policy, tokenizer)

    return lambda: batcher.serving_calls(lambda: sum(part.running_calls for part in parts))


class ModelProxy:
    """Behaves like the model: `generate` and calls go through the batcher, in evaluation mode and without gradients;
    other attributes are read and set on the model itself.

    `to`, `eval`, `train` and the like do nothing.
    """

    __slots__ = ("_call", "_model")

    def __init__(self, call: Callable[..., Any], model: PreTrainedModel) -> None:
        """`call(method, ...)` calls a method of the model, in the thread that may touch it."""
        object.__setattr__(self, "_call", call)
        object.__setattr__(self, "_model", model)

    def generate(self, *args: object, **kwargs: object) -> Any:
        """The model's `generate`, with the result of a separate call; it samples with the episode's seed."""
        return self._call("generate", *args, **kwargs)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The model's forward pass, without gradients."""
        return self._call("__call__", *args, **kwargs)

    forward = __call__

    def to(self, *args: object, **kwargs: object) -> ModelProxy:
        """Do nothing; returns the proxy."""
        return self

    eval = train = requires_grad_ = cuda = cpu = float = half = bfloat16 = to

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that it is an instance of the model's class
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._model, name, value)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("the model that is being trained cannot be copied or pickled from inside an episode")


class ProxyBatcher:
    """Answers the calls of a `ModelProxy` by an engine, which gets those with the same settings as one batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        engine: BatchingEngine | VLLMServerEngine | None = None,
        refusal: str = "",
        shares_prompts: bool = True,
    ) -> None:
        """Without an engine the model generates, unless there is a refusal."""
        self.policy = ModelProxy(self.call_model, model)
        self._model, self._refusal = model, refusal
        self._engine = engine
        if engine is None and not refusal:
            end = EndOfTurn(_eos_ids(model.generation_config.eos_token_id))
            self._engine = own = HFEngine(model, tokenizer, Sampling(), end)
            own.shares_prompts = shares_prompts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: Callable[[], int] = lambda: 0
        self._lock = threading.Lock()
        """Held while a call begins, so that none begins after the last one was refused."""
        self._calls: set[Future[Any]] = set()
        """Calls that threads wait for."""
        self._unanswered = 0
        self._waiting: list[GenerateRequest] = []
        self._window = FIRST_WINDOW

    def call_model(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model from any thread but that of the event loop, which must not wait.

        Raises:
            RuntimeError: the calling task was abandoned, or calls are not served now, as the model may be training.
            Exception: what the method raises.
        """
        seeds = current_seeds.get() if method == "generate" else None
        seed = None if seeds is None else seeds.next_call()
        over = RuntimeError("the model was called after the episode had ended")
        with paused():  # from before the model may begin
            with self._lock:
                if self._loop is None or is_abandoned():
                    raise over
                call = asyncio.run_coroutine_threadsafe(self._serve(method, seed, *args, **kwargs), self._loop)
                self._calls.add(call)
            try:
                return call.result()
            except CancelledError:
                raise over from None
            finally:
                self._calls.discard(call)

    @asynccontextmanager
    async def serving_calls(self, running: Callable[[], int]) -> AsyncIterator[None]:
        """Context in which calls of other threads are served; `running` returns the number of threads that may call.
        Calls that still wait at its end are refused."""
        self._running, self._loop = running, asyncio.get_running_loop()
        try:
            with nullcontext() if self._refusal else evaluation_mode(self._model):  # one that may train keeps its mode
                yield
        finally:
            with self._lock:
                self._loop = None
                for call in list(self._calls):
                    call.cancel()
            self._waiting = []

    async def _serve(self, method: str, seed: int | None, /, *args: Any, **kwargs: Any) -> Any:
        """The result of a call. One that cannot share a batch runs at once; the first of the others waits for more."""
        self._unanswered += 1
        try:
            request = None
            if method == "generate" and self._engine is not None:
                with suppress(Exception):  # `generate` itself raises the error of settings that are invalid
                    request = GenerateRequest.of(self._model, seed, *args, **kwargs)
            if request is None:
                return self._run(method, seed, *args, **kwargs)
            if isinstance(self._engine, VLLMServerEngine):
                with activity.own.doing(GENERATING):
                    return request.result(await self._engine.complete(request.rows, request.sampling))
            self._waiting.append(request)
            if len(self._waiting) == 1:
                await self._generate_waiting()
            return await request.answer
        finally:
            self._unanswered -= 1

    async def _generate_waiting(self) -> None:
        """Answer the calls that wait once no other thread can call, but at most after half the duration of the last
        generation, as a separate one would take all of it."""
        end = time.monotonic() + self._window
        while self._unanswered < self._running() and time.monotonic() < end:
            await asyncio.sleep(POLL)
        batches: dict[object, list[GenerateRequest]] = {}
        for request in self._waiting:
            batches.setdefault((request.sampling, request.rows[0].max_tokens), []).append(request)
        self._waiting = []
        for batch in batches.values():
            self._answer(batch)

    def _answer(self, batch: list[GenerateRequest]) -> None:
        """Generate a batch; if that fails, each call by itself, so that only a faulty one fails."""
        assert isinstance(self._engine, BatchingEngine)
        start, rows = time.monotonic(), [row for request in batch for row in request.rows]
        try:
            with activity.own.doing(GENERATING):
                completions = iter(self._engine.sample(rows, batch[0].sampling, rows[0].max_tokens))
        except Exception as error:
            for request in batch:
                if len(batch) == 1:
                    request.answer.set_exception(error)
                else:
                    self._answer([request])
            return
        self._window = max(SHORTEST_WINDOW, (time.monotonic() - start) / 2)
        for request in batch:
            request.answer.set_result(request.result([next(completions) for _ in request.rows]))

    def _run(self, method: str, seed: int | None, /, *args: Any, **kwargs: Any) -> Any:
        """Call the model; a call with a seed samples with it.

        Raises:
            RuntimeError: the model cannot be called.
        """
        if self._refusal:
            raise RuntimeError(self._refusal)
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            return getattr(self._model, method)(*args, **kwargs)


@dataclass(frozen=True)
class GenerateRequest:
    """A call of `generate` that an engine can answer; calls with the same sampling and limit share a batch."""

    ids: torch.Tensor
    """Shape (rows, tokens), padded on the left."""
    rows: list[GenerationRequest]
    """One for each completion, without padding, all with the same limit."""
    sampling: Sampling
    pad: int
    """Token that fills rows behind their end."""
    answer: asyncio.Future[torch.Tensor]

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        seed: int | None,
        /,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        **given: Any,
    ) -> GenerateRequest | None:
        """The request with these arguments of `generate`; None if no engine supports one of them, or without
        `max_new_tokens`."""
        ids, mask = input_ids, attention_mask
        if ids.dim() != 2 or not ids.numel():
            return None
        usual = model.generation_config
        settings = copy.deepcopy(usual)
        settings.top_k = 50 if usual.top_k is None else usual.top_k  # the default; None as an argument is none
        unknown = settings.update(**given)  # also a generation_config, with which the model itself generates
        ends, pad = _eos_ids(settings.eos_token_id), settings.pad_token_id
        used = {name for name in _SETTINGS if getattr(settings, name)}
        is_known = not (any(unknown.values()) or used - ENGINE_SETTINGS or (settings.num_beams or 1) > 1)
        is_masked = mask is not None or pad is None or not (ids == pad).any()
        if not (is_known and is_masked and settings.max_new_tokens and {*ends} == {*_eos_ids(usual.eos_token_id)}):
            return None
        rows = list[GenerationRequest]()
        base = int(torch.randint(2**62, ())) if seed is None else seed
        for row, kept in zip(ids, torch.ones_like(ids) if mask is None else mask, strict=True):
            prompt = row[kept.bool()].tolist()
            for _ in range(settings.num_return_sequences or 1):
                row_seed = SampleSeed(derived_seed(base, len(rows)))
                rows.append(GenerationRequest(prompt, settings.max_new_tokens, row_seed, Decoding.SEEDED, index=-1))
        sampling = Sampling(1.0 if settings.temperature is None else settings.temperature, settings.top_k or 0)
        sampling = replace(sampling, top_p=settings.top_p or 1.0) if settings.do_sample else sampling.greedy
        pad, answer = next(iter(ends), 0) if pad is None else pad, asyncio.get_running_loop().create_future()
        return cls(ids, rows, sampling, pad, answer)

    def result(self, completions: list[Completion]) -> torch.Tensor:
        """What `generate` returns: each prompt and its completion, filled up to the longest of the call."""
        rows = [torch.tensor(one.ids, dtype=torch.long, device=self.ids.device) for one in completions]
        generated = pad_sequence(rows, batch_first=True, padding_value=self.pad)
        return torch.cat([self.ids.repeat_interleave(len(rows) // len(self.ids), dim=0), generated], dim=1)


def _eos_ids(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else ids
