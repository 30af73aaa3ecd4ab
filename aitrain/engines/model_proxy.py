"""Calls of `model.generate` from many threads, gathered into few.

An environment that plays with the model itself is handed a `Policy` in its place. What it asks for is done in one
thread, that of the event loop: no other touches the model.

Where we lean on the inside of transformers 5.17:

    model._prepare_generation_config(config, **words)           called: the settings that `generate` comes to
    GenerationConfig._get_default_generation_params()           called: what a setting is when nobody sets it
    GenerationMixin._prepare_attention_mask_for_generation      done the same way: the mask of a call without one
    GenerationMixin._prepare_generated_length                   done the same way: how long its completions may be
"""

from __future__ import annotations

import asyncio
import copy
import functools
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import GenerationConfig

from aitrain import activity
from aitrain.engines.row_sampling import seeded_rows
from aitrain.environment.seeds import SampleSeed, current_seeds, derived_seed
from aitrain.execution.task import is_abandoned, paused

Engine = Callable[[list[list[int]], dict[str, Any]], list[list[int]]]
"""Completion ids for prompt ids, in their order: `engine(prompts, sampling)`. `sampling` has `max_new_tokens` and, as
vLLM takes them, `temperature` (0: greedy), `top_k` (-1: all), `top_p`, `min_p` and `repetition_penalty`; and `seeds`,
one for each prompt, where the episodes that ask have them."""

SHORTEST_WINDOW, FIRST_WINDOW = 0.01, 0.05
"""Seconds; the first one before it is known how long a generation takes: 64 threads need 20 milliseconds to call."""

ENGINE_SETTINGS = {
    "max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "num_return_sequences", "eos_token_id", "pad_token_id", "bos_token_id",
    "use_cache", "disable_compile", "transformers_version", "_from_model_config",
}  # fmt: skip
"""What an engine does as well as the model, or need not know."""

SHARED_SETTINGS = ENGINE_SETTINGS | {
    "min_new_tokens", "typical_p", "epsilon_cutoff", "eta_cutoff", "suppress_tokens",
    "renormalize_logits", "remove_invalid_values",
}  # fmt: skip
"""What does the same to a row whatever other rows there are and however far it is padded. Calls with any other setting
(beams, n-grams, ...) do not share a batch."""


