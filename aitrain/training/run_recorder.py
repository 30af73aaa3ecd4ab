"""What a run records in its folder: metrics and rollouts, without gaps and duplicates when it is resumed; and the
facts of environment.json: its environments, packages and hardware.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from aitrain.environment.adapters import adapter_named
from aitrain.environment.requirements import requirements_of
from aitrain.environment.runner import Runner
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.machine import usable_cores
from aitrain.packages import version_of
from aitrain.redaction import without_secrets
from aitrain.runs.checkpoint import read_manifest, rewind
from aitrain.runs.environment_source import files_of, keep_source, source_facts, source_hash
from aitrain.runs.records import MetricsLine, RolloutRecord
from aitrain.runs.run_folder import RunFolder, append_lines, json_lines, read_lines, sync, write_text

PACKAGES = ("aitrain", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm")


class RunRecorder:
    """Appends records to the run folder. In a resumed run, the first new record deletes those after the checkpoint, so
    that a run that is killed earlier keeps them."""

    def __init__(self, folder: RunFolder, checkpoint: Path | None) -> None:
        self.folder = folder
        self.resumed_from = None if checkpoint is None else read_manifest(checkpoint)

    def begin(self) -> None:
        """Delete the old records, once. Every process must call this: none may write meanwhile.

        Raises:
            CannotWriteError: another command has the run folder.
        """
        self.folder.check_owner()
        if self.resumed_from is None:
            return
        state = PartialState()
        if state.is_main_process:
            rewind(self.folder, self.resumed_from)
        self.resumed_from = None
        state.wait_for_everyone()

    def add_rollouts(self, records: list[RolloutRecord]) -> None:
        """Append one line per episode to this process's own file. Every process must call this."""
        self.begin()
        self.folder.rollouts.mkdir(exist_ok=True)
        append_lines(self._own_rollouts, (record.to_json() for record in records))

    def add_metrics(self, line: MetricsLine) -> None:
        """Append one line of metrics; a scoring stands before the line of its step, also if it was made up for later.
        Only the first process may call this, after `begin`."""
        before = list(read_lines(self.folder.metrics)) if line.is_scoring else []
        if before and before[-1].get("step") == line.step:
            write_text(self.folder.metrics, json_lines([*before[:-1], line.to_json(), before[-1]]))
        else:
            append_lines(self.folder.metrics, [line.to_json()])

    def sync(self) -> None:
        """Make this process's records survive a power cut: a checkpoint must not be newer than its records."""
        state = PartialState()
        files = [self._own_rollouts, *([self.folder.metrics] if state.is_main_process else [])]
        for file in files:
            if file.exists():
                sync(file)

    @property
    def _own_rollouts(self) -> Path:
        return self.folder.rollouts / f"rank{PartialState().process_index}.jsonl"


# -- environment.json


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
