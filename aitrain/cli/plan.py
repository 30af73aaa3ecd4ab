"""`aitrain plan`: what a run would do and need, here or on other hardware, without starting it. Its flags are those of
`aitrain grpo`."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from aitrain.cli.flags import AsJson, ConfigFile, print_json, with_options
from aitrain.errors import ConfigError
from aitrain.launch.hardware import Hardware
from aitrain.launch.preflight import RunPlan, check, not_checked
from aitrain.launch.resource_estimate import (
    MIB,
    PROMPT,
    TIGHT,
    assumed_lengths,
    format_bytes,
    free_disk,
)
from aitrain.launch.step_estimate import ASSUMED, HardwareEstimate
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.ui.output import escape_controls

Line = tuple[str, str]
"""The name of a line and its text; further lines of a name have none."""


@with_options(TrainConfig)
def plan(
    config: ConfigFile = None,
    *,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Plan for these GPUs, such as H100 or H100x8, and not for this machine."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Machines with these GPUs [--nnodes].")] = None,
    as_json: AsJson = False,
    **flags: object,
) -> int:
    """Show what a run would do, and what it needs of memory and disk. Nothing is started; aitrain grpo --dry-run also
    loads the environment and the tokenizer.

    aitrain plan --model tiny --rl-env path/to/file.py:Class

    aitrain plan --gpu H100 --model Qwen/Qwen3-4B --rl-env path/to/file.py:Class --use-vllm
    """
    if nodes is not None and gpu is None:
        raise ConfigError("nodes: of which GPUs?\nAdd --gpu, such as --gpu H100x8.")
    options = resolve(TrainConfig, config, flags)
    hardware = None if gpu is None else Hardware.of(gpu, nodes or options.nnodes or 1)
    show_plan(check(options, hardware=hardware), as_json)
    return 0


def show_plan(plan: RunPlan, as_json: bool, is_dry_run: bool = False) -> None:
    """Show a plan, for a dry run the notes of a training process that checks it as well, and what is not checked.

    Raises:
        AitrainError: the run would be refused.
    """
    estimate = HardwareEstimate.of(plan.needs, plan.hardware) if plan.hardware and plan.needs else None
    lines = [*_run(plan), *_needs(plan), *(_on_hardware(plan, estimate) if estimate else ())]
    if not as_json:
        for name, text in lines:
            typer.echo(f"{name:12} {text}")
    notes = [f"! {note}" for note in plan.notes]
    if is_dry_run:
        from aitrain.launch.command_processes import dry_run  # here, because a plan does not need it

        notes += [note.mark + escape_controls(note.text) for note in dry_run(plan)]
    left = not_checked(plan, with_environment=is_dry_run)
    if not as_json:
        for line in (*notes, *(f"not checked: {what}" for what in left)):
            typer.echo(line)
        return
    document = {
        "options": plan.config.changed(),
        "gpus": list(plan.gpus),
        "completions_per_step": plan.batch.completions_per_step,
        "lines": lines,
        "notes": notes,
        "not_checked": left,
    }
    if estimate is not None:
        document["estimate"] = {**asdict(estimate), "peak": estimate.memory.peak}
    print_json(document)


# -- the run


def _run(plan: RunPlan) -> Iterator[Line]:
    config = plan.config
    yield "model", config.model
    yield "batch", str(plan.batch)
    trained = "for LoRA" if config.peft else "for all weights"
    yield "lr", f"{config.learning_rate:g}{'' if config.lr else f', {trained}'}"
    repeated = f" x {config.repeated_updates} updates with each batch" if config.repeated_updates > 1 else ""
    cases = f"{config.epochs} x training cases / {plan.batch.prompts_per_step}{repeated}, rounded up"
    yield "steps", str(config.max_steps or cases)
    yield "options", ", ".join(f"{name} {value}" for name, value in config.changed().items())
    machines = f", on each of {plan.nodes.count} machines" if plan.nodes else ""
    yield "processes", f"{plan.processes} on {'GPU ' + ', '.join(plan.gpus) if plan.gpus else 'CPU'}{machines}"
    if config.starts_vllm_servers:
        where = f"GPU {', '.join(plan.server_gpus)}" if plan.server_gpus else "the CPU"
        yield "vLLM servers", f"{config.vllm_servers} on {where}, weights by {config.weight_sync}"
    if plan.hardware is None:
        yield "run folder", str(plan.folder.path if plan.folder else Path(config.output_dir) / config.project_name)
    if plan.checkpoint:
        yield "resumes from", str(plan.checkpoint)
    if plan.is_done:
        yield "left to do", "nothing"


# -- what it needs


def _needs(plan: RunPlan) -> Iterator[Line]:
    """Memory and disk."""
    config, needs = plan.config, plan.needs
    if needs is None:
        yield "memory", "unknown: this model's files are not on this machine, not safetensors, or quantized"
        return
    need, device = needs.memory, needs.device
    sharing = device.shared_by(plan.processes)
    free = "" if device.free is None else f", {format_bytes(device.free)} free"
    yield "shape", str(needs.shape)
    each = f" for each of {sharing} processes" if sharing > 1 else ""
    prompt = f"{config.rl_max_prompt_length or f'{PROMPT} (assumed; --rl-max-prompt-length)'}"
    lengths = f"prompts of {prompt} and completions of {assumed_lengths(config)[1]} tokens"
    yield "memory", f"about {format_bytes(need.peak)} of the {device.kind}'s{each}{free}; {lengths}"
    phases = {f"{name} (the largest of these counts)": size for name, size in need.phases.items()}
    for name, size in {**need.stay, **phases}.items():
        if size >= MIB:
            yield "", f"{format_bytes(size):>10} {name}"
    model, checkpoint = needs.disk
    kept = f"model {format_bytes(model)}, each checkpoint {format_bytes(checkpoint)}"
    yield "disk", kept if plan.hardware else f"{kept}, {format_bytes(free_disk(Path(config.output_dir)))} free"


# -- on other hardware


def _on_hardware(plan: RunPlan, estimate: HardwareEstimate) -> Iterator[Line]:
    """Whether it fits, the passes of a step, and its seconds."""
    config, changes = plan.config, estimate.changes
    yield "hardware", str(estimate.hardware)
    verdict = "yes" if changes == [] else f"no; with {' '.join(changes)} it does" if changes else "no"
    yield "fits", f"{verdict} ({TIGHT:.0%} of the memory may be used)"
    if estimate.cached_episodes is not None:
        room = f"a cache for {estimate.cached_episodes:,.0f} of the longest episodes"
        if estimate.cached_episodes < 1:
            room = "too little (--vllm-gpu-memory-utilization, --vllm-tensor-parallel-size)"
        yield "vLLM", f"with {config.vllm_memory:.0%} of each GPU: {room}"
    kept = "activations kept" if config.disable_gradient_checkpointing else "gradient checkpointing"
    prompts = "shared" if config.shares_prompts else "computed for each completion"
    yield "passes", f"{estimate.passes} in each process; {kept}, prompts {prompts}"
    for part, (least, most) in estimate.seconds.items():
        seconds = f"{least:,.1f} to {most:,.1f} s"
        if part == "step":
            yield part, f"{seconds}, estimated and not measured"
        else:
            yield "", f"{seconds} of it: {part}"
    yield "", f"assumed: {ASSUMED}"
