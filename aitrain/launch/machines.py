"""Finds the machines and processes of a run: by the options, or by variables of torchrun, SLURM, MPI and Kubernetes."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig

DEFAULT_PORT = TrainConfig.model_fields["master_port"].default
PORTS = range(20000, 30000)
"""Ports for jobs that have no MASTER_PORT, so that jobs that share a machine do not meet each other."""
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Environment variables from which torch's `env://` knows the other processes."""
FOREIGN = ("ACCELERATE_", "GROUP_RANK", "ROLE_RANK", "PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL")
"""Beginnings of variables of launchers that accelerate or torch would read in a training process."""
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""The variables of torch's launchers, of Open MPI and of MPICH: rank, all ranks, rank on its machine, ranks of the
machine."""


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


@dataclass(frozen=True)
class LaunchedRank:
    """One training process, and where all of them meet, whoever starts them."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    has_store: bool = False
    """Whether the launcher runs the TCPStore at this address; else node 0 does."""
    restarts: int = 0
    """How often the launcher has restarted all processes."""

    @property
    def node(self) -> int:
        """Number of this machine."""
        return self.rank // self.local_world

    @property
    def nodes(self) -> Nodes | None:
        """The machines; None for one."""
        count = self.world // self.local_world
        return None if count == 1 else Nodes(count, self.node, self.address, self.port)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables by which the process knows the others; none if it is alone."""
        if self.world == 1:
            return {}
        values = (self.rank, self.local_rank, self.world, self.local_world, self.address, self.port, self.has_store)
        return dict(zip(RANK_VARIABLES, map(str, values), strict=True))


def launched_rank(environ: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """The training process that torchrun, accelerate launch, srun or mpirun started with this command; None if it
    started one command on each machine, or nothing did.

    Raises:
        ConfigError: the processes are not spread evenly, or nothing says where they meet.
    """
    number = partial(_number, environ)
    tasks, nodes = number("SLURM_STEP_NUM_TASKS"), number("SLURM_STEP_NUM_NODES")
    variables = next((names for names in LAUNCHERS if {*names[:3]} <= environ.keys()), None)
    is_torch = variables == LAUNCHERS[0]
    for name, instead in (("FSDP", "--distributed-backend fsdp2"), ("DEEPSPEED", "--trl deepspeed=FILE")):
        if is_torch and environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise ConfigError(f"accelerate launch is set up for {name}, which is an option here\nUse {instead}.")
    if "SLURM_PROCID" in environ and tasks > nodes and not is_torch:
        if tasks % nodes:
            raise ConfigError(f"srun started {tasks} tasks on {nodes} nodes\nUse the same number on each of them.")
        share, local_rank = tasks // nodes, number("SLURM_LOCALID", 0)
        rank = number("SLURM_NODEID", 0) * share + local_rank
        found = LaunchedRank(rank, tasks, local_rank, share, *_slurm_place(environ))
    elif variables is not None:
        rank, world, local_rank = (number(name) for name in variables[:3])
        if world == 1 and "TORCHELASTIC_RUN_ID" not in environ:  # a single process that no torchrun restarts
            return None
        share = number(variables[3], world)
        if "MASTER_ADDR" not in environ and world > share:
            raise ConfigError(
                "The launcher does not say where the machines meet\nSet MASTER_ADDR to the name of the first one."
            )
        # on one machine, a port by the number of the process that started the ranks
        port = PORTS[os.getppid() % len(PORTS)] if world == share else DEFAULT_PORT
        found = LaunchedRank(
            rank,
            world,
            local_rank,
            share,
            environ.get("MASTER_ADDR", "127.0.0.1"),
            number("MASTER_PORT", port),
            environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            number("TORCHELASTIC_RESTART_COUNT", 0),
        )
    else:
        return None
    if found.world % found.local_world or found.rank % found.local_world != found.local_rank:
        raise ConfigError(
            f"The launcher made rank {found.rank} of {found.world} number {found.local_rank} of {found.local_world} on"
            " its machine\nStart the same number of processes on each machine, with consecutive ranks."
        )
    return found


def without_ranks() -> dict[str, str]:
    """The variables of this process but for those by which a launcher, or accelerate's, describes the ranks."""
    return {
        name: value for name, value in os.environ.items() if name not in RANK_VARIABLES and not name.startswith(FOREIGN)
    }


def _slurm_place(environ: Mapping[str, str]) -> tuple[str, int]:
    """The first machine of SLURM's step, and a port by the numbers of job and step."""
    number = partial(_number, environ)
    names = re.sub(r"\[(\w+)[^\]]*\]", r"\1", environ.get("SLURM_STEP_NODELIST", ""))  # `gpu[01-03,7],login`
    spread = number("SLURM_JOB_ID") * 7 + number("SLURM_STEP_ID", 0)
    address = environ.get("MASTER_ADDR", names.partition(",")[0])
    return address, number("MASTER_PORT", PORTS[spread % len(PORTS)])


def find_nodes(config: TrainConfig, environ: Mapping[str, str] = os.environ) -> Nodes | None:
    """The machines by the options, or by SLURM and other launchers; None for one machine.

    Raises:
        ConfigError: the options are incomplete.
    """
    if (rank := launched_rank(environ)) is not None:
        if config.nnodes is not None:
            raise ConfigError("nnodes: a launcher has chosen the machines already\nOmit it.")
        return rank.nodes
    given = given_machines(environ)
    count = config.nnodes or (given.count if given else 1)
    if count == 1:
        if config.nnodes is None and (config.node_rank is not None or config.master_addr is not None):
            raise ConfigError("node_rank: without --nnodes there is one machine\nAdd --nnodes, or omit --node-rank.")
        return None
    if given is not None and given.count == count:
        port = given.port if config.master_port == DEFAULT_PORT else config.master_port
        return Nodes(count, given.rank, config.master_addr or given.address, port)
    if config.node_rank is None or config.master_addr is None:
        missing = "node_rank" if config.node_rank is None else "master_addr"
        raise ConfigError(
            f"{missing}: {count} machines need it\nGive each machine its --node-rank (0 to {count - 1}), and all the"
            " --master-addr of machine 0."
        )
    if config.node_rank >= count:
        raise ConfigError(f"node_rank: {config.node_rank} of {count} machines; the ranks are 0 to {count - 1}")
    return Nodes(count, config.node_rank, config.master_addr, config.master_port)


def given_machines(environ: Mapping[str, str]) -> Nodes | None:
    """The machines by the variables of a launcher that started one command on each; None if there is one machine."""
    number = partial(_number, environ)
    tasks, nodes = number("SLURM_STEP_NUM_TASKS"), number("SLURM_STEP_NUM_NODES")
    if "SLURM_PROCID" in environ and tasks > 1:
        return Nodes(nodes, number("SLURM_NODEID", 0), *_slurm_place(environ))
    world = number("WORLD_SIZE")
    if world > 1 and {"RANK", "MASTER_ADDR"} <= environ.keys():
        port = number("MASTER_PORT", DEFAULT_PORT)
        return Nodes(world, number("RANK", 0), environ["MASTER_ADDR"], port)
    return None


def _number(environ: Mapping[str, str], name: str, default: int = 1) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else default
