"""What a command asks the process for that it starts: a chat, or an export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aitrain.errors import ConfigError
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.runs.model_reference import before_training, read_model, run_options


@dataclass(frozen=True)
class ChatSetup:
    """A chat that can begin, as `aitrain chat` sends it to its process as JSON."""

    model: str
    options: dict[str, object]
    """Options of a run, for sampling."""
    only: str | None = None
    """`base` or `tuned`; None for both."""
    system: str = ""
    greedy: bool = False
    seed: int = 0
    as_json: bool = False
    answer_tokens: int | None = None
    """Maximum tokens of an answer, if the user has set it."""

    @property
    def config(self) -> TrainConfig:
        """The options, checked."""
        return resolve(TrainConfig, None, self.options)


def chat_options(model: str, only: str | None, given: Mapping[str, object]) -> dict[str, object]:
    """The options of the run that trained a model, with those that are `given`.

    Raises:
        ConfigError: the model cannot be talked to, or there is no base to talk to.
    """
    reference = read_model(model)
    if only not in (None, "base", "tuned"):
        raise ConfigError(f"only: must be base or tuned, not {only}")
    if reference.kind == "url":
        raise ConfigError(f"model: {model} is an address; a chat loads the model itself: give its folder or name")
    if only == "base" and before_training(reference) is None:
        raise ConfigError(f"only: it is not known what {model} was trained from")
    trained = {name: value for name, value in run_options(reference).items() if name in TrainConfig.model_fields}
    return {**trained, "model": reference.base, **given}


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
