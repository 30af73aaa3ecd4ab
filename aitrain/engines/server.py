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
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from accelerate.utils import gather_object

from aitrain import activity
from aitrain.engines.sampling import CompletionBatch
from aitrain.engines.scopes import replaced
from aitrain.engines.weight_sync import WeightSync
from aitrain.errors import RunFailed, ServerFailed, ServerGoneError, ServerRefusedError
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.engine import Completion, Decoding, GenerationRequest, Leave
from aitrain.rollout.limits import EndOfTurn
from aitrain.vllm.client import VLLMClient

T = TypeVar("T")

PAUSE_SECONDS = 1.0
"""Between two looks whether the server is back."""

CURRENT_SECONDS = 1.0
"""How long a check of the server's weights stays valid: no server restarts faster."""

TRIES = 3
"""How often one thing is asked for, when the server dies of it or meanwhile."""

CHUNK_PROMPTS, CHUNK_TOKENS = 64, 200_000
"""The most in one request, a few megabytes; all requests are in flight at the same time."""

LIKELIEST = 5
"""Tokens whose log-probabilities are asked for; a server allows 20 unless it was started otherwise."""

SALT = uuid.uuid4().hex
"""Identifies this process, so that the server's prefix cache is not shared with other runs."""


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
    _looking: threading.Lock = field(default_factory=threading.Lock, init=False)
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

    async def complete(self, batch: CompletionBatch) -> list[list[int]]:
        """Token ids of one completion for each prompt.

        Raises:
            RunFailed: as for `generate`.
        """
        sampling = batch.sampling
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        changed: dict[str, object] = {name: getattr(sampling, name) for name in names}
        changed["max_completion_length"], changed["seeds"] = batch.max_tokens, batch.seeds
        changed["generation_kwargs"] = sampling.vllm_extras(self.end.eos_ids, batch.max_tokens)
        with replaced(self, changed):
            return [ids for ids, _ in self.generate_batch(batch.prompts)]

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
        """Load the weights again if the server was restarted since the last request."""
        if self.pushes and not self.sync.holds(self.server, self.pushes):
            self.restarts += 1
            self.sync.restore(self.server, self.pushes)
        self._current_until = time.monotonic() + CURRENT_SECONDS

    # -- requests

    def _ask(self, prompts: list[list[int]]) -> list[Answer]:
        """Generate the whole batch again after a restart: keeping finished completions would favor short ones."""
        self._make_current()
        chunks = self._chunks(prompts)
        answers: dict[int, Answer] = {}
        calls = [
            partial(self._request, [prompts[n] for n in chunk.places], chunk.limit, chunk.seed) for chunk in chunks
        ]
        for chunk, part in zip(chunks, _in_parallel(calls), strict=True):
            answers.update(zip(chunk.places, part, strict=True))
        if self.pushes and not self.sync.holds(self.server, self.pushes):
            raise ServerGoneError("it was restarted while it answered")  # some answers may come from other weights
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
        _refuse_other_limit(self.server.url, choices, limit)
        return [_answer(choice) for choice in choices]

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


def _refuse_other_limit(url: str, choices: list[dict[str, Any]], limit: int) -> None:
    """A server that takes its model's generation_config cuts all answers at that file's max_new_tokens."""
    cut = [len(choice["token_ids"]) for choice in choices if choice.get("finish_reason") == "length"]
    if cut and max(cut) < limit:
        raise RunFailed(
            f"The vLLM server at {url} cuts answers at {max(cut)} tokens, and {limit} were asked for.\n"
            "Start it with --generation-config vllm: its model's own settings limit them otherwise."
        )


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
