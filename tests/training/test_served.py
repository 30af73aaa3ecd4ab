"""Generation by a vLLM server that is written down; tests/vllm has the real one."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel

from aitrain.engines import server as server_engine
from aitrain.engines.sampling import Sampling
from aitrain.engines.server import PolicyServer, VLLMServerEngine
from aitrain.engines.server_check import ServerModel, ServerNeeds, check_servers
from aitrain.engines.sharded_tensors import merged_weights
from aitrain.engines.weight_sync import AdapterSync, DiskSync, roomy_folder
from aitrain.environment.seeds import SampleSeed
from aitrain.errors import ConfigError, RunFailed
from aitrain.packages import TINY_FOLDER
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.engine import Completion, GenerationRequest
from aitrain.rollout.event_loop import event_loop
from tests.training.conftest import are_equal, random_adapter
from tests.training.small_server import END, Fake, Reply

run = event_loop().run


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Fake]]:
    monkeypatch.setattr(server_engine, "POLL_SECONDS", 0.01)
    servers = [Fake() for _ in range(3)]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def fake(servers: list[Fake]) -> Fake:
    return servers[0]


def by(*servers: Fake, sync: Any = None, **settings: Any) -> VLLMServerEngine:
    """An engine that calls servers without a network."""
    clients = [PolicyServer(server.url, server.transport) for server in servers]
    return VLLMServerEngine(clients, sync, "base", EndOfTurn([END]), **settings)


def answers(
    engine: VLLMServerEngine, prompts: list[list[int]], max_tokens: int = 16, seeds: list[int] | None = None
) -> list[Completion]:
    chosen = map(SampleSeed, seeds or range(len(prompts)))
    rows = [GenerationRequest(prompt, max_tokens, seed) for prompt, seed in zip(prompts, chosen, strict=True)]
    return run(engine.complete(rows, engine.sampling))


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.ids for completion in completions]


def load(engine: VLLMServerEngine, step: int) -> None:
    run(engine.load_weights(step))


def is_current(engine: VLLMServerEngine) -> bool:
    (server,) = engine.servers
    return run(engine.sync.has_version(server, str(engine.version)))


@pytest.fixture(scope="module")
def model() -> PeftModel:
    return random_adapter(TINY_FOLDER)


@pytest.fixture(params=[AdapterSync, DiskSync])
def sync(request: pytest.FixtureRequest, model: PeftModel, tmp_path: Path) -> Any:
    return request.param(model, tmp_path / "sync")


# -- requests


def test_answers_come_in_the_order_of_the_prompts_and_no_more_is_asked_at_a_time_than_files_may_be_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_engine, "allow_open_files", lambda: 8)
    waiting: list[int] = [0, 0]

    class Counting(Fake):
        async def respond(self, request: httpx.Request) -> httpx.Response:
            waiting[0] += 1
            waiting[1] = max(waiting)
            await asyncio.sleep(0)
            waiting[0] -= 1
            return await super().respond(request)

    fake, prompts = Counting(), [[n] * (1 + 7 * n % 5) for n in range(1, 20)]
    assert answers(by(fake), prompts) == [Completion([sum(prompt), END], [0.0, -0.5]) for prompt in prompts]
    assert waiting == [0, 4]
    fake.stop()


def test_a_request_says_every_sampling_option_and_keeps_within_the_context(fake: Fake) -> None:
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9, stop=("</a>",))
    answers(by(fake, sampling=sampling), [[1, 2]], max_tokens=30)
    (body,) = fake.bodies("/v1/completions")
    assert body.pop("cache_salt")
    always = {
        "model": "base", "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [END], "logprobs": 0,
        "return_token_ids": True, "return_tokens_as_token_ids": True, "stop": ["</a>"], "skip_special_tokens": False,
        "include_stop_str_in_output": True, "spaces_between_special_tokens": False,
    }  # fmt: skip
    assert body == always | {
        "prompt": [[1, 2]],
        "seed": 0,
        "max_tokens": 30,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
    }
    answers(by(fake, context=100), [[1] * 60, [1] * 95], max_tokens=30)
    assert {body["max_tokens"] for body in fake.bodies("/v1/completions")[1:]} == {30, 5}


def test_each_answer_is_asked_for_with_its_own_seed(fake: Fake) -> None:
    engine = by(fake)
    answers(engine, [[1, 2], [1, 2], [3]], seeds=[7, 8, 20])
    assert run(engine.generate(GenerationRequest([6], 5, SampleSeed(40)))) == Completion([6, END], [0.0, -0.5])
    asked = [(body["prompt"], body["seed"]) for body in fake.bodies("/v1/completions")]
    assert asked == [([[1, 2]], 7), ([[1, 2]], 8), ([[3]], 20), ([[6]], 40)]


# -- trouble


def take_too_long(_: Fake) -> Reply:
    raise httpx.ReadTimeout("slow")


def said(prompt: list[int], ids: list[int], reason: str = "stop") -> Reply:
    """A server's answer of these tokens to this prompt."""
    logprobs = {"token_logprobs": [0.0] * len(ids)}
    choice = {"index": 0, "prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs, "finish_reason": reason}
    return 200, {"choices": [choice]}


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (take_too_long, "within 600 seconds"),
        (lambda _: (400, {"error": {"message": "the prompt is too long"}}), "the prompt is too long"),
        (lambda _: said([7, 1], [2]), "another prompt"),
        (lambda _: said([1], [5] * 3, "length"), r"at 3 tokens instead of 16(.|\n)*--generation-config vllm"),
    ],
    ids=["slow", "refuses", "answers to something else", "has a token limit of its own"],
)
def test_what_asking_again_does_not_mend_ends_the_run_at_once(trouble: Any, words: str, fake: Fake) -> None:
    fake.troubles = [trouble]
    with pytest.raises(RunFailed, match=words):
        answers(by(fake), [[1]])
    assert len(fake.bodies("/v1/completions")) == 1


