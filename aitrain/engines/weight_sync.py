"""How weights get to a vLLM server: an adapter alone, or all weights, as files."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers.utils import logging

from aitrain.engines.merged_weights import merged_weights
from aitrain.errors import RunFailed, ServerRefusedError
from aitrain.vllm.client import VLLMClient

TRIES = 3
"""Attempts to lock the folder of the weights."""

PAUSE_SECONDS = 1.0
"""Between these attempts."""

IN_MEMORY = "aitrain-weights-"
"""What folders of weights in memory are called."""

PUSHED = "aitrain-"
"""What the version of weights begins with that were pushed."""


class WeightSync(Protocol):
    """How weights get to the server."""

    name: str | None
    """What requests call the policy once it was pushed; None: what they called it before."""

    def write(self, number: int) -> int:
        """Write the present weights as push `number`, from one process; returns the size in bytes."""

    def push(self, server: VLLMClient, number: int) -> None:
        """Make the server use them, whatever it uses now. For one process, and while none generates."""

    def restore(self, server: VLLMClient, number: int) -> None:
        """The same for a restarted server. Several processes may call this at the same time."""

    def holds(self, server: VLLMClient, number: int) -> bool:
        """Whether the server uses them."""

    def is_new(self, server: VLLMClient) -> bool:
        """Whether nothing was pushed to the server since it was started."""

    def close(self) -> None:
        """Leave nothing behind."""


class _Files:
    """A folder of our own with the weights of the last push, which is gone when the process is."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model = model
        self.folder = folder.absolute()
        self._removal: Callable[[], object] | None = None

    def close(self) -> None:
        """Remove the folder, in the process that wrote it."""
        if self._removal is not None:
            self._removal()

    def _take(self) -> None:
        """Make the folder, and lock it for as long as this process lives."""
        for _ in range(TRIES):
            self.folder.mkdir(parents=True, exist_ok=True)
            if (lock := _locked(self.folder)) is not None:
                self._removal = weakref.finalize(self, _remove, self.folder, lock)
                return
            time.sleep(PAUSE_SECONDS)  # another run may just be looking whether it is an orphan
        raise RunFailed(f"Another process writes weights to {self.folder}: is this run running twice?")

    def path(self, number: int) -> Path:
        """Directory of push `number`."""
        return self.folder / str(number)

    @contextmanager
    def _writing(self, number: int) -> Iterator[Path]:
        """A new folder, whole or not at all, in the place of the one before: there may be no room for two."""
        if self._removal is None:
            self._take()
        for before in self.folder.iterdir():
            shutil.rmtree(before, ignore_errors=True)
        partial_folder = self.folder / "partial"
        partial_folder.mkdir()
        yield partial_folder
        partial_folder.rename(self.path(number))

    def _size(self, number: int) -> int:
        return sum(file.stat().st_size for file in self.path(number).iterdir())


class AdapterSync(_Files):
    """The adapter alone, for a server that has the base and never changes it.

    An adapter that vLLM loaded with `load_inplace` is read from disk again at every step of its engine, so the one
    before is unloaded instead.
    """

    name = "policy"

    def write(self, number: int) -> int:
        """adapter_model.safetensors and adapter_config.json."""
        with self._writing(number) as folder:
            weights = get_peft_model_state_dict(self.model, save_embedding_layers=False)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
            self.model.peft_config[self.model.active_adapter].save_pretrained(str(folder))
        return self._size(number)

    def push(self, server: VLLMClient, number: int) -> None:
        """See Sync."""
        if self._loaded_from(server) is not None:
            server.post("/v1/unload_lora_adapter", {"lora_name": self.name})
        self.restore(server, number)

    def restore(self, server: VLLMClient, number: int) -> None:
        """See Sync."""
        try:
            server.post("/v1/load_lora_adapter", {"lora_name": self.name, "lora_path": str(self.path(number))})
        except ServerRefusedError:
            if not self.holds(server, number):  # another process was faster
                raise

    def holds(self, server: VLLMClient, number: int) -> bool:
        """See Sync."""
        source = self._loaded_from(server)
        if source is not None and Path(source).parent != self.folder:
            raise _shared(server)
        return source == str(self.path(number))

    def is_new(self, server: VLLMClient) -> bool:
        """See Sync."""
        return self._loaded_from(server) is None

    def _loaded_from(self, server: VLLMClient) -> str | None:
        cards = server.get("/v1/models")["data"]
        return next((str(card["root"]) for card in cards if card["id"] == self.name), None)


class DiskSync(_Files):
    """All weights, for a server in its development mode that reads them over its own."""

    name = None

    def __init__(self, model: Any, folder: Path, dtype: torch.dtype | None = None, renews: bool = False) -> None:
        super().__init__(model, folder)
        self._renews = renews
        """Whether the server is on the CPU, too, and needs it: see tied_head.py."""
        self._dtype = dtype
        """What they are written as: more than the server computes in is of no use to it."""

    def write(self, number: int) -> int:
        """As `save_pretrained` writes a model, with the adapter in it if there is one."""
        base = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        with self._writing(number) as folder, _no_progress_bar():
            base.save_pretrained(folder, state_dict=self._weights())
        return self._size(number)

    def _weights(self) -> dict[str, torch.Tensor]:
        pairs = merged_weights(self.model)
        return {name: weight.detach().to(dtype=self._dtype or weight.dtype) for name, weight in pairs}

    def push(self, server: VLLMClient, number: int) -> None:
        """See Sync."""
        where = {"weights_path": str(self.path(number))}
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": where})
        if self._renews:
            server.post("/collective_rpc", {"method": "renew_tied_head"})
        server.post("/update_weight_version", {"new_version": self._version(number)})

    restore = push

    def holds(self, server: VLLMClient, number: int) -> bool:
        """See Sync."""
        version = weight_version_of(server)
        if version.startswith(PUSHED) and version != self._version(number):
            raise _shared(server)
        return version == self._version(number)

    def is_new(self, server: VLLMClient) -> bool:
        """See Sync."""
        return not weight_version_of(server).startswith(PUSHED)

    def _version(self, number: int) -> str:
        """A number of this run, and no other's."""
        return f"{PUSHED}{uuid.uuid5(uuid.NAMESPACE_URL, str(self.path(number))).hex[:12]}"


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """At every step it would be a new one."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def weight_version_of(server: VLLMClient) -> str:
    """The name of the weights that a server in its development mode has."""
    return str(server.get("/weight_info")["weight_version"])


def _shared(server: VLLMClient) -> RunFailed:
    return RunFailed(
        f"Another run hands its weights to the vLLM server at {server.url}, and it has one policy at a time.\n"
        "Give each run a server of its own; without --vllm-server-url aitrain starts one."
    )


def roomy_folder(run_folder: Path, needed: int, memory: Path = Path("/dev/shm")) -> Path:
    """Folder for `needed` bytes of weights: in memory if half of the free memory is left, else in the run folder."""
    remove_orphans(memory)
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 2 * needed
    name = uuid.uuid5(uuid.NAMESPACE_URL, str(run_folder.absolute())).hex[:12]
    return memory / f"{IN_MEMORY}{name}" if has_room else run_folder / "sync"


def remove_orphans(memory: Path) -> None:
    """Weights whose process was killed: nobody holds the lock on their folder."""
    for folder in memory.glob(f"{IN_MEMORY}*"):
        with suppress(PermissionError):  # somebody else's
            lock = _locked(folder)
            if lock is not None:
                _remove(folder, lock)


def _locked(folder: Path) -> int | None:
    """A lock on the folder, which ends with the process; None when another process has it, or has removed it."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), folder.stat()):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
