"""Whole runs by a vLLM server that dies, is gone, or has other weights.

The server is a stand-in that generates with what it was handed; tests/vllm has the real one.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain.engines.logprob_check import TEXTS, LogprobCheck, kl_by_position
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.server_check import ServerModel
from aitrain.engines.weight_sync import AdapterSync
from aitrain.errors import RunFailed
from aitrain.options.train import TrainConfig
from aitrain.packages import TINY_FOLDER
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.training.engine_setup import notify_difference
from tests.conftest import episodes_of, read_lines
from tests.environments.vowels import Vowels
from tests.training.conftest import Train, rollouts
from tests.training.small_server import SmallServer
from tests.training.test_grpo import Asks
from tests.training.test_processes import Command, command
from tests.training.test_resume import as_if_killed_after
from tests.training.test_served import by, run

__all__ = ["command"]  # a fixture

REACHED: dict[str, Any] = {"max_steps": 1, "eval_cases": 0, "rl_max_new_tokens": 2, "rl_top_k": 0, "use_vllm": True,
                           "vllm_mode": "server"}  # fmt: skip


@pytest.fixture
def server(small_model: Path) -> Iterator[SmallServer]:
    serving = SmallServer(small_model)
    yield serving
    serving.stop()


def acting(score: int, act: Callable[[], object]) -> Vowels:
    """An environment in one of whose scores something happens."""
    numbers = count(1)

    class Acts(Vowels):
        concurrent = True

        def score_episode(self, completion: str) -> float:  # type: ignore[override]
            if next(numbers) == score:
                act()
            return super().score_episode(None, None, completion, 0)

    return Acts()


def test_a_run_goes_on_with_a_server_that_comes_back_and_loses_no_step(train: Train, server: SmallServer) -> None:
    options = {**REACHED, "vllm_server_url": server.url, "peft": True, "rl_top_k": 20, "max_steps": 4, "lr": 1e-2}
    result = train(acting(2 * 8, server.restart), **options, rl_check=False)

    lines = [line for line in result.history if "reward" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for name in ("sampling_logp_difference/mean", "kl_from_0"):
        assert 0 < max(line[f"sampling/{name}"] for line in lines) < 1e-3
    assert [line["vllm/restarts"] for line in lines][::3] == [0, 1]
    assert all(line["sync/seconds"] > 0 for line in lines)
    assert not list(result.folder.glob("sync"))


@pytest.mark.parametrize(("is_asked_to_stop", "ahead"), [(True, 1), (False, 0)])
def test_a_run_whose_server_is_gone_for_good_or_that_is_to_stop_waits_no_longer_and_saves_everything(
    is_asked_to_stop: bool, ahead: int, train: Train, server: SmallServer, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "runs" / "run")

    def stop_server() -> None:
        server.stop()
        if is_asked_to_stop:
            signal.raise_signal(signal.SIGINT)
        else:
            folder.server.write_text(json.dumps({"why": "vLLM's server is not restarted again."}))

    options = {**REACHED, "vllm_server_url": server.url, "max_steps": 9, "save_strategy": "steps", "rl_ahead": ahead}
    with nullcontext() if is_asked_to_stop else pytest.raises(RunFailed, match=r"is gone: (.|\n)*not restarted again"):
        train(acting(3 * 8, stop_server), **options, project_name="run", rl_check=False)

    result = read_object(folder.result)
    assert result["status"] == ("stopped" if is_asked_to_stop else "failed")
    assert len([line for line in read_lines(folder.metrics) if "reward" in line]) == result["steps"] > 0
    assert (folder.model / "config.json").exists()
    assert (folder.checkpoints / f"checkpoint-{result['steps']}" / "trainer_state.json").exists()


@pytest.mark.parametrize("peft", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_server_that_has_other_weights_is_noticed_before_a_step_is_made(
    peft: bool, train: Train, server: SmallServer, tmp_path: Path
) -> None:
    """Of the same shape, under the same name: a base that is another one, and files that nobody read."""
    server.ignores = True
    server.policy = AutoModelForCausalLM.from_pretrained(TINY_FOLDER).eval()
    advice = "the same base model as the run" if peft else "reads the same files"
    with pytest.raises(RunFailed, match=f"does not have this run's weights(.|\n)*{advice}"):
        train(Vowels(), vllm_server_url=server.url, peft=peft, **REACHED)
    assert not list(tmp_path.glob("runs/*/result.json"))


def test_an_environment_that_asks_the_model_itself_asks_the_server(train: Train, server: SmallServer) -> None:
    (record, *_) = rollouts(train(Asks(), vllm_server_url=server.url, peft=True, **REACHED))
    assert (record["score"], record["error"]) == (1.0, None)
    asked = [body for body in server.bodies("/v1/completions") if body["max_tokens"] == 4]
    assert asked
    assert all(body["model"].endswith("-step-0-load-1") and body["temperature"] == 0.0 for body in asked)


# -- weights that a server does not use

STEP = 5e-4
"""What one update moves each weight by: a log-probability then moves by some thousandths."""


def test_a_server_is_asked_twice_and_accused_only_if_it_does_not_use_its_weights(
    server: SmallServer, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(server.model), lora)
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    trained = {weight: torch.randn_like(weight).sign() for name, weight in model.named_parameters() if "lora_B" in name}

    def engine(name: str) -> VLLMServerEngine:
        engine = by(server, sync=AdapterSync(model, tmp_path / name))
        engine.servers[0].check = LogprobCheck(model, tokenizer).compare
        return engine

    def compared() -> int:
        return len(server.bodies("/v1/completions")) // len(TEXTS)

    def move() -> None:
        with torch.no_grad():
            for weight, direction in trained.items():
                weight += STEP * direction

    ours = engine("ours")
    for step in range(2):
        run(ours.load_weights(step))
    assert compared() == 2, "nothing is asked while the policy has not moved beyond rounding"
    for step in range(2, 6):
        move()
        run(ours.load_weights(step))
    assert compared() == 3  # policy and base the first time, and once it has moved

    server.ignores = True
    for _ in range(9):
        move()
    with pytest.raises(RunFailed, match="try --vllm-mode colocate"):  # a resumed run looks at once
        run(engine("resumed").load_weights(20))


@pytest.mark.parametrize(
    ("more", "is_quantized", "is_noted"),
    [({}, False, False), ({}, True, True), ({"quantization": "int8"}, False, True)],
)
def test_a_difference_of_a_base_that_is_quantized_is_noted_and_another_one_ends_the_run(
    more: dict[str, Any], is_quantized: bool, is_noted: bool
) -> None:
    config = TrainConfig(use_vllm=True, vllm_mode="server", peft=True, **more)
    base = ServerModel("base", 100, is_quantized=is_quantized)
    assert (notify_difference(config, base, print) is not None) == is_noted


def test_kl_by_position_shows_where_the_sampler_drifts() -> None:
    """From token 4,096 on, after a prompt of 1,000. Padding, a token of the environment and one that the sampler gave
    no log-probability for do not count."""
    sampled, mask = torch.full((1, 6000), -1.0), torch.ones(1, 6000)
    trained = sampled.clone()
    trained[0, 4096 - 1000 :] += 0.3
    mask[0, 7], mask[0, 5000:], sampled[0, 8] = 0, 0, torch.nan
    trained[0, 7], trained[0, 5000:] = -torch.inf, 9.0
    sums = kl_by_position(trained, sampled, mask, torch.tensor([1000]))
    assert sums[:, 1].tolist() == [22, 1024, 2048, 1904, 0, 0, 0, 0]
    kl = sums[:, 0] / sums[:, 1].clamp(min=1)
    assert kl.tolist() == pytest.approx([0, 0, 0, math.exp(0.3) - 1.3, 0, 0, 0, 0], rel=1e-4)


# -- batches that are played while another one trains


def trained(folder: RunFolder) -> tuple[set[tuple[int, int]], list[tuple[int, int | None, object]]]:
    """Step and weight version of all episodes in training, and step, group and case of each."""
    records = episodes_of(folder.path)
    cases = sorted((record["step"], record["group"], record["case_idx"]) for record in records)
    return {(record["step"], record["weight_version"]) for record in records}, cases


@pytest.mark.slow
def test_a_run_that_samples_ahead_and_is_killed_trains_on_the_same_cases(command: Command, server: SmallServer) -> None:
    """Each batch has the weights from before the step that trains beside it, also where held-out cases are scored and a
    checkpoint is written meanwhile. The batch that was played ahead is sampled again, with the weights that the resumed
    run then has; the checkpoint lies between two steps on one batch."""
    done = command.run(
        "Slow", "--use-vllm", "--vllm-mode=server", f"--vllm-server-url={server.url}", "--rl-ahead=1",
        "--num-processes=2", "--rl-updates-per-rollout=2", "--max-steps=8", "--peft", "--lora-dropout=0.2",
        "--save-strategy=steps", "--save-steps=1", "--save-total-limit=9",
        "--eval-strategy=steps", "--eval-steps=2", "--rl-max-episode-tokens=300",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = RunFolder(command.folder / "run")
    versions, cases = trained(whole)
    assert versions == {(1, 0), (3, 0), (5, 2), (7, 4)}

    killed = as_if_killed_after(whole.path, 3, "killed")
    resume = [*command.aitrain, "grpo", "--config", str(killed / "config.yaml"), "--resume"]
    subprocess.run(resume, cwd=command.folder, stdout=subprocess.DEVNULL, check=True)
    again, same_cases = trained(RunFolder(killed))
    assert same_cases == cases
    assert again == {(1, 0), (3, 0), (5, 4), (7, 4)}
