"""Options of training in several processes: how the model is distributed, on which machines, and by which launcher."""

from collections.abc import Iterator
from typing import Literal

from aitrain.options.section import Options, ResumeSafe
from aitrain.options.value_types import NonNegativeInt, PositiveInt


class DistributedOptions(Options):
    """Several GPUs, several machines."""

    section = "Several GPUs and machines"

    distributed_backend: ResumeSafe[Literal["ddp", "fsdp2"]] = "ddp"
    """How several processes hold the model: ddp, each all of it; fsdp2, each a part."""
    nnodes: ResumeSafe[PositiveInt | None] = None
    """Machines that train together; unset: one, or those of SLURM and other launchers."""
    node_rank: ResumeSafe[NonNegativeInt | None] = None
    """Which of the machines this is, 0 to N-1; unset: that of the launcher."""
    master_addr: ResumeSafe[str | None] = None
    """Address of machine 0, as the others reach it; unset: that of the launcher."""
    master_port: ResumeSafe[PositiveInt] = 29400
    """Port on machine 0 where the machines meet."""
    launcher: ResumeSafe[Literal["local", "ray"]] = "local"
    """What starts the training processes: this command, or Ray Train on a Ray cluster."""
    ray_address: ResumeSafe[str | None] = None
    """Address of the Ray cluster, such as 10.0.0.1:6379 or auto; unset: RAY_ADDRESS, else a cluster on this machine."""
    max_failures: ResumeSafe[NonNegativeInt] = 3
    """How often Ray restarts the training from its newest checkpoint after a process or a machine is lost."""

    def rules(self) -> Iterator[str]:
        """Options of one launcher are not given to another one."""
        is_here = self.nnodes in (None, 1) and self.node_rank is None and self.master_addr is None
        if self.launcher == "ray" and not is_here:
            yield "launcher: ray chooses the machines itself: leave out nnodes, node_rank and master_addr"
        if self.launcher != "ray" and self.max_failures != DistributedOptions.model_fields["max_failures"].default:
            yield "max_failures: only Ray restarts a training: add launcher ray"
