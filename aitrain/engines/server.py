"""The engine of stock vLLM servers: token ids in; token ids and log-probabilities out.

Each rank sends its own requests, to one server or to several. Rank 0 loads the policy's weights as files: an adapter
alone, or all weights.

What this uses of vLLM 0.31 (tests/training/test_served.py runs against it):

    POST /v1/completions                prompt: lists of token ids; seed; return_token_ids: the ids as sampled, with the
                                        one that ended the completion; logprobs 0: of the sampled tokens, k: of the k
                                        most likely ones, too (prompt_logprobs would do more, and ends the engine of a
                                        server on the CPU that has an adapter)
    GET  /v1/models                     names, the folder of an adapter, max_model_len
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter
    POST /collective_rpc reload_weights, /update_weight_version; GET /weight_info, /server_info    in its development
                                        mode only
    GET  /health
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate.utils import gather_object

from aitrain import activity
from aitrain.engines.batching import BatchRow
from aitrain.engines.sampling import Sampling
from aitrain.engines.server_fleet import FleetServer, ServerFleet
from aitrain.engines.weight_sync import WeightVersion
from aitrain.environment.seeds import SampleSeed
from aitrain.errors import RunFailed, ServerFailed
from aitrain.machine import allow_open_files
from aitrain.rollout.engine import Completion, Decoding, GenerationRequest, Leave, RolloutClock
from aitrain.rollout.episode import run_all
from aitrain.rollout.limits import EndOfTurn

Gather = Callable[[list[Any]], list[Any]]

TOP_LOGPROBS = 5
"""Most likely tokens whose log-probabilities are requested; a server allows 20 unless it was started otherwise."""

SALT = uuid.uuid4().hex
"""Identifies this process, so that the server's prefix cache is not shared with other runs."""


