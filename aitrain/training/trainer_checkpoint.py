"""Writes the state of a trainer into a checkpoint, and restores it from there.

runs/checkpoint.py makes the folder a checkpoint, with its manifest, and replaces and deletes it; this module fills it.
transformers and TRL write weights, optimizer, scheduler and random states. Added here is one pair of files per process
with what they leave out: the position inside a generation window, and metrics not logged yet. Files of a checkpoint are
unpickled with torch's `weights_only=True` only.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aitrain import activity
from aitrain.engines.scopes import replaced
from aitrain.errors import CannotWriteError
from aitrain.runs.checkpoint import (
    PREFIX,
    STAGING,
    Manifest,
    changed,
    checkpoints_of,
    line_stays,
    publish,
    read_manifest,
    refuse_changes,
    rotate,
    seal,
    step_of,
)
from aitrain.runs.json_values import as_object
from aitrain.runs.metrics_line import read_metrics
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.training.evaluation import EvalPlan
from aitrain.training.held_out_scoring import EvalState
from aitrain.training.run_context import RunContext
from aitrain.training.run_recorder import RunRecorder
from aitrain.training.trainer import EpisodeTrainer
from aitrain.training.trl_arguments import steps_before

TORCH_WRITE_ERRORS = ("inline_container", "PytorchStreamWriter", "iostream")
"""Parts of the messages of torch's RuntimeErrors for a file that could not be written."""


NOT_KEPT = ("training_args.bin", "zero_to_fp32.py", "zero_to_torch.py")
"""What nothing reads: a pickle, and DeepSpeed's programs for files that model.safetensors makes unnecessary."""


@dataclass
class CheckpointWriter:
    """Writes the checkpoints of one run."""

    folder: RunFolder
    recorder: RunRecorder
    manifest: Manifest
    """The manifest without the values that change with each checkpoint."""
    eval_state: EvalState
    limit: int | None
    last: int | None = field(default=None, init=False)

    def save(self, trainer: EpisodeTrainer, write: Callable[[], None]) -> None:
        """Write one checkpoint. Every process must call this.

        `write` is transformers' method, which fills a folder below `args.output_dir`.

        Raises:
            CannotWriteError: the disk is full or read-only, or another command has the run folder; earlier checkpoints
                stay intact.
        """
        step, accelerator = trainer.state.global_step, trainer.accelerator
        if step == self.last:
            return  # the end of an epoch, whose last step was saved already
        staging = self.folder.checkpoints / f"{STAGING}{step}"
        size = save_size(trainer)
        with activity.own.doing("saving a checkpoint", moves_files=True), explain_write_errors(self.folder, size):
            self.folder.check_owner()
            if accelerator.is_main_process:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
            accelerator.wait_for_everyone()
            self._fill(trainer, staging, write)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                self._finish(trainer, staging)
        accelerator.wait_for_everyone()
        self.last = step

    def _fill(self, trainer: EpisodeTrainer, staging: Path, write: Callable[[], None]) -> None:
        made = staging / f"{PREFIX}{trainer.state.global_step}"
        with replaced(trainer.args, {"output_dir": str(staging)}):
            write()
        made.mkdir(parents=True, exist_ok=True)
        write_window(trainer, made)
        trainer.rollouts.settle()
        write_reference(trainer, made)
        write_case_order(trainer, made)
        write_call_policies(trainer, made)
        self.recorder.sync()

    def _finish(self, trainer: EpisodeTrainer, staging: Path) -> None:
        step, state = trainer.state.global_step, self.eval_state
        made = staging / f"{PREFIX}{step}"
        for name in NOT_KEPT:
            (made / name).unlink(missing_ok=True)
        seconds, tokens = round(trainer.watch.trained_seconds, 3), trainer.rollouts.trained_tokens
        manifest = replace(self.manifest, step=step, best=state.best, owes_evaluation=state.owes_evaluation)
        if trainer.pass_limit != trainer.planned_limit:
            size = {"batch_size": trainer.pass_limit.completions, "rl_prompts_per_step": trainer.prompts_per_step}
            manifest = replace(manifest, config={**manifest.config, **size})
        seal(made, replace(manifest, seconds=seconds, tokens=tokens, epoch=self.folder.epoch))
        self.folder.check_owner()
        publish(made, self.folder.checkpoints / made.name)
        shutil.rmtree(staging, ignore_errors=True)
        rotate(self.folder, self.limit, state.best)


# -- state that transformers and TRL do not save


