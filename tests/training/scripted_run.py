"""Train with completions that are written down: `scripted_run.py MODEL OUT BACKEND JOB...`, one process of a group.

Eight completions a step whatever the number of processes, so that the only difference is who computes what. All runs of
a group share its processes, as importing torch and TRL takes longer than the runs.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import state
from accelerate.utils import DistributedType

from aitrain.engines import scopes
from aitrain.engines.hf import HFEngine
from aitrain.engines.weight_sync import AdapterSync, DiskSync
from aitrain.environment.runner import start_runner
from aitrain.jobs.env_loading import describe_run
from aitrain.jobs.grpo import run
from aitrain.jobs.worker import EventChannel, exit_now
from aitrain.options import train
from aitrain.options.train import FSDP_SMALL, TrainConfig
from aitrain.rollout.engine import Completion, GenerationRequest
from aitrain.runs.checkpoint import PREFIX
from aitrain.runs.run_folder import RunFolder
from aitrain.training import passes, sharding
from aitrain.training.distributed import init_processes, shutdown_group
from aitrain.training.model import choose_precision
from aitrain.training.run_context import RunContext
from aitrain.training.trainer import EpisodeTrainer

ANSWERS = ["abz", "zzzzz", "bcd", "mno", "y", "aaaaaa", "nnm", "xyab"]


def early_letters(text: str) -> float:
    """The share of letters below n."""
    return sum(letter < "n" for letter in text) / max(1, len(text))


class Scripted:
    """Rewards letters below n, as the answers have them in different shares. A step holds the last case of an epoch and
    the first of the next."""

    concurrent = True  # rows of a batch are answered by their places

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}:"} for number in range(7)]

    def score_episode(self, completion: str) -> float:
        return early_letters(completion)


class ScriptedTalk(Scripted):
    """The same over several turns, more of them for some cases and answers than for others."""

    score_episode = None  # type: ignore[assignment]

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        said = reply = yield None
        for turn in range(case_idx % 3 + len(reply) % 2):
            reply = yield f" more {turn}:"
            said += reply
        return early_letters(said)


class Unscored(Scripted):
    """Every second case has no score, so that a process may have none at all."""

    def score_episode(self, completion: str, case_idx: int) -> float | None:  # type: ignore[override]
        return None if case_idx % 2 else super().score_episode(completion)


class UnscoredTalk(ScriptedTalk):
    """Several turns; the last of the accumulated passes may have no score at all."""

    def episode(self, case_idx: int) -> Any:
        score = yield from super().episode(case_idx)
        return None if case_idx % 3 == 2 else score


class Endless(Scripted):
    """In every second case the environment never stops asking."""

    score_episode = None  # type: ignore[assignment]

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        reply = yield None
        while case_idx % 2:
            yield " more:"
        return early_letters(reply)


class Evaluated(Scripted):
    """With completions that the environment samples itself; every other held-out prompt is the same."""

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": "say:" if number % 2 else f"tell {number}:", "case_idx": number} for number in range(9)]

    def score_episode(self, model: Any, tokenizer: Any, completion: str) -> Any:  # type: ignore[override]
        ids = tokenizer([f"{completion} more:"] * 2, return_tensors="pt")
        said = model.generate(**ids, do_sample=True, top_k=0, max_new_tokens=5)
        own = float(said[:, ids["input_ids"].shape[1] :].sum())
        return {"score": super().score_episode(completion), "own": own}


def scripted_sample(self: HFEngine, rows: list[GenerationRequest], *_: Any) -> list[Completion]:
    """In the place of sampling: the answer depends on what was said before, and on how many others of the group have
    said the same, so that it is the same for any number of processes."""
    seen: Counter[int] = Counter()
    answers = []
    for ids in (row.prompt_ids for row in rows):
        answers.append(ANSWERS[(seen[sum(ids)] + sum(ids)) % len(ANSWERS)] + "<|im_end|>")
        seen[sum(ids)] += 1
    return [Completion(ids) for ids in self.tokenizer(answers)["input_ids"]]


# -- the runs

OPTIONS: dict[str, Any] = {
    "rl_num_generations": 4, "max_steps": 4, "lr": 1e-3, "rl_kl_coef": 0.0, "eval_cases": 0, "rl_max_new_tokens": 8,
    "rl_check": False,
}  # fmt: skip
SHARED_OUT = {"rl_prompts_per_step": 2, "batch_size": 4, "rl_trim_padding": False, "save_strategy": "no"}
REWARDS = {"rl_kl_coef": 0.1, "rl_overlong_buffer": 6}
LOSS = {"rl_kl_coef": 0.1, "custom_loss": "tests/environments/extensions.py:likelihood"}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {}, "grpo-talk": {"environment": ScriptedTalk},
    "grpo-unscored": {"environment": Unscored}, "dapo-unscored": {"environment": Unscored},
    "dr_grpo-rewards": {"environment": ScriptedTalk, **REWARDS}, "dr_grpo-custom": {"environment": Unscored, **LOSS},
}  # fmt: skip
"""Each loss, named first; with several turns, cases without a score, and parts of ours."""

SAVED = {"gradient_accumulation": 1, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}
MANY_TURNS = SAVED | {"environment": UnscoredTalk, "rl_kl_coef": 0.1, "gradient_accumulation": 2, "eval_cases": 2}
JOBS: dict[str, dict[str, Any]] = {
    **{name: SHARED_OUT | {"rl_loss_type": name.partition("-")[0], **more} for name, more in KINDS.items()},
    "held-out": SHARED_OUT | {"environment": Evaluated, "sample": HFEngine.sample, "eval_cases": 9, "max_steps": 1},
    "talk": MANY_TURNS | {"rl_trim_padding": False},
    "trimmed": MANY_TURNS | {"tokens_per_pass": 40, "is_large": True},
    # without clipping, whose norm adds the parts up in another order, an adapter's weights are equal to the last bit
    "adapter": SAVED | {"environment": ScriptedTalk, "peft": True, "lora_r": 4, "rl_kl_coef": 0.1,
                        "max_grad_norm": 1e6, "merge_adapter": False, "share_prefixes": False},
}  # fmt: skip
"""Options of the runs, beside OPTIONS; with `is_large` the model counts as one of a billion weights or more."""


def shard_on_cpu() -> None:
    """Let accelerate 1.15 shard on the CPU: its AcceleratorState turns MULTI_GPU into FSDP, but never MULTI_CPU, so
    that an FSDP plugin is silently ignored there."""
    make = state.AcceleratorState.__init__

    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **keywords: Any) -> None:
        make(self, *arguments, fsdp_plugin=fsdp_plugin, **keywords)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = init
    sharding.UNSHARDED_DEVICES = ()


def main(model: str, out: Path, backend: str, jobs: list[str]) -> None:
    # two thirds of a short run: see conftest.py
    scopes.gc = SimpleNamespace(collect=int, freeze=int, unfreeze=int)  # type: ignore[assignment]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if backend == "fsdp2":
        shard_on_cpu()
    trainers: list[EpisodeTrainer] = []
    make = EpisodeTrainer.__init__

    def kept(self: EpisodeTrainer, *arguments: Any) -> None:
        make(self, *arguments)
        trainers.append(self)

    EpisodeTrainer.__init__ = kept  # type: ignore[method-assign]
    passes.LEAST_GAIN = -math.inf  # prompts are shared wherever padding is trimmed
    for job in jobs:
        name, _, resumed_from = job.partition("<")
        options = {"batch_size": 8 // world, **OPTIONS, **JOBS[name.partition("-resumed")[0]]}
        environment, limit = options.pop("environment", Scripted)(), 0 if options.pop("is_large", False) else FSDP_SMALL
        for module in (train, sharding):
            module.FSDP_SMALL = limit  # type: ignore[attr-defined]
        HFEngine.sample = options.pop("sample", scripted_sample)  # type: ignore[method-assign]
        place = {"model": model, "output_dir": str(out), "project_name": name}
        config = TrainConfig(**place, resume_anyway=True, distributed_backend=backend, **options)
        folder = RunFolder(out / name)
        checkpoint = folder.checkpoints / f"{PREFIX}2" if resumed_from else None
        if rank == 0:
            folder.path.mkdir(parents=True)
            if checkpoint is not None:
                shutil.copytree(out / resumed_from / "checkpoints" / checkpoint.name, checkpoint)
        runner = start_runner(environment, config)
        context = RunContext(config, folder, runner, lambda _: None, describe_run)
        if checkpoint is not None:
            init_processes(config, choose_precision(config))
            torch.distributed.barrier()
            context = replace(context, checkpoint=checkpoint)
        run(context)
        if backend == "fsdp2" and not resumed_from:
            sync(trainers[-1], folder.path, rank)
        trainers.clear()
    shutdown_group()


def sync(trainer: EpisodeTrainer, folder: Path, rank: int) -> None:
    """Write the weights for a vLLM server after a forward pass without gradients."""
    with scopes.evaluation_mode(trainer.model):
        trainer.model(torch.tensor([[1, 2, 3], [4, 5, 0]]))
    version = "step-4-load-1"
    is_adapter = hasattr(trainer.model, "peft_config")
    whole = DiskSync(trainer.model, folder / "disk", rank == 0, torch.bfloat16 if is_adapter else None)
    for written in (whole, *([AdapterSync(trainer.model, folder / "adapter", rank == 0)] if is_adapter else [])):
        written.write(version)
        if rank == 0:
            shutil.copytree(written.path(version), folder / f"by-{written.folder.name}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    exit_now(0, EventChannel(sys.stdout, rank=0))
