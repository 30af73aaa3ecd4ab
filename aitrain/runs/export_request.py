"""What `aitrain export` was asked for: sent by the command to the process that exports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EXPORTS = "exports"
"""Folder of exports, unless --out names another."""
DTYPES = ("float32", "bfloat16", "float16")
"""Types that weights can have."""


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of `aitrain export`."""

    model: str
    """A run, a checkpoint, an adapter, or a folder with a whole model."""
    out: str | None = None
    dtype: str | None = None
    """Type of the weights; None for that of the training."""
    adapter_only: bool = False
    shard_size: str = "5GB"
    push_to_hub: bool = False
    repo_id: str | None = None
    username: str | None = None
    hub_private: bool = True
    trust_remote_code: bool = False
    as_json: bool = False

    def folder(self, label: str) -> Path:
        """The folder to write."""
        return Path(self.out).expanduser() if self.out else Path(EXPORTS) / label
