"""Generation by a vLLM server that knows nothing of training: what stands in the place of TRL's VLLMGeneration.

Every process of a run asks the server by itself, with token ids, and gets token ids and their log-probabilities back.
New weights travel as files: an adapter alone, or all weights. A server that dies and comes back on the same address is
given the weights again, and what it was doing is asked for once more.

Where we lean on vLLM 0.31 (tests/training/test_served.py runs against it):

    POST /v1/completions                return_token_ids: the ids as sampled, with the one that ended the answer;
                                        logprobs 0: of the sampled token alone; cache_salt: which cached prefixes count;
                                        seed: each prompt of a request samples with it, and of n completions of a prompt
                                        the first with seed, the second with seed + 1, and so on; logprobs 5:
                                        of the likeliest tokens, too (prompt_logprobs would do more, and ends the engine
                                        of a server on the CPU that has an adapter)
    GET  /v1/models                     names, the folder an adapter came from, max_model_len
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter
    POST /collective_rpc reload_weights, /update_weight_version; GET /weight_info, /server_info    in its development
                                        mode only
    GET  /health
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import httpx
import torch
from accelerate.utils import gather_object
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers.utils import logging

from aitrain import activity
from aitrain.engines import tied_head
from aitrain.engines.merged_weights import merged_weights
from aitrain.errors import ConfigError, RunFailed, ServerFailed, ServerGoneError, ServerRefusedError, ServerTimeoutError
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.engine import Completion, Decoding, GenerationRequest, Leave
from aitrain.rollout.limits import EndOfTurn
from aitrain.vllm_ranks import RANKS, served_rank

T = TypeVar("T")

CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 5.0
CHECK_SECONDS = 60.0
"""For each of the first questions, one of which may be its first completion."""
PAUSE_SECONDS = 1.0
"""Between two looks whether the server is back."""

CURRENT_SECONDS = 1.0
"""For so long after a look the server has what it had: none dies and starts anew in less."""

TRIES = 3
"""How often one thing is asked for, when the server dies of it or meanwhile."""

CHUNK_PROMPTS, CHUNK_TOKENS = 64, 200_000
"""The most in one request, a few megabytes; all requests are in flight at the same time."""

LIKELIEST = 5
"""Tokens whose log-probabilities are asked for; a server allows 20 unless it was started otherwise."""

IN_MEMORY = "aitrain-weights-"
"""What folders of weights in memory are called."""

PUSHED = "aitrain-"
"""What the version of weights begins with that were pushed."""

SALT = uuid.uuid4().hex
"""Of this process: nobody else's cached prefixes are ours."""


# -- HTTP


