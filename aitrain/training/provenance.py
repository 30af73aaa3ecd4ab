"""The facts of environment.json: the environments, packages and hardware of a run."""

from __future__ import annotations

import platform
import shutil
import subprocess
from typing import Any

import torch

from aitrain.environment.adapters import adapter_named
from aitrain.environment.requirements import requirements_of
from aitrain.environment.runner import Runner
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.machine import usable_cores
from aitrain.options.train import TrainConfig
from aitrain.redaction import without_secrets
from aitrain.runs.environment_source import files_of, keep_source, package_version, source_facts, source_hash
from aitrain.runs.run_folder import RunFolder

PACKAGES = ("aitrain", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm")


def describe_run(runner: Runner) -> dict[str, Any]:
    """Environments, versions and hardware of a run."""
    each = {name: _describe(part.config, part.environment) for name, part in runner.parts.items()}
    adapters = [adapter_named(part.config.env_place.partition(":")[0]) for part in runner.parts.values()]
    packages = dict.fromkeys([*PACKAGES, *(one.package for one in adapters if one and one.package)])
    facts = {
        "packages": {name: version for name in packages if (version := package_version(name))},
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": usable_cores(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
    return {**(each[""] if "" in each else _joined(each, runner)), **facts}


def _describe(config: TrainConfig, environment: object) -> dict[str, Any]:
    facts = {
        **source_facts(environment),
        "config": without_secrets(config.rl_env_config or {}),
        "requires": requirements_of(environment).as_options(),
    }
    return {**facts, **environment.facts} if isinstance(environment, ServedEnvironment) else facts


def _joined(each: dict[str, dict[str, Any]], runner: Runner) -> dict[str, Any]:
    """What several environments are together, and the facts of each."""
    config, parts = runner.config, runner.parts
    required = dict.fromkeys(option for facts in each.values() for option in facts["requires"])

    def all_of(name: str) -> str | None:
        return ", ".join(dict.fromkeys(facts[name] for facts in each.values() if facts.get(name))) or None

    for name, share in config.env_shares.items():
        each[name] |= {"share": share, "score_range": parts[name].config.rl_score_range}
    return {
        "module": all_of("module"),
        "class": ", ".join(f"{name}={facts['class']}" for name, facts in each.items()),
        "file": all_of("file"),
        "sha256": source_hash(file for part in parts.values() for file in files_of(part.environment)),
        "package": all_of("package"),
        "config": {name: facts["config"] for name, facts in each.items()},
        "requires": {option: getattr(config, option) for option in required},
        "environments": each,
    }


def keep_sources(runner: Runner, folder: RunFolder) -> None:
    """Keep the source of the environment, or of each in a folder of its name."""
    shutil.rmtree(folder.environment_source, ignore_errors=True)
    for name, part in runner.parts.items():
        keep_source(part.environment, folder.environment_source / name)


def _git_commit() -> str | None:
    try:
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
