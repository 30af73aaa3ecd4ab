"""Starts and shuts down the process group, and explains timeouts of collective operations."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch._C._distributed_c10d import Store, TCPStore
from transformers import TrainerControl

from aitrain.errors import RunFailed
from aitrain.events import STORE_VARIABLE
from aitrain.options.train import TrainConfig
from aitrain.training.model import Precision

T = TypeVar("T")

TIMEOUT_MESSAGES = ("timed out waiting", "timeout caused", "watchdog caught collective", "wait timeout")
"""Parts of the timeout messages of gloo and NCCL, in lower case."""


_stores: list[Store] = []
"""The store that this process runs for all ranks of a machine."""


def init_processes(config: TrainConfig, precision: Precision) -> int:
    """Number of processes. Starts gloo on the CPU, where transformers ignores `ddp_timeout` and waits 30 minutes."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if listener := os.environ.pop(STORE_VARIABLE, None):  # torch itself would listen on all addresses
        place = "127.0.0.1", int(os.environ["MASTER_PORT"])
        store = TCPStore(*place, None, True, wait_for_workers=False, master_listen_fd=int(listener))
        _stores.append(store)
    if count > 1 and precision.use_cpu and not torch.distributed.is_initialized():
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")  # accelerate's name, cpu:0, is refused by torch.load
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=config.ddp_timeout))
    return count


def thread_gather(timeout: int) -> Callable[[list[Any]], list[Any]]:
    """A function that joins lists of all ranks, in a process group of its own: a thread may call it while others use
    the training's group. Every rank must call this."""
    group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def gather(values: list[Any]) -> list[Any]:
        lists: list[list[Any]] = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(lists, values, group=group)
        return [value for part in lists for value in part]

    return gather


def of_first(value: T) -> T:
    """The value that the first process has. Every process must call this."""
    values = [value]
    broadcast_object_list(values)
    return values[0]


def agree_on(control: TrainerControl) -> bool:
    """Make all ranks log or save if a callback on any of them asked for it. Returns whether one asked for an
    evaluation, which transformers cannot make: it has no held-out cases. Every rank must call this."""
    asked = gather_object([(control.should_log, control.should_save, control.should_evaluate)])
    control.should_log, control.should_save, is_evaluation_due = map(any, zip(*asked, strict=True))
    control.should_evaluate = False
    return is_evaluation_due


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
