"""Finds the machines of a run: by the options, by SLURM's step, or by the variables that Kubernetes operators set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig

PORTS = range(20000, 30000)
"""Ports for the steps of SLURM, so that jobs that share a machine do not meet each other."""
STARTED_HERE = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
"""Set by torchrun, accelerate launch and OpenMPI's mpirun in each process that they start."""
FOREIGN_VARIABLES = (
    *("GROUP_RANK", "ROLE_RANK", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)
"""Variables of other launchers that accelerate would read in a training process."""


@dataclass(frozen=True)
class Given:
    """Machines as a launcher has given them."""

    count: int
    rank: int
    address: str
    port: int | None


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, and which of them this one is."""

    count: int
    rank: int
    address: str
    """Of node 0, as the others reach it."""
    port: int

    @property
    def place(self) -> str:
        """Where the machines meet."""
        return f"{self.address}:{self.port}"


def find_nodes(config: TrainConfig, environ: Mapping[str, str] = os.environ) -> Nodes | None:
    """The machines by the options, or by SLURM and other launchers; None for one machine.

    Raises:
        ConfigError: the options are incomplete, or this command was started several times on one machine.
    """
    given = given_machines(environ)
    count = config.nnodes or (given.count if given else 1)
    if count == 1:
        if config.nnodes is None and (config.node_rank is not None or config.master_addr is not None):
            raise ConfigError("node_rank: without --nnodes there is one machine\nAdd --nnodes, or omit --node-rank.")
        return None
    if given is not None and given.count == count:
        rank, address = given.rank, config.master_addr or given.address
        is_default = config.master_port == TrainConfig.model_fields["master_port"].default
        return Nodes(count, rank, address, given.port if is_default and given.port else config.master_port)
    if config.node_rank is None or config.master_addr is None:
        missing = "node_rank" if config.node_rank is None else "master_addr"
        raise ConfigError(
            f"{missing}: {count} machines need it\nGive each machine its --node-rank (0 to {count - 1}), and all the"
            " --master-addr of machine 0."
        )
    if config.node_rank >= count:
        raise ConfigError(f"node_rank: {config.node_rank} of {count} machines; the ranks are 0 to {count - 1}")
    return Nodes(count, config.node_rank, config.master_addr, config.master_port)


def given_machines(environ: Mapping[str, str]) -> Given | None:
    """The machines by the variables of a launcher that started one command on each; None if there is one machine.

    Raises:
        ConfigError: a launcher started several commands on a machine.
    """
    refuse_launchers(environ)
    tasks, nodes = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_STEP_NUM_NODES")
    if "SLURM_PROCID" in environ and tasks > 1:
        if tasks != nodes:
            raise ConfigError(
                f"srun started {tasks} tasks on {nodes} {'node' if nodes == 1 else 'nodes'}; aitrain starts the"
                " training processes of a machine itself\nUse srun --ntasks-per-node=1."
            )
        first = expand(environ.get("SLURM_STEP_NODELIST", ""))[0]
        spread = _number(environ, "SLURM_JOB_ID") * 7 + _number(environ, "SLURM_STEP_ID", 0)
        return Given(nodes, _number(environ, "SLURM_NODEID", 0), first, PORTS[spread % len(PORTS)])
    world = _number(environ, "WORLD_SIZE")
    if world > 1 and {"RANK", "MASTER_ADDR"} <= environ.keys():
        port = environ.get("MASTER_PORT", "")
        return Given(world, _number(environ, "RANK", 0), environ["MASTER_ADDR"], int(port) if port.isdigit() else None)
    return None


def refuse_launchers(environ: Mapping[str, str]) -> None:
    """Refuse to be one of several processes that another launcher started on this machine.

    Raises:
        ConfigError: it did.
    """
    count = max(_number(environ, "WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_SIZE"))
    if not any(name in environ for name in STARTED_HERE):
        count = 1
    mpich = max(_number(environ, "PMI_SIZE"), _number(environ, "MV2_COMM_WORLD_SIZE"))
    if mpich != _number(environ, "SLURM_STEP_NUM_TASKS"):  # else srun has set it (--mpi=pmi2)
        count = max(count, mpich)
    if count > 1:
        raise ConfigError(
            f"torchrun, accelerate launch or mpirun started this command {count} times; aitrain starts its training"
            " processes itself\nRun the command alone with --num-processes; on several machines once on each, with"
            " --nnodes, --node-rank and --master-addr."
        )


def idle_nodes(environ: Mapping[str, str]) -> int:
    """Number of further machines of a SLURM job in whose batch script this command runs without srun."""
    in_step = "SLURM_STEP_NUM_TASKS" in environ
    return 0 if in_step or "SLURM_JOB_ID" not in environ else _number(environ, "SLURM_JOB_NUM_NODES") - 1


def expand(nodelist: str) -> list[str]:
    """Names in SLURM's short form: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7, login."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        pieces = re.split(r"\[([^\]]*)\]", part)
        made = [pieces[0]]
        for numbers, after in zip(pieces[1::2], pieces[2::2], strict=True):
            made = [f"{name}{number}{after}" for name in made for number in _numbers(numbers)]
        names += made
    return names


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for piece in text.split(","):
        low, _, high = piece.partition("-")
        found += [f"{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]
    return found


def _number(environ: Mapping[str, str], name: str, default: int = 1) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else default
