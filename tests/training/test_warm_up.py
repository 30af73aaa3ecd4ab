"""What is done before the first step, the warm-up: nothing of it is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aitrain import RunFailed, TrainConfig
from aitrain.batch import PassLimit
from aitrain.jobs import grpo
from aitrain.training import warm_up
from aitrain.training.trainer import EpisodeTrainer
from tests.finished_runs import Words
from tests.training.conftest import Train
from tests.training.test_resume import assert_same


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Warm up on the CPU, too; the shapes that went through the loss."""
    shapes: list[tuple[int, ...]] = []
    compute = EpisodeTrainer.loss_of_pass

    def seen(trainer: Any, model: Any, inputs: Any, divisor: float) -> Any:
        shapes.append((*inputs["prompt_ids"].shape, inputs["completion_ids"].shape[1]))
        return compute(trainer, model, inputs, divisor)

    monkeypatch.setattr(grpo, "can_warm_up", lambda trainer: True)
    monkeypatch.setattr(EpisodeTrainer, "loss_of_pass", seen)
    return shapes


@pytest.mark.slow
def test_a_run_is_the_same_with_and_without_it(train: Train, as_on_gpus: list[tuple[int, ...]]) -> None:
    options = {
        "peft": True, "lora_dropout": 0.1, "merge_adapter": False,
        "rl_entropy_coef": 0.01, "trl": {"use_adaptive_entropy": True, "entropy_target": 9.0},
    }  # fmt: skip
    with_it = train(Words(), project_name="with", **options)
    without = train(Words(), project_name="without", warm_up=False, **options)

    rows, prompt, completion = as_on_gpus[0]
    assert (rows, prompt, completion) == (2, max(shape[1] for shape in as_on_gpus), 6)
    assert_same(with_it.folder, without.folder)


@pytest.mark.parametrize("peft", [False, True])
def test_what_comes_before_the_training_computes_in_its_number_format(
    peft: bool, train: Train, as_on_gpus: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up, held-out cases, and the choice of the passes."""
    seen, linear = set[bool](), torch.nn.functional.linear

    def watched(*given: Any) -> torch.Tensor:
        seen.add(torch.is_autocast_enabled("cpu"))
        return linear(*given)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    train(Words(), mixed_precision="bf16", max_steps=1, peft=peft)
    assert seen == {True}


def test_too_little_memory_shows_before_anything_is_sampled(
    train: Train, as_on_gpus: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    monkeypatch.setattr(EpisodeTrainer, "loss_of_pass", full)
    with pytest.raises(RunFailed) as failure:
        train(Words())
    assert "Out of memory in the warm-up" in str(failure.value)
    assert "Use --peft" in str(failure.value)


def test_the_longest_episode_of_several_turns_is_that_of_all_its_turns_within_the_context() -> None:
    def longest(turns: int, episode: int | None = None, context: int | None = None) -> int:
        config = TrainConfig(rl_max_turns=turns, rl_max_new_tokens=100, rl_max_episode_tokens=episode)
        runner = SimpleNamespace(parts={"": SimpleNamespace(has_sessions=turns > 1, config=config)})
        prompts = {"": SimpleNamespace(length_of=lambda case: 10)}
        split = SimpleNamespace(train=[SimpleNamespace(env="")])
        parts: Any = SimpleNamespace(runner=runner, prompts=prompts, split=split, context_tokens=context)
        return warm_up.longest_shapes(parts).completion

    assert longest(turns=1) == 100
    assert longest(turns=4) == 400
    assert longest(turns=4, episode=250) == 250
    assert longest(turns=4, context=200) == 190


@pytest.mark.parametrize(("fits", "expected"), [(16, 16), (5, 4), (1, 1)])
def test_a_pass_is_halved_until_it_fits_on_every_rank(
    fits: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: Any = SimpleNamespace(
        pass_limit=PassLimit(64), trims=True, is_fsdp_enabled=False,
        args=SimpleNamespace(per_device_train_batch_size=16),
        accelerator=SimpleNamespace(
            device="cpu", reduce=lambda failed, reduction: failed, gather=None, pad_across_processes=None
        ),
    )  # fmt: skip

    def full(trainer: Any, lengths: Any) -> None:
        if trainer.pass_limit.largest(10, 16)[0] > fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(warm_up, "warm_up", full)
    assert warm_up.fit_passes(trainer, warm_up.LongestShapes(4, 6)).largest(10, 16)[0] == expected