def test_an_answer_as_long_as_was_asked_for_is_an_answer(fake: Fake) -> None:
    fake.troubles = [lambda _: said([1], [5] * 3, "length")]
    assert ids_of(answers(by(fake), [[1]], max_tokens=3)) == [[5, 5, 5]]


def test_a_server_that_dies_in_a_batch_or_was_started_anew_since_gets_the_weights_again_and_is_asked_again(
    fake: Fake, sync: Any
) -> None:
    engine = by(fake, sync=sync)
    fake.dies()  # while it takes the weights
    load(engine, 1)
    assert is_current(engine)
    before = engine.restarts  # 1 unless it was back before the weights were written
    fake.troubles = [lambda fake: fake.dies()]
    prompts = [[n] for n in range(10)]
    for restarts in (1, 1, 2):
        if restarts == 2:
            fake.restart()
        assert ids_of(answers(engine, prompts)) == [[n, END] for n in range(10)]
        assert engine.restarts == before + restarts
        assert is_current(engine)


def test_answers_of_a_server_that_was_started_anew_meanwhile_do_not_count(
    fake: Fake, model: PeftModel, tmp_path: Path
) -> None:
    engine = by(fake, sync=DiskSync(model, tmp_path / "sync"))
    load(engine, 1)

    def answer_with_other_weights(fake: Fake) -> Reply:
        fake.restart()
        return said([1], [7])

    fake.troubles = [answer_with_other_weights]
    assert ids_of(answers(engine, [[1]])) == [[1, END]]
    assert engine.restarts == 1
    assert len(fake.bodies("/v1/completions")) == 2


# -- weights


def test_weights_are_named_after_their_step_and_no_prefix_of_other_weights_counts(
    fake: Fake, model: PeftModel, tmp_path: Path
) -> None:
    engine = by(fake, sync=AdapterSync(model, tmp_path / "sync"))
    for step in (0, 5):
        answers(engine, [[1]])
        load(engine, step)
        load(engine, step)  # is loaded already
    answers(engine, [[1]])
    bodies = fake.bodies("/v1/completions")
    names = list(map(engine.sync.name, ["step-0-load-1", "step-5-load-2"]))
    assert [body["model"] for body in bodies] == ["base", *names]
    assert len({body["cache_salt"] for body in bodies}) == 3
    folder = tmp_path / "sync" / "step-5-load-2"
    assert fake.adapters == {names[1]: str(folder)}
    assert list((tmp_path / "sync").iterdir()) == [folder]
    assert [file.name for file in folder.glob("*.safetensors")] == ["adapter_model.safetensors"]
    engine.weight_version = None  # the policy's have changed within the step
    load(engine, 5)
    assert engine.version == "step-5-load-3"
    run(engine.close())
    assert not (tmp_path / "sync").exists()


def test_two_runs_do_not_share_a_server(fake: Fake, sync: Any, tmp_path: Path) -> None:
    engine, other = by(fake, sync=sync), by(fake, sync=type(sync)(sync.model, tmp_path / "other"))
    for each in (engine, other):
        load(each, 1)
        answers(each, [[1]])
    with pytest.raises(RunFailed, match="Another run"):
        answers(engine, [[1]])


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"modules_to_save": ["norm"]}], ids=str)
def test_full_weights_are_those_of_the_merged_model_and_the_base_is_as_it_was(options: dict[str, Any]) -> None:
    model = random_adapter(TINY_FOLDER, **options)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    ours = dict(merged_weights(model))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert are_equal(ours, merged)