class ProxyBatcher:
    """Answers a policy's calls, those with the same settings together, in the thread that made it or that entered
    `serving` last."""

    def __init__(self, model: Any, pad_token_id: int, engine: Engine | None = None) -> None:
        self.policy = ModelProxy(self, model)
        self.wake: Callable[[], None] = _nobody_to_wake
        """How other threads make the serving one call `poll`."""
        self.on_call_end: Callable[[], None] = _nobody_to_wake
        """To be called on the event loop when a call of an environment has ended."""
        self._model, self._pad, self._engine = model, pad_token_id, engine
        self._thread = threading.get_ident()
        self._session: _Session | None = None
        self._waiting: list[_Call] = []
        self._idle_since = 0.0
        self._window = FIRST_WINDOW

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While this lasts, calls of other threads wait for `poll`; who still waits at its end is refused."""
        session = _Session()
        self._thread, self._idle_since, self._session = threading.get_ident(), time.monotonic(), session
        try:
            yield
        finally:
            self._session, waiting, self._waiting = None, self._waiting, []
            session.is_over = True
            _refuse([*waiting, *session.arrivals()])

    def ask(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What this method of the model returns: at once in the serving thread, which may wait for nobody.

        Raises:
            RuntimeError: the calling task was abandoned, or calls are not served now, as the model may be training.
            Exception: whatever the method raises.
        """
        is_generate, seeds = method == "generate", current_seeds.get()
        seed = seeds.next_call() if is_generate and seeds is not None else None
        call = _Call(method, args, kwargs, _request(args, kwargs) if is_generate else None, seed)
        if threading.get_ident() == self._thread:
            return self._alone([call])[0]
        session = self._session
        if session is None or is_abandoned():
            raise _over()
        session.calls.put(call)
        if session.is_over:  # perhaps nobody saw it
            _refuse(session.arrivals())
        self.wake()
        with paused():
            return call.answer()

    @asynccontextmanager
    async def serving_calls(self, running: Callable[[], int]) -> AsyncIterator[None]:
        """While this lasts, the event loop serves calls of other threads; `running` threads could make one."""
        loop, timer = asyncio.get_running_loop(), None

        def poll() -> None:
            nonlocal timer
            if timer is not None:
                timer.cancel()
            seconds = self.poll(running()) if self._session is not None else math.inf
            timer = None if seconds == math.inf else loop.call_later(seconds, poll)

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed: the run ended meanwhile
                loop.call_soon_threadsafe(poll)

        self.wake, self.on_call_end = wake, poll
        try:
            with self.serving():
                yield
        finally:
            self.wake = self.on_call_end = _nobody_to_wake

    # -- when

    def poll(self, running: int) -> float:
        """Do what is due, where `running` threads could ask for something; returns seconds until more may be due."""
        if self._session is not None:
            self._waiting += self._session.arrivals()
        if due := self._due(running):
            self._waiting = [call for call in self._waiting if call not in due]
            self._serve(due)
            return 0.0
        return max(0.0, self._window_ends() - time.monotonic()) if self._waiting else math.inf

    def _due(self, running: int) -> list[_Call]:
        """What cannot share a batch; and when nobody else can come, or the window is over, everything."""
        alone = [call for call in self._waiting if call.request is None]
        if alone or not self._waiting:
            return alone
        is_full = len(self._waiting) >= running
        return self._waiting if is_full or time.monotonic() >= self._window_ends() else []

    def _window_ends(self) -> float:
        """The model stands idle for half as long as it generates, which costs at most half as much again; a batch of
        one costs a whole generation."""
        return max(self._waiting[0].arrived, self._idle_since) + self._window

    def _serve(self, calls: list[_Call]) -> None:
        start, came_alone = time.monotonic(), len(calls) == 1 and calls[0].arrived >= self._idle_since
        try:
            with activity.own.doing("generating for the environment"):
                for kind, alike in groupby(sorted(calls, key=_kind), key=_kind):
                    self._answer_alike(kind, list(alike))
        except BaseException:  # Ctrl+C
            _refuse(calls)
            raise
        self._idle_since = time.monotonic()
        if calls[0].request is not None:
            took = 0.0 if came_alone else self._idle_since - start  # nobody else came: wait less the next time
            self._window = max(SHORTEST_WINDOW, took / 2)

    # -- how

    def _answer_alike(self, kind: str, calls: list[_Call]) -> None:
        settings = _settings(self._model, calls[0].request)
        shared = [call for call in calls if settings and call.request and settings.allow(call.request)]
        for call in calls:
            if call not in shared:
                self._answer([call], self._alone)
        if settings and shared:
            self._answer(shared, functools.partial(self._together, settings))

    def _answer(self, calls: list[_Call], work: Callable[[list[_Call]], list[Any]]) -> None:
        """Where several fail together, each half is tried again: only who is to blame fails, and all fit in memory."""
        try:
            results = work(calls)
        except Exception as error:
            results = []
            if len(calls) == 1:
                calls[0].answers.put((None, error))
        for call, result in zip(calls, results, strict=False):
            call.answers.put((result, None))
        if not results and len(calls) > 1:
            middle = len(calls) // 2
            self._answer(calls[:middle], work)
            self._answer(calls[middle:], work)

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], calls: list[_Call]) -> Any:
        """Without dropout and gradients; afterwards the model's mode is what it was. Rows of calls that have a seed are
        sampled by it."""
        was_training = self._model.training
        if was_training:
            self._model.eval()
        try:
            is_seeded = any(call.seed is not None for call in calls)
            sampling = seeded_rows(self._model, functools.partial(_draws, calls)) if is_seeded else nullcontext()
            with torch.no_grad(), sampling:
                return getattr(self._model, method)(*args, **kwargs)
        finally:
            if was_training:
                self._model.train()

    def _alone(self, calls: list[_Call]) -> list[Any]:
        return [self._run(call.method, call.args, call.kwargs, [call]) for call in calls]

    def _together(self, settings: _Settings, calls: list[_Call]) -> list[torch.Tensor]:
        if self._engine is not None and settings.is_for_engine:
            return self._by_engine(self._engine, settings, calls)
        return self._by_model(settings, calls) if len(calls) > 1 else self._alone(calls)

    def _by_model(self, settings: _Settings, calls: list[_Call]) -> list[torch.Tensor]:
        requests = _requests(calls)
        width = max(request.width for request in requests)
        words = {
            "input_ids": torch.cat([request.widened(width) for request in requests]),
            "attention_mask": torch.cat([settings.mask(request, width) for request in requests]),
            **requests[0].with_limit(max(settings.limit(request) for request in requests)),
        }
        generated = self._run("generate", (), words, calls)[:, width:]
        return _handed_out(settings, requests, generated, _lengths(generated, settings.ends))

    def _by_engine(self, engine: Engine, settings: _Settings, calls: list[_Call]) -> list[torch.Tensor]:
        requests = _requests(calls)
        prompts = [
            ids[mask.bool()].tolist()
            for request in requests
            for ids, mask in zip(request.ids, settings.mask(request, request.width), strict=True)
            for _ in range(settings.rows)
        ]
        sampling = settings.sampling(max(settings.limit(request) for request in requests))
        seeds = [draw.request_seed for draw in _draws(calls, len(prompts)) if draw is not None]
        answers = engine(prompts, sampling | ({"seeds": seeds} if len(seeds) == len(prompts) else {}))
        lengths = [len(answer) for answer in answers]
        fill = self._pad if settings.pad is None else settings.pad
        padded = [answer + [fill] * (max(lengths) - len(answer)) for answer in answers]
        generated = torch.tensor(padded, dtype=torch.long, device=requests[0].ids.device)
        return _handed_out(settings, requests, generated, lengths)


