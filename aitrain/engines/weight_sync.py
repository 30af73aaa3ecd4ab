"""Weight sync to a vLLM server by files: the LoRA adapter alone, or all weights."""

import fcntl
import os
import shutil
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file

from aitrain.engines.scopes import innermost, savable_generation_config
from aitrain.engines.sharded_tensors import gathered, merged_weights, reshard
from aitrain.errors import RunFailed, ServerGoneError, ServerRefusedError
from aitrain.vllm.client import VLLMClient

IN_MEMORY = "aitrain-weights-"
"""Prefix of the names of folders of weights in memory."""

LOADED = "aitrain-"
"""Prefix of the names that the servers have for the weights of runs."""
PARTIAL = "-partial"
"""End of the server's weight version while it loads all weights."""


class WeightSync(ABC):
    """How weights get to the servers: by files in a folder of the run, which is removed when the process ends. Each
    version has a name within the run."""

    is_adapter = False
    """Whether an adapter is synced, which requests name as their model; if not, the server's own weights change."""

    def __init__(self, model: Any, folder: Path, writes: bool = True, dtype: torch.dtype | None = None) -> None:
        self.model, self.dtype = model, dtype
        self.folder = folder.absolute()
        self.writes = writes
        """Whether this process writes the files, and loads them on the servers."""
        self._prefix = f"{LOADED}{_name_of(self.folder)}-"
        """Beginning of the servers' names for the weights of this run."""
        self._removal: Callable[[], object] | None = None

    def write(self, version: str) -> None:
        """Write the policy's weights, in the data type `dtype` if there is one, to a new folder; the one before is
        removed first, to save space.

        One process writes, but every process must call this, as the parts of sharded weights are gathered.

        Raises:
            RunFailed: they cannot be written, so that all ranks end together.
        """
        weights = gathered(self.tensors(), self.writes, self.dtype)
        if not self.writes:
            return
        try:
            if self._removal is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                with suppress(OSError):  # not every file system of run folders has locks
                    fcntl.flock(os.open(self.folder, os.O_RDONLY), fcntl.LOCK_SH)  # until this process ends
                self._removal = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
            for before in self.folder.iterdir():
                shutil.rmtree(before, ignore_errors=True)
            self.path(version).mkdir()
            self.save(self.path(version), weights)
        except (OSError, SafetensorError) as error:
            raise RunFailed(
                f"The weights for the vLLM server could not be written to {self.folder}: {error}"
            ) from error

    @abstractmethod
    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights that are synced."""

    @abstractmethod
    def save(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """Write the files that the server reads."""

    @abstractmethod
    async def load(self, client: VLLMClient, version: str) -> None:
        """Make the server use the weights that were written. Several processes may call this at the same time.

        Raises:
            ServerGoneError: it is gone, or was restarted meanwhile and has its own weights again.
        """

    @abstractmethod
    async def loaded(self, client: VLLMClient) -> list[str]:
        """The server's names for the weights of runs that it has."""

    async def unload(self, client: VLLMClient) -> bool:
        """Remove the server's policy where it can be removed, while no request is sent; returns False if there is none,
        as in a server that was just started."""
        return bool(await self.loaded(client))

    async def has_version(self, client: VLLMClient, version: str) -> bool:
        """Whether the server uses these weights.

        Raises:
            RunFailed: it has those of another run.
        """
        names = await self.loaded(client)
        if not all(name.startswith(self._prefix) for name in names):
            raise RunFailed(
                f"Another run syncs its weights to the vLLM server at {client.url}, which has one policy at a time.\n"
                "Give each run its own server; without --vllm-server-url aitrain starts one."
            )
        return self.name(version) in names

    def name(self, version: str) -> str:
        """The server's name for these weights."""
        return f"{self._prefix}{version}"

    def path(self, version: str) -> Path:
        """Directory of these weights."""
        return self.folder / version

    def close(self) -> None:
        """Remove the folder, in the process that wrote it."""
        if self._removal is not None:
            self._removal()


class AdapterSync(WeightSync):
    """Syncs the adapter alone, with a new name each time, to a server that has the base model.

    The adapter before is unloaded; with `load_inplace`, vLLM would read it from disk at every step of its engine.
    """

    is_adapter = True

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The adapter's weights."""
        reshard(self.model)
        state: dict[str, torch.Tensor] = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return state.items()

    def save(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """Write adapter_model.safetensors and adapter_config.json."""
        tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        self.model.peft_config[self.model.active_adapter].save_pretrained(str(folder))

    async def load(self, client: VLLMClient, version: str) -> None:
        """Load the adapter, if no other process has done so."""
        body = {"lora_name": self.name(version), "lora_path": str(self.path(version))}
        try:
            await client.post("/v1/load_lora_adapter", body)
        except ServerRefusedError:
            if not await self.has_version(client, version):
                raise

    async def loaded(self, client: VLLMClient) -> list[str]:
        """Names of the adapters of runs."""
        cards = (await client.get("/v1/models"))["data"]
        return [card["id"] for card in cards if card.get("parent") and card["id"].startswith(LOADED)]

    async def unload(self, client: VLLMClient) -> bool:
        """Unload all adapters of runs."""
        names = await self.loaded(client)
        for name in names:
            await client.post("/v1/unload_lora_adapter", {"lora_name": name})
        return bool(names)


class DiskSync(WeightSync):
    """Syncs all weights, to a server in its development mode, which replaces its own."""

    renews = False
    """Whether the server is on the CPU and its output layer must be repacked: see vllm/extensions.py."""

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All weights, with a merged adapter."""
        return merged_weights(self.model)

    def save(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """Write the files of `save_pretrained`."""
        with savable_generation_config(self.model):
            innermost(self.model).save_pretrained(folder, state_dict=weights)

    async def load(self, client: VLLMClient, version: str) -> None:
        """Have the server read the files and set its weight version."""
        name, where = self.name(version), {"weights_path": str(self.path(version))}
        partial = f"{name}{PARTIAL}"  # a server that was restarted does not have it, and reading may end half-way
        await client.post("/update_weight_version", {"new_version": partial})
        await client.post("/collective_rpc", {"method": "reload_weights", "kwargs": where})
        if self.renews:
            await client.post("/collective_rpc", {"method": "renew_tied_head"})
        if await weight_version_of(client) not in (partial, name):
            raise ServerGoneError("it was restarted while it loaded the weights")
        await client.post("/update_weight_version", {"new_version": name})

    async def loaded(self, client: VLLMClient) -> list[str]:
        """The server's weight version, if it is a run's."""
        version = await weight_version_of(client)
        return [version] if version.startswith(LOADED) else []


async def weight_version_of(client: VLLMClient) -> str:
    """The name of the weights that a server in its development mode has."""
    return str((await client.get("/weight_info"))["weight_version"])


def roomy_folder(run_folder: Path, needed: int, memory: Path = Path("/dev/shm")) -> Path:
    """Folder for `needed` bytes of weights: in memory if half of the free memory is left, else in the run folder.
    Folders in memory that no process holds the lock of, as theirs was killed, are removed."""
    for folder in memory.glob(f"{IN_MEMORY}*"):
        with suppress(OSError):  # it is another user's, or its process lives
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 2 * needed
    return memory / f"{IN_MEMORY}{_name_of(run_folder.absolute())}" if has_room else run_folder / "sync"


def _name_of(folder: Path) -> str:
    return uuid.uuid5(uuid.NAMESPACE_URL, str(folder)).hex[:12]
