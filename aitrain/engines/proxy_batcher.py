"""Gathers `model.generate` calls from many threads into few batches of an engine.

An environment that generates with the policy gets a `ModelProxy` instead of the model. Only the thread of the event
loop uses the model.

Inside API of transformers 5.17 that it uses (tests/training/test_upstream.py):

    model._prepare_generation_config(config, **arguments)       called: the settings that `generate` resolves
    GenerationConfig._get_default_generation_params()           called: default of each setting
    GenerationMixin._prepare_attention_mask_for_generation      done the same way: the mask of a call without one
    GenerationMixin._prepare_generated_length                   done the same way: maximum length of its completions
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from aitrain import activity
from aitrain.engines.hf import HFEngine, HFModel
from aitrain.engines.hf_sampling import seeded_rows
from aitrain.engines.sampling import Completer, CompletionBatch, Sampling
from aitrain.engines.scopes import evaluation_mode
from aitrain.environment.mixed_runner import Runner
from aitrain.environment.seeds import SampleSeed, current_seeds, derived_seed
from aitrain.errors import RunFailed, ServerRefusedError, ServerTimeoutError
from aitrain.execution.task import is_abandoned, paused
from aitrain.rollout.limits import EndOfTurn

SHORTEST_WINDOW, FIRST_WINDOW = 0.01, 0.05
"""Seconds to wait for further calls; the first one until the duration of a generation is known."""

ENGINE_SETTINGS = {
    "max_length", "max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "num_return_sequences", "eos_token_id", "pad_token_id", "bos_token_id",
    "use_cache", "disable_compile", "transformers_version", "_from_model_config",
}  # fmt: skip
"""Settings of `generate` that an engine supports, or can ignore. The model itself generates for calls with others."""


def offer_model(
    runner: Runner,
    model: PreTrainedModel,
    tokenizer: Any,
    engine: Completer | None = None,
    refusal: str = "",
) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Give a runner's environment the model, whose calls are batched; returns the context in which it may score.
    `refusal` says why the model itself cannot be called."""
    batcher = ProxyBatcher(model, tokenizer, engine, refusal)
    runner.around, runner.on_call_end = torch.no_grad, batcher.on_call_end
    runner.offer(batcher.policy, tokenizer)

    @asynccontextmanager
    async def scoring() -> AsyncIterator[None]:
        with nullcontext() if refusal else evaluation_mode(model):  # one that may train meanwhile keeps its mode
            async with batcher.serving_calls(lambda: runner.running_calls):
                yield

    return scoring


class ModelProxy:
    """Behaves like the model: `generate` and calls go through the batcher, in evaluation mode and without gradients;
    other attributes are read and set on the model itself.

    `to`, `eval`, `train` and the like do nothing.
    """

    __slots__ = ("_call", "_model")

    def __init__(self, call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any], model: PreTrainedModel) -> None:
        """`call(method, args, kwargs)` calls a method of the model, in the thread that may touch it."""
        object.__setattr__(self, "_call", call)
        object.__setattr__(self, "_model", model)

    def generate(self, *args: object, **kwargs: object) -> Any:
        """The model's `generate`, with the result of a separate call; it samples with the episode's seed."""
        return self._call("generate", args, kwargs)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The model's forward pass, without gradients."""
        return self._call("__call__", args, kwargs)

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

    def __repr__(self) -> str:
        return repr(self._model)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("the model that is being trained cannot be copied or pickled from inside an episode")


