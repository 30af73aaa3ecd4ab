"""Gathers `model.generate` calls from many threads into few batches.

An environment that generates with the policy gets a `ModelProxy` instead of the model. Only the thread of the event
loop uses the model.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedModel

from aitrain import activity
from aitrain.engines.generate_arguments import GenerateRequest, GenerateSettings
from aitrain.engines.model_proxy import ModelProxy
from aitrain.engines.row_sampling import seeded_rows
from aitrain.engines.sampling import Completer
from aitrain.engines.scopes import evaluation_mode
from aitrain.environment.runner import Runner
from aitrain.environment.seeds import SampleSeed, current_seeds, derived_seed
from aitrain.errors import RunFailed, ServerRefusedError, ServerTimeoutError
from aitrain.execution.task import is_abandoned, paused

SHORTEST_WINDOW, FIRST_WINDOW = 0.01, 0.05
"""Seconds to wait for further calls; the first one until the duration of a generation is known."""


def offer_model(
    runner: Runner,
    model: PreTrainedModel,
    tokenizer: Any,
    engine: Completer | None = None,
    refusal: str = "",
) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Give a runner's environment the model, whose calls are batched; returns the context in which it may score.
    `refusal` says why the model itself cannot be called."""
    proxy = ProxyBatcher(model, tokenizer.pad_token_id, engine, refusal)
    runner.around, runner.on_call_end = torch.no_grad, proxy.on_call_end
    runner.offer(proxy.policy, tokenizer)

    @asynccontextmanager
    async def scoring() -> AsyncIterator[None]:
        with nullcontext() if refusal else evaluation_mode(model):  # one that may train meanwhile keeps its mode
            async with proxy.serving_calls(lambda: runner.running_calls):
                yield

    return scoring


