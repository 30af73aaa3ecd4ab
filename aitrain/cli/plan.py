"""`aitrain plan`: what a run would do and need, without starting it. Its flags are those of `aitrain grpo`."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from aitrain.batch import RolloutSize, schedule_cases
from aitrain.cli.flags import Flag, with_options
from aitrain.cli.grpo import NOT_CHECKED, checked_lines, plan_lines, train_options
from aitrain.errors import AitrainError, ConfigError
from aitrain.events import Failed
from aitrain.launch.model_shape import read_model_shape
from aitrain.launch.preflight import RunPlan, check
from aitrain.launch.resource_estimate import (
    MIB,
    PROMPT,
    device_memory,
    estimate_disk,
    estimate_memory,
    format_bytes,
    free_disk,
    memory_savers,
    processes_sharing,
)
from aitrain.options.documentation import help_text
from aitrain.options.fsdp_settings import fsdp_settings
from aitrain.options.train import TrainConfig
from aitrain.runs.metrics_line import read_metrics
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.ui.duration import duration

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of a unit of ru_maxrss."""


def _show_help(wanted: bool) -> None:
    if wanted:
        typer.echo(HELP + help_text(TrainConfig, min(100, shutil.get_terminal_size().columns)))
        raise typer.Exit()


HELP = """\
Usage: aitrain plan [OPTIONS]

  Show what a run would do, and what it needs of memory, disk and time:

    aitrain plan --model tiny --rl-env path/to/file.py:Class --measure 3

Command:
  --config FILE
        YAML file with options; flags override it.
  --measure INTEGER
        Train at least this number of steps in a temporary folder, to show how long the run would take.
  --options-only
        Check options and files only, in a fraction of a second; do not load the environment.
  --debug
        Show tracebacks and the libraries' output.
  --json
        Print a JSON object instead of lines.
  -h, --help
        Show this. A switch below has a --no- form as well; [..] is the default.

"""


