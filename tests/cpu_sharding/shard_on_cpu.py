"""Lets accelerate 1.15 shard on the CPU, for tests: its AcceleratorState turns MULTI_GPU into FSDP, but never
MULTI_CPU, so that an FSDP plugin is silently ignored there. Importing this module is all that is needed.

`sitecustomize.py` beside it imports it in training processes that are started with this folder on PYTHONPATH, and
tests/preloaded.py in those that it forks; both only if SHARD_ON_CPU is set.
"""

from __future__ import annotations

from typing import Any

from accelerate import state
from accelerate.utils import DistributedType

from aitrain.training import sharding

_init = state.AcceleratorState.__init__


def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **keywords: Any) -> None:
    """The state with the plugin, as several GPUs have it."""
    _init(self, *arguments, fsdp_plugin=fsdp_plugin, **keywords)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        state.PartialState._shared_state["distributed_type"] = self.distributed_type


state.AcceleratorState.__init__ = init
sharding.UNSHARDED_DEVICES = ()
