"""Several vLLM servers: which one a request goes to, and what happens when one is gone or comes back."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from aitrain.engines import server_fleet
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.server_fleet import ServerFleet
from aitrain.engines.weight_sync import AdapterSync, DiskSync
from aitrain.rollout.engine import Completion, GenerationRequest
from aitrain.rollout.limits import EndOfTurn
from aitrain.vllm.client import VLLMClient
from tests.training.test_served import END, Fake, adapted, run

Engine = VLLMServerEngine


class Slow(Fake):
    """Holds completions back until it is told to answer; knows which prompts it has got."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.answers = asyncio.Event()
        super().__init__()

    @property
    def url(self) -> str:
        return f"http://server-{id(self)}"

    def start(self) -> None:
        """Without a socket."""
        self.adapters, self.version, self.is_up = {}, "default", True
        self.answers.set()

    async def respond(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions" and self.is_up:
            self.prompts.append(json.loads(request.content)["prompt"][0])
            await self.answers.wait()
        return await super().respond(request)

    def stop(self) -> None:
        """It dies: what it was asked is not answered."""
        self.is_up = False
        self.answers.set()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Slow]:
    monkeypatch.setattr(server_fleet, "POLL_SECONDS", 0.01)
    return [Slow() for _ in range(3)]


@pytest.fixture(scope="module")
def model() -> Any:
    return adapted()


@pytest.fixture(params=[AdapterSync, DiskSync])
def sync(request: pytest.FixtureRequest, model: Any, tmp_path: Path) -> Any:
    return request.param(model, tmp_path / "sync")


def fleet_of(servers: list[Slow], sync: Any = None, **settings: Any) -> Engine:
    fleet = ServerFleet.of([VLLMClient(server.url, transport=server.transport) for server in servers], sync)
    for name, value in settings.items():
        setattr(fleet, name, value)
    return VLLMServerEngine(fleet, "base", EndOfTurn([END]))


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.001)


async def ask(engine: Engine, *prompts: list[int], max_tokens: int = 10) -> list[Completion]:
    requests = [GenerationRequest(prompt, max_tokens, index=index) for index, prompt in enumerate(prompts)]
    return await asyncio.gather(*map(engine.generate, requests))


def versions(servers: list[Slow]) -> list[str]:
    """The weights that each server has, of an adapter or of all weights."""
    return [",".join(server.adapters) or server.version.partition("step")[2] for server in servers]


def test_an_interrupt_ends_the_wait_for_servers_that_are_gone(servers: list[Slow]) -> None:
    engine = fleet_of(servers)
    for server in servers:
        server.stop()

    async def interrupted() -> None:
        asyncio.get_running_loop().call_later(0.05, signal.raise_signal, signal.SIGINT)
        await ask(engine, [1])

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(interrupted())
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_requests_of_a_server_that_dies_in_a_batch_move_and_the_next_weights_reach_all(
    servers: list[Slow], sync: Any
) -> None:
    notes: list[str] = []
    states: list[dict[str, str]] = []
    engine = fleet_of(servers, sync, notify=notes.append, on_change=states.append)
    run(engine.load_weights(0))
    one = servers[1]

    async def play() -> list[Completion]:
        one.answers.clear()
        async with engine.batch(12):
            asked = asyncio.create_task(ask(engine, *([number] for number in range(12))))
            await until(lambda: len(one.prompts) == 4)
            one.stop()
            return await asked

    completions = run(play())
    assert [completion.ids for completion in completions] == [[number, END] for number in range(12)]
    assert engine.metrics["vllm/servers"] == 2
    assert f"The vLLM server at {one.url} is gone, 2 of 3 servers left: /v1/completions: " in notes[0]
    assert states == [{server.url: "gone" if server is one else "live" for server in servers}]

    one.restart()
    run(engine.load_weights(1))
    assert len(set(versions(servers))) == 1
    assert "-1-load-2" in versions(servers)[0]
    assert notes[1:] == [f"The vLLM server at {one.url} is back, and has the weights of the policy."]
    assert engine.metrics["vllm/servers"] == 3
    assert engine.restarts == 1


@pytest.mark.parametrize("restarts", [True, False], ids=["restarted", "cut off"])
def test_a_server_that_is_back_gets_the_present_weights_before_the_next_batch(
    servers: list[Slow], sync: Any, restarts: bool
) -> None:
    """It has none, or older ones of this run."""
    engine = fleet_of(servers, sync)
    run(engine.load_weights(0))
    one = servers[0]
    one.stop()
    run(engine.load_weights(1))
    if restarts:
        one.start()
    one.is_up = True
    one.asked.clear()

    async def play() -> None:
        async with engine.batch(3):
            await ask(engine, [1], [2], [3])

    run(play())
    assert [said[-9:] for said in versions(servers)] == ["-1-load-2"] * 3
    assert engine.restarts == 1
    paths = [path for path, _ in one.asked]
    loaded = "/v1/load_lora_adapter" if isinstance(sync, AdapterSync) else "/update_weight_version"
    assert paths.index(loaded) < paths.index("/v1/completions")
