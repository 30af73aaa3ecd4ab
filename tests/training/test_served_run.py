"""Whole runs, in real training processes, by a vLLM server that dies, is gone, or has other weights.

The server is a stand-in that generates with what it was handed; tests/vllm has the real one.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain.engines.logprob_check import LogprobCheck, SharedForward, kl_by_position
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.server_check import ServerModel
from aitrain.engines.weight_sync import AdapterSync
from aitrain.errors import RunFailed
from aitrain.events import SERVER_VARIABLE, Failed, decode
from aitrain.launch.processes import PYTHON, WORKER
from aitrain.options.train import TrainConfig
from aitrain.runs.result import Result
from aitrain.runs.run_folder import RunFolder, read_lines
from aitrain.training.engine_setup import notify_difference
from aitrain.training.model import TINY_MODEL
from tests.environments.vowels import Vowels
from tests.training.conftest import rollouts
from tests.training.small_server import SmallServer
from tests.training.test_served import by, run

ENVIRONMENT = f"{Path(__file__).parents[1] / 'environments' / 'processes.py'}:Slow"


@pytest.fixture
def server(small_model: Path) -> Iterator[SmallServer]:
    serving = SmallServer(small_model)
    yield serving
    serving.stop()


class Served:
    """The processes of one run, as `aitrain grpo` would start them, in a folder of their own."""

    def __init__(self, folder: Path, model: Path, url: str, python: Path, **options: Any) -> None:
        self.folder, processes = RunFolder(folder / "run"), options.pop("processes", 1)
        self.folder.path.mkdir()
        short = {"max_steps": 6, "rl_max_new_tokens": 4, "rl_kl_coef": 0.0, "lr": 1e-2, "rl_prompts_per_step": 2,
                 "save_strategy": "no", "eval_strategy": "no", "rl_top_k": 0}  # fmt: skip
        self.folder.write_config(TrainConfig(
            model=str(model), rl_env=ENVIRONMENT, output_dir=str(folder), project_name="run", use_vllm=True,
            vllm_mode="server", **{**short, **options},
        ))  # fmt: skip
        torchrun = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--no-python"]
        worker = [*PYTHON, "-m", WORKER, str(self.folder.path), "0"]
        command = worker if processes == 1 else [*torchrun, f"--nproc-per-node={processes}", *worker]
        self.process = subprocess.Popen(
            [str(python), *command[1:]],
            cwd=folder, env={**os.environ, SERVER_VARIABLE: url, "CUDA_VISIBLE_DEVICES": ""}, text=True,
            stdout=subprocess.PIPE, stderr=self.folder.log.open("w"), start_new_session=True,
        )  # fmt: skip

    def wait_for_step(self, step: int) -> None:
        give_up = time.monotonic() + 240
        while not any(line["step"] >= step for line in read_lines(self.folder.metrics)):
            assert self.process.poll() is None, self.folder.log.read_text()[-3000:]
            assert time.monotonic() < give_up
            time.sleep(0.05)

    def end(self) -> list[Failed]:
        """Wait for it; what its processes said that they failed of."""
        said, _ = self.process.communicate(timeout=240)
        return [event for line in said.splitlines() if isinstance(event := decode(line), Failed)]

    def lines(self) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.folder.metrics) if "reward" in line]

    def is_saved(self, step: int) -> bool:
        saved = [self.folder.model / "config.json", self.folder.model / "adapter_config.json"]
        checkpoint = self.folder.checkpoints / f"checkpoint-{step}" / "trainer_state.json"
        return any(file.exists() for file in saved) and checkpoint.exists()


Start = Callable[..., Served]


@pytest.fixture
def start(tmp_path: Path, small_model: Path, server: SmallServer, preloaded_aitrain: Path) -> Iterator[Start]:
    started: list[Served] = []

    def begin(**values: Any) -> Served:
        started.append(Served(tmp_path, small_model, server.url, preloaded_aitrain / "preloaded-python", **values))
        return started[-1]

    yield begin
    for served in started:
        served.process.kill()
        assert served.process.stdout is not None
        served.process.stdout.close()  # what torchrun leaves behind ends itself
        served.process.wait()


@pytest.mark.slow
def test_a_run_goes_on_with_a_server_that_comes_back_and_loses_no_step(start: Start, server: SmallServer) -> None:
    run = start(processes=2, peft=True, rl_top_k=20)
    run.wait_for_step(2)
    server.restart()
    assert run.end() == []

    assert [line["step"] for line in run.lines()] == [1, 2, 3, 4, 5, 6]
    for name in ("sampling_logp_difference/mean", "kl_from_0"):
        assert 0 < max(line[f"sampling/{name}"] for line in run.lines()) < 1e-3
    assert [line["vllm/restarts"] for line in run.lines()][::5] == [0, 1]
    assert all(line["sync/bytes"] > 10_000 and line["sync/seconds"] > 0 for line in run.lines())
    assert Result.read(run.folder.path).vllm_restarts == 1
    assert not list(run.folder.path.glob("sync"))


@pytest.mark.slow
def test_a_server_that_is_gone_for_good_ends_the_run_with_everything_saved(start: Start, server: SmallServer) -> None:
    run = start(processes=2, max_steps=500)
    run.folder.server.write_text(json.dumps({"why": "vLLM's server ended, and is not restarted again."}))
    run.wait_for_step(2)
    server.stop()
    failures = run.end()
    server.start()

    assert len(failures) == 2
    assert all("is gone: " in each.message and "is not restarted again" in each.message for each in failures)
    result = json.loads(run.folder.result.read_text())
    assert result["status"] == "failed"
    assert run.is_saved(result["steps"])
    assert len(run.lines()) == result["steps"]


@pytest.mark.slow
def test_a_run_whose_parent_is_gone_does_not_wait_for_its_server(start: Start, server: SmallServer) -> None:
    """Nor for that of a batch ahead."""
    run = start(processes=2, max_steps=500, rl_ahead=1)
    run.wait_for_step(2)
    server.stop()
    assert run.process.stdout is not None
    run.process.stdout.close()
    run.process.wait(timeout=120)
    server.start()

    result = json.loads(run.folder.result.read_text())
    assert result["status"] == "stopped"
    assert run.is_saved(result["steps"])


REACHED: dict[str, Any] = {"max_steps": 1, "eval_cases": 0, "rl_max_new_tokens": 2, "use_vllm": True,
                           "vllm_mode": "server"}  # fmt: skip


@pytest.mark.parametrize("peft", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_server_that_has_other_weights_is_noticed_before_a_step_is_made(
    peft: bool, train: Callable[..., Result], server: SmallServer, tmp_path: Path
) -> None:
    """Of the same shape, under the same name: a base that is another one, and files that nobody read."""
    server.ignores = True
    server.policy = AutoModelForCausalLM.from_pretrained(TINY_MODEL).eval()
    advice = "the same base model as the run" if peft else "reads the same files"
    with pytest.raises(RunFailed, match=f"does not have this run's weights(.|\n)*{advice}"):
        train(Vowels(), vllm_server_url=server.url, peft=peft, **REACHED)
    assert not list(tmp_path.glob("runs/*/result.json"))


class Asks:
    """Plays its second turn itself, as AITraining's environments do."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}"} for number in range(4)]

    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        ids = tokenizer(f"{completion}{case_idx}", return_tensors="pt")
        output = model.generate(**ids, max_new_tokens=3 + case_idx, do_sample=True, top_k=7)
        return float(output.shape[1] > ids["input_ids"].shape[1])


