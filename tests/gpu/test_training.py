"""Training on a GPU, without vLLM: number formats, LoRA, quantization, resuming, memory against the plan."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from aitrain.options.train import TrainConfig
from tests.conftest import episodes_of
from tests.gpu.conftest import IS_REHEARSAL, SETTINGS, Models, Record, Train, need_cuda, need_package, planned_mib

OFF = 0.25
"""How far the plan may be off."""
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "full with reference": {"rl_kl_coef": 0.04},
    "LoRA": {"peft": True},
    "QLoRA 4 bits": {"peft": True, "quantization": "int4"},
    "QLoRA 8 bits": {"peft": True, "quantization": "int8"},
}
TRAININGS = (
    [("tiny", "full"), ("tiny", "LoRA"), ("tiny", "QLoRA 4 bits")]
    if IS_REHEARSAL
    else [
        *(("0.5B", way) for way in WAYS),
        *((shape, way) for shape in ("1.5B", "3B") for way in ("full", "LoRA", "QLoRA 4 bits")),
    ]
)


def test_the_demos_task_is_learned_in_bf16(train: Train, record_property: Record) -> None:
    small = {"max_steps": 2, "eval_cases": 4} if IS_REHEARSAL else {"max_steps": 80, "eval_cases": 200}
    done = train(model="tiny", rl_env="envs.arithmetic", rl_prompts_per_step=16, batch_size=128, rl_max_new_tokens=8,
                 rl_loss_type="dapo", lr=4e-4, **small)  # fmt: skip

    result = json.loads((done.folder / "result.json").read_text(encoding="utf-8"))
    for when in ("before", "after"):
        score = result["scores"]["sampled"][when]
        record_property(f"score {when}", "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**score))
    if not IS_REHEARSAL:
        assert result["score_before"] <= 0.45
        assert result["score_after"] >= 0.85


@pytest.mark.parametrize(("shape", "way"), TRAININGS)
def test_a_model_trains_within_the_memory_of_its_plan(
    shape: str, way: str, train: Train, model_of: Models, record_property: Record
) -> None:
    options = {"model": model_of(shape), **WAYS[way]}
    if "quantization" in options:
        need_cuda("quantization")
        need_package("bitsandbytes", 'pip install "aitrain[quantization]"')
    planned = planned_mib(TrainConfig(**{**SETTINGS, **options}))
    done = train(**options)

    record_property("planned MiB", planned)
    assert done.probe["trained"] == ["torch.float32"]
    if not IS_REHEARSAL:
        real = done.probe["peak_mib"]
        record_property("real MiB", real)
        record_property("reserved MiB", done.probe["reserved_mib"])
        record_property("plan / real", planned / real)
        assert done.probe["devices"] == ["cuda"]
        assert done.probe["bf16"]
        assert abs(planned / real - 1) <= OFF


def test_a_resumed_run_samples_what_it_would_have_sampled(train: Train, model_of: Models) -> None:
    """The rollout of the first step after the checkpoint is the same. What comes later need not be: a GPU's backward
    passes add up in another order every time."""
    model = model_of(TRAININGS[0][0])
    keep = {"model": model, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 5}
    whole = train(**keep)
    sampled = rollout_of(whole.folder, 3)
    shutil.rmtree(whole.folder / "checkpoints" / "checkpoint-4")
    (whole.folder / "result.json").unlink()
    resumed = train(**keep, resume_from_checkpoint="auto")

    assert rollout_of(resumed.folder, 3) == sampled
    assert len(sampled) == SETTINGS["rl_prompts_per_step"] * SETTINGS["rl_num_generations"]


def rollout_of(folder: Any, step: int) -> list[Any]:
    """The messages of a step's episodes."""
    return [record["messages"] for record in episodes_of(folder) if record["step"] == step]
