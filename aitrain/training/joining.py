"""Training processes: how they find each other, and what is said when one of them no longer answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from aitrain.errors import RunFailed
from aitrain.options.train import TrainConfig
from aitrain.training.model import Precision

TIMEOUTS = ("timed out waiting", "timeout caused", "watchdog caught collective", "wait timeout")
"""How gloo and NCCL say that another process did not answer in time, in small letters."""


def join(config: TrainConfig, precision: Precision) -> int:
    """The number of processes. On the CPU they are joined here: transformers would leave `ddp_timeout` out, and then
    they wait for half an hour for one that hangs."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1 and precision.use_cpu and not torch.distributed.is_initialized():
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")  # its own name, cpu:0, is one that torch.load refuses
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=config.ddp_timeout))
    return count


@contextmanager
def saying_who_hangs(config: TrainConfig) -> Iterator[None]:
    """A process that waited in vain says so, and not in its library's words.

    Raises:
        RunFailed: another process did not answer within `ddp_timeout`.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error).lower() for words in TIMEOUTS):
            raise
        raise RunFailed(
            f"Process {os.environ.get('RANK')} has waited for another one for {config.ddp_timeout} seconds"
            " (--ddp-timeout): that one hangs.\n"
            "See train.log for what it said last; go on with --resume."
        ) from error