def test_an_environment_that_asks_the_model_itself_asks_the_server(
    train: Callable[..., Result], server: SmallServer
) -> None:
    (record, *_) = rollouts(train(Asks(), vllm_server_url=server.url, peft=True, **REACHED))
    assert (record["score"], record["error"]) == (1.0, None)
    asked = [body for body in server.bodies("/v1/completions") if body["top_k"] == 7]
    assert {body["max_tokens"] for body in asked} <= {3, 4, 5, 6}
    assert all(body["model"].endswith("-step-0-load-1") and body["seed"] > 0 for body in asked)


# -- weights that a server does not use

STEP = 1e-4
"""What one update moves each weight by: a log-probability then moves by about a thousandth."""


def test_a_server_is_asked_twice_and_accused_only_if_it_does_not_use_its_weights(
    server: SmallServer, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(server.model), lora)
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    trained = {weight: torch.randn_like(weight).sign() for name, weight in model.named_parameters() if "lora_B" in name}

    def engine(name: str) -> VLLMServerEngine:
        check = LogprobCheck(SharedForward(model), tokenizer)
        return by(server, AdapterSync(model, tmp_path / name), check=check.compare)

    def compared() -> int:
        return sum(body["logprobs"] > 0 for body in server.bodies("/v1/completions"))

    def move() -> None:
        with torch.no_grad():
            for weight, direction in trained.items():
                weight += STEP * direction

    ours = engine("ours")
    for step in range(5):
        run(ours.load_weights(step))
    assert compared() == 1, "nothing is asked while the policy has not moved beyond rounding"
    for step in range(5, 20):
        move()
        run(ours.load_weights(step))
    assert compared() == 2  # the first time, and once it has moved

    server.ignores = True
    for _ in range(15):
        move()
    with pytest.raises(RunFailed, match="try --vllm-sync disk"):  # a resumed run looks at once
        run(engine("resumed").load_weights(20))