@with_options(TrainConfig)
def plan(
    config: Annotated[Path | None, typer.Option("--config")] = None,
    measure: Annotated[int | None, typer.Option("--measure", min=2)] = None,
    *,
    options_only: Annotated[bool, typer.Option("--options-only")] = False,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    debug: Annotated[bool, typer.Option("--debug")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    show_help: Annotated[bool, typer.Option("--help", "-h", is_eager=True, callback=_show_help)] = False,
    **flags: Flag,
) -> int:
    """Show what a run would do, and what it needs."""
    if measure and options_only:
        raise ConfigError("--measure: trains, so it cannot be combined with --options-only\nLeave one of them out.")
    wanted = check(train_options(config, flags, resume))
    lines = chain(
        plan_lines(wanted),
        _resource_lines(wanted),
        _measured(wanted, measure, debug) if measure else _time_left(wanted),
    )
    found = checked_lines(wanted, options_only, debug)
    if as_json:
        typer.echo(json.dumps(_document(wanted, list(lines), list(found)), indent=2))
        return 0
    for line in chain(lines, found):
        typer.echo(line)
    return 0


def _document(wanted: RunPlan, lines: list[str], found: list[str]) -> dict[str, object]:
    """The plan for programs: numbers as numbers, and every line of the text by its name."""
    named: dict[str, list[str]] = {}
    for line in "\n".join(lines).splitlines():
        name = line[:12].strip() or next(reversed(named))
        named.setdefault(name, []).append(line[13:].strip())
    open_ends = [one.removeprefix(NOT_CHECKED) for one in found if one.startswith(NOT_CHECKED)]
    return {
        "options": wanted.config.changed(),
        "processes": wanted.processes,
        "gpus": list(wanted.gpus),
        "completions_per_step": wanted.batch.completions_per_step,
        "prompts_per_step": wanted.batch.prompts_per_step,
        "lines": {name: "\n".join(texts) for name, texts in named.items()},
        "notes": [one for one in found if not one.startswith(NOT_CHECKED)],
        "not_checked": open_ends,
    }


# -- memory and disk


def _resource_lines(wanted: RunPlan) -> Iterator[str]:
    shape = read_model_shape(wanted.config.model)
    if shape is None:
        yield _line("memory", "unknown: this model's files are not on this machine, or not safetensors")
        return
    device = device_memory(wanted.gpus)
    need = estimate_memory(shape, wanted.config, wanted.batch, device)
    sharing = processes_sharing(wanted.processes, device)
    free = "" if device.free is None else f", {format_bytes(device.free)} free"
    yield _line("shape", str(shape))
    each = f" for each of {sharing} processes" if sharing > 1 else ""
    config, prompt = wanted.config, wanted.config.rl_max_prompt_length
    prompts = f"prompts of {prompt}" if prompt else f"prompts of {PROMPT} (assumed; --rl-max-prompt-length)"
    lengths = f"{prompts} and completions of {config.rl_max_episode_tokens or config.rl_max_new_tokens} tokens"
    yield _line("memory", f"about {format_bytes(need.peak)} of the {device.kind}'s{each}{free}; {lengths}")
    phases = {f"{name} (the largest of these counts)": size for name, size in need.phases.items()}
    parts = [*need.stay.items(), *phases.items()]
    yield from (_line("", f"{format_bytes(size):>10} {name}") for name, size in parts if size >= MIB)
    if need.merging == need.peak:
        yield _line("", f"{format_bytes(need.merging):>10} at the end, while the adapter is merged")
    for flag, saved in memory_savers(shape, wanted.config, wanted.batch, device)[:4]:
        yield _line("", f"{'-' + format_bytes(saved):>10} with {flag}")
    room = estimate_disk(shape, config, wanted.batch)
    if config.distributed_backend == "fsdp2":
        sizes = f"over {wanted.batch.processes} processes, a checkpoint of {format_bytes(room.checkpoint)}"
        yield _line("sharding", f"{sizes}; {fsdp_settings(config, shape.weights)}")
    rollouts = "" if room.rollouts is None else f" + rollouts at most {format_bytes(room.rollouts)}"
    kept = f"model {format_bytes(room.model)} + checkpoints {format_bytes(room.checkpoints)}{rollouts}"
    yield _line("disk", f"{kept}, {format_bytes(free_disk(Path(config.output_dir)))} free")


# -- time


def _time_left(wanted: RunPlan) -> Iterator[str]:
    """Estimate the time from the run folder of this name, if it has timed steps."""
    folder = RunFolder(Path(os.path.expanduser(wanted.config.output_dir)) / wanted.config.project_name)
    status = read_object(folder.status)
    pace, steps, step = _pace(folder), status.get("steps"), status.get("step")
    if pace is None:
        count = _whole_rollouts(3, wanted)
        yield _line("time", f"unknown: --measure {count} trains {count} steps to measure it")
    elif isinstance(steps, int) and isinstance(step, int) and status.get("status") != "finished":
        yield _line("time", f"{duration(pace)} a step in {folder.path}: {duration(pace * (steps - step))} left there")
    else:
        yield _line("time", f"{_whole(pace, wanted, steps)} as in {folder.path}")


def _whole(pace: float, wanted: RunPlan, steps: object) -> str:
    count = wanted.config.max_steps or steps
    whole = f", {duration(pace * count)} for {count} steps" if isinstance(count, int) else ""
    return f"{pace:.2f}s a step{whole}, without scoring held-out cases,"


def _pace(folder: RunFolder) -> float | None:
    """Seconds per step, without the first line of metrics, as first steps are slow."""
    timed = [(line.step, line.seconds) for line in read_metrics(folder.metrics) if line.seconds is not None]
    if len(timed) < 2 or timed[-1][0] <= timed[0][0]:
        return None
    (first, start), (last, end) = timed[0], timed[-1]
    return (end - start) / (last - first)


def _measured(wanted: RunPlan, count: int, debug: bool) -> Iterator[str]:
    """Train some steps in a temporary folder, and measure time and memory."""
    if wanted.config.resume_from_checkpoint is not None:
        raise ConfigError("--measure: cannot be combined with --resume-from-checkpoint\nLeave one of them out.")
    count = _whole_rollouts(count, wanted)
    with tempfile.TemporaryDirectory(prefix="aitrain-plan-") as parent:
        short = {"max_steps": count, "eval_cases": 0, "eval_strategy": "no", "save_strategy": "no", "log": "none"}
        quiet = {"output_dir": parent, "merge_adapter": False, "push_to_hub": False, "logging_steps": 1}
        folder = _train(replace(wanted, config=wanted.config.model_copy(update=short | quiet)), debug)
        pace, cases = _pace(folder), read_object(folder.result).get("train_cases")
    if pace is None:
        raise AitrainError("--measure: no step could be timed")
    steps = schedule_cases(wanted.config, wanted.batch, cases).steps if isinstance(cases, int) else None
    rollout = RolloutSize.of(wanted.config, wanted.batch).steps
    sampled = f", with a rollout every {rollout}" if rollout > 1 else ""
    yield _line("time", f"{_whole(pace, wanted, steps)} measured in {count} steps{sampled}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * RSS_UNIT
    yield _line("", f"{format_bytes(peak):>10} of the CPU's memory were used at most by a process")


def _whole_rollouts(count: int, wanted: RunPlan) -> int:
    """At least this number of steps, so that after the first one, which is slow, whole rollouts are timed."""
    steps = RolloutSize.of(wanted.config, wanted.batch).steps
    return 1 + steps * math.ceil((count - 1) / steps)


def _train(short: RunPlan, debug: bool) -> RunFolder:
    from aitrain.launch.ray_processes import launcher_of

    with short.open_folder() as folder:
        end = launcher_of(short)(short, folder, lambda event: None).run()  # its events are not shown
    if debug:
        typer.echo(folder.log.read_text(encoding="utf-8", errors="replace"), err=True)
    if isinstance(end, Failed):
        error = AitrainError(end.message)
        error.exit_code = end.exit_code
        raise error
    return folder


def _line(name: str, text: str) -> str:
    return f"{name:12} {text}"
