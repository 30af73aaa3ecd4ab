"""Starts and shuts down the process group, and explains timeouts of collective operations."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from aitrain.errors import RunFailed
from aitrain.options.train import TrainConfig
from aitrain.runs.heartbeat import Progress
from aitrain.runs.node_info import NodeInfo
from aitrain.training.model import Precision

TIMEOUT_MESSAGES = ("timed out waiting", "timeout caused", "watchdog caught collective", "wait timeout")
"""Parts of the timeout messages of gloo and NCCL, in lower case."""


def init_processes(config: TrainConfig, precision: Precision) -> int:
    """Number of processes. Starts gloo on the CPU, where transformers ignores `ddp_timeout` and waits 30 minutes."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1 and precision.use_cpu and not torch.distributed.is_initialized():
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")  # accelerate's name, cpu:0, is refused by torch.load
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=config.ddp_timeout))
    return count


@contextmanager
def explain_timeout(config: TrainConfig) -> Iterator[None]:
    """Turn a collective operation's timeout into a RunFailed that names the rank.

    Raises:
        RunFailed: another rank did not answer within `ddp_timeout` seconds.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error).lower() for words in TIMEOUT_MESSAGES):
            raise
        raise RunFailed(
            f"Rank {os.environ.get('RANK')} timed out after {config.ddp_timeout} seconds waiting for another rank"
            " (--ddp-timeout).\n"
            "See the end of train.log for the last output of each rank; continue with --resume."
        ) from error


def shutdown_group() -> None:
    """Shut down the process group on all ranks together; a rank that communicates with an ended one would abort."""
    state = PartialState()
    if state.num_processes > 1:
        state.wait_for_everyone()
        state.destroy_process_group()


def note_processes(progress: Progress) -> None:
    """Note the training processes of the first machine, and the machines if there are several. Every rank must call
    this."""
    state, has_gpu = PartialState(), PartialState().device.type != "cpu"
    own = NodeInfo(0, socket.gethostname(), _own_address(), int(has_gpu), (os.getpid(),))
    machines: dict[int, list[NodeInfo]] = {}
    # ranks of a machine are consecutive
    for first, rank in gather_object([(state.process_index - state.local_process_index, own)]):
        machines.setdefault(first, []).append(rank)
    nodes = [
        replace(
            ranks[0], rank=number, gpus=sum(r.gpus for r in ranks), pids=tuple(pid for r in ranks for pid in r.pids)
        )
        for number, ranks in enumerate(machines.values())
    ]
    progress.pids, progress.nodes = list(nodes[0].pids), nodes if len(nodes) > 1 else []


def _own_address() -> str:
    """The address from which this machine reaches the first one; empty if that is a loopback address."""
    master = os.environ.get("MASTER_ADDR", "")
    with socket.socket(socket.AF_INET6 if ":" in master else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing
        except OSError:
            return ""
        address = str(probe.getsockname()[0])
    return "" if address.startswith("127.") or address == "::1" else address
