"""The files of a run folder, each of which is written as a whole or not at all.

runs/<project-name>/
  config.yaml  environment.json  environment/  metrics.jsonl  rollouts/  checkpoints/  model/  report.html  result.json
  diagnostics.jsonl  status.json  train.log
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aitrain.errors import CannotWriteError, ConfigError
from aitrain.execution.user_code import own_files
from aitrain.redaction import to_jsonable
from aitrain.runs.json_values import parse_object, read_whole, regular, whole_lines

if TYPE_CHECKING:
    from aitrain.options.train import TrainConfig

T = TypeVar("T")

RUNS = "runs"
"""Folder of run folders, unless --output-dir names another."""
SWEEP_LOG = "optuna.log"
"""Optuna's journal, which is in the folder of a sweep."""


class Part:
    """A file or folder in a run folder, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, owner: type) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Only `create` makes the folder."""

    path: Path
    is_new: bool = field(default=False, compare=False)
    """Whether it was made for this run, so that `discard` removes it."""
    epoch: int = field(default=0, compare=False)
    """How often a command had begun to write here when this one did, itself included; 0: this is not known."""
    lock: int | None = field(default=None, compare=False)
    """File descriptor of the lock; None if it is not held, or the file system has no locks."""

    config = Part("config.yaml")
    """The resolved options; `aitrain grpo --config` takes them."""
    environment = Part("environment.json")
    """The environment's class and file, package versions and hardware."""
    environment_source = Part("environment")
    """Folder of the environment's source as it ran."""
    metrics = Part("metrics.jsonl")
    """One JSON line a logging step."""
    diagnostics = Part("diagnostics.jsonl")
    """One JSON line for each condition that was found; there from the first step on."""
    rollouts = Part("rollouts")
    """Folder of JSON lines, one an episode, one file a process."""
    checkpoints = Part("checkpoints")
    """Folder of `checkpoint-<step>` folders."""
    model = Part("model")
    """The result: adapter or full weights, tokenizer, model card."""
    report = Part("report.html")
    """The run's page for a browser."""
    result = Part("result.json")
    """The result, for programs."""
    status = Part("status.json")
    """Whether the run is running, and its progress."""
    server = Part("vllm-server.json")
    """State of the run's own vLLM server, its number of restarts, and the reason if it is not restarted again."""
    log = Part("train.log")
    """Everything that the libraries and the environment print."""

    @property
    def rollout_files(self) -> list[Path]:
        """Those in `rollouts`, one of each process."""
        return sorted(self.rollouts.glob("*.jsonl"))

    @property
    def processes(self) -> int:
        """Processes that trained the run when it was last started."""
        return int(read_object(self.environment).get("processes", 1))

    @classmethod
    def create(cls, config: TrainConfig) -> RunFolder:
        """Make a new folder; a second run with the same name gets `-2` at its end.

        Raises:
            ConfigError: it cannot be made or written.
        """
        parent = Path(os.path.expanduser(config.output_dir))
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path = make_unused(parent / config.project_name)
        except OSError as error:
            raise cannot_make(parent, error.strerror) from None
        return cls(path, is_new=True)

    def write_config(self, config: TrainConfig) -> None:
        """Write config.yaml, with the folder's name as project name.

        Options that the environment may declare are left out until it was asked, unless they are given; and which
        machine this is, as others use the file as well.
        """
        # here, because commands that only read runs need neither
        from aitrain.options.environment import DECLARED_OPTIONS
        from aitrain.options.yaml_text import write_yaml

        named = config.model_copy(update={"project_name": self.path.name})
        left_out = {*DECLARED_OPTIONS.values()} - config.model_fields_set | {"node_rank"}
        values = {name: value for name, value in named.written().items() if name not in left_out}
        write_text(self.config, write_yaml(values))

    def write_status(self, status: str, **known: object) -> None:
        """Update status.json, unless another command has claimed the folder; None and missing values are kept."""
        if self._is_lost():
            return
        news = {name: value for name, value in known.items() if value is not None}
        write_json(self.status, {**read_object(self.status), **news, "status": status}, durable=status != "running")

    def claimed(self, **known: object) -> RunFolder:
        """This folder with the next epoch in status.json: earlier commands cannot write any more. Paths of its options
        are relative to the `directory`."""
        before = read_object(self.status).get("epoch")
        epoch = 1 + (before if isinstance(before, int) else 0)
        self.write_status("running", epoch=epoch, nodes=[], directory=os.getcwd(), **known)
        return replace(self, epoch=epoch)

    def check_owner(self) -> None:
        """Check that the folder is there, and no other command has claimed it; called before something is written.

        Raises:
            CannotWriteError: it was moved or deleted, or another command has claimed it.
        """
        if not self.path.is_dir():
            raise CannotWriteError(
                f"The run folder {self.path} was moved or deleted during the run.\n"
                "If it was moved, continue it where it is now: aitrain grpo --config FOLDER/config.yaml --resume"
            )
        if self._is_lost():
            raise CannotWriteError(f"Another command runs in {self.path} now: this one writes nothing more.")

    def _is_lost(self) -> bool:
        return self.epoch > 0 and read_object(self.status).get("epoch", self.epoch) != self.epoch

    def discard(self) -> None:
        """Remove what was made for a run that was refused before it began; a folder that was there stays."""
        if self.is_new:
            shutil.rmtree(self.path, ignore_errors=True)


def cannot_make(parent: Path, why: str | None) -> ConfigError:
    """The error of a run folder that cannot be made or written."""
    return ConfigError(f"output_dir: cannot make a run folder in {parent}: {why}\nChoose another with --output-dir.")


def make_unused(wanted: Path) -> Path:
    """Make a folder, with `-2` and so on at its end if the name is taken."""
    path, number = wanted, 1
    while True:
        with suppress(FileExistsError):
            path.mkdir()
            return path
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Write a text file, see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"), durable)


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    """Replace a file atomically. `durable` also makes it survive a power cut."""
    own_files.add(os.path.abspath(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
        if durable:
            sync(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or damaged."""
    try:
        return parse_object(read_whole(path)) or {}
    except OSError:
        return {}


def write_json(path: Path, values: Mapping[str, object], durable: bool = True) -> None:
    """Write one indented JSON object."""
    write_text(path, json.dumps(to_jsonable(values), indent=2, ensure_ascii=False) + "\n", durable)


def append_lines(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Append JSON lines."""
    append_text(path, "".join(json.dumps(to_jsonable(record), ensure_ascii=False) + "\n" for record in records))


def append_text(path: Path, text: str) -> None:
    """Append to a text file. Lone surrogates become `?`."""
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(text)


def parsed_lines(path: Path, parse: Callable[[bytes], T]) -> Iterator[tuple[bytes, T]]:
    """The whole lines of a JSON lines file with what they say; without those that `parse` refuses by a ValueError. None
    if the file is missing."""
    with suppress(FileNotFoundError, NotADirectoryError), open(path, "rb", opener=regular) as file:
        for line, _, _ in whole_lines(file):
            with suppress(ValueError):
                yield line, parse(line)


def keep_lines(path: Path, is_kept: Callable[[T], bool], parse: Callable[[bytes], T]) -> None:
    """Keep only these records of a JSON lines file, and remove damaged lines."""
    if path.exists():
        write_bytes(path, b"".join(line for line, record in parsed_lines(path, parse) if is_kept(record)))


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