@dataclass
class VLLMServerEngine:
    """vLLM servers as an engine; requests are independent of each other."""

    fleet: ServerFleet
    base_model: str
    """The servers' name for the model that they were started with."""
    end: EndOfTurn
    sampling: Sampling = field(default_factory=Sampling)
    """How `generate` samples."""
    context: int | None = None
    """Maximum tokens of prompt and completion."""
    check: Callable[[VLLMServerEngine], Awaitable[None]] | None = None
    """Called after each load of weights for each server, with an engine of this server alone, by the process that loads
    them."""
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of all ranks around a load of weights, in which `check` may use a model that is sharded."""
    clock: RolloutClock = field(default_factory=RolloutClock)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(allow_open_files() // 2))
    """One for each completion in flight of this process, as each request is an open file."""
    weight_version: int | None = field(default=None, init=False)
    """Optimizer steps of the loaded weights; None if none were loaded, or the policy's have changed since."""
    last_bytes: int = field(default=0, init=False)
    last_seconds: float = field(default=0.0, init=False)
    """Size and duration of the last load of weights by this process."""

    @property
    def restarts(self) -> int:
        """Number of times that a server had lost the policy's weights, as this rank has noticed."""
        return self.fleet.restarts

    @property
    def metrics(self) -> dict[str, float]:
        """Size and duration of the last load of weights by this process, and restarts."""
        return {"sync/bytes": self.last_bytes, "sync/seconds": self.last_seconds, "vllm/restarts": self.restarts}

    @asynccontextmanager
    async def batch(self, episodes: int) -> AsyncIterator[Leave]:
        """Context of episodes that are played together. Their requests are independent of each other."""
        with activity.own.waiting("generating", 0.0):
            yield lambda: None

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion.

        Raises:
            RunFailed: the server does not come back, exceeds the deadline, or refuses the request.
        """
        sampling = self.sampling.greedy if request.decoding is Decoding.GREEDY else self.sampling
        with self.clock.running("generate"):
            prompt, limit = request.prompt_ids, request.max_tokens
            return await self._complete(prompt, sampling, limit, request.seed, request.index)

    async def complete(self, rows: list[BatchRow], sampling: Sampling, max_tokens: int) -> list[Completion]:
        """One completion for each row; fails as `generate` does."""
        return await run_all(
            self._complete(row.prompt_ids, sampling, max_tokens, row.seed, place) for place, row in enumerate(rows)
        )

    async def top_logprobs(self, contexts: list[list[int]], of_base: bool = False) -> list[dict[int, float]]:
        """Log-probabilities at temperature 1 of the most likely next tokens after each context, by token id: the
        policy's, or those of the model that the server was started with. Fails as `generate` does."""
        body = {**self._body(Sampling(), 1), "prompt": contexts, "logprobs": TOP_LOGPROBS}
        if of_base:
            body["model"] = self.base_model

        async def attempt(server: FleetServer) -> list[dict[int, float]]:
            choices = (await server.client.post("/v1/completions", body))["choices"]
            ordered = sorted(choices, key=lambda choice: int(choice["index"]))
            return [
                {int(name.removeprefix("token_id:")): float(value) for name, value in logprobs.items()}
                for logprobs in (choice["logprobs"]["top_logprobs"][0] for choice in ordered)
            ]

        return await self.fleet.request(attempt)

    async def _complete(
        self, prompt: list[int], sampling: Sampling, max_tokens: int, seed: SampleSeed | None, place: int
    ) -> Completion:
        """One completion, within the context, as a server refuses requests that could exceed it."""
        if self.context is not None:
            max_tokens = max(1, min(max_tokens, self.context - len(prompt)))

        async def attempt(server: FleetServer) -> Completion:
            url = server.client.url
            body = {**self._body(sampling, max_tokens), "prompt": [prompt]}
            if seed is not None:
                body["seed"] = seed.request_seed
            (choice,) = (await server.client.post("/v1/completions", body))["choices"]
            ids: list[int] = choice["token_ids"]
            if choice["prompt_token_ids"] != prompt:
                raise RunFailed(f"The vLLM server at {url} completed another prompt than that of the request.")
            if choice.get("finish_reason") == "length" and len(ids) < max_tokens:  # of its generation_config.json
                raise RunFailed(
                    f"The vLLM server at {url} cuts completions at {len(ids)} tokens instead of {max_tokens}.\n"
                    "Start it with --generation-config vllm: its model's own settings limit them otherwise."
                )
            logprobs: list[float] = choice["logprobs"]["token_logprobs"]
            activity.own.add_tokens(len(ids))
            return Completion(ids, logprobs, "stop" if self.end.is_reached(ids) else "length", self.weight_version or 0)

        async with self.slots:
            return await self.fleet.request(attempt, place)

    def _body(self, sampling: Sampling, max_tokens: int) -> dict[str, Any]:
        """Fields of a request. Requests share cached prefixes only if they have the same `cache_salt`."""
        return {
            "model": self.fleet.policy or self.base_model,
            **sampling.as_vllm(self.end.eos_ids, max_tokens),
            "return_token_ids": True,
            "cache_salt": f"{SALT}-{self.fleet.version}",
            "logprobs": 0,
            "return_tokens_as_token_ids": True,  # else the server decodes each token
        }

    # -- weights, by all ranks

    async def load_weights(self, version: int) -> None:
        """Load the policy's weights, which have done `version` optimizer steps, unless the server has this version.
        Every rank must call this.

        Raises:
            ServerFailed: the server does not come back, or refuses the weights.
        """
        if self.weight_version == version:
            return
        new, start = WeightVersion(version, self.fleet.loads + 1), time.monotonic()
        with activity.own.doing("weight sync"), self.failing_together(gather_object), self.together():
            self.last_bytes = self.fleet.sync.write(new)
            if self.fleet.sync.writes:
                await self.fleet.load(new)
                if self.check is not None:
                    for server in self.fleet.servers:
                        await self.check(replace(self, fleet=replace(self.fleet, servers=[server])))
                self.last_seconds = time.monotonic() - start
        if not self.fleet.sync.writes:
            self.fleet.note_loaded(new)
        self.weight_version = version

    @contextmanager
    def failing_together(self, gather: Gather) -> Iterator[None]:
        """Context that ends on all ranks together, and raises a failure of one rank on all. Every rank must enter it.

        Raises:
            ServerFailed: a rank failed.
        """
        failure = None
        try:
            yield
        except RunFailed as error:
            failure = error
        messages = gather([None if failure is None else str(failure)])
        if (message := next(filter(None, messages), None)) is not None:
            raise ServerFailed(message) from failure

    async def close(self) -> None:
        """Remove files of weights, and close connections."""
        await self.fleet.close()
