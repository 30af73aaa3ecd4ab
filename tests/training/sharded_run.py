"""Train with scripted completions: `sharded_run.py MODEL OUT BACKEND JOB...`, one process of a group.

All runs of a backend share a process, as importing torch and TRL takes longer than the runs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cpu_sharding")]
if sys.argv[3] == "fsdp2":
    import shard_on_cpu  # type: ignore[import-not-found]  # noqa: F401

import torch  # noqa: E402

from aitrain.engines import scopes  # noqa: E402
from aitrain.engines.hf import HFEngine  # noqa: E402
from aitrain.engines.logprob_check import SharedForward  # noqa: E402
from aitrain.engines.sharded_tensors import own_part  # noqa: E402
from aitrain.engines.weight_sync import AdapterSync, DiskSync, WeightVersion  # noqa: E402
from aitrain.environment.runner import start_runner  # noqa: E402
from aitrain.jobs.grpo import run  # noqa: E402
from aitrain.jobs.worker import exit_now  # noqa: E402
from aitrain.options.train import TrainConfig  # noqa: E402
from aitrain.runs.checkpoint import PREFIX  # noqa: E402
from aitrain.runs.run_folder import RunFolder  # noqa: E402
from aitrain.training import passes  # noqa: E402
from aitrain.training.distributed import shutdown_group  # noqa: E402
from aitrain.training.run_context import RunContext  # noqa: E402
from aitrain.training.trainer import EpisodeTrainer  # noqa: E402
from tests.training.scripted_run import Scripted, ScriptedTalk, scripted_sample  # noqa: E402

RANK = int(os.environ["RANK"])
SHARDED: dict[str, object] = {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
ONE_COPY: dict[str, object] = {"fsdp_config": {"cpu_ram_efficient_loading": True, "reshard_after_forward": True}}
ADAPTER = {
    "peft": True, "lora_r": 4, "rl_kl_coef": 0.1, "max_grad_norm": 1e6, "merge_adapter": False, "share_prefixes": False,
}  # fmt: skip
"""Without clipping, whose norm adds the parts up in another order, an adapter's weights are equal to the last bit."""


class Unscored(ScriptedTalk):
    """Several turns; the last of the accumulated passes may have no score at all."""

    def episode(self, case_idx: int) -> Any:
        score = yield from super().episode(case_idx)
        return None if case_idx % 3 == 2 else score


TALK: dict[str, Any] = {"environment": Unscored, "rl_kl_coef": 0.1, "gradient_accumulation": 2, "eval_cases": 2}
JOBS: dict[str, dict[str, Any]] = {
    "talk": TALK | {"rl_trim_padding": False},
    "trimmed": TALK | {"tokens_per_pass": 40},
    "adapter": ADAPTER,
    "sampled": {"environment": Scripted, "sample": HFEngine.sample, "eval_cases": 2},
    "one-copy": TALK | {"trl": ONE_COPY},
    "shards": {"gradient_accumulation": 2, "trl": SHARDED},
}
"""Options of the runs, beside OPTIONS."""

OPTIONS: dict[str, Any] = {
    "batch_size": 8 // int(os.environ["WORLD_SIZE"]), "gradient_accumulation": 1, "rl_num_generations": 4,
    "max_steps": 4, "lr": 1e-3, "rl_kl_coef": 0.0, "eval_cases": 0, "rl_max_new_tokens": 8, "save_strategy": "steps",
    "save_steps": 2, "save_total_limit": 3, "rl_check": False,
}  # fmt: skip


def main(model: str, out: Path, backend: str, jobs: list[str]) -> None:
    # two thirds of a short run: see conftest.py
    scopes.gc = SimpleNamespace(collect=int, freeze=int, unfreeze=int)  # type: ignore[assignment]
    trainers: list[EpisodeTrainer] = []
    make = EpisodeTrainer.__init__

    def kept(self: EpisodeTrainer, *arguments: Any) -> None:
        make(self, *arguments)
        trainers.append(self)

    EpisodeTrainer.__init__ = kept  # type: ignore[method-assign]
    passes.LEAST_GAIN = -math.inf  # prompts are shared wherever padding is trimmed
    for job in jobs:
        name, _, resumed_from = job.partition("<")
        options = OPTIONS | JOBS[name.partition("-resumed")[0]]
        environment = options.pop("environment", ScriptedTalk)()
        HFEngine.sample = options.pop("sample", scripted_sample)  # type: ignore[method-assign]
        checkpoint = out / name / "checkpoints" / f"{PREFIX}2" if resumed_from else None
        config = TrainConfig(
            model=model,
            output_dir=str(out),
            project_name=name,
            resume_anyway=True,
            distributed_backend=backend,
            **options,
        )
        folder = RunFolder(out / name)
        if RANK == 0:
            folder.path.mkdir(parents=True)
            if checkpoint is not None:
                shutil.copytree(out / resumed_from / "checkpoints" / checkpoint.name, checkpoint)
        context = RunContext(config, folder, start_runner(environment, config), lambda _: None)
        if checkpoint is not None:
            torch_barrier(config)
            context = replace(context, checkpoint=checkpoint)
        run(context)
        (trainer,) = trainers
        trainers.clear()
        (folder.path / f"rank{RANK}.json").write_text(json.dumps(held(trainer)))
        if backend == "fsdp2" and not resumed_from:
            sync(trainer, folder.path)
    shutdown_group()


def torch_barrier(config: TrainConfig) -> None:
    from aitrain.training.distributed import init_processes
    from aitrain.training.model import choose_precision

    init_processes(config, choose_precision(config))
    torch.distributed.barrier()


def held(trainer: EpisodeTrainer) -> dict[str, int]:
    """Weights of the model, and how many of them this process holds."""
    parameters = list(trainer.model.parameters())
    own = (own_part(parameter) for parameter in parameters)
    return {"all": sum(p.numel() for p in parameters), "own": sum(p.numel() for p in own)}


def sync(trainer: EpisodeTrainer, folder: Path) -> None:
    """Write the weights for a vLLM server after a forward pass without gradients."""
    forward, version = SharedForward(trainer.model, RANK == 0, is_shared=True), WeightVersion(4, 1)
    with forward.led_by_main():
        if RANK == 0:
            forward.logits([[1, 2, 3], [4, 5]])
    is_adapter = hasattr(trainer.model, "peft_config")
    whole = DiskSync(trainer.model, folder / "disk", RANK == 0, torch.bfloat16 if is_adapter else None)
    for written in (whole, *([AdapterSync(trainer.model, folder / "adapter", RANK == 0)] if is_adapter else [])):
        size = written.write(version)
        assert (size > 0) == (RANK == 0)
        if RANK == 0:
            shutil.copytree(written.path(version), folder / f"by-{written.folder.name}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    exit_now(0)
