"""Several vLLM servers: which one a request goes to, and what happens when one is gone or comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from aitrain import RunFailed
from aitrain.engines import server_fleet
from aitrain.engines.sampling import CompletionBatch, Sampling
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.server_check import ServerModel, ServerNeeds, check_servers
from aitrain.engines.server_fleet import ServerFleet
from aitrain.engines.weight_sync import AdapterSync, DiskSync
from aitrain.errors import ConfigError
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


# -- which server


def test_a_request_goes_to_the_server_with_the_fewest_tokens_in_flight(servers: list[Slow]) -> None:
    engine = fleet_of(servers)

    async def play() -> None:
        for server in servers:
            server.answers.clear()
        tasks = []
        for length in (100, 40, 30, 20, 30, 15):
            tasks.append(asyncio.create_task(ask(engine, [length] * length)))
            await asyncio.sleep(0)
            await until(lambda: sum(len(server.prompts) for server in servers) == len(tasks))
        for server in servers:
            server.answers.set()
        await asyncio.gather(*tasks)

    run(play())
    # with 10 tokens to sample: 110; 50; 40, then 30 more, then the second one has 50 and the third 70, ...
    assert [[len(prompt) for prompt in server.prompts] for server in servers] == [[100], [40, 30], [30, 20, 15]]
    assert [server.tokens for server in engine.fleet.servers] == [0, 0, 0]


def test_an_episode_stays_on_its_server(servers: list[Slow]) -> None:
    engine = fleet_of(servers)

    async def play() -> None:
        async with engine.batch(6):
            for turn in range(1, 5):
                await ask(engine, *([episode] * turn for episode in range(6)))

    run(play())
    seen = [{prompt[0] for prompt in server.prompts} for server in servers]
    assert sorted(len(episodes) for episodes in seen) == [2, 2, 2]
    assert set.union(*seen) == set(range(6))
    assert [len(server.prompts) for server in servers] == [8, 8, 8]


def test_a_batch_for_an_environment_is_divided_over_the_servers(servers: list[Slow]) -> None:
    engine = fleet_of(servers)
    prompts = [[number] for number in range(9)]
    completions = run(engine.generate_batch(CompletionBatch(prompts, Sampling(), 8, list(range(0, 90, 10)))))
    assert [completion.ids for completion in completions] == [[number, END] for number in range(9)]
    assert [len(server.prompts) for server in servers] == [3, 3, 3]

    completions = run(engine.generate_batch(CompletionBatch(prompts, Sampling().greedy, 8)))
    assert [completion.ids for completion in completions] == [[number, END] for number in range(9)]
    assert [len(server.prompts) for server in servers] == [6, 6, 6]


# -- one is gone


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

    completions = run(engine.settled(play()))
    assert [completion.ids for completion in completions] == [[number, END] for number in range(12)]
    assert sorted(prompt[0] for server in servers if server is not one for prompt in server.prompts) == list(range(12))
    assert engine.metrics["vllm/servers"] == 2
    assert len(notes) == 1
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
def test_a_server_that_is_back_during_a_batch_gets_the_present_weights_before_it_is_asked(
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
        async with asyncio.timeout(60):
            while not one.prompts:
                await ask(engine, [1], [2], [3])
                await asyncio.sleep(0.01)

    run(engine.settled(play()))
    assert [said[-9:] for said in versions(servers)] == ["-1-load-2"] * 3
    assert engine.restarts == 1
    paths = [path for path, _ in one.asked]
    loaded = "/v1/load_lora_adapter" if isinstance(sync, AdapterSync) else "/update_weight_version"
    assert paths.index(loaded) < paths.index("/v1/completions")


def test_when_all_servers_are_gone_for_good_the_run_ends_and_names_them(servers: list[Slow]) -> None:
    for server in servers:
        server.stop()
    with pytest.raises(RunFailed, match=r"are gone, and none was back within 0 seconds: .*ConnectError") as caught:
        run(ask(fleet_of(servers, restart_timeout=0.05), [1]))
    assert all(server.url in str(caught.value) for server in servers)
    with pytest.raises(RunFailed, match=r"are gone: .*\nThe run was asked to stop\."):
        run(ask(fleet_of(servers, give_up_reason=lambda: "The run was asked to stop."), [1]))


def test_a_server_that_comes_back_and_takes_no_weights_is_left_out_and_that_is_said(
    servers: list[Slow], model: Any, tmp_path: Path
) -> None:
    notes: list[str] = []
    engine = fleet_of(servers, AdapterSync(model, tmp_path / "sync"), notify=notes.append)
    run(engine.load_weights(0))
    servers[0].stop()
    run(ask(engine, [1]))
    servers[0].missing = {"/v1/load_lora_adapter"}
    servers[0].restart()
    tries = len(servers[0].bodies("/v1/load_lora_adapter"))

    async def play() -> None:
        await ask(engine, [1])
        await until(lambda: len(servers[0].bodies("/v1/load_lora_adapter")) > tries + 2)

    run(engine.settled(play()))
    assert len(notes) == 2
    assert "refuses /v1/load_lora_adapter: 404" in notes[1]
    assert engine.metrics["vllm/servers"] == 2


# -- servers that are checked


def test_servers_of_one_run_serve_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ServerNeeds("some/model", 90, 8)
    fakes = [Fake(), Fake()]
    try:
        urls = [fake.url for fake in fakes]
        assert check_servers(urls, needs) == ServerModel("base", 100)
        fakes[1].details = {"device_config": {"device": "cpu"}}
        with pytest.raises(ConfigError, match="differ: base on GPUs, and base on a CPU"):
            check_servers(urls, needs)
        monkeypatch.setattr(fakes[0], "answer", lambda *_: (401, {"error": "Unauthorized"}))
        with pytest.raises(ConfigError, match="VLLM_API_KEY"):
            check_servers(urls[:1], needs)
    finally:
        for fake in fakes:
            fake.stop()
