"""The engine of stock vLLM servers: token ids in; token ids and log-probabilities out.

Each rank sends its own requests, to one server or to several; an episode goes to one of them. Rank 0 loads the policy's
weights as files: an adapter alone, or all weights. A server that is gone is waited for, and gets the weights when it is
back; requests of one that died, or that had lost the weights, are repeated.

What this uses of vLLM 0.31 (tests/training/test_served.py runs against it):

    POST /v1/completions                prompt: lists of token ids; seed; return_token_ids: the ids as sampled, with the
                                        one that ended the completion; logprobs 0: of the sampled tokens
    GET  /v1/models                     names, the folder of an adapter, max_model_len
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter
    POST /collective_rpc reload_weights, /update_weight_version; GET /weight_info, /server_info    in its development
                                        mode only
    GET  /health
"""

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate.utils import gather_object

from aitrain import activity
from aitrain.engines.sampling import Sampling
from aitrain.engines.weight_sync import WeightSync
from aitrain.errors import AitrainError, RunFailed, ServerFailed, ServerGoneError, ServerRefusedError
from aitrain.machine import allow_open_files
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.engine import Completion, Decoding, Engine, GenerationRequest
from aitrain.rollout.episode import run_all
from aitrain.vllm.client import VLLMClient

Gather = Callable[[list[Any]], list[Any]]

SALT = uuid.uuid4().hex
"""Identifies this process, so that the server's prefix cache is not shared with other runs."""

POLL_SECONDS = 1.0
"""Seconds between two checks whether a server is back."""
BACK_SECONDS = 600.0
"""Seconds to wait for a server."""
ATTEMPTS = 3
"""Attempts of a request if its server dies during it."""


class PolicyServer(VLLMClient):
    """A server that gets the policy's weights."""

    def __init__(self, url: str, transport: Any = None) -> None:
        super().__init__(url, transport=transport)
        self.lock = asyncio.Lock()
        """Held while its weights are checked or loaded."""
        self.waiting = asyncio.Lock()
        """Held by the request that looks whether it is back."""
        self.restarts = 0
        """Number of times that it had lost the policy's weights."""
        self.last_check = -math.inf
        """Time at which the last check that found the weights began."""
        self.check: Callable[[VLLMServerEngine], Awaitable[None]] | None = None
        """What all ranks call after each load of weights, with an engine of this server."""


