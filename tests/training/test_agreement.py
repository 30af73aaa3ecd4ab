"""A vLLM server that takes new weights and goes on with old ones is noticed, and one that does as it should is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain import Result, RunFailed, TrainConfig
from aitrain.engines.logprob_check import LogprobCheck, SharedForward, kl_by_position
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.server_check import ServerModel
from aitrain.engines.weight_sync import AdapterSync
from aitrain.training.engine_setup import notify_difference
from tests.environments.vowels import Vowels
from tests.training.small_server import SmallServer
from tests.training.test_served import by, run
from tests.training.test_served_run import server

STEP = 1e-4
"""What one update moves each weight by: a log-probability then moves by about a thousandth."""


__all__ = ["server"]  # a fixture


class Policy:
    """A model in training, and the server that it is handed to."""

    def __init__(self, server: SmallServer, folder: Path) -> None:
        torch.manual_seed(0)
        lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")
        model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(server.model), lora)
        sync, self.server = AdapterSync(model, folder / "sync"), server
        trained = (weight for name, weight in model.named_parameters() if "lora_B" in name)
        self.direction = {weight: torch.randn_like(weight).sign() for weight in trained}
        self.check = LogprobCheck(SharedForward(model), AutoTokenizer.from_pretrained(server.model))
        self.engine: VLLMServerEngine = by(server, sync, check=self.check.compare)
        self.steps = 0

    def update(self) -> None:
        """As an optimizer does: each weight by a little."""
        with torch.no_grad():
            for weight, direction in self.direction.items():
                weight += STEP * direction

    def load(self) -> None:
        """Hand over the weights as they are."""
        run(self.engine.load_weights(self.steps))
        self.steps += 1

    def compared(self) -> int:
        """How often the server was asked for log-probabilities."""
        return sum(body["logprobs"] > 0 for body in self.server.bodies("/v1/completions"))


@pytest.fixture
def policy(server: SmallServer, tmp_path: Path) -> Policy:
    return Policy(server, tmp_path)


def test_a_server_that_uses_its_weights_is_asked_twice_and_never_accused(policy: Policy) -> None:
    for _ in range(5):
        policy.load()
    assert policy.compared() == 1, "nothing is asked while the policy has not moved beyond rounding"
    for _ in range(15):
        policy.update()
        policy.load()
    assert policy.compared() == 2  # the first time, and once it has moved


def test_the_adapter_of_a_resumed_run_is_looked_for_at_once(policy: Policy) -> None:
    policy.update()
    policy.server.ignores = True
    with pytest.raises(RunFailed, match="try --vllm-sync disk"):
        policy.load()


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