def write_window(trainer: EpisodeTrainer, folder: Path) -> None:
    """Write this process's position in the generation window, and its metrics not logged yet."""
    pieces = trainer.rest_of_window()
    tensors = {
        f"{number}.{name}": value.detach().cpu().clone().contiguous()
        for number, piece in enumerate(pieces)
        for name, value in piece.items()
        if isinstance(value, torch.Tensor)
    }
    plain_values = [
        {name: value for name, value in piece.items() if not isinstance(value, torch.Tensor)} for piece in pieces
    ]
    rank = trainer.accelerator.process_index
    save_file(tensors, folder / f"window_{rank}.safetensors")
    (folder / f"window_{rank}.json").write_text(
        json.dumps({"pieces": plain_values, **trainer.unlogged()}), encoding="utf-8"
    )


def read_window(trainer: EpisodeTrainer, folder: Path) -> None:
    """Restore what `write_window` wrote; a process without a file starts a new window."""
    rank = trainer.accelerator.process_index
    if not (folder / f"window_{rank}.json").exists():
        return
    values = json.loads((folder / f"window_{rank}.json").read_text(encoding="utf-8"))
    pieces: list[dict[str, object]] = values.pop("pieces")
    tensors = load_file(folder / f"window_{rank}.safetensors", device=str(trainer.accelerator.device))
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        pieces[int(number)][key] = tensor
    trainer.restore_state(pieces, values)


CASE_ORDER = "case_order.json"


def write_case_order(trainer: EpisodeTrainer, folder: Path) -> None:
    """Write what the order of the cases has learned, and how many cases it is about."""
    state = trainer.batches.order_state()
    if state and trainer.accelerator.is_main_process:
        values = {"cases": len(trainer.cases), "state": state}
        (folder / CASE_ORDER).write_text(json.dumps(values), encoding="utf-8")


def read_case_order(trainer: EpisodeTrainer, folder: Path) -> None:
    """Restore what `write_case_order` wrote, unless the number of cases has changed."""
    values = read_object(folder / CASE_ORDER)
    if values.get("cases") == len(trainer.cases):
        trainer.batches.order.restore(as_object(values.get("state")))


def write_call_policies(trainer: EpisodeTrainer, folder: Path) -> None:
    """Write how this process calls each environment, which it has learned from the first calls."""
    states = {name: part.policy.state() for name, part in trainer.rollouts.rollout.runner.parts.items()}
    path = folder / f"call_policies_{trainer.accelerator.process_index}.json"
    path.write_text(json.dumps(states), encoding="utf-8")


def read_call_policies(trainer: EpisodeTrainer, folder: Path) -> None:
    """Restore what `write_call_policies` wrote; a process without a file learns it again."""
    states = read_object(folder / f"call_policies_{trainer.accelerator.process_index}.json")
    for name, part in trainer.rollouts.rollout.runner.parts.items():
        part.policy.restore(as_object(states.get(name)))


REFERENCE = "reference.safetensors"


def write_reference(trainer: EpisodeTrainer, folder: Path) -> None:
    """Write the weights of the reference model if they were synced from the policy (`--trl sync_ref_model`)."""
    if trainer.has_moved_reference and trainer.accelerator.is_main_process:
        save_model(trainer.accelerator.unwrap_model(trainer.ref_model), str(folder / REFERENCE))


def read_reference(trainer: EpisodeTrainer, folder: Path) -> None:
    """Restore what `write_reference` wrote; without it the reference model is the initial one."""
    if trainer.has_moved_reference and (folder / REFERENCE).exists():
        load_model(trainer.accelerator.unwrap_model(trainer.ref_model), str(folder / REFERENCE))


def save_size(trainer: EpisodeTrainer, with_optimizer: bool = True) -> int:
    """Bytes to save: the weights, or the adapter alone, and their optimizer state."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = [p for p in model.parameters() if p.requires_grad or not hasattr(model, "peft_config")]
    states = trainer.optimizer.state.values() if with_optimizer else ()
    kept = [value for state in states for value in state.values()]
    reference = trainer.ref_model.parameters() if with_optimizer and trainer.has_moved_reference else ()
    tensors = [value for value in (*weights, *reference, *kept) if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def explain_write_errors(folder: RunFolder, size: int) -> Iterator[None]:
    """Turn a failed write into an error that says how much disk space is needed.

    Raises:
        CannotWriteError: a file could not be written; partial files were deleted.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in TORCH_WRITE_ERRORS):
            raise
        for unfinished in (*folder.checkpoints.glob(f"{STAGING}*"), *folder.path.glob(f"{STAGING}*")):
            shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(folder.path).free
        is_full = isinstance(error, RuntimeError) and free < size  # torch says only at which position it failed
        why = getattr(error, "strerror", None) or (os.strerror(errno.ENOSPC) if is_full else _short(error))
        raise CannotWriteError(
            f"Cannot save in {folder.path}: {why}\n"
            f"It takes about {_megabytes(size)}, and {_megabytes(free)} are free. Everything saved before is intact:\n"
            "free some disk space and continue with --resume."
        ) from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


