"""What a command asks the process for that it starts: a chat, or an export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.runs.model_reference import chat_options


@dataclass(frozen=True)
class ChatSetup:
    """A chat that can begin, as `aitrain chat` sends it to its process as JSON."""

    model: str
    given: dict[str, object]
    """Sampling options, in place of those of the run."""
    only: str | None = None
    """`base` or `tuned`; None for both."""
    system: str = ""
    greedy: bool = False
    seed: int = 0

    @property
    def config(self) -> TrainConfig:
        """The options of the run that trained the model, with the given ones, checked."""
        return resolve(TrainConfig, None, chat_options(self.model, self.only, self.given))


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
    """Type of the weights; None for that of the base."""
    trust_remote_code: bool = False
    as_json: bool = False

    def folder(self, label: str) -> Path:
        """The folder to write."""
        return Path(self.out).expanduser() if self.out else Path(EXPORTS) / label
