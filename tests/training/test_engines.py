"""vLLM in the training process, whose engine is written down; tests/vllm has the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from aitrain.engines.colocated import ColocatedEngine
from aitrain.engines.sampling import Sampling
from aitrain.environment.seeds import SampleSeed
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.engine import Completion, GenerationRequest


class ScriptedLLM:
    """vLLM's engine: answers with the prompt and the end token, and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], Any]] = []

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        self.calls.append((ids, sampling_params))
        chosen = SimpleNamespace(rank=1, logprob=-0.5)
        outputs = [SimpleNamespace(token_ids=[*row, 9], logprobs=[{0: chosen}] * (len(row) + 1)) for row in ids]
        return [
            SimpleNamespace(prompt_token_ids=row, outputs=[output]) for row, output in zip(ids, outputs, strict=True)
        ]


@pytest.fixture
def generation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's class itself, without its constructor, which starts vLLM; `syncs` counts the weight syncs."""
    monkeypatch.setattr(vllm_generation, "SamplingParams", lambda **given: SimpleNamespace(**given), raising=False)
    generation = object.__new__(VLLMGeneration)
    settings = {"temperature": 9.0, "top_p": 9.0, "top_k": 9, "min_p": 9.0, "repetition_penalty": 9.0}
    vars(generation).update(
        mode="colocate", tensor_parallel_size=1, accelerator=Accelerator(cpu=True), enable_sleep_mode=False, logprobs=0,
        structured_outputs_regex=None, max_completion_length=1, generation_kwargs={}, model=torch.nn.Identity(),
        llm=ScriptedLLM(), _dist=SimpleNamespace(is_fsdp=False), syncs=[], **settings,
    )  # fmt: skip
    vars(generation)["sync_weights"] = lambda: generation.syncs.append(1)
    return generation


Make = Callable[..., ColocatedEngine]


@pytest.fixture
def make_engine(generation: Any) -> Make:
    return lambda **sampling: ColocatedEngine(generation, Sampling(**sampling), EndOfTurn([9]))


def test_a_colocated_engine_samples_each_row_with_its_seed_and_the_sampling_of_its_batch(
    generation: Any, make_engine: Make
) -> None:
    """An environment's own batch has its own sampling."""
    given: dict[str, Any] = {"temperature": 0.7, "top_k": 5}
    engine, before = make_engine(**given), dict(vars(generation))
    rows = [GenerationRequest(prompt, 4, SampleSeed(seed)) for prompt, seed in (([1], 3), ([2, 3], 4))]
    completions = engine.sample(rows, engine.sampling, 4)
    engine.sample(rows[:1], engine.sampling.greedy, 4)
    answers = engine.sample(rows, Sampling(top_p=0.9), 3)

    assert completions == answers == [Completion([1, 9], [-0.5] * 2), Completion([2, 3, 9], [-0.5] * 3)]
    (prompts, sampled), (_, (greedy,)), (_, own) = generation.llm.calls
    assert prompts == [[1], [2, 3]]
    assert [each.seed for each in (*sampled, *own)] == [3, 4, 3, 4]
    expected = {**given, "top_p": 1.0, "stop_token_ids": [9], "max_tokens": 4}
    assert vars(sampled[1]).items() >= expected.items()
    assert (greedy.temperature, greedy.top_k) == (0.0, 0)
    assert (own[0].temperature, own[0].top_p, own[0].top_k) == (1.0, 0.9, 0)
    assert vars(generation) == before


def test_weights_are_synced_once_for_each_version(generation: Any, make_engine: Make) -> None:
    engine, syncs = make_engine(), []
    for version in (0, 0, 1, 1, 3):
        asyncio.run(engine.load_weights(version))
        syncs.append(len(generation.syncs))
    assert syncs == [1, 1, 2, 2, 3]
    engine.weight_version = None  # the policy has other weights of the same step
    asyncio.run(engine.load_weights(3))
    assert len(generation.syncs) == 4


@pytest.mark.parametrize(
    ("changes", "is_shared"),
    [({}, False), ({"tensor_parallel_size": 2}, True), ({"_dist": SimpleNamespace(is_fsdp=True)}, True)],
)
def test_two_ranks_generate_together_where_they_share_vllm_or_the_weights(
    generation: Any, make_engine: Make, changes: dict[str, Any], is_shared: bool
) -> None:
    """The other rank has 7 rows left, and at most 2 tokens for each."""
    vars(generation).update(changes)
    generation.accelerator = SimpleNamespace(
        num_processes=2, device="cpu", state=SimpleNamespace(deepspeed_plugin=None),
        gather=lambda own: torch.cat([own, torch.tensor([[7, 2]])]),
    )  # fmt: skip
    engine = make_engine()
    assert (engine.shared_by is not None) is is_shared
    assert engine._over_ranks(3, 5) == ([7, 5] if is_shared else [3, 5])