@dataclass
class VLLMServerEngine(Engine):
    """vLLM servers as an engine; requests are independent of each other."""

    servers: list[PolicyServer]
    sync: WeightSync
    """How the weights get to the servers."""
    base_model: str
    """The servers' name for the model that they were started with."""
    end: EndOfTurn
    sampling: Sampling = field(default_factory=Sampling)
    """How `generate` samples."""
    context: int | None = None
    """Maximum tokens of prompt and completion."""
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(allow_open_files() // 2))
    """One for each completion in flight of this process, as each request is an open file."""
    give_up_reason: Callable[[], str] = lambda: ""
    """Called while waiting for a server: the reason to give up, empty to continue."""
    version: str = ""
    """Name of the weights that the servers should have; empty: those that they were started with."""
    loads: int = 0
    """Number of loads of weights, without those after restarts."""
    last_seconds: float = field(default=0.0, init=False)
    """Duration of the last load of weights by this process."""

    @property
    def restarts(self) -> int:
        """Number of times that servers had lost the policy's weights, as this rank has noticed."""
        return sum(server.restarts for server in self.servers)

    @property
    def policy(self) -> str | None:
        """The policy's model name in requests; None for that of the model that the servers were started with."""
        return self.sync.name(self.version) if self.version and self.sync.is_adapter else None

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion.

        Raises:
            RunFailed: the server does not come back, exceeds the deadline, or refuses the request.
        """
        sampling = self.sampling.greedy if request.decoding is Decoding.GREEDY else self.sampling
        with self.clock.running("generate"), activity.own.waiting("generating"):
            return await self._complete(request, sampling)

    async def complete(self, rows: list[GenerationRequest], sampling: Sampling) -> list[Completion]:
        """One completion for each row; fails as `generate` does."""
        return await run_all(self._complete(row, sampling) for row in rows)

    async def _complete(self, row: GenerationRequest, sampling: Sampling) -> Completion:
        """One completion by the policy's weights, within the context, as a server refuses requests that could exceed
        it. Those of an episode go to the same server, for its prefix cache; others are spread by their seeds.

        Raises:
            RunFailed: the server does not come back, or fails in each attempt.
        """
        place = row.seed.seed if row.index < 0 else row.index
        server, cause = self.servers[place % len(self.servers)], ""
        if self.context is not None:
            row = replace(row, max_tokens=max(1, min(row.max_tokens, self.context - len(row.prompt_ids))))
        async with self.slots:
            for _ in range(ATTEMPTS):
                restarts = server.restarts
                try:
                    completion = await self._request(server, row, sampling)
                    if self.policy is None:  # else the request names the weights
                        await self._ensure_loaded(server, time.monotonic())
                    if server.restarts == restarts:
                        return completion
                    cause = "it was restarted, and had lost the weights of the policy"
                except (ServerGoneError, ServerRefusedError) as error:
                    # 404: it has lost the adapter
                    if isinstance(error, ServerRefusedError) and not (self.policy and error.status == 404):
                        raise
                    cause = str(error)
                    await self._wait_for(server, error)
        raise RunFailed(f"vLLM at {server.url} failed {ATTEMPTS} times at the same request: {cause}")

    async def _request(self, server: PolicyServer, row: GenerationRequest, sampling: Sampling) -> Completion:
        """A server's completion. Requests share cached prefixes only if they have the same `cache_salt`."""
        body = {
            "model": self.policy or self.base_model,
            "prompt": [row.prompt_ids],
            "seed": row.seed.request_seed,
            **sampling.as_vllm(self.end.eos_ids, row.max_tokens),
            "return_token_ids": True,
            "cache_salt": f"{SALT}-{self.version}",
            "logprobs": 0,
            "return_tokens_as_token_ids": True,  # else the server decodes each token
        }
        (choice,) = (await server.post("/v1/completions", body))["choices"]
        ids: list[int] = choice["token_ids"]
        if choice["prompt_token_ids"] != row.prompt_ids:
            raise RunFailed(f"The vLLM server at {server.url} completed another prompt than that of the request.")
        if choice.get("finish_reason") == "length" and len(ids) < row.max_tokens:  # of its generation_config.json
            raise RunFailed(
                f"The vLLM server at {server.url} cuts completions at {len(ids)} tokens instead of {row.max_tokens}.\n"
                "Start it with --generation-config vllm: its model's own settings limit them otherwise."
            )
        activity.own.add_tokens(len(ids))
        return Completion(ids, choice["logprobs"]["token_logprobs"], not self.end.is_reached(ids))

    # -- weights, by all ranks

    async def sync_weights(self, version: int) -> None:
        """Load the policy's weights on all servers.

        Raises:
            ServerFailed: the server does not come back, or refuses the weights.
        """
        start = time.monotonic()
        self.loads += 1
        self.version = f"step-{version}-load-{self.loads}"  # weights may change without a step
        with activity.own.doing("weight sync"):
            with self.failing_together():
                self.sync.write(self.version)
                if self.sync.writes:
                    await run_all(map(self._load_on, self.servers))
            with self.failing_together():
                for server in sorted(self.servers, key=lambda server: server.url):  # ranks have them in other orders
                    if server.check is not None:
                        await server.check(replace(self, servers=[server]))
            self.last_seconds = time.monotonic() - start

    async def _load_on(self, server: PolicyServer) -> None:
        """Load the weights in place of those before.

        Raises:
            RunFailed: the server does not come back, or refuses them.
        """
        try:
            async with server.lock:
                had_weights = await self.sync.unload(server)
                server.restarts += self.loads > 1 and not had_weights
                await self.sync.load(server, self.version)
        except ServerGoneError as gone:
            await self._wait_for(server, gone)

    async def _ensure_loaded(self, server: PolicyServer, since: float = math.inf) -> None:
        """Load the weights on a server that does not have them, unless a check that began after `since` found them.

        Raises:
            ServerGoneError: it is gone.
            RunFailed: it refuses them, or has those of another run.
        """
        async with server.lock:
            if not self.version or server.last_check >= since:
                return
            start = time.monotonic()
            if not await self.sync.has_version(server, self.version):
                server.restarts += 1
                await self.sync.load(server, self.version)
            server.last_check = start

    async def _wait_for(self, server: PolicyServer, cause: AitrainError) -> None:
        """Wait until a server is back and has the weights.

        Raises:
            RunFailed: it does not come back, or refuses the weights.
        """
        start, name = time.monotonic(), f"vLLM at {server.url}"
        await asyncio.sleep(POLL_SECONDS)  # a server that dies may answer for a moment longer
        async with server.waiting:
            while True:
                if reason := self.give_up_reason():
                    raise RunFailed(f"{name} is gone: {cause}\n{reason}")
                if await server.is_up():
                    with suppress(ServerGoneError):
                        await self._ensure_loaded(server)
                        activity.tick()
                        return
                if time.monotonic() > start + BACK_SECONDS:
                    raise RunFailed(
                        f"{name} is gone, and was not back within {BACK_SECONDS:.0f} seconds: {cause}\n"
                        "See vLLM's log for the reason."
                    )
                await asyncio.sleep(POLL_SECONDS)

    @contextmanager
    def failing_together(self, gather: Gather = gather_object) -> Iterator[None]:
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
        self.sync.close()
        for server in self.servers:
            await server.close()