class VLLMClient:
    """Calls that all have a deadline, each on a connection of its own: one that was kept may be closed by now."""

    def __init__(self, url: str, deadline: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._deadline = deadline
        self._http = httpx.Client(
            timeout=httpx.Timeout(deadline, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,  # a proxy for the world outside is none for a machine next door
        )

    def get(self, path: str) -> Any:
        """What is there.

        Raises:
            ServerGoneError, ServerRefusedError, ServerTimeoutError: as for `post`.
        """
        return self._call("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer.

        Raises:
            ServerGoneError: there is no server, it hung up, or says that it failed.
            ServerRefusedError: it does not do what it was asked for.
            ServerTimeoutError: it took too long.
        """
        return self._call("POST", path, json=body)

    def is_up(self) -> bool:
        """Whether it would take a request now."""
        try:
            return self._http.get(f"{self.url}/health", timeout=HEALTH_SECONDS).status_code == 200
        except httpx.HTTPError:
            return False

    def _call(self, verb: str, path: str, **body: Any) -> Any:
        try:
            response = self._http.request(verb, f"{self.url}{path}", **body)
        except httpx.ReadTimeout:
            raise ServerTimeoutError(
                f"The vLLM server at {self.url} did not answer {path} within {self._deadline:.0f} seconds.\n"
                "Its log says what it is doing; fewer episodes at a time or shorter answers take less."
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerGoneError(f"{path}: {type(error).__name__}: {error}") from None
        if response.status_code >= 400:
            raise self._failure(path, response)
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    def _failure(self, path: str, response: httpx.Response) -> Exception:
        what = f"{path}: {response.status_code}: {_message(response)}"
        if response.status_code >= 500:
            return ServerGoneError(what)
        return ServerRefusedError(f"The vLLM server at {self.url} refuses {what}", response.status_code)


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
        text = body["error"]["message"] if "error" in body else body["detail"]
    except (ValueError, KeyError, TypeError):
        text = response.text
    return " ".join(str(text).split())[:500]


# -- generation


class WeightSync(Protocol):
    """How weights get to the server."""

    name: str | None
    """What requests call the policy once it was pushed; None: what they called it before."""

    def write(self, number: int) -> int:
        """Put down the weights as they are now, as number so and so; returns bytes. For one process."""

    def push(self, server: VLLMClient, number: int) -> None:
        """Make the server use them, whatever it uses now. For one process, and while none generates."""

    def restore(self, server: VLLMClient, number: int) -> None:
        """The same for a server that was started anew. Several processes may do it at the same time."""

    def holds(self, server: VLLMClient, number: int) -> bool:
        """Whether the server uses them."""

    def is_new(self, server: VLLMClient) -> bool:
        """Whether nothing was pushed to the server since it was started."""

    def close(self) -> None:
        """Leave nothing behind."""


@dataclass
class VLLMServerEngine:
    """A vLLM server as the trainer's generation: `generate` and `sync_weights`, and settings that may be replaced."""

    server: VLLMClient
    sync: WeightSync
    accelerator: Any
    model: str
    """What the server calls the model it was started with."""
    longest: int | None = None
    """Tokens of prompt and answer together that the server takes."""
    stop_token_ids: list[int] = field(default_factory=list)
    """What ends an answer, beside what the server's model says."""
    patience: float = 600.0
    """Seconds in which a server that is gone may come back."""
    no_sense_in_waiting: Callable[[], str] = lambda: ""
    """Why it will not, where that is known; asked while it is waited for."""
    verify: Callable[[VLLMServerEngine], None] = lambda _: None
    """Looks at a server that was given weights."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = 0.0
    repetition_penalty: float = 1.0
    max_completion_length: int = 16
    seeds: list[int] | None = None
    """What each prompt of the next `generate` is sampled with; None: the server's own random numbers."""
    generation_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, as in TRL's VLLMGeneration."""

    end: EndOfTurn = field(default_factory=lambda: EndOfTurn(()))
    clock: RolloutClock = field(default_factory=RolloutClock)
    weight_version: int | None = None
    """Optimizer steps that the weights of the last sync had done; None: there was none, or the policy has others."""
    pushes: int = field(default=0, init=False)
    restarts: int = field(default=0, init=False)
    """How often the server had forgotten our weights."""
    last_bytes: int = field(default=0, init=False)
    last_seconds: float = field(default=0.0, init=False)
    """Of the last push."""
    _looking: Any = field(default_factory=threading.Lock, init=False)
    _current_until: float = field(default=0.0, init=False)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion.

        Raises:
            RunFailed: the server is gone for good, takes too long, or refuses.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Answer] = loop.create_future()

        def work() -> None:
            answer: Answer | None = None
            failure: Exception | None = None
            try:
                answer = self._complete(request)
            except Exception as error:
                failure = error
            with suppress(RuntimeError):  # the loop was closed: the run ended meanwhile
                loop.call_soon_threadsafe(_settle, result, answer, failure)

        version = self.weight_version or 0
        with self.clock.running("generate"):
            _HANDS.do(work)
            ids, logprobs = await result
        return Completion(ids, logprobs, "stop" if self.end.is_reached(ids) else "length", version)

    @asynccontextmanager
    async def batch(self, episodes: int) -> AsyncIterator[Leave]:
        """Nothing to prepare: the server answers each request by itself."""
        with activity.own.waiting("generating", 0.0):
            yield lambda: None

    def _complete(self, request: GenerationRequest) -> Answer:
        """In a thread. If the server dies, requests that wait are sent again: environments cannot go back."""
        seed = None if request.seed is None else request.seed.request_seed
        greedy = GREEDY if request.decoding is Decoding.GREEDY else {}

        def ask() -> Answer:
            with self._looking:
                if time.monotonic() >= self._current_until:
                    self._make_current()
            prompt = request.prompt_ids
            try:
                return self._request([prompt], self._limit(prompt, request.max_tokens), seed, greedy)[0]
            except ServerRefusedError as refused:
                if self.pushes and not self.sync.holds(self.server, self.pushes):
                    raise ServerGoneError("it was restarted and has forgotten the policy") from refused
                raise

        return self._insist(ask)

    def generate_batch(self, prompts: list[list[int]]) -> list[Answer]:
        """One completion for each prompt, in their order, with `seeds` and `max_completion_length`.

        Raises:
            RunFailed: as for `generate`.
        """
        return self._insist(lambda: self._ask(prompts))

    def likeliest(self, contexts: list[list[int]], of_base: bool = False) -> list[dict[int, float]]:
        """The likeliest next tokens after each of these tokens, with their log-probabilities at temperature 1: the
        policy's, or those of the base that the server was started with.

        Raises:
            RunFailed: as for `generate`.
        """
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        body = self._body(contexts, 1) | neutral | {"logprobs": LIKELIEST}
        model = {"model": self.model} if of_base else {}

        def ask() -> Any:
            self._make_current()
            return self.server.post("/v1/completions", body | model)

        choices = sorted(self._insist(ask)["choices"], key=lambda choice: int(choice["index"]))
        return [
            {int(name.removeprefix("token_id:")): float(value) for name, value in said.items()}
            for said in (choice["logprobs"]["top_logprobs"][0] for choice in choices)
        ]

    def load_weights(self, version: int) -> None:
        """Sync the policy's weights, unless the server has this version. Every process must call this."""
        if self.weight_version != version:
            self.sync_weights()
            self.weight_version = version

    def generate_for_environment(self, prompts: list[list[int]], sampling: dict[str, Any]) -> list[list[int]]:
        """Completions for an environment that calls `model.generate`: with that call's sampling."""
        max_tokens, seeds = sampling.pop("max_new_tokens"), sampling.pop("seeds", None)
        extras = {"stop_token_ids": list(self.end.eos_ids)}
        changed = {**sampling, "max_completion_length": max_tokens, "generation_kwargs": extras, "seeds": seeds}
        before = {name: getattr(self, name) for name in changed}
        vars(self).update(changed)
        try:
            return [ids for ids, _ in self.generate_batch(prompts)]
        finally:
            vars(self).update(before)

    def sync_weights(self) -> None:
        """Make the server generate with the weights as they are now. Every process must call this.

        Raises:
            RunFailed: the server is gone for good, or does not take them.
        """
        self.pushes += 1
        with activity.own.doing("weight sync"):
            self.in_common(self._push if self.accelerator.is_main_process else lambda: None)

    def in_common(self, work: Callable[[], T]) -> T:
        """What every process does by itself, and waits for the others at its end. Every process must call this.

        Raises:
            ServerFailed: the server failed one of them.
        """
        result, failure = None, None
        try:
            result = work()
        except RunFailed as error:
            failure = error
        told = gather_object([(self.restarts, None if failure is None else str(failure))])
        self.restarts = max(restarts for restarts, _ in told)
        for _, message in told:
            if message is not None:
                raise ServerFailed(message) from failure
        return cast(T, result)

    def _push(self) -> None:
        start = time.monotonic()
        self.last_bytes = self.sync.write(self.pushes)
        self._insist(self._hand_over)
        self.verify(self)
        self.last_seconds = time.monotonic() - start

    def _hand_over(self) -> None:
        self.restarts += self.pushes > 1 and self.sync.is_new(self.server)
        self.sync.push(self.server, self.pushes)

    def close(self) -> None:
        """Leave nothing behind, such as weights in memory."""
        self.sync.close()

    # -- a server that dies and comes back

    def _insist(self, work: Callable[[], T]) -> T:
        for _ in range(TRIES):
            try:
                return work()
            except ServerGoneError as gone:
                what = str(gone)
                self._current_until = 0.0
                self._wait_until_up(what)
        raise RunFailed(f"The vLLM server at {self.server.url} failed {TRIES} times at the same thing: {what}")

    def _wait_until_up(self, what: str) -> None:
        """A server that dies may answer for a moment longer, so look a little later."""
        give_up = time.monotonic() + self.patience
        time.sleep(PAUSE_SECONDS)
        while not self.server.is_up():
            if why := self.no_sense_in_waiting():
                raise RunFailed(f"The vLLM server at {self.server.url} is gone: {what}\n{why}")
            if time.monotonic() > give_up:
                raise RunFailed(
                    f"The vLLM server at {self.server.url} is gone, and was not back within {self.patience:.0f} "
                    f"seconds: {what}\nIts log says why."
                )
            time.sleep(PAUSE_SECONDS)
        activity.tick()

    def _make_current(self) -> None:
        """It may have been started anew while nobody asked it for anything."""
        if self.pushes and not self.sync.holds(self.server, self.pushes):
            self.restarts += 1
            self.sync.restore(self.server, self.pushes)
        self._current_until = time.monotonic() + CURRENT_SECONDS

    # -- requests

    def _ask(self, prompts: list[list[int]]) -> list[Answer]:
        """All of it anew after a restart: to keep what was done by then would be to prefer short answers."""
        self._make_current()
        chunks = self._chunks(prompts)
        answers: dict[int, Answer] = {}
        calls = [
            partial(self._request, [prompts[n] for n in chunk.places], chunk.limit, chunk.seed) for chunk in chunks
        ]
        for chunk, part in zip(chunks, _in_parallel(calls), strict=True):
            answers.update(zip(chunk.places, part, strict=True))
        if self.pushes and not self.sync.holds(self.server, self.pushes):
            raise ServerGoneError("it was started anew while it answered")  # some answers may be those of other weights
        return [answers[n] for n in range(len(prompts))]

    def _chunks(self, prompts: list[list[int]]) -> list[_Chunk]:
        if self.seeds is not None and self.temperature > 0:
            return self._seeded_chunks(prompts, self.seeds)
        limits = [self._limit(prompt, self.max_completion_length) for prompt in prompts]
        chunks: list[_Chunk] = []
        for place in sorted(range(len(prompts)), key=limits.__getitem__):
            tokens = len(prompts[place])
            if not chunks or not chunks[-1].has_room(limits[place], tokens):
                chunks.append(_Chunk(limits[place]))
            chunks[-1].places.append(place)
            chunks[-1].tokens += tokens
        return chunks

    def _seeded_chunks(self, prompts: list[list[int]], seeds: list[int]) -> list[_Chunk]:
        """A request for each prompt; one for all completions of a prompt whose seeds are consecutive."""
        chunks: list[_Chunk] = []
        for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            last = chunks[-1] if chunks else None
            if last is None or prompt != prompts[last.places[0]] or seed != last.next_seed:
                last = _Chunk(self._limit(prompt, self.max_completion_length), seed=seed)
                chunks.append(last)
            last.places.append(place)
        return chunks

    def _limit(self, prompt: list[int], most: int) -> int:
        """The server refuses what could become too long, where an engine inside the process stops in time."""
        return max(1, most if self.longest is None else min(most, self.longest - len(prompt)))

    def _request(
        self, prompts: list[list[int]], limit: int, seed: int | None = None, changes: Mapping[str, float] | None = None
    ) -> list[Answer]:
        """An answer to each prompt; those that are sampled with a seed, and the ones after it, have the same prompt."""
        seeded = {} if seed is None else {"prompt": prompts[:1], "n": len(prompts), "seed": seed}
        reply = self.server.post("/v1/completions", self._body(prompts, limit) | dict(changes or {}) | seeded)
        activity.tick()
        choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
        if [choice["prompt_token_ids"] for choice in choices] != prompts:
            raise RunFailed(f"The vLLM server at {self.server.url} answers other prompts than it was given.")
        self._refuse_other_limit(choices, limit)
        return [_answer(choice) for choice in choices]

    def _refuse_other_limit(self, choices: list[dict[str, Any]], limit: int) -> None:
        """A server that takes its model's generation_config cuts all answers at that file's max_new_tokens."""
        cut = [len(choice["token_ids"]) for choice in choices if choice.get("finish_reason") == "length"]
        if cut and max(cut) < limit:
            raise RunFailed(
                f"The vLLM server at {self.server.url} cuts answers at {max(cut)} tokens, and {limit} were asked for.\n"
                "Start it with --generation-config vllm: its model's own settings limit them otherwise."
            )

    def _body(self, prompts: list[list[int]], limit: int) -> dict[str, Any]:
        """All that the model's generation_config.json would set otherwise."""
        return {
            "model": (self.sync.name if self.pushes else None) or self.model,
            "prompt": prompts,
            "max_tokens": limit,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "stop_token_ids": self.stop_token_ids,
            "logprobs": 0,
            **self._extras(limit),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # or it would decode each of them
            "cache_salt": f"{SALT}-{self.pushes}",  # what was computed with other weights is not used
        }

    def _extras(self, limit: int) -> dict[str, Any]:
        """vLLM refuses more tokens at least than at most."""
        fewest = self.generation_kwargs.get("min_tokens")
        return self.generation_kwargs | ({} if fewest is None else {"min_tokens": min(fewest, limit)})


Answer = tuple[list[int], list[float]]
"""Token ids and their log-probabilities."""


GREEDY = {"temperature": 0.0, "top_k": -1, "top_p": 1.0}
"""The fields of a request for the likeliest token every time."""


def _settle(result: asyncio.Future[Answer], answer: Answer | None, failure: Exception | None) -> None:
    """On the event loop, in which the request may have been cancelled."""
    if result.done():
        return
    if failure is not None:
        result.set_exception(failure)
    elif answer is not None:
        result.set_result(answer)


class _Hands:
    """Threads that are kept: to start one takes as long as the busiest core lets the new one wait. They are daemons, so
    that none keeps an interrupted run alive."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = threading.Semaphore(0)

    def do(self, job: Callable[[], None]) -> None:
        """In a thread that has nothing to do, or a new one."""
        if not self._free.acquire(blocking=False):
            threading.Thread(target=self._work, daemon=True).start()
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            self._free.release()


_HANDS = _Hands()


@dataclass
class _Chunk:
    """Prompts of one request, by their places, with the most tokens of each answer. With a seed, they are all the same,
    and each place has the seed after that of the one before."""

    limit: int
    places: list[int] = field(default_factory=list)
    tokens: int = 0
    seed: int | None = None

    @property
    def next_seed(self) -> int | None:
        """The one that one more place would have."""
        return None if self.seed is None else self.seed + len(self.places)

    def has_room(self, limit: int, tokens: int) -> bool:
        return limit == self.limit and len(self.places) < CHUNK_PROMPTS and self.tokens + tokens <= CHUNK_TOKENS


def _answer(choice: dict[str, Any]) -> Answer:
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if len(ids) != len(logprobs):
        raise RunFailed(f"The vLLM server gave {len(logprobs)} log-probabilities for {len(ids)} tokens.")
    return ids, logprobs


def _in_parallel(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Their results in order; the first error, once all are done. The threads do not keep an interrupted run alive."""
    done: queue.SimpleQueue[tuple[int, T | None, Exception | None]] = queue.SimpleQueue()

    def run(number: int) -> None:
        try:
            done.put((number, calls[number](), None))
        except Exception as error:
            done.put((number, None, error))

    for number in range(len(calls)):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    outcomes = sorted((done.get() for _ in calls), key=lambda outcome: outcome[0])
    for _, _, error in outcomes:
        if error is not None:
            raise error
    return [result for _, result, _ in outcomes]  # type: ignore[misc]  # no error: a result


# -- weights on their way


class _Files:
    """A folder of our own with the weights of the last push, which is gone when the process is."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model = model
        self.folder = folder.absolute()
        self._removal: Callable[[], Any] | None = None

    def close(self) -> None:
        """Remove the folder, in the process that wrote it."""
        if self._removal is not None:
            self._removal()

    def _take(self) -> None:
        """Make the folder, and lock it for as long as this process lives."""
        for _ in range(TRIES):
            self.folder.mkdir(parents=True, exist_ok=True)
            if (lock := _locked(self.folder)) is not None:
                self._removal = weakref.finalize(self, _remove, self.folder, lock)
                return
            time.sleep(PAUSE_SECONDS)  # another run may just be looking whether it is an orphan
        raise RunFailed(f"Another process writes weights to {self.folder}: is this run running twice?")

    def path(self, number: int) -> Path:
        """Where push number so and so lies."""
        return self.folder / str(number)

    @contextmanager
    def _writing(self, number: int) -> Iterator[Path]:
        """A new folder, whole or not at all, in the place of the one before: there may be no room for two."""
        if self._removal is None:
            self._take()
        for before in self.folder.iterdir():
            shutil.rmtree(before, ignore_errors=True)
        partial_folder = self.folder / "partial"
        partial_folder.mkdir()
        yield partial_folder
        partial_folder.rename(self.path(number))

    def _size(self, number: int) -> int:
        return sum(file.stat().st_size for file in self.path(number).iterdir())


class AdapterSync(_Files):
    """The adapter alone, for a server that has the base and never changes it.

    An adapter that vLLM loaded with `load_inplace` is read from disk again at every step of its engine, so the one
    before is unloaded instead.
    """

    name = "policy"

    def write(self, number: int) -> int:
        """adapter_model.safetensors and adapter_config.json."""
        with self._writing(number) as folder:
            weights = get_peft_model_state_dict(self.model, save_embedding_layers=False)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
            self.model.peft_config[self.model.active_adapter].save_pretrained(str(folder))
        return self._size(number)

    def push(self, server: VLLMClient, number: int) -> None:
        """See Sync."""
        if self._loaded_from(server) is not None:
            server.post("/v1/unload_lora_adapter", {"lora_name": self.name})
        self.restore(server, number)

    def restore(self, server: VLLMClient, number: int) -> None:
        """See Sync."""
        try:
            server.post("/v1/load_lora_adapter", {"lora_name": self.name, "lora_path": str(self.path(number))})
        except ServerRefusedError:
            if not self.holds(server, number):  # another process was faster
                raise

    def holds(self, server: VLLMClient, number: int) -> bool:
        """See Sync."""
        source = self._loaded_from(server)
        if source is not None and Path(source).parent != self.folder:
            raise _shared(server)
        return source == str(self.path(number))

    def is_new(self, server: VLLMClient) -> bool:
        """See Sync."""
        return self._loaded_from(server) is None

    def _loaded_from(self, server: VLLMClient) -> str | None:
        cards = server.get("/v1/models")["data"]
        return next((str(card["root"]) for card in cards if card["id"] == self.name), None)


class DiskSync(_Files):
    """All weights, for a server in its development mode that reads them over its own."""

    name = None

    def __init__(self, model: Any, folder: Path, dtype: torch.dtype | None = None, renews: bool = False) -> None:
        super().__init__(model, folder)
        self._renews = renews
        """Whether the server is on the CPU, too, and needs it: see tied_head.py."""
        self._dtype = dtype
        """What they are written as: more than the server computes in is of no use to it."""

    def write(self, number: int) -> int:
        """As `save_pretrained` writes a model, with the adapter in it if there is one."""
        base = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        with self._writing(number) as folder, _no_progress_bar():
            base.save_pretrained(folder, state_dict=self._weights())
        return self._size(number)

    def _weights(self) -> dict[str, torch.Tensor]:
        pairs = merged_weights(self.model)
        return {name: weight.detach().to(dtype=self._dtype or weight.dtype) for name, weight in pairs}

    def push(self, server: VLLMClient, number: int) -> None:
        """See Sync."""
        where = {"weights_path": str(self.path(number))}
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": where})
        if self._renews:
            server.post("/collective_rpc", {"method": "renew_tied_head"})
        server.post("/update_weight_version", {"new_version": self._version(number)})

    restore = push

    def holds(self, server: VLLMClient, number: int) -> bool:
        """See Sync."""
        version = _weight_version(server)
        if version.startswith(PUSHED) and version != self._version(number):
            raise _shared(server)
        return version == self._version(number)

    def is_new(self, server: VLLMClient) -> bool:
        """See Sync."""
        return not _weight_version(server).startswith(PUSHED)

    def _version(self, number: int) -> str:
        """A number of this run, and no other's."""
        return f"{PUSHED}{uuid.uuid5(uuid.NAMESPACE_URL, str(self.path(number))).hex[:12]}"


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """At every step it would be a new one."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _weight_version(server: VLLMClient) -> str:
    return str(server.get("/weight_info")["weight_version"])


def _shared(server: VLLMClient) -> RunFailed:
    return RunFailed(
        f"Another run hands its weights to the vLLM server at {server.url}, and it has one policy at a time.\n"
        "Give each run a server of its own; without --vllm-server-url aitrain starts one."
    )


def roomy_folder(run_folder: Path, needed: int, memory: Path = Path("/dev/shm")) -> Path:
    """Where so many bytes of weights pass by best: in memory if that leaves half of what is free, else in the run."""
    remove_orphans(memory)
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 2 * needed
    name = uuid.uuid5(uuid.NAMESPACE_URL, str(run_folder.absolute())).hex[:12]
    return memory / f"{IN_MEMORY}{name}" if has_room else run_folder / "sync"


def remove_orphans(memory: Path) -> None:
    """Weights whose process was killed: nobody holds the lock on their folder."""
    for folder in memory.glob(f"{IN_MEMORY}*"):
        with suppress(PermissionError):  # somebody else's
            lock = _locked(folder)
            if lock is not None:
                _remove(folder, lock)


def _locked(folder: Path) -> int | None:
    """A lock on the folder, which ends with the process; None when another process has it, or has removed it."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), folder.stat()):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


# -- a server that somebody else started


@dataclass(frozen=True)
class ServerNeeds:
    """What a run needs of a server."""

    model: str
    """As in `--model`, or what the server calls it."""
    longest: int
    """Tokens of prompt and answer."""
    rank: int | None
    """Of the adapter that is handed over; None: all weights are."""
    is_on_cpu: bool = False
    """Whether the server has no GPU."""

    @property
    def command(self) -> str:
        """What starts such a server."""
        adapter = f" --enable-lora --max-lora-rank {served_rank(self.rank) or RANKS[-1]}" if self.rank else ""
        mode = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" if self.rank else "VLLM_SERVER_DEV_MODE=1"
        extension = f" --worker-extension-cls {tied_head.__name__}.WorkerExtension"
        adapter = adapter or (extension if self.is_on_cpu else "")
        options = f"--max-model-len {self.longest} --generation-config vllm --logprobs-mode processed_logprobs{adapter}"
        return f"{mode} vllm serve {self.model} {options}"


@dataclass(frozen=True)
class ServerModel:
    """The model that a server was started with."""

    name: str
    longest: int
    is_on_cpu: bool = False
    """As far as it tells."""


def check_server(url: str, wanted: ServerNeeds) -> ServerModel:
    """The server's model, if it can be trained with.

    Raises:
        ConfigError: there is none, or it lacks something; says how to start it.
    """
    server = VLLMClient(url, deadline=CHECK_SECONDS)
    try:
        details = _details(server)
        wanted = replace(wanted, is_on_cpu=_is_on_cpu(details))
        base = _base(server, wanted)
        lack = _lack(server, base, wanted) or _lack_in(details, wanted)
    except ServerGoneError as gone:
        lack = f"cannot be used ({gone})"
    except ServerTimeoutError:
        lack = f"did not answer within {CHECK_SECONDS:.0f} seconds"
    except (RunFailed, KeyError, TypeError) as error:
        lack = f"does not answer like one ({type(error).__name__}: {error})"
    if lack:
        raise ConfigError(f"The vLLM server at {url} {lack}.\nStart it with: {wanted.command}")
    assert base is not None
    return base


def check_for_nccl(url: str, model: str) -> None:
    """Whether there is a server for TRL's own way, which looks for one for minutes.

    Raises:
        ConfigError: nobody answers.
    """
    if not VLLMClient(url).is_up():
        raise ConfigError(
            f"The vLLM server at {url} does not answer.\nStart it with: VLLM_SERVER_DEV_MODE=1 vllm serve {model}"
            """ --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs --max-logprobs -1"""
        )


def _base(server: VLLMClient, wanted: ServerNeeds) -> ServerModel | None:
    for card in server.get("/v1/models")["data"]:
        if not card.get("parent") and wanted.model in (card["id"], card["root"]):
            return ServerModel(card["id"], int(card["max_model_len"]), wanted.is_on_cpu)
    return None


def _lack(server: VLLMClient, base: ServerModel | None, wanted: ServerNeeds) -> str:
    """What is missing, or nothing."""
    if base is None:
        names = ", ".join(str(card["id"]) for card in server.get("/v1/models")["data"])
        return f"has {names}, and we train {wanted.model}"
    if base.longest < wanted.longest:
        return f"takes {base.longest} tokens of prompt and answer, and we need {wanted.longest}"
    if lack := _lacks_sync(server, wanted):
        return lack
    if _has_raw_logprobs(server, base):
        return "gives log-probabilities before temperature and top-p, which training cannot correct with"
    return ""


def _details(server: VLLMClient) -> dict[str, Any]:
    """How it was started, which it tells in its development mode only."""
    try:
        details: dict[str, Any] = server.get("/server_info?config_format=json")["vllm_config"]
    except ServerRefusedError:
        return {}
    return details


def _is_on_cpu(details: dict[str, Any]) -> bool:
    return bool((details.get("device_config") or {}).get("device") == "cpu")


def _lack_in(details: dict[str, Any], wanted: ServerNeeds) -> str:
    """What is missing by what it tells, or nothing."""
    rank = (details.get("lora_config") or {}).get("max_lora_rank")
    if wanted.rank and rank is not None and rank < wanted.rank:
        return f"takes adapters of rank {rank} at most, and we train one of rank {wanted.rank}"
    extension = (details.get("parallel_config") or {}).get("worker_extension_cls")
    if wanted.is_on_cpu and not wanted.rank and not extension:
        return "runs on the CPU and lacks what it needs there to be handed weights"
    return ""


def _lacks_sync(server: VLLMClient, wanted: ServerNeeds) -> str:
    if wanted.rank is None:
        return "" if _has(lambda: server.get("/weight_info")) else "is not in its development mode"
    if (version := _version_of(server)).startswith(PUSHED):
        return f"has no base any more: a run has handed it other weights ({version})"
    nothing = {"lora_name": "policy", "lora_path": "/nonexistent"}
    try:
        server.post("/v1/load_lora_adapter", nothing)
    except ServerGoneError as gone:
        return "takes no adapters" if "not enabled" in str(gone) else ""
    except ServerRefusedError as refused:
        return "does not load adapters while it runs" if "Not Found" in str(refused) else ""
    return ""


def _version_of(server: VLLMClient) -> str:
    """Nothing where it does not tell."""
    try:
        return _weight_version(server)
    except ServerRefusedError:
        return ""


def _has(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ServerRefusedError:
        return False
    return True


def _has_raw_logprobs(server: VLLMClient, base: ServerModel) -> bool:
    """Where only the likeliest token may be drawn, it is certain; before that it was not."""
    body = {"model": base.name, "prompt": [[n] for n in range(1, 9)], "max_tokens": 1, "logprobs": 0}
    choices = server.post("/v1/completions", body | {"temperature": 1.0, "top_k": 1})["choices"]
    return any(choice["logprobs"]["token_logprobs"][0] < -1e-3 for choice in choices)