def test_weights_pass_through_memory_where_there_is_room_and_those_of_a_run_that_was_killed_are_removed_there(
    model: PeftModel, tmp_path: Path
) -> None:
    folder, lives = tmp_path / "run", AdapterSync(model, tmp_path / "aitrain-weights-1")
    lives.write("step-0-load-1")
    for name in ("aitrain-weights-2/step-3-load-1", "another's"):
        (tmp_path / name).mkdir(parents=True)
    assert roomy_folder(folder, 1000, memory=tmp_path).parent == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aitrain-weights-1", "another's"]
    assert roomy_folder(folder, 10**18, memory=tmp_path) == folder / "sync"
    assert roomy_folder(folder, 1000, memory=tmp_path / "nowhere") == folder / "sync"


# -- several servers


async def play(engine: VLLMServerEngine, count: int) -> list[Completion]:
    """The answers to the prompts [0], [1] and so on, in one batch."""
    requests = [GenerationRequest([number], 10, SampleSeed(number), index=number) for number in range(count)]
    async with engine.batch(count):
        return await asyncio.gather(*map(engine.generate, requests))


def versions(servers: list[Fake]) -> list[str]:
    """The weights that each server has, of an adapter or of all weights."""
    return [",".join(server.adapters) or server.version.partition("step")[2] for server in servers]


def test_the_requests_of_a_server_that_dies_in_a_batch_wait_until_it_is_back(servers: list[Fake], sync: Any) -> None:
    engine = by(*servers, sync=sync)
    load(engine, 0)
    servers[1].troubles = [lambda fake: fake.dies()]

    assert ids_of(run(play(engine, 12))) == [[number, END] for number in range(12)]
    assert [len(server.bodies("/v1/completions")) for server in servers[::2]] == [4, 4]
    assert engine.restarts == 1
    assert len(set(versions(servers))) == 1


# -- a server that somebody else started


ADAPTER, ALL = ServerNeeds("some/model", 100, 8), ServerNeeds("some/model", 100, None)
ON_CPU = {"device_config": {"device": "cpu"}}
DRAFTS = {"speculative_config": {"method": "ngram"}}
HALF = {"model_config": {"dtype": "torch.bfloat16", "quantization": None}}
QUANTIZED = {"model_config": {"dtype": "torch.bfloat16", "quantization": "fp8_per_channel"}}


@pytest.mark.parametrize(
    ("details", "needs", "found"),
    [
        ({}, ServerNeeds("base", 50, 8), {}),
        (ON_CPU, ADAPTER, {"is_on_cpu": True}),
        (HALF, ADAPTER, {"dtype": torch.bfloat16}),
        (QUANTIZED, ADAPTER, {"is_quantized": True}),
    ],
)
def test_a_fitting_server_is_found_so(
    details: dict[str, Any], needs: ServerNeeds, found: dict[str, Any], fake: Fake
) -> None:
    fake.details = details
    assert check_servers([fake.url], needs) == ServerModel("base", 100, **found)


@pytest.mark.parametrize(
    ("details", "missing", "needs", "advice"),
    [
        (None, "", ServerNeeds("other/model", 100, 8), "vllm serve other/model"),
        (None, "", ServerNeeds("some/model", 101, 8), "--max-model-len 101"),
        (None, "/v1/load_lora_adapter", ADAPTER, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        (None, "/weight_info", ALL, "VLLM_SERVER_DEV_MODE"),
        (None, "/v1/models", ALL, "cannot be used"),
        (ON_CPU | DRAFTS, "", ADAPTER, "from another distribution"),
    ],
)
def test_what_a_server_lacks_is_said_with_what_starts_it(
    details: dict[str, Any] | None, missing: str, needs: ServerNeeds, advice: str, fake: Fake
) -> None:
    fake.details, fake.missing = details, {missing}
    with pytest.raises(ConfigError, match=advice):
        check_servers([fake.url], needs)


def test_a_server_that_would_spoil_a_run_is_refused(fake: Fake, model: PeftModel, tmp_path: Path) -> None:
    """Another run has replaced its base, its log-probabilities are before temperature, or it does not answer."""
    load(by(fake, sync=DiskSync(model, tmp_path / "sync")), 1)
    assert check_servers([fake.url], ALL) == ServerModel("base", 100)  # it gets all weights anyway
    with pytest.raises(ConfigError, match="another run"):
        check_servers([fake.url], ADAPTER)
    fake.surely = False
    with pytest.raises(ConfigError, match="before temperature"):
        check_servers([fake.url], ALL)
    fake.stop()
    with pytest.raises(ConfigError, match="cannot be used"):
        check_servers([fake.url], ADAPTER)
