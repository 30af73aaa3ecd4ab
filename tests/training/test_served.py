"""Generation by a vLLM server that is written down; tests/vllm has the real one."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from aitrain.engines import server as server_engine
from aitrain.engines import server_fleet
from aitrain.engines.batching import BatchRow
from aitrain.engines.sampling import Sampling
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.server_check import ServerModel, ServerNeeds, check_server
from aitrain.engines.server_fleet import ServerFleet
from aitrain.engines.sharded_tensors import merged_weights
from aitrain.engines.weight_sync import AdapterSync, DiskSync, WeightVersion, roomy_folder
from aitrain.environment.seeds import SampleSeed
from aitrain.errors import ConfigError, RunFailed
from aitrain.rollout.engine import Completion, GenerationRequest
from aitrain.rollout.event_loop import EventLoop
from aitrain.rollout.limits import EndOfTurn
from aitrain.training.model import TINY_MODEL
from aitrain.vllm.client import VLLMClient

END = 258
FIRST = WeightVersion(0, 1)
run = EventLoop().run


def adapted(seed: int = 0, **options: Any) -> PeftModel:
    """The tiny model with an adapter that changes what it says."""
    base = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", **options)).eval()
    return changed(model, seed)


def changed(model: PeftModel, seed: int, scale: float = 0.05) -> PeftModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return model


# -- a server that is written down


class Fake:
    """What vLLM's server does as far as anybody here asks; answers a prompt with its sum and the end."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.troubles: list[Callable[[Fake], tuple[int, Any] | None]] = []
        """What the next completions meet with; None: the connection ends without an answer."""
        self.missing: set[str] = set()
        self.details: dict[str, Any] | None = None
        """What it tells of itself in its development mode."""
        self.surely = True
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Anew: adapters and pushed weights are forgotten."""
        self.adapters: dict[str, str] = {}
        self.version = "default"
        self.is_up = True
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                answer = fake.answer(self.path, json.loads(body or b"{}"))
                if answer is None:
                    self.close_connection = True
                    return
                text = json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._http.daemon_threads = True
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.is_up = False
        self._http.shutdown()
        self._http.server_close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def dies(self, seconds: float = 0.2) -> None:
        """And comes back."""
        self.stop()
        threading.Timer(seconds, self.start).start()

    @property
    def transport(self) -> httpx.MockTransport:
        """The server without a network."""
        return httpx.MockTransport(self.respond)

    async def respond(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        if not self.is_up:
            raise httpx.ConnectError("refused")
        answer = self.answer(request.url.path, json.loads(request.content or b"{}"))
        if answer is None:
            raise httpx.RemoteProtocolError("no response")
        return httpx.Response(answer[0], json=answer[1])

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        path = path.partition("?")[0]
        self.asked.append((path, body))
        if path in self.missing:
            return 404, {"detail": "Not Found"}
        return getattr(self, "_" + path.removeprefix("/v1").strip("/").replace("/", "_"))(body)

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    def _health(self, _: Any) -> tuple[int, Any]:
        return 200, {}

    def _models(self, _: Any) -> tuple[int, Any]:
        base = {"id": "base", "root": "some/model", "parent": None, "max_model_len": 100}
        adapters = [{"id": name, "root": root, "parent": "base"} for name, root in self.adapters.items()]
        return 200, {"data": [base, *adapters]}

    def _server_info(self, _: Any) -> tuple[int, Any]:
        return (404, {"detail": "Not Found"}) if self.details is None else (200, {"vllm_config": self.details})

    def _weight_info(self, _: Any) -> tuple[int, Any]:
        return 200, {"weight_version": self.version}

    def _update_weight_version(self, body: Any) -> tuple[int, Any]:
        self.version = body["new_version"]
        return 200, {}

    def _collective_rpc(self, body: Any) -> tuple[int, Any]:
        assert body["method"] == "reload_weights"
        assert (Path(body["kwargs"]["weights_path"]) / "model.safetensors").is_file()
        return 200, {"results": [None]}

    def _load_lora_adapter(self, body: Any) -> tuple[int, Any]:
        if not (Path(body["lora_path"]) / "adapter_model.safetensors").is_file():
            return 404, {"error": {"message": f"No adapter found for {body['lora_path']}"}}
        if body["lora_name"] in self.adapters:
            return 400, {"error": {"message": "has already been loaded"}}
        self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, {}

    def _unload_lora_adapter(self, body: Any) -> tuple[int, Any]:
        del self.adapters[body["lora_name"]]
        return 200, {}

    def _completions(self, body: Any) -> tuple[int, Any] | None:
        if self.troubles:
            return self.troubles.pop(0)(self)
        if body["model"] not in ("base", *self.adapters):
            return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
        surely = [0.0 if self.surely else -0.3]
        choices = [
            {
                "index": index,
                "prompt_token_ids": prompt,
                "token_ids": [sum(prompt), END],
                "logprobs": {"token_logprobs": [*surely, -0.5]},
            }
            for index, prompt in enumerate(prompt for prompt in body["prompt"] for _ in range(body.get("n", 1)))
        ]
        return 200, {"choices": choices[::-1]}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(server_fleet, "POLL_SECONDS", 0.05)
    server = Fake()
    yield server
    server.stop()


def by(server: Fake, sync: Any = None, **settings: Any) -> VLLMServerEngine:
    """An engine that calls a server without a network; `settings` are those of the engine and of its fleet."""
    fleet = ServerFleet.of([VLLMClient(server.url, transport=server.transport)], sync)
    for name in settings.keys() & {"restart_timeout", "give_up_reason"}:
        setattr(fleet, name, settings.pop(name))
    return VLLMServerEngine(fleet, "base", EndOfTurn([END]), **settings)


def answers(
    engine: VLLMServerEngine, prompts: list[list[int]], max_tokens: int = 16, seeds: list[int] | None = None
) -> list[Completion]:
    rows = [BatchRow(prompt, seed=SampleSeed(seeds[place]) if seeds else None) for place, prompt in enumerate(prompts)]
    return run(engine.complete(rows, engine.sampling, max_tokens))


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.ids for completion in completions]


def load(engine: VLLMServerEngine, step: int) -> None:
    run(engine.load_weights(step))


def is_current(engine: VLLMServerEngine) -> bool:
    (server,) = engine.fleet.servers
    return run(engine.fleet.sync.has_version(server.client, engine.fleet.version))


@pytest.fixture(params=[AdapterSync, DiskSync])
def sync(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return request.param(adapted(), tmp_path / "sync")


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


def test_a_request_says_every_sampling_option_and_no_more_tokens_at_least_than_at_most(fake: Fake) -> None:
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1)
    answers(by(fake, sampling=sampling), [[1, 2]], max_tokens=30)
    (body,) = fake.bodies("/v1/completions")
    assert body.pop("cache_salt")
    always = {
        "model": "base", "min_p": 0.0, "stop_token_ids": [END], "logprobs": 0, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0,
    }  # fmt: skip
    assert body == always | {
        "prompt": [[1, 2]], "max_tokens": 30, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1,
    }  # fmt: skip
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=-1.0, min_new_tokens=20, stop=("</a>",))
    answers(by(fake, context=100, sampling=sampling), [[1] * 60, [1] * 95], max_tokens=30)
    bodies = {body["max_tokens"]: body for body in fake.bodies("/v1/completions")[1:]}
    assert {limit: body["min_tokens"] for limit, body in bodies.items()} == {30: 20, 5: 5}
    assert bodies[5].items() >= {
        "presence_penalty": 0.5, "frequency_penalty": -1.0, "stop": ["</a>"], "include_stop_str_in_output": True,
        "skip_special_tokens": False, "stop_token_ids": [END],
    }.items()  # fmt: skip


def test_each_answer_is_asked_for_with_its_own_seed(fake: Fake) -> None:
    engine = by(fake)
    prompts = [[1, 2], [1, 2], [1, 2], [3], [4, 5], [4, 5]]
    sampled = answers(engine, prompts, seeds=[7, 8, 9, 20, 21, 30])
    assert ids_of(sampled) == [[sum(prompt), END] for prompt in prompts]
    asked = [(body["prompt"], body["seed"]) for body in fake.bodies("/v1/completions")]
    assert asked == [([prompt], seed) for prompt, seed in zip(prompts, [7, 8, 9, 20, 21, 30], strict=True)]
    request = GenerationRequest([6], 5, SampleSeed(40))
    assert run(engine.generate(request)) == Completion([6, END], [0.0, -0.5])
    assert fake.bodies("/v1/completions")[-1]["seed"] == 40


# -- trouble


def take_too_long(_: Fake) -> tuple[int, Any]:
    raise httpx.ReadTimeout("slow")


def said(prompt: list[int], ids: list[int], reason: str = "stop") -> tuple[int, Any]:
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
    fake: Fake, sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = by(fake, sync)
    fake.dies()  # while it takes the weights
    load(engine, 1)
    assert is_current(engine)
    assert engine.restarts == 0
    fake.troubles = [lambda fake: fake.dies()]
    prompts = [[n] for n in range(10)]
    for restarts in (1, 1, 2):
        if restarts == 2:
            fake.restart()
        assert ids_of(answers(engine, prompts)) == [[n, END] for n in range(10)]
        assert engine.restarts == restarts
        assert is_current(engine)


def test_answers_of_a_server_that_was_started_anew_meanwhile_do_not_count(fake: Fake, tmp_path: Path) -> None:
    engine = by(fake, DiskSync(adapted(), tmp_path / "sync"))
    load(engine, 1)

    def answer_with_other_weights(fake: Fake) -> tuple[int, Any]:
        fake.restart()
        return said([1], [7])

    fake.troubles = [answer_with_other_weights]
    assert ids_of(answers(engine, [[1]])) == [[1, END]]
    assert engine.restarts == 1
    assert len(fake.bodies("/v1/completions")) == 2


# -- weights


def test_weights_are_named_after_their_step_and_no_prefix_of_other_weights_counts(fake: Fake, tmp_path: Path) -> None:
    engine = by(fake, AdapterSync(adapted(), tmp_path / "sync"))
    for step in (0, 5):
        answers(engine, [[1]])
        load(engine, step)
        load(engine, step)  # is loaded already
    answers(engine, [[1]])
    bodies = fake.bodies("/v1/completions")
    names = [engine.fleet.sync.name(WeightVersion(*numbers)) for numbers in ((0, 1), (5, 2))]
    assert [name[-13:] for name in names] == ["step-0-load-1", "step-5-load-2"]
    assert [body["model"] for body in bodies] == ["base", *names]
    assert len({body["cache_salt"] for body in bodies}) == 3
    folder = tmp_path / "sync" / "step-5-load-2"
    assert fake.adapters == {names[1]: str(folder)}
    assert list((tmp_path / "sync").iterdir()) == [folder]
    assert engine.last_bytes == sum(file.stat().st_size for file in folder.iterdir())
    engine.weight_version = None  # the policy's have changed within the step
    load(engine, 5)
    assert str(engine.fleet.version) == "step-5-load-3"
    run(engine.close())
    assert not (tmp_path / "sync").exists()


def test_two_runs_do_not_share_a_server(fake: Fake, sync: Any, tmp_path: Path) -> None:
    engine, other = by(fake, sync), by(fake, type(sync)(sync.model, tmp_path / "other"))
    for each in (engine, other):
        load(each, 1)
        answers(each, [[1]])
    with pytest.raises(RunFailed, match="Another run"):
        answers(engine, [[1]])


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"modules_to_save": ["norm"]}], ids=str)
def test_full_weights_are_those_of_the_merged_model_and_the_base_is_as_it_was(options: dict[str, Any]) -> None:
    model = adapted(**options)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    ours = dict(merged_weights(model))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert ours.keys() == merged.keys()
    assert all(torch.equal(ours[name], merged[name]) for name in ours)


def test_weights_pass_through_memory_where_there_is_room_and_those_of_a_run_that_was_killed_are_removed_there(
    tmp_path: Path,
) -> None:
    folder, lives = tmp_path / "run", AdapterSync(adapted(), tmp_path / "aitrain-weights-1")
    lives.write(FIRST)
    for name in ("aitrain-weights-2/step-3-load-1", "another's"):
        (tmp_path / name).mkdir(parents=True)
    assert roomy_folder(folder, 1000, memory=tmp_path).parent == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aitrain-weights-1", "another's"]
    assert roomy_folder(folder, 10**18, memory=tmp_path) == folder / "sync"
    assert roomy_folder(folder, 1000, memory=tmp_path / "nowhere") == folder / "sync"


# -- a server that somebody else started


ADAPTER, ALL = ServerNeeds("some/model", 100, 8), ServerNeeds("some/model", 100, None)
ON_CPU = {"device_config": {"device": "cpu"}}
DRAFTS = {"speculative_config": {"method": "ngram"}}
HALF = {"model_config": {"dtype": "torch.bfloat16", "quantization": None}}
QUANTIZED = {"model_config": {"dtype": "torch.bfloat16", "quantization": "fp8_per_channel"}}
RANK_8 = {"lora_config": {"max_lora_rank": 8}}


@pytest.mark.parametrize(
    ("details", "needs", "found"),
    [
        (None, ADAPTER, {}),
        (RANK_8, ServerNeeds("base", 50, 8), {}),
        (ON_CPU, ADAPTER, {"is_on_cpu": True}),
        (HALF, ADAPTER, {"dtype": torch.bfloat16}),
        (QUANTIZED, ADAPTER, {"is_quantized": True}),
    ],
)
def test_a_fitting_server_is_found_so(
    details: dict[str, Any] | None, needs: ServerNeeds, found: dict[str, Any], fake: Fake
) -> None:
    fake.details = details
    assert check_server(fake.url, needs) == ServerModel("base", 100, **found)


@pytest.mark.parametrize(
    ("details", "missing", "needs", "advice"),
    [
        (None, "", ServerNeeds("other/model", 100, 8), "vllm serve other/model"),
        (None, "", ServerNeeds("some/model", 101, 8), "--max-model-len 101"),
        (None, "/v1/load_lora_adapter", ADAPTER, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        (None, "/weight_info", ALL, "VLLM_SERVER_DEV_MODE"),
        (None, "/v1/models", ALL, "does not answer like a vLLM server"),
        (RANK_8, "", ServerNeeds("some/model", 100, 9), "--max-lora-rank 16"),
        (ON_CPU | DRAFTS, "", ADAPTER, "from another distribution"),
    ],
)
def test_what_a_server_lacks_is_said_with_what_starts_it(
    details: dict[str, Any] | None, missing: str, needs: ServerNeeds, advice: str, fake: Fake
) -> None:
    fake.details, fake.missing = details, {missing}
    with pytest.raises(ConfigError, match=advice):
        check_server(fake.url, needs)


def test_a_server_that_would_spoil_a_run_is_refused(fake: Fake, tmp_path: Path) -> None:
    """Another run has replaced its base, its log-probabilities are before temperature, or it does not answer."""
    load(by(fake, DiskSync(adapted(), tmp_path / "sync")), 1)
    assert check_server(fake.url, ALL) == ServerModel("base", 100)  # it gets all weights anyway
    with pytest.raises(ConfigError, match="another run"):
        check_server(fake.url, ADAPTER)
    fake.surely = False
    with pytest.raises(ConfigError, match="before temperature"):
        check_server(fake.url, ALL)
    fake.stop()
    with pytest.raises(ConfigError, match="cannot be used"):
        check_server(fake.url, ADAPTER)