class ModelProxy:
    """What an environment is handed as the model: `generate` and calls go through the batcher, in evaluation mode and
    without gradients, anything else (also setting an attribute) to the model itself.

    Where the model is, in which format and mode, is the trainer's: `to`, `eval`, `train` and their kin change nothing.
    """

    __slots__ = ("_batcher", "_model")

    def __init__(self, batcher: ProxyBatcher, model: Any) -> None:
        object.__setattr__(self, "_batcher", batcher)
        object.__setattr__(self, "_model", model)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, as if it were called alone; what is sampled follows from the episode's seed."""
        return self._batcher.ask("generate", args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, without gradients."""
        return self._batcher.ask("__call__", args, kwargs)

    forward = __call__

    def to(self, *args: Any, **kwargs: Any) -> ModelProxy:
        """The policy as it is."""
        return self

    eval = train = requires_grad_ = cuda = cpu = float = half = bfloat16 = to

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that it is an instance of the model's class
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def __repr__(self) -> str:
        return repr(self._model)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("the model that is being trained cannot be copied or pickled from inside an episode")


# -- calls


@dataclass(frozen=True, eq=False)
class _Call:
    """A method of the model that a thread waits for; without a request it is done by itself, as given."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    request: _Request | None
    seed: int | None = None
    """What its rows are sampled with; None: with the engine's own random numbers."""
    arrived: float = field(default_factory=time.monotonic)
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = field(default_factory=queue.SimpleQueue)

    def answer(self) -> Any:
        """Wait for it."""
        result, error = self.answers.get()
        if error is not None:
            raise error
        return result


class _Session:
    """A time in which calls are served."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self.is_over = False

    def arrivals(self) -> list[_Call]:
        """The calls that nobody has taken yet."""
        calls = []
        try:
            while True:
                calls.append(self.calls.get_nowait())
        except queue.Empty:
            return calls


def _requests(calls: list[_Call]) -> list[_Request]:
    return [call.request for call in calls if call.request is not None]


def _draws(calls: list[_Call], rows: int) -> list[SampleSeed | None]:
    """What each row of a batch of these calls is drawn with. Each call has a share of the rows: one call all of them,
    several as many as they have prompts, times the answers that each prompt gets."""
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
    """Those that have their answer read no second one."""
    for call in calls:
        call.answers.put((None, _over()))


def _over() -> RuntimeError:
    return RuntimeError("the model was asked for something after the episode had ended")


def _nobody_to_wake() -> None:
    pass


# -- what can share a batch


@dataclass(frozen=True, eq=False)
class _Request:
    """A call of `generate` that those of the same kind may join."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    config: GenerationConfig | None
    words: dict[str, Any]
    kind: str

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def widened(self, width: int) -> torch.Tensor:
        """The ids, padded on the left with what they begin with: nobody attends to it, and a repetition penalty, which
        knows no mask, sees no new token."""
        return torch.cat([self.ids[:, :1].expand(-1, width - self.width), self.ids], dim=1)

    def with_limit(self, tokens: int) -> dict[str, Any]:
        """The arguments except ids and mask, with at most `tokens` new tokens."""
        words = {name: value for name, value in self.words.items() if name not in ("max_length", "max_new_tokens")}
        if self.config is None:
            return words | {"max_new_tokens": tokens}
        config = copy.deepcopy(self.config)
        config.max_new_tokens, config.max_length = tokens, None
        return words | {"generation_config": config}


def _request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Request | None:
    """The call, unless it has more than ids, a mask, a generation config and plain values."""
    words = dict(zip(("inputs", "generation_config"), args, strict=False)) | kwargs
    if len(words) < len(args) + len(kwargs) or ("inputs" in words and "input_ids" in words):
        return None
    ids = words.pop("inputs", None) if "inputs" in words else words.pop("input_ids", None)
    mask, config = words.pop("attention_mask", None), words.pop("generation_config", None)
    if not _are_prompts(ids, mask) or not _is_plain(list(words.values())):
        return None
    if not (config is None or isinstance(config, GenerationConfig)):
        return None
    settings = None if config is None else sorted(config.to_dict().items())
    return _Request(ids, mask, config, words, repr((ids.device, settings, sorted(words.items()))))


def _are_prompts(ids: Any, mask: Any) -> bool:
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.long or ids.dim() != 2 or ids.numel() == 0:
        return False
    return mask is None or (isinstance(mask, torch.Tensor) and (mask.shape, mask.device) == (ids.shape, ids.device))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, (bool, int, float, str))