class ProxyBatcher:
    """Queues the calls of a `ModelProxy` before an engine, which gets those with the same settings as one batch."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, engine: Completer | None = None, refusal: str = ""
    ) -> None:
        """Without an engine the model generates, unless there is a refusal."""
        self.policy = ModelProxy(self.call_model, model)
        self._model, self._pad, self._refusal = model, tokenizer.pad_token_id, refusal
        if engine is None and not refusal:
            engine = HFEngine(HFModel(model, tokenizer), Sampling(), EndOfTurn(_eos_ids(model.generation_config)))
        self._engine = engine
        self._thread = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        """Held while a call is put, so that none is put after the last one was refused."""
        self._waiting: list[_Call] = []
        self._changed = asyncio.Event()

    def call_model(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the model; in the thread of the event loop, which must not wait, it runs at once.

        Raises:
            RuntimeError: the calling task was abandoned, or calls are not served now, as the model may be training.
            Exception: what the method raises.
        """
        seeds = current_seeds.get() if method == "generate" else None
        call = _Call(method, args, kwargs, None if seeds is None else seeds.next_call())
        if threading.get_ident() == self._thread:
            return self._run(call)
        with paused():  # from before the model may begin
            with self._lock:
                if self._loop is None or is_abandoned():
                    raise _over()
                self._loop.call_soon_threadsafe(self._put, call)
            return call.result.result()

    def on_call_end(self) -> None:
        """To be called on the event loop when a call of an environment has ended."""
        self._changed.set()

    @asynccontextmanager
    async def serving_calls(self, running: Callable[[], int]) -> AsyncIterator[None]:
        """Context in which calls of other threads are served; `running` returns the number of threads that may call.
        Calls that still wait at its end are refused."""
        self._thread, self._changed = threading.get_ident(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        server = asyncio.ensure_future(self._serve_calls(running))
        try:
            yield
        finally:
            with self._lock:
                self._loop = None
            server.cancel()
            await asyncio.wait([server])  # meanwhile the last calls are put
            _fail(self._waiting, _over())
            self._waiting = []

    # -- when

    def _put(self, call: _Call) -> None:
        if call.method == "generate" and self._engine is not None:
            with suppress(Exception):  # `generate` itself raises the error of settings that are invalid
                call.request = GenerateRequest.of(self._model, call.args, call.kwargs)
        self._waiting.append(call)
        self._changed.set()

    async def _serve_calls(self, running: Callable[[], int]) -> None:
        """Run calls that cannot share a batch at once. The others wait until no other thread can call, but at most for
        half the duration of the last generation, as a separate generation would take all of it."""
        window = FIRST_WINDOW
        while True:
            while not self._waiting:
                await self._change()
            with suppress(TimeoutError):
                async with asyncio.timeout(window):
                    while not self._alone() and len(self._waiting) < running():
                        await self._change()
            start, alone = time.monotonic(), self._alone()
            with activity.own.doing("generating for the environment"):
                await self._serve(alone or self._waiting)
            if not alone:
                window = max(SHORTEST_WINDOW, (time.monotonic() - start) / 2)
            self._waiting = [call for call in self._waiting if not call.result.done()]
            await asyncio.sleep(0)  # the threads of these calls continue, and may call again or end

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _alone(self) -> list[_Call]:
        return [call for call in self._waiting if call.request is None]

    # -- how

    async def _serve(self, calls: Sequence[_Call]) -> None:
        kinds: dict[object, list[_Call]] = {}
        for call in calls:
            kinds.setdefault(call.request.kind if call.request else call, []).append(call)
        for alike in kinds.values():
            await self._answer(alike)

    async def _answer(self, calls: list[_Call]) -> None:
        """Run calls together; if that fails, each half again, so that only a faulty call fails, and memory suffices. An
        engine that is gone is not tried again: each try would wait for it for minutes."""
        try:
            results = await self._generate(calls) if calls[0].request else [self._run(calls[0])]
        except Exception as error:
            is_gone = isinstance(error, RunFailed) and not isinstance(error, (ServerRefusedError, ServerTimeoutError))
            if is_gone or len(calls) == 1:
                _fail(calls, error)
                return
            middle = len(calls) // 2
            await self._answer(calls[:middle])
            await self._answer(calls[middle:])
            return
        for call, result in zip(calls, results, strict=True):
            call.result.set_result(result)

    async def _generate(self, calls: list[_Call]) -> list[torch.Tensor]:
        """For each call, its prompts followed by the engine's completions, as wide as if it had been alone."""
        requests = [call.request for call in calls if call.request is not None]
        prompts = [prompt for request in requests for prompt in request.prompts]
        seeds = [
            derived_seed(call.seed, row)
            for call, request in zip(calls, requests, strict=True)
            for row in range(len(request.prompts))
            if call.seed is not None
        ]
        limit, have_seeds = max(request.limit for request in requests), len(seeds) == len(prompts)
        batch = CompletionBatch(prompts, requests[0].sampling, limit, seeds if have_seeds else None)
        assert self._engine is not None
        completions = iter([completion.ids for completion in await self._engine.complete(batch)])
        return [request.result([next(completions) for _ in request.prompts], self._pad) for request in requests]

    def _run(self, call: _Call) -> Any:
        """Call the model, without dropout and gradients; a call with a seed samples with it.

        Raises:
            RuntimeError: the model cannot be called.
        """
        if self._refusal:
            raise RuntimeError(self._refusal)

        def seeds(rows: int) -> list[SampleSeed]:
            return [SampleSeed(derived_seed(call.seed, row)) for row in range(rows)]

        sampling = nullcontext() if call.seed is None else seeded_rows(self._model, seeds)
        with evaluation_mode(self._model), sampling:
            return getattr(self._model, call.method)(*call.args, **call.kwargs)


@dataclass(frozen=True)
class GenerateRequest:
    """A call of `generate` that an engine can answer; calls of the same `kind` share a batch."""

    ids: torch.Tensor
    """Shape (rows, tokens), padded on the left."""
    prompts: list[list[int]]
    """Token ids without padding, once for each completion."""
    limit: int
    """Maximum new tokens of each completion."""
    sampling: Sampling
    pad: int | None
    """Token that fills rows behind their end; None: the tokenizer's."""
    kind: tuple[object, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GenerateRequest | None:
        """The request with these arguments of `generate`; None if no engine supports one of them."""
        given = dict(zip(("inputs", "generation_config"), args, strict=False)) | dict(kwargs)
        if len(given) < len(args) + len(kwargs) or ("inputs" in given and "input_ids" in given):
            return None
        ids = given.pop("inputs" if "inputs" in given else "input_ids", None)
        mask, own = given.pop("attention_mask", None), given.pop("generation_config", None)
        if not isinstance(ids, torch.Tensor) or ids.dtype != torch.long or ids.dim() != 2 or ids.numel() == 0:
            return None
        config, rest = model._prepare_generation_config(own, **given)
        ends = _eos_ids(config)
        if rest or _changed(config) - ENGINE_SETTINGS or set(ends) != set(_eos_ids(model.generation_config)):
            return None
        has_length = any((given.get("max_length"), own and own.max_length, model.generation_config.max_length))
        limit = _limit(config, ids.shape[1], has_length, getattr(model.config, "max_position_embeddings", None))
        if limit < 1 or (mask is not None and mask.shape != ids.shape):
            return None
        pad = config.pad_token_id if config.pad_token_id is not None else next(iter(ends), None)
        if mask is None:
            mask = torch.ones_like(ids) if pad is None or pad in ends else ids.ne(pad)
        prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
        prompts = [prompt for prompt in prompts for _ in range(config.num_return_sequences)]
        sampling = _sampling(config)
        kind = (sampling, config.max_new_tokens, config.max_length, ids.device)
        return cls(ids, prompts, limit, sampling, pad, kind)

    def result(self, completions: list[list[int]], pad: int) -> torch.Tensor:
        """What `generate` returns: each prompt and its completion, filled up to the longest of the call."""
        fill = pad if self.pad is None else self.pad
        completions = [completion[: self.limit] for completion in completions]
        width = max(map(len, completions))
        rows = [completion + [fill] * (width - len(completion)) for completion in completions]
        generated = torch.tensor(rows, dtype=torch.long, device=self.ids.device)
        return torch.cat([self.ids.repeat_interleave(len(rows) // len(self.ids), dim=0), generated], dim=1)


def _limit(config: GenerationConfig, width: int, has_length: bool, context: int | None) -> int:
    """Maximum new tokens after a prompt of this width; without a length of the user's, as `generate` limits them."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if has_length or context is None:
        return int(config.max_length) - (width if has_length else 0)
    return min(int(config.max_length), context - width)


def _sampling(config: GenerationConfig) -> Sampling:
    sampling = Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        repetition_penalty=config.repetition_penalty or 1.0,
        min_new_tokens=config.min_new_tokens or 0,
    )
    if not config.do_sample:
        return sampling.greedy
    return replace(sampling, top_k=config.top_k or 0, top_p=config.top_p or 1.0, min_p=config.min_p or 0.0)


def _changed(config: GenerationConfig) -> set[str]:
    """Names of the settings that differ from their defaults."""
    usual = vars(GenerationConfig()) | GenerationConfig._get_default_generation_params()
    return {name for name, value in vars(config).items() if name in usual and (value or None) != (usual[name] or None)}


def _eos_ids(config: GenerationConfig) -> list[int]:
    ids = config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


@dataclass(eq=False)
class _Call:
    """A call of a model's method, for which a thread waits; without a `request` it is not batched."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int | None
    """Seed of the sampling of its rows; None: the engine's own random numbers."""
    request: GenerateRequest | None = None
    result: Future[Any] = field(default_factory=Future)


def _fail(calls: list[_Call], error: Exception) -> None:
    """Raise an error in the threads of calls that have no result yet."""
    for call in calls:
        if not call.result.done():
            call.result.set_exception(error)


def _over() -> RuntimeError:
    return RuntimeError("the model was called after the episode had ended")
