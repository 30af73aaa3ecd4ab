"""The files of a run folder, each of which is written as a whole or not at all.

runs/<project-name>/
  config.yaml  environment.json  environment/  metrics.jsonl  rollouts/  checkpoints/  model/  report.html  result.json
  diagnostics.jsonl  status.json  system.jsonl  system-node1.jsonl  train.log
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aitrain.errors import CannotWriteError, ConfigError
from aitrain.redaction import MASK, is_random, redact
from aitrain.runs.json_values import parse_object, read_whole, regular, whole_lines

if TYPE_CHECKING:
    from aitrain.options.train import TrainConfig

RUNS = "runs"
"""Folder of run folders, unless --output-dir names another."""
LOCK = ".lock"
LOCK_VARIABLE = "AITRAIN_LOCK"
"""Environment variable with the file descriptor of the lock that a training process inherits."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Only `create` makes the folder."""

    path: Path
    made: tuple[Path, ...] = field(default=(), compare=False)
    """Folders that were made for it, outermost first; `discard` removes them."""
    epoch: int = field(default=0, compare=False)
    """How often a command had begun to write here when this one did, itself included; 0: this is not known."""
    lock: int | None = field(default=None, compare=False)
    """File descriptor of the lock; None if it is not held, or the file system has no locks."""

    @property
    def config(self) -> Path:
        """The resolved options; `aitrain grpo --config` takes them."""
        return self.path / "config.yaml"

    @property
    def config_schema(self) -> Path:
        """The JSON schema of config.yaml, for editors."""
        return self.path / "config.schema.json"

    @property
    def environment(self) -> Path:
        """The environment's class and file, package versions and hardware."""
        return self.path / "environment.json"

    @property
    def environment_source(self) -> Path:
        """Folder of the environment's source as it ran."""
        return self.path / "environment"

    @property
    def metrics(self) -> Path:
        """One JSON line a logging step."""
        return self.path / "metrics.jsonl"

    @property
    def diagnostics(self) -> Path:
        """One JSON line for each condition that was found; there from the first step on."""
        return self.path / "diagnostics.jsonl"

    @property
    def rollouts(self) -> Path:
        """Folder of JSON lines, one an episode, one file a process."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """Folder of `checkpoint-<step>` folders."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The result: adapter or full weights, tokenizer, model card."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        """The run's page for a browser."""
        return self.path / "report.html"

    @property
    def result(self) -> Path:
        """The result, for programs."""
        return self.path / "result.json"

    @property
    def status(self) -> Path:
        """Whether the run is running, and its progress."""
        return self.path / "status.json"

    @property
    def server(self) -> Path:
        """State of the run's own vLLM server, its number of restarts, and the reason if it is not restarted again."""
        return self.path / "vllm-server.json"

    @property
    def system(self) -> Path:
        """The use of CPU, memory and GPUs while the run lasts, on the first machine."""
        return self.path / "system.jsonl"

    def system_of(self, node: int) -> Path:
        """The same of one of several machines."""
        return self.path / f"system-node{node}.jsonl" if node else self.system

    @property
    def log(self) -> Path:
        """Everything that the libraries and the environment print."""
        return self.path / "train.log"

    @classmethod
    def create(cls, config: TrainConfig) -> RunFolder:
        """Make a new folder; a second run with the same name gets `-2` at its end.

        Raises:
            ConfigError: it cannot be made or written.
        """
        parent = Path(os.path.expanduser(config.output_dir))
        try:
            missing = _missing(parent)
            parent.mkdir(parents=True, exist_ok=True)
            path = make_unused(parent / config.project_name)
        except OSError as error:
            raise _cannot_make(parent, error.strerror) from None
        return cls(path, (*missing, path))

    @classmethod
    @contextmanager
    def new(cls, config: TrainConfig) -> Iterator[RunFolder]:
        """A folder of `create`, locked until the block ends.

        Raises:
            ConfigError: it cannot be made or written.
        """
        while True:
            with cls.create(config).locked() as folder:
                if not folder.config.exists():  # else a command with --resume was faster
                    yield folder
                    return

    @staticmethod
    def check_place(config: TrainConfig) -> None:
        """Check that `create` can make a folder, without making one.

        Raises:
            ConfigError: it cannot.
        """
        parent = Path(os.path.expanduser(config.output_dir))
        nearest = next(folder for folder in (parent, *parent.absolute().parents) if os.path.lexists(folder))
        if not nearest.is_dir():
            raise _cannot_make(parent, os.strerror(errno.ENOTDIR))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise _cannot_make(parent, os.strerror(errno.EACCES))

    def write_config(self, config: TrainConfig) -> None:
        """Write config.yaml, with the folder's name as project name, and its schema.

        Options that the environment may declare are left out until it was asked, unless they are given; and which
        machine this is, as others use the file as well.
        """
        # here, because commands that only read runs need none of them
        from aitrain.options.environment import DECLARED_OPTIONS
        from aitrain.options.schema import json_schema
        from aitrain.options.yaml_text import write_yaml

        named = config.model_copy(update={"project_name": self.path.name})
        left_out = {*DECLARED_OPTIONS.values()} - config.model_fields_set | {"node_rank"}
        values = {name: value for name, value in named.written().items() if name not in left_out}
        write_json(self.config_schema, json_schema(type(config)))
        header = f"# yaml-language-server: $schema={self.config_schema.name}\n"
        write_text(self.config, header + write_yaml(values))

    def write_status(self, status: str, **known: object) -> None:
        """Update status.json, unless another command has claimed the folder; values that are None or missing are
        kept."""
        if self._is_lost():
            return
        news = {name: value for name, value in known.items() if value is not None}
        write_json(
            self.status,
            {"status": status} | read_object(self.status) | news | {"status": status},
            durable=status != "running",
        )

    def read_server(self) -> dict[str, object]:
        """Content of vllm-server.json; empty for a run that starts no server."""
        values: dict[str, object] = json.loads(self.server.read_text(encoding="utf-8")) if self.server.exists() else {}
        return values

    def unfinished(self) -> list[Path]:
        """Temporary files that a killed process left: `.config.yaml.4711-x1y2z3w4`, with its id. Those of
        processes that live are being written."""
        written = [
            self.config,
            self.config_schema,
            self.environment,
            self.metrics,
            self.result,
            self.status,
            self.system,
            *self.path.glob("system-node*.jsonl"),
            *self.rollouts.glob("*.jsonl"),
        ]
        found = [path for file in written for path in file.parent.glob(f".{file.name}.*-????????")]
        return [path for path in found if not _is_alive(path.name.rpartition(".")[2].partition("-")[0])]

    def is_foreign(self) -> bool:
        """Whether there are files in the folder, and no run."""
        own = {self.config_schema.name, self.status.name}  # written before config.yaml
        if self.config.exists() or not self.path.is_dir():
            return False
        return any(not name.startswith(".") and name not in own for name in os.listdir(self.path))

    # -- one command at a time

    @contextmanager
    def locked(self, tell: Callable[[str], None] = lambda text: None) -> Iterator[RunFolder]:
        """Keep other commands out of this folder until the block ends. It is made if it is missing, and removed at the
        end if no run began in it.

        Waits for a command that has it, after telling so. The training processes inherit the lock: if this process is
        killed, it lasts until the last of them has ended.

        Raises:
            ConfigError: the folder cannot be made or written.
        """
        try:
            made, handle, has_lock = self._open_lock(tell)
        except OSError as error:
            raise _cannot_make(self.path.parent, error.strerror) from None
        _locks.add(handle)
        folder = replace(self, made=() if self.config.exists() else made, lock=handle if has_lock else None)
        try:
            yield folder
        finally:
            if not self.config.exists():
                (self.path / LOCK).unlink(missing_ok=True)
                folder.discard()
            _locks.discard(handle)
            os.close(handle)

    def _open_lock(self, tell: Callable[[str], None]) -> tuple[tuple[Path, ...], int, bool | None]:
        """The folders that were made, the locked file, and whether the file system has locks."""
        while True:
            made = self.made or tuple(_missing(self.path))
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                has_lock = lock_file(handle)
                if has_lock is False:
                    tell(self._who_has_it())
                    has_lock = lock_file(handle, waits=True)
                if is_open_file(handle, self.path / LOCK):
                    return made, handle, has_lock
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)  # the command that had it has removed the folder, as nothing began there

    def _who_has_it(self) -> str:
        status = read_object(self.status)
        who = f" (process {status['pid']} on {status.get('host')})" if status.get("pid") else ""
        return f"Another command runs in {self.path}{who}: waiting for its end. Ctrl-C ends the wait."

    def remarks(self, wanted: str, is_eval: bool = False) -> Iterator[str]:
        """What a user must know of a locked folder: that it has another name than they wanted, or no lock."""
        first = replace(self, path=self.path.with_name(wanted))
        if self.made and self.path != first.path:
            file = shlex.quote(str(first.config))
            again = f"aitrain eval --config {file} --resume" if is_eval else f"aitrain grpo --config {file} --resume"
            how = f" To continue the first one: {again}" if first.config.exists() else ""
            yield f"{first.path} exists, so this is {self.path}.{how}"
        if self.lock is None:
            yield (
                f"{self.path} is on a file system without locks: a second command for it would not wait, and end this"
                " one. Start one at a time."
            )

    def claimed(self, least: int, **known: object) -> RunFolder:
        """This folder with the next epoch, at least `least`, which status.json gets with what is known.

        A command that had the folder before, and still lives where there are no locks or they were lost, cannot write
        into it any more.
        """
        before = read_object(self.status).get("epoch")
        epoch = max(least, 1 + (before if isinstance(before, int) else 0))
        self.write_status("running", epoch=epoch, **known)
        return replace(self, epoch=epoch)

    def check_owner(self) -> None:
        """Check that no other command has claimed the folder; called before something is written.

        Raises:
            CannotWriteError: one has.
        """
        if self._is_lost():
            raise CannotWriteError(
                f"Another command has begun to run in {self.path}: this one writes nothing more, and ends.\n"
                "Start one command for a run folder; one that is started with --resume waits where there are locks."
            )

    def _is_lost(self) -> bool:
        return self.epoch > 0 and read_object(self.status).get("epoch", self.epoch) != self.epoch

    def discard(self) -> None:
        """Remove what was made for a run that was refused before it began; a folder that was there stays."""
        if self.made:
            shutil.rmtree(self.path, ignore_errors=True)
        for folder in reversed(self.made[:-1]):
            try:
                folder.rmdir()
            except OSError:
                return  # another run uses it


