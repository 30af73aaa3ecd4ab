"""Writes the state of a trainer into a checkpoint, and restores it from there.

runs/checkpoint.py makes the folder a checkpoint, with its manifest, and replaces and deletes it; this module fills it.
transformers and TRL write weights, optimizer, scheduler and random states. Added here is one file per process with what
they leave out, such as the position inside a generation window, and metrics not logged yet. Files of a checkpoint are
unpickled with torch's `weights_only=True` only.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from aitrain import activity
from aitrain.engines.scopes import replaced
from aitrain.errors import CannotWriteError, ConfigError
from aitrain.runs.checkpoint import (
    PREFIX,
    STAGING,
    Manifest,
    changed,
    publish,
    read_manifest,
    refuse_changes,
    rotate,
    seal,
)
from aitrain.runs.records import read_metrics
from aitrain.runs.run_folder import RunFolder
from aitrain.training.distributed import of_first
from aitrain.training.held_out_scoring import EvalState
from aitrain.training.run_context import RunContext
from aitrain.training.trainer import EpisodeTrainer

TORCH_WRITE_ERRORS = ("inline_container", "PytorchStreamWriter", "iostream")
"""Parts of the messages of torch's RuntimeErrors for a file that could not be written."""
STATE = "rank_{rank}.pt"
"""File of each process, with what transformers and TRL do not save."""


def save_checkpoint(
    manifest: Manifest, eval_state: EvalState, trainer: EpisodeTrainer, write: Callable[[], None]
) -> None:
    """Write a checkpoint. Every process must call this.

    `manifest` lacks the values that change with each checkpoint. `write` is transformers' method, which fills a folder
    below `args.output_dir`.

    Raises:
        CannotWriteError: the disk is full or read-only, or another command has the run folder; earlier checkpoints stay
            intact.
    """
    folder, step, accelerator = trainer.run.folder, trainer.state.global_step, trainer.accelerator
    if step == trainer.saved_step:
        return  # the end of an epoch, whose last step was saved already
    staging = folder.checkpoints / f"{STAGING}{step}"
    made = staging / f"{PREFIX}{step}"
    with activity.own.doing("saving a checkpoint", moves_files=True), explain_write_errors(folder):
        folder.check_owner()
        if accelerator.is_main_process:
            shutil.rmtree(staging, ignore_errors=True)
            made.mkdir(parents=True)
        accelerator.wait_for_everyone()
        with replaced(trainer.args, {"output_dir": str(staging)}):
            write()
        write_state(trainer, made)
        trainer.recorder.sync()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            of_step = replace(
                manifest,
                step=step,
                config={**manifest.config, **trainer.lowered},
                before=eval_state.before,
                last_other=eval_state.last_other,
                seconds=round(trainer.watch.trained_seconds, 3),
            )
            seal(made, of_step)
            folder.check_owner()
            publish(made, folder.checkpoints / made.name)
            shutil.rmtree(staging, ignore_errors=True)
            best = eval_state.best
            rotate(folder, trainer.run.config.save_total_limit, None if best is None else best.step)
    accelerator.wait_for_everyone()
    trainer.saved_step = step


def write_state(trainer: EpisodeTrainer, folder: Path) -> None:
    """Write this process's state that transformers and TRL do not save: the steps of the last generation batch, if some
    are not trained on yet, values for the next line of metrics, and what the order of the cases and the calls of each
    environment have learned."""
    trainer.rollouts.settle()
    is_inside = trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations)
    parts = trainer.rollouts.rollout.runner.parts
    state = {
        "pieces": (trainer._buffered_inputs or []) if is_inside else [],
        "metrics": {name: list(map(float, values)) for name, values in trainer._metrics["train"].items()},
        "loss": trainer._tr_loss.item(),
        "logged": trainer._globalstep_last_logged,
        "skipped": [trainer.watch.skipped, trainer.watch.skipped_in_a_row],
        "case_order": trainer.batches.state,
        "call_policies": {name: part.policy.state() for name, part in parts.items()},
    }
    torch.save(state, folder / STATE.format(rank=trainer.accelerator.process_index))


@contextmanager
def explain_write_errors(folder: RunFolder) -> Iterator[None]:
    """Turn a failed write into an error that says what remains.

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
        why = getattr(error, "strerror", None) or " ".join(str(error).split())  # torch's does not name a full disk
        free = shutil.disk_usage(folder.path).free / 2**20
        raise CannotWriteError(
            f"Cannot save in {folder.path}: {why[:120]} ({free:,.0f} MiB are free)\n"
            "Everything saved before is intact: free some disk space and continue with --resume."
        ) from error


# -- resuming


def resumed_eval_state(context: RunContext, now: Manifest) -> EvalState:
    """Compare the run with the one that wrote the checkpoint, and return its evaluations; empty for a new run.

    Raises:
        ConfigError: it is another run, and `resume_anyway` is not set; or it was written by an earlier version.
    """
    if context.checkpoint is None:
        return EvalState()
    if not (context.checkpoint / STATE.format(rank=0)).exists():
        raise ConfigError(
            f"{context.checkpoint} was written by an earlier version of aitrain, and cannot be resumed from.\n"
            f"Start a new run with its weights: --model {context.checkpoint}"
        )
    before = read_manifest(context.checkpoint)
    changes = changed(before, now, context.config)
    if not context.config.resume_anyway:
        refuse_changes(context.checkpoint, changes)
    elif changes:
        context.note(f"Resumed with changes, so without exact reproducibility: {'; '.join(changes)}")
    samples = before.config["eval_samples"] == context.config.eval_samples
    is_comparable = not changes and before.held_out == now.held_out and samples
    # rank 0 sees all metrics
    metrics = read_metrics(context.folder.metrics)
    made = of_first([line for line in metrics if line.is_scoring and line.step <= before.step])
    if made and not is_comparable and context.config.save_best:
        context.note("--save-best compares new scores only: the run or its held-out cases have changed.")
    last_scored = made[-1].step if made else 0
    last_other = before.last_other if is_comparable else last_scored
    return EvalState(
        not changes,
        before.before if is_comparable else {},
        last_scored,
        last_other,
        [line for line in made if line.step > last_other],
    )


def restore_state(trainer: EpisodeTrainer, checkpoint: Path, is_same: bool) -> None:
    """Restore what transformers does not restore, before the first new step. A run with changed options starts a new
    generation window. The learning rate is that of the schedule with the present options, not the old one of the
    optimizer's state; a schedule that does not depend on the step alone keeps its state."""
    path = checkpoint / STATE.format(rank=trainer.accelerator.process_index)
    path = path if path.exists() else checkpoint / STATE.format(rank=0)  # of a run with fewer processes
    saved = torch.load(path, map_location=trainer.accelerator.device, weights_only=True)
    trainer.batches.restore(saved["case_order"])
    for name, part in trainer.rollouts.rollout.runner.parts.items():
        part.policy.restore(saved["call_policies"].get(name, {}))
    if is_same:
        trainer._step, trainer._buffered_inputs = trainer.state.global_step, saved["pieces"] or None
        trainer._metrics["train"].update(saved["metrics"])
        trainer._tr_loss = torch.tensor(saved["loss"], device=trainer.args.device)
        trainer._globalstep_last_logged = saved["logged"]
        trainer.watch.skipped, trainer.watch.skipped_in_a_row = saved["skipped"]
    scheduler = trainer.lr_scheduler
    if hasattr(scheduler, "lr_lambdas"):
        scheduler.base_lrs = [trainer.args.learning_rate] * len(scheduler.base_lrs)
        scheduler.last_epoch -= 1
        scheduler.step()
