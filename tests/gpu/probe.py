"""What a training process used, told by a callback of the trainer: `--custom-callbacks tests/gpu/probe.py:Probe`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

FILE = "AITRAIN_GPU_PROBE"
"""Environment variable with the file that is written."""
MIB = 2**20


class Probe(TrainerCallback):
    """Where the weights are, their types, and the peaks of the GPU's memory in MiB."""

    def __init__(self) -> None:
        self.in_use: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What all processes have taken of the GPU by now, a colocated or another vLLM's as well."""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.in_use.append((total - free) / MIB)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Write what was seen."""
        weights = list(model.parameters())
        found: dict[str, Any] = {
            "devices": sorted({weight.device.type for weight in weights}),
            "trained": sorted({str(weight.dtype) for weight in weights if weight.requires_grad}),
            "bf16": bool(args.bf16),
            "in_use_mib": max(self.in_use, default=0.0),
        }
        if torch.cuda.is_available():
            found["peak_mib"] = torch.cuda.max_memory_allocated() / MIB
            found["reserved_mib"] = torch.cuda.max_memory_reserved() / MIB
        Path(os.environ[FILE]).write_text(json.dumps(found), encoding="utf-8")