def test_a_run_ends_before_it_trains_on_what_a_stale_server_says(
    train: Callable[..., Result], server: SmallServer
) -> None:
    server.ignores = True
    with pytest.raises(RunFailed, match="does not generate with the weights"):
        train(
            Vowels(), peft=True, max_steps=5, lr=1e-5, warmup_ratio=0.0, eval_cases=0, rl_top_k=0,
            use_vllm=True, vllm_mode="server", vllm_server_url=server.url,
        )  # fmt: skip
    assert len(server.bodies("/v1/load_lora_adapter")) == 3  # one looks whether the server takes adapters at all


@pytest.mark.parametrize(
    ("more", "is_quantized", "is_noted"),
    [({}, False, False), ({}, True, True), ({"vllm_quantization": "fp8"}, False, True)],
)
def test_a_difference_of_a_base_that_is_quantized_is_noted_and_another_one_ends_the_run(
    more: dict[str, Any], is_quantized: bool, is_noted: bool
) -> None:
    noted: list[str] = []
    config = TrainConfig(use_vllm=True, vllm_mode="server", peft=True, **more)
    base = ServerModel("base", 100, is_quantized=is_quantized)
    assert (notify_difference(config, base, noted.append) == noted.append) == is_noted


def test_kl_by_position_shows_where_the_sampler_drifts() -> None:
    """From token 4,096 on, which is at another place of each completion. Padding, a token of the environment and one
    that the sampler gave no log-probability for do not count."""
    sampled, mask = torch.full((2, 6000), -1.0), torch.ones(2, 6000)
    trained = sampled.clone()
    trained[0, 4096 - 1000 :] += 0.3
    trained[1, 4096 - 3000 :] += 0.3
    mask[1, 2000:], mask[0, 7], sampled[0, 8] = 0, 0, torch.nan
    trained[0, 7], trained[1, 2000:] = -torch.inf, 9.0
    sums = kl_by_position(trained, sampled, mask, torch.tensor([1000, 3000]))
    assert sums[:, 1].tolist() == [22, 1024, 2048 + 1096, 2904 + 904, 0, 0, 0, 0]
    kl = sums[:, 0] / sums[:, 1].clamp(min=1)
    assert kl.tolist() == pytest.approx([0, 0, 0, math.exp(0.3) - 1.3, 0, 0, 0, 0], rel=1e-4)
