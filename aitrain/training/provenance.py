"""The facts of environment.json: the environments, packages and hardware of a run."""

from __future__ import annotations

import platform
import shutil
import subprocess
from contextlib import suppress
from typing import Any

import torch

from aitrain.environment.adapters import adapter_named
from aitrain.environment.requirements import requirements_of
from aitrain.environment.runner import Runner
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.machine import usable_cores
from aitrain.packages import version_of
from aitrain.redaction import without_secrets
from aitrain.runs.environment_source import files_of, keep_source, source_facts, source_hash
from aitrain.runs.run_folder import RunFolder

PACKAGES = ("aitrain", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm")


def describe_run(runner: Runner) -> dict[str, Any]:
    """Environments, versions and hardware of a run. Of several environments, what they are together, and each."""
    parts, each = runner.parts, dict[str, dict[str, Any]]()
    packages = dict.fromkeys(PACKAGES)
    for name, part in parts.items():
        each[name] = {
            **source_facts(part.environment),
            "config": without_secrets(part.config.rl_env_config or {}),
            "requires": requirements_of(part.environment).as_options(),
        }
        if isinstance(part.environment, ServedEnvironment):
            each[name] |= part.environment.facts
        adapter = adapter_named(part.config.env_place.partition(":")[0])
        if adapter is not None and adapter.package:
            packages[adapter.package] = None
    commit = None
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        commit = done.stdout.strip() or None
    facts = {
        "packages": {name: version for name in packages if (version := version_of(name))},
        "git_commit": commit,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": usable_cores(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
    if "" in each:
        return {**each[""], **facts}
    for name, share in runner.config.env_shares.items():
        each[name] |= {"share": share, "score_range": parts[name].config.rl_score_range}
    joined = {
        key: ", ".join(dict.fromkeys(one[key] for one in each.values() if one.get(key))) or None
        for key in ("module", "file", "package")
    }
    return {
        **joined,
        "class": ", ".join(f"{name}={one['class']}" for name, one in each.items()),
        "sha256": source_hash(file for part in parts.values() for file in files_of(part.environment)),
        "config": {name: one["config"] for name, one in each.items()},
        "requires": {option: getattr(runner.config, option) for one in each.values() for option in one["requires"]},
        "environments": each,
        **facts,
    }


def keep_sources(runner: Runner, folder: RunFolder) -> None:
    """Keep the source of the environment, or of each in a folder of its name."""
    shutil.rmtree(folder.environment_source, ignore_errors=True)
    for name, part in runner.parts.items():
        keep_source(part.environment, folder.environment_source / name)
