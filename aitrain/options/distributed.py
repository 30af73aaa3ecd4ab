"""Options of training in several processes: how the model is distributed, on which machines, and by which launcher."""

from collections.abc import Iterable
from typing import Literal

from aitrain.options.section import Options, ResumeSafe, Rule
from aitrain.options.value_types import JsonFile, NonNegativeInt, PositiveInt, ZeROStage

SET_BY_OPTIONS = {
    "train_batch_size": "--batch-size",
    "train_micro_batch_size_per_gpu": "--batch-size",
    "gradient_accumulation_steps": "--gradient-accumulation",
    "gradient_clipping": "--max-grad-norm",
    "optimizer": "--optimizer, --lr and --weight-decay",
    "scheduler": "--scheduler and --warmup-ratio",
    "bf16": "--mixed-precision bf16",
    "fp16": "--mixed-precision fp16",
}
"""Entries of a DeepSpeed configuration that options stand for."""

READERS = ("checkpoint", "datastates_ckpt")
"""Entries with which DeepSpeed reads its checkpoints, which are pickles, with functions other than the one that
training/zero.py replaces."""


class DistributedOptions(Options):
    """Several GPUs, several machines."""

    section = "Several GPUs and machines"

    distributed_backend: ResumeSafe[Literal["ddp", "fsdp2", "deepspeed"]] = "ddp"
    """How several processes hold the model: ddp, each all of it; fsdp2, each a part; deepspeed, ZeRO."""
    zero_stage: ResumeSafe[ZeROStage] = 2
    """DeepSpeed's ZeRO stage: 2 shards gradients and optimizer state, 3 the weights as well."""
    deepspeed_config: ResumeSafe[JsonFile | None] = None
    """A DeepSpeed configuration file in JSON, instead of --zero-stage; its contents are kept in config.yaml."""
    allow_pickle: ResumeSafe[bool] = False
    """Load DeepSpeed's checkpoints, which are pickles, even if they could run code; see docs/sharding.md."""
    nnodes: ResumeSafe[PositiveInt | None] = None
    """Machines that train together; unset: one, or those of the SLURM step."""
    node_rank: ResumeSafe[NonNegativeInt | None] = None
    """Which of the machines this is, 0 to N-1; unset: that of the SLURM step."""
    master_addr: ResumeSafe[str | None] = None
    """Address of machine 0, as the others reach it; unset: that of the SLURM step."""
    master_port: ResumeSafe[PositiveInt] = 29400
    """Port on machine 0 where the machines meet."""
    launcher: ResumeSafe[Literal["local", "ray"]] = "local"
    """What starts the training processes: this command, or Ray Train on a Ray cluster."""
    ray_address: ResumeSafe[str | None] = None
    """Address of the Ray cluster, such as 10.0.0.1:6379 or auto; unset: RAY_ADDRESS, else a cluster on this machine."""
    max_failures: ResumeSafe[NonNegativeInt] = 3
    """How often Ray restarts the training from its newest checkpoint after a process or a machine is lost."""

    @property
    def zero(self) -> int | None:
        """The ZeRO stage that the run trains with; None without DeepSpeed."""
        if self.distributed_backend != "deepspeed":
            return None
        given = (self.deepspeed_config or {}).get("zero_optimization")
        stage = given.get("stage") if isinstance(given, dict) else None
        return stage if isinstance(stage, int) else self.zero_stage

    def rules(self) -> Iterable[Rule]:
        """Options of one backend or launcher are not given to another one."""
        return [*self._deepspeed_rules(), *self._launcher_rules()]

    def _deepspeed_rules(self) -> list[Rule]:
        changed = self.changed()
        given = [name for name in ("zero_stage", "deepspeed_config", "allow_pickle") if name in changed]
        stated = next((name for name in SET_BY_OPTIONS if not _is_auto((self.deepspeed_config or {}).get(name))), "")
        reader = next((name for name in READERS if name in (self.deepspeed_config or {})), "")
        return [
            (
                bool(reader) and not self.allow_pickle,
                f"deepspeed_config: with {reader} DeepSpeed loads checkpoints in ways that could run code in them\n"
                "Remove it from the file, or add --allow-pickle if you know who wrote the checkpoints.",
            ),
            (
                bool(given) and self.distributed_backend != "deepspeed",
                f"{', '.join(given)}: {self.distributed_backend} has no such setting\n"
                "Add --distributed-backend deepspeed, or leave it out.",
            ),
            (
                self.zero is not None and self.zero_stage not in (self.zero, 2),
                "zero_stage: the file of --deepspeed-config has the stage: leave one of the two out",
            ),
            (
                bool(stated),
                f"deepspeed_config: {stated} follows from options: use {SET_BY_OPTIONS.get(stated)}\n"
                "Remove it from the file, or set it to auto.",
            ),
            (
                self.zero not in (None, 2, 3),
                f"deepspeed_config: ZeRO stage {self.zero} is not supported\nUse stage 2 or 3.",
            ),
        ]

    def _launcher_rules(self) -> list[Rule]:
        is_on_ray = self.launcher == "ray"
        return [
            (
                is_on_ray and not (self.nnodes in (None, 1) and self.node_rank is None and self.master_addr is None),
                "launcher: ray chooses the machines itself: leave out --nnodes, --node-rank and --master-addr",
            ),
            (
                not is_on_ray and self.max_failures != DistributedOptions.model_fields["max_failures"].default,
                "max_failures: only Ray restarts a training: add --launcher ray",
            ),
        ]


def _is_auto(value: object) -> bool:
    """Whether a value of a DeepSpeed configuration is left to the trainer."""
    return value in (None, "auto") or (isinstance(value, dict) and value.get("enabled") == "auto")