class ProxyBatcher:
    """Runs the calls of a `ModelProxy`, those with the same settings in one batch."""

    def __init__(
        self, model: PreTrainedModel, pad_token_id: int, engine: Completer | None = None, refusal: str = ""
    ) -> None:
        """`engine` generates for the calls whose settings it supports; None: the model generates for all, unless
        there is a refusal."""
        self.policy = ModelProxy(self.call_model, model)
        self._model, self._pad, self._engine, self._refusal = model, pad_token_id, engine, refusal
        self._thread = threading.get_ident()
        self._session: _Session | None = None
        self._idle_since = 0.0
        self._window = FIRST_WINDOW

    def call_model(self, method: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Call a method of the model; in the thread of the event loop, which must not wait, it runs at once.

        Raises:
            RuntimeError: the calling task was abandoned, or calls are not served now, as the model may be training.
            Exception: what the method raises.
        """
        is_generate, seeds = method == "generate", current_seeds.get()
        seed = seeds.next_call() if is_generate and seeds is not None else None
        call = _Call(method, args, kwargs, GenerateRequest.of(args, kwargs) if is_generate else None, seed)
        if threading.get_ident() == self._thread:
            return self._run(method, args, kwargs, [call])
        session = self._session
        if session is None or is_abandoned():
            raise _over()
        with paused():  # from before the model may begin
            session.calls.put(call)
            if session.is_over:  # it may have ended before the call was put
                _refuse(session.arrivals())
            session.wake()
            return call.answer()

    def on_call_end(self) -> None:
        """To be called on the event loop when a call of an environment has ended."""
        if self._session is not None:
            self._session.changed.set()

    @asynccontextmanager
    async def serving_calls(self, running: Callable[[], int]) -> AsyncIterator[None]:
        """Context in which calls of other threads are served; `running` returns the number of threads that may call.
        Calls that still wait at its end are refused."""
        session = _Session(asyncio.get_running_loop())
        self._thread, self._idle_since, self._session = threading.get_ident(), time.monotonic(), session
        server = asyncio.ensure_future(self._serve_calls(session, running))
        try:
            yield
        finally:
            self._session, session.is_over = None, True
            _refuse([*session.waiting, *session.arrivals()])
            server.cancel()
            with suppress(asyncio.CancelledError):  # it may have ended by Ctrl-C
                await server

    # -- when

    async def _serve_calls(self, session: _Session, running: Callable[[], int]) -> None:
        while True:
            session.changed.clear()
            session.waiting += session.arrivals()
            due = self._due(session.waiting, running())
            if due:
                session.waiting = [call for call in session.waiting if call not in due]
                await self._serve(due)
                await asyncio.sleep(0)  # their threads continue, and may call again or end
                continue
            rest = max(0.0, self._window_end(session.waiting) - time.monotonic()) if session.waiting else None
            with suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await session.changed.wait()

    def _due(self, waiting: list[_Call], running: int) -> list[_Call]:
        """The calls that cannot share a batch; all calls if no other thread can call, or the window is over."""
        alone = [call for call in waiting if call.request is None]
        if alone or not waiting:
            return alone
        return waiting if len(waiting) >= running or time.monotonic() >= self._window_end(waiting) else []

    def _window_end(self, waiting: list[_Call]) -> float:
        """Time until which to wait for further calls: half the duration of the last generation, so that waiting adds at
        most half of the time, while a separate generation would add all of it."""
        return max(waiting[0].arrived, self._idle_since) + self._window

    async def _serve(self, calls: list[_Call]) -> None:
        start, came_alone = time.monotonic(), len(calls) == 1 and calls[0].arrived >= self._idle_since
        try:
            with activity.own.doing("generating for the environment"):
                for _, alike in groupby(sorted(calls, key=_kind), key=_kind):
                    await self._answer_alike(list(alike))
        except Exception as error:  # settings that cannot be read; later calls are served
            _fail(calls, error)
        except BaseException:  # Ctrl+C, or the end of the session
            _refuse(calls)
            raise
        self._idle_since = time.monotonic()
        if calls[0].request is not None:
            took = 0.0 if came_alone else self._idle_since - start  # no further call came: wait less the next time
            self._window = max(SHORTEST_WINDOW, took / 2)

    # -- how

    async def _answer_alike(self, calls: list[_Call]) -> None:
        """Run calls of one kind."""
        first = calls[0].request
        settings = first and GenerateSettings.of(self._model, first)
        shared = [call for call in calls if settings and call.request and settings.allow(call.request)]
        for call in calls:
            if call not in shared:
                await self._answer([call], self._alone)
        if settings and shared:
            await self._answer(shared, functools.partial(self._together, settings))

    async def _answer(self, calls: list[_Call], work: Callable[[list[_Call]], Awaitable[Sequence[object]]]) -> None:
        """Run calls together; if that fails, each half again, so that only a faulty call fails, and memory suffices. An
        engine that is gone is not tried again: each try would wait for it for minutes."""
        try:
            results = await work(calls)
        except Exception as error:
            is_gone = isinstance(error, RunFailed) and not isinstance(error, (ServerRefusedError, ServerTimeoutError))
            if is_gone or len(calls) == 1:
                _fail(calls, error)
                return
            results = []
        for call, result in zip(calls, results, strict=False):
            call.answers.put((result, None))
        if not results and len(calls) > 1:
            middle = len(calls) // 2
            await self._answer(calls[:middle], work)
            await self._answer(calls[middle:], work)

    async def _alone(self, calls: list[_Call]) -> Sequence[object]:
        return [self._run(call.method, call.args, call.kwargs, [call]) for call in calls]

    async def _together(self, settings: GenerateSettings, calls: list[_Call]) -> Sequence[object]:
        requests = [call.request for call in calls if call.request is not None]
        if self._engine is not None and settings.is_for_engine:
            count = sum(len(request.ids) for request in requests) * settings.rows
            seeds = [seed.request_seed for seed in _seeds(calls, count) if seed is not None]
            answers = await self._engine.complete(settings.batch(requests, seeds if len(seeds) == count else None))
            lengths = [len(answer) for answer in answers]
            fill = self._pad if settings.pad is None else settings.pad
            padded = [answer + [fill] * (max(lengths) - len(answer)) for answer in answers]
            generated = torch.tensor(padded, dtype=torch.long, device=requests[0].ids.device)
            return settings.results(requests, generated, lengths)
        if len(calls) == 1:
            return await self._alone(calls)
        arguments = settings.arguments(requests)
        generated = self._run("generate", (), arguments, calls)[:, max(request.width for request in requests) :]
        return settings.results(requests, generated, settings.lengths(generated))

    def _run(self, method: str, args: tuple[object, ...], kwargs: dict[str, object], calls: list[_Call]) -> Any:
        """Call the model, without dropout and gradients; rows of calls with a seed are sampled with it.

        Raises:
            RuntimeError: the model cannot be called.
        """
        if self._refusal:
            raise RuntimeError(self._refusal)
        is_seeded = any(call.seed is not None for call in calls)
        sampling = seeded_rows(self._model, functools.partial(_seeds, calls)) if is_seeded else nullcontext()
        with evaluation_mode(self._model), sampling:
            return getattr(self._model, method)(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a model's method, for which a thread waits; without a `request` it is not batched."""

    method: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    request: GenerateRequest | None
    seed: int | None = None
    """Seed of the sampling of its rows; None: the engine's own random numbers."""
    arrived: float = field(default_factory=time.monotonic)
    answers: queue.SimpleQueue[tuple[object, Exception | None]] = field(default_factory=queue.SimpleQueue)

    def answer(self) -> object:
        """Wait for the result."""
        result, error = self.answers.get()
        if error is not None:
            raise error
        return result


class _Session:
    """A period in which calls are served."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self.waiting: list[_Call] = []
        self.changed = asyncio.Event()
        self.is_over = False
        self._loop = loop

    def wake(self) -> None:
        """Let the event loop look for arrivals; from any thread."""
        with suppress(RuntimeError):  # the loop was closed: the run has ended
            self._loop.call_soon_threadsafe(self.changed.set)

    def arrivals(self) -> list[_Call]:
        """The calls that were not taken yet."""
        calls = []
        with suppress(queue.Empty):
            while True:
                calls.append(self.calls.get_nowait())
        return calls


def _seeds(calls: list[_Call], rows: int) -> list[SampleSeed | None]:
    """Seed of each row of a batch of these calls, whose rows are divided over the calls in proportion to prompts."""
    prompts = [1 if call.request is None else len(call.request.ids) for call in calls]
    each = rows // sum(prompts)
    counts = [count * each for count in prompts[:-1]]
    counts.append(rows - sum(counts))
    return [
        None if call.seed is None else SampleSeed(derived_seed(call.seed, row))
        for call, count in zip(calls, counts, strict=True)
        for row in range(count)
    ]


def _kind(call: _Call) -> str:
    return call.request.kind if call.request else ""


def _refuse(calls: list[_Call]) -> None:
    _fail(calls, _over())


def _fail(calls: list[_Call], error: Exception) -> None:
    """Put an error as answer of each call; a call that has its answer ignores it."""
    for call in calls:
        call.answers.put((None, error))


def _over() -> RuntimeError:
    return RuntimeError("the model was called after the episode had ended")