def _cannot_make(parent: Path, why: str | None) -> ConfigError:
    return ConfigError(f"output_dir: cannot make a run folder in {parent}: {why}\nChoose another with --output-dir.")


_locks: set[int] = set()
"""File descriptors of the locks of this process."""


def inherit_lock() -> None:
    """Keep the lock that the parent passed on, and pass it on to no other program."""
    if handle := os.environ.pop(LOCK_VARIABLE, None):
        os.set_inheritable(int(handle), False)
        _locks.add(int(handle))


def _drop_locks() -> None:
    """Called in forked processes: one of the environment's that outlives the run would keep its folder locked."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_drop_locks)


def lock_file(handle: int, waits: bool = False) -> bool | None:
    """Lock an open file; False if another process has the lock, None if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_open_file(handle: int, path: Path) -> bool:
    """Whether the name is still that of the file or folder that was opened."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


def _missing(path: Path) -> list[Path]:
    """Folders of a path that do not exist, outermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()][::-1]


def make_unused(wanted: Path) -> Path:
    """Make a folder, with `-2` and so on at its end if the name is taken."""
    for number in range(1, 10_000):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(0, f"there are 10,000 runs named {wanted.name}", str(wanted))


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Write a text file, see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"), durable)


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    """Replace a file atomically. `durable` also makes it survive a power cut."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.{os.getpid()}-")
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


def _is_alive(pid: str) -> bool:
    """Whether a process of this machine has this id."""
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


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
    append_text(path, json_lines(records))


def json_lines(records: Iterable[Mapping[str, object]]) -> str:
    """One line for each record."""
    return "".join(json.dumps(to_jsonable(record), ensure_ascii=False) + "\n" for record in records)


def append_text(path: Path, text: str) -> None:
    """Append to a text file. Lone surrogates become `?`."""
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(text)


def read_lines(path: Path) -> Iterator[dict[str, object]]:
    """The records of a JSON lines file, without incomplete lines; none if the file is missing."""
    for _, record in _lines_and_records(path):
        yield record


def _lines_and_records(path: Path) -> Iterator[tuple[bytes, dict[str, object]]]:
    with suppress(FileNotFoundError), open(path, "rb", opener=regular) as file:
        for line, _, _ in whole_lines(file):
            if (record := parse_object(line)) is not None:
                yield line, record


def keep_lines(path: Path, is_kept: Callable[[dict[str, object]], bool]) -> None:
    """Keep only these records of a JSON lines file, and remove incomplete lines."""
    if path.exists():
        write_bytes(path, b"".join(line for line, record in _lines_and_records(path) if is_kept(record)))


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_jsonable(value: object) -> object:
    """The value in JSON types, secrets redacted: nan and inf become null, scalars numbers, other objects their text."""
    if isinstance(value, str):
        return redact(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return to_json_object(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(item) for item in value]
    item = getattr(value, "item", None)  # numpy and torch scalars have it
    return to_jsonable(item()) if callable(item) and getattr(value, "ndim", 1) == 0 else redact(str(value))


def to_json_object(values: Mapping[str, object]) -> dict[str, object]:
    """`to_jsonable` for a mapping."""
    return {
        redact(str(key)): MASK if isinstance(item, str) and is_random(str(key), item) else to_jsonable(item)
        for key, item in values.items()
    }