# -- resuming

SCORED_BY = ("eval_cases", "eval_samples", "save_best")
"""Options that must be equal for two evaluations to be comparable."""


def resumed_eval_state(context: RunContext, now: Manifest) -> EvalState:
    """Compare the run with the one that wrote the checkpoint, and return its evaluations; empty for a new run.

    Raises:
        ConfigError: it is another run, and `resume_anyway` is not set.
    """
    if context.checkpoint is None:
        return EvalState()
    before = read_manifest(context.checkpoint)
    changes = changed(before, now, context.config)
    if not context.config.resume_anyway:
        refuse_changes(context.checkpoint, changes)
    elif changes:
        context.note(f"Resumed with changes, so without exact reproducibility: {'; '.join(changes)}")
    has_best = [before.best and before.best.step in map(step_of, checkpoints_of(context.folder))]
    broadcast_object_list(has_best)  # rank 0 sees all checkpoints
    best = before.best if has_best[0] else None
    if best and any(before.config.get(name, now.config[name]) != now.config[name] for name in SCORED_BY):
        best = None
        if context.config.save_best:
            context.note("--save-best compares new scores only: the held-out cases or their samples have changed.")
    return EvalState(best, before.owes_evaluation, is_same=not changes)


def continue_scorings(state: EvalState, trainer: EpisodeTrainer, checkpoint: Path, plan: EvalPlan) -> None:
    """Continue the time and the tokens of the training, and take over its evaluations that the plan's are comparable
    with, from metrics.jsonl."""
    before = read_manifest(checkpoint)
    trainer.watch.seconds_before, trainer.rollouts.trained_tokens = before.seconds, before.tokens
    cases, samples = (None, len(plan.cases)), (None, plan.samples)
    found = [
        line
        for line in read_metrics(RunFolder(checkpoint.parent.parent).metrics)
        if line.is_scoring and line_stays(before, line) and line.eval_cases in cases and line.eval_samples in samples
    ]
    scorings = [found]
    broadcast_object_list(scorings)  # rank 0 sees all metrics
    state.scorings = scorings[0]


class RestoreState(TrainerCallback):  # type: ignore[misc]
    """Restores the state of a resumed run that transformers does not restore."""

    def __init__(self, checkpoint: Path, trainer: EpisodeTrainer, is_same: bool) -> None:
        self.checkpoint, self.trainer, self.is_same = checkpoint, trainer, is_same

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Restore the state before the first new step. A run with changed options starts a new generation window. The
        optimizer state holds the old learning rate, which other options or another number of steps replace."""
        read_reference(self.trainer, self.checkpoint)
        read_case_order(self.trainer, self.checkpoint)
        read_call_policies(self.trainer, self.checkpoint)
        if self.is_same:
            read_window(self.trainer, self.checkpoint)
        else:
            _set_learning_rate(self.trainer, args.learning_rate)
        if steps_before(self.checkpoint) != state.max_steps:
            _follow_schedule(self.trainer)


def _set_learning_rate(trainer: EpisodeTrainer, rate: float) -> None:
    scheduler = trainer.lr_scheduler
    change = rate / scheduler.base_lrs[0]
    scheduler.base_lrs = [base * change for base in scheduler.base_lrs]
    scheduler._last_lr = [last * change for last in scheduler.get_last_lr()]  # the value that is logged
    for group in trainer.optimizer.param_groups:
        group["lr"], group["initial_lr"] = group["lr"] * change, rate


def _follow_schedule(trainer: EpisodeTrainer) -> None:
    """Set the learning rate to that of the schedule for the present number of steps; schedules that are no function of
    the step go on as they are."""
    scheduler = trainer.lr_scheduler
    if hasattr(scheduler, "lr_lambdas"):
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        scheduler._last_lr = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
        for group, rate in zip(trainer.optimizer.param_groups, scheduler._last_lr, strict=True):
            group["lr"] = rate
