"""All that can be checked before a process is started, without torch and without running the user's code."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from aitrain.batch import BatchPlan, plan_batch
from aitrain.config import TrainConfig
from aitrain.environment.loading import Source, check_by_reading, find
from aitrain.errors import ConfigError, did_you_mean
from aitrain.run_folder import RunFolder, is_checkpoint

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1", "0.0.0.0")  # recognised in addresses; nothing listens there


@dataclass(frozen=True)
class Plan:
    """A run that passed every check: what will be started."""

    config: TrainConfig
    source: Source | None
    """Where the environment comes from; None for an object that a notebook made."""
    batch: BatchPlan
    gpus: tuple[str, ...]
    """The GPUs that training uses, as CUDA_VISIBLE_DEVICES names them; none on CPU."""
    checkpoint: Path | None

    @property
    def folder(self) -> RunFolder | None:
        """The run folder that a resumed run goes on in; None: a new one is to be made."""
        if self.checkpoint is None or self.checkpoint.parent.name != "checkpoints":
            return None
        return RunFolder(self.checkpoint.parent.parent)

    def open_folder(self) -> RunFolder:
        """The run's folder, with its config.yaml."""
        folder = self.folder or RunFolder.create(self.config)
        folder.write_config(self.config)
        return folder


def check(config: TrainConfig, has_environment: bool = False) -> Plan:
    """Everything that can be said about a run by looking.

    Raises:
        ConfigError: it cannot work.
        EnvironmentFailed: the environment's file is not Python.
    """
    _check_trl_fields(config)
    source = None if has_environment else find(config)
    if source is not None:
        check_by_reading(source, config.rl_env_config or {})
    _check_model(config)
    _check_packages(config)
    gpus = training_gpus(config)
    processes = _count_processes(config, gpus)
    return Plan(config, source, plan_batch(config, processes), gpus[:processes], _find_checkpoint(config))


# -- TRL


def _check_trl_fields(config: TrainConfig) -> None:
    if not config.trl:
        return
    known = set(trl_fields())
    for name in config.trl:
        if known and name not in known:
            raise ConfigError(f"--trl {name}: TRL has no such field.{did_you_mean(name, known)}")


def trl_fields() -> Iterator[str]:
    """Names of GRPOConfig's fields, read from the source: importing it takes seconds."""
    for package, file in (
        ("trl", "trainer/grpo_config.py"),
        ("trl", "trainer/base_config.py"),
        ("transformers", "training_args.py"),
    ):
        yield from _annotated_names(package, file)


def _annotated_names(package: str, file: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id


# -- model and packages


def _check_model(config: TrainConfig) -> None:
    folder = Path(config.model).expanduser()
    if not folder.exists() and (config.model.startswith((".", "/", "~")) or config.model.count("/") > 1):
        near = did_you_mean(folder.name, [other.name for other in folder.parent.glob("*/")])
        raise ConfigError(f"model: there is no folder {config.model}.{near}\nGive a folder, a Hub name, or `tiny`.")
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"model: {config.model} is an adapter, not a model\nGive the merged model (its folder merged/) instead."
        )


def _check_packages(config: TrainConfig) -> None:
    if config.use_vllm and not _is_installed("vllm"):
        raise ConfigError('use_vllm: vLLM is not installed\nInstall it with: pip install "aitrain[vllm]"')
    if config.log != "none" and not _is_installed(config.log):
        raise ConfigError(f"log: {config.log} is not installed\nInstall it with: pip install {config.log}")


def _is_installed(package: str) -> bool:
    """Installed, not merely a folder of that name in the working directory."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


# -- processes and GPUs


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, by CUDA_VISIBLE_DEVICES or else by the driver; none on CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [name.strip() for name in visible.split(",") if name.strip()]
        return tuple(named) if "-1" not in named else tuple(named[: named.index("-1")])
    return tuple(str(index) for index in range(_count_by_driver()))


def _count_by_driver() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def training_gpus(config: TrainConfig) -> tuple[str, ...]:
    """The visible GPUs, less the last ones where a vLLM server of this machine holds them.

    Raises:
        ConfigError: none is left to train on.
    """
    gpus = visible_gpus()
    if not (gpus and config.vllm_server_url and _is_here(config.vllm_server_url)):
        return gpus
    left = gpus[: -config.vllm_server_gpus]
    if not left:
        raise ConfigError(
            f"vllm_server_gpus: {len(gpus)} GPUs are visible and the vLLM server holds {config.vllm_server_gpus}:"
            " none is left to train on"
        )
    return left


def _is_here(url: str) -> bool:
    return (urlsplit(url if "//" in url else f"//{url}").hostname or "") in LOCAL_HOSTS


def _count_processes(config: TrainConfig, gpus: tuple[str, ...]) -> int:
    count = config.num_processes or max(1, len(gpus))
    if gpus and count > len(gpus):
        raise ConfigError(f"num_processes: {count} processes need {count} GPUs, and {len(gpus)} are there to train on")
    if config.use_vllm and config.vllm_mode == "colocate" and count % config.vllm_tensor_parallel_size:
        raise ConfigError(
            f"vllm_tensor_parallel_size: {count} processes cannot be divided into engines of"
            f" {config.vllm_tensor_parallel_size}"
        )
    return count


# -- resuming


def _find_checkpoint(config: TrainConfig) -> Path | None:
    wanted = config.resume_from_checkpoint
    if wanted is None:
        return None
    if wanted == "auto":
        folder = RunFolder(Path(config.output_dir).expanduser() / config.project_name)
        newest = folder.newest_checkpoint()
        if newest is None:
            raise ConfigError(f"resume_from_checkpoint: there is no checkpoint in {folder.checkpoints}")
        return newest.resolve()
    path = Path(wanted).expanduser()
    if not is_checkpoint(path):
        raise ConfigError(f"resume_from_checkpoint: {wanted} is not a checkpoint folder (checkpoint-<step>)")
    return path.resolve()
