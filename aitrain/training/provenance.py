"""The facts of environment.json: the environment, packages and hardware of a run."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from typing import Any

import torch

from aitrain.environment.adapters import adapter_named
from aitrain.environment.requirements import requirements_of
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.machine import usable_cores
from aitrain.options.train import TrainConfig
from aitrain.redaction import without_secrets
from aitrain.runs.environment_source import files_of, source_hash

PACKAGES = ("aitrain", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm")


def describe_run(config: TrainConfig, environment: object) -> dict[str, Any]:
    """Environment, versions and hardware of a run."""
    made_from, files = type(environment), files_of(environment)
    adapter = adapter_named((config.rl_env or "").partition(":")[0])
    packages = (*PACKAGES, adapter.package) if adapter and adapter.package else PACKAGES
    facts = {
        "module": made_from.__module__,
        "class": made_from.__qualname__,
        "file": str(files[0]) if files else None,
        "sha256": source_hash(files),
        "config": without_secrets(config.rl_env_config or {}),
        "requires": requirements_of(environment).as_options(),
        "packages": {name: version for name in packages if (version := _version(name))},
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": usable_cores(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
    return {**facts, **environment.facts} if isinstance(environment, ServedEnvironment) else facts


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    try:
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