class _Settings:
    """What `generate` makes of the arguments of one kind of request."""

    def __init__(self, model: Any, request: _Request) -> None:
        self._config, rest = model._prepare_generation_config(request.config, **request.words)
        lengths = [request.words.get("max_length"), request.config and request.config.max_length]
        self._has_length = {*lengths, model.generation_config.max_length} != {None}
        self._context = getattr(model.config, "max_position_embeddings", None)
        self._is_shared = not rest and _unusual(self._config) <= SHARED_SETTINGS
        self.ends = _as_list(self._config.eos_token_id)
        self.pad: int | None = next(iter([*_as_list(self._config.pad_token_id), *self.ends]), None)
        has_usual_ends = set(self.ends) == set(_as_list(model.generation_config.eos_token_id))
        self.is_for_engine = has_usual_ends and _unusual(self._config) <= ENGINE_SETTINGS
        self.rows: int = self._config.num_return_sequences
        """For each prompt."""

    def allow(self, request: _Request) -> bool:
        """Whether it may share a batch."""
        return self._is_shared and self.limit(request) > 0

    def limit(self, request: _Request) -> int:
        """How many new tokens it may get."""
        if self._config.max_new_tokens is not None:
            return int(self._config.max_new_tokens)
        if self._has_length or self._context is None:
            return int(self._config.max_length) - (request.width if self._has_length else 0)
        return min(int(self._config.max_length), int(self._context) - request.width)

    def mask(self, request: _Request, width: int) -> torch.Tensor:
        """Its attention mask, for ids of this width."""
        if request.mask is not None:
            mask = request.mask.long()
        elif self.pad is not None and self.pad not in self.ends:
            mask = request.ids.ne(self.pad).long()
        else:
            mask = torch.ones_like(request.ids)
        return pad(mask, (width - request.width, 0))

    def sampling(self, tokens: int) -> dict[str, Any]:
        """What an engine is told."""
        config = self._config
        drawing = {
            "temperature": 1.0 if config.temperature is None else config.temperature,
            "top_k": config.top_k or -1,
            "top_p": config.top_p or 1.0,
            "min_p": config.min_p or 0.0,
        }
        greedy = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
        penalty = {"repetition_penalty": config.repetition_penalty or 1.0}
        return {"max_new_tokens": tokens, **(drawing if config.do_sample else greedy), **penalty}


def _settings(model: Any, request: _Request | None) -> _Settings | None:
    try:
        return None if request is None else _Settings(model, request)
    except Exception:  # `generate` says what is wrong
        return None


def _unusual(config: GenerationConfig) -> set[str]:
    """The settings that are not what they are when nobody sets them."""
    usual = vars(GenerationConfig()) | GenerationConfig._get_default_generation_params()
    return {name for name, value in vars(config).items() if name in usual and (value or None) != (usual[name] or None)}


def _as_list(tokens: int | list[int] | None) -> list[int]:
    if tokens is None:
        return []
    return [tokens] if isinstance(tokens, int) else list(tokens)


# -- what comes of a batch


def _lengths(generated: torch.Tensor, ends: list[int]) -> list[int]:
    """How long each row is, with the token that ends it."""
    is_end = torch.isin(generated, torch.tensor(ends, dtype=generated.dtype, device=generated.device))
    until_end = is_end.int().argmax(dim=1) + 1
    lengths: list[int] = until_end.masked_fill(~is_end.any(dim=1), generated.shape[1]).tolist()
    return lengths


def _handed_out(
    settings: _Settings, requests: list[_Request], generated: torch.Tensor, lengths: list[int]
) -> list[torch.Tensor]:
    """To each request its own rows, as wide as if it had come alone."""
    results, first = [], 0
    for request in requests:
        rows = slice(first, first + len(request.ids) * settings.rows)
        width = min(settings.limit(request), max(lengths[rows]))
        prompts = request.ids.repeat_interleave(settings.rows, dim=0)
        results.append(torch.cat([prompts, generated[rows, :width]], dim=1))
        first = rows.stop
    return results
