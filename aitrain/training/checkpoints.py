"""Checkpoints: written whole or not at all, with everything that a run needs to go on as if it had never stopped.

transformers and TRL write weights, optimizer, schedule and random states; trainer.py says where. What they leave out is
added here, one pair of files a process: the place inside a generation window, and what has not been logged yet. No file
of a checkpoint is unpickled but by torch's `weights_only=True`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aitrain import activity
from aitrain.checkpoint import PREFIX, STAGING, Manifest, publish, rotate, seal
from aitrain.errors import RunFailed
from aitrain.run_folder import RunFolder
from aitrain.training.callbacks import Standing
from aitrain.training.run_recorder import RunRecorder
from aitrain.training.scopes import replaced
from aitrain.training.trainer import EpisodeTrainer

TORCH_CANNOT_WRITE = ("inline_container", "PytorchStreamWriter", "iostream")
"""What its errors name when a file could not be written: they are plain RuntimeErrors."""


@dataclass
class Checkpoints:
    """Writes the checkpoints of one run."""

    folder: RunFolder
    history: RunRecorder
    about: Manifest
    """What does not change from one checkpoint to the next."""
    standing: Standing
    limit: int | None
    last: int | None = field(default=None, init=False)

    def save(self, trainer: EpisodeTrainer, write: Callable[[], None]) -> None:
        """One checkpoint; `write` is transformers' own way to fill a folder below `args.output_dir`. Every process must
        call this.

        Raises:
            RunFailed: there is no room, or the folder cannot be written; what was whole is whole.
        """
        step, accelerator = trainer.state.global_step, trainer.accelerator
        if step == self.last:
            return  # at the end of an epoch, after a save in its last step
        staging = self.folder.checkpoints / f"{STAGING}{step}"
        size = size_of(trainer)
        with activity.own.doing("saving a checkpoint", moves_files=True), saying_what_room_it_needs(self.folder, size):
            if accelerator.is_main_process:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
            accelerator.wait_for_everyone()
            self._fill(trainer, staging, write)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                self._finish(staging, step)
        accelerator.wait_for_everyone()
        self.last = step

    def _fill(self, trainer: EpisodeTrainer, staging: Path, write: Callable[[], None]) -> None:
        made = staging / f"{PREFIX}{trainer.state.global_step}"
        with replaced(trainer.args, {"output_dir": str(staging)}):
            write()
        made.mkdir(exist_ok=True)
        write_window(trainer, made)
        write_reference(trainer, made)
        self.history.sync()

    def _finish(self, staging: Path, step: int) -> None:
        made = staging / f"{PREFIX}{step}"
        (made / "training_args.bin").unlink(missing_ok=True)  # a pickle that nobody reads
        now = replace(self.about, step=step, best=self.standing.best, owes_evaluation=self.standing.owes_evaluation)
        seal(made, now)
        publish(made, self.folder.checkpoints / made.name)
        shutil.rmtree(staging, ignore_errors=True)
        rotate(self.folder, self.limit, self.standing.best)


# -- what transformers and TRL leave out


def write_window(trainer: EpisodeTrainer, folder: Path) -> None:
    """This process's place in the generation window, and what it has not logged yet."""
    pieces = trainer.rest_of_window()
    tensors = {
        f"{number}.{name}": value.detach().cpu().clone().contiguous()
        for number, piece in enumerate(pieces)
        for name, value in piece.items()
        if isinstance(value, torch.Tensor)
    }
    plainly = [
        {name: value for name, value in piece.items() if not isinstance(value, torch.Tensor)} for piece in pieces
    ]
    rank = trainer.accelerator.process_index
    save_file(tensors, folder / f"window_{rank}.safetensors")
    (folder / f"window_{rank}.json").write_text(json.dumps({"pieces": plainly, **trainer.unlogged()}), encoding="utf-8")


def read_window(trainer: EpisodeTrainer, folder: Path) -> None:
    """Put it back. Without one, in a resumed run of more processes, the window begins anew."""
    rank = trainer.accelerator.process_index
    if not (folder / f"window_{rank}.json").exists():
        return
    values = json.loads((folder / f"window_{rank}.json").read_text(encoding="utf-8"))
    pieces: list[dict[str, Any]] = values.pop("pieces")
    tensors = load_file(folder / f"window_{rank}.safetensors", device=str(trainer.accelerator.device))
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        pieces[int(number)][key] = tensor
    trainer.go_on(pieces, values)


REFERENCE = "reference.safetensors"


def write_reference(trainer: EpisodeTrainer, folder: Path) -> None:
    """The weights of the reference model, where they have been changed (`--trl sync_ref_model`)."""
    if trainer.has_moved_reference and trainer.accelerator.is_main_process:
        save_model(trainer.accelerator.unwrap_model(trainer.ref_model), str(folder / REFERENCE))


def read_reference(trainer: EpisodeTrainer, folder: Path) -> None:
    """Put them back; without them, the reference model is the initial one."""
    if trainer.has_moved_reference and (folder / REFERENCE).exists():
        load_model(trainer.accelerator.unwrap_model(trainer.ref_model), str(folder / REFERENCE))


def size_of(trainer: EpisodeTrainer, with_optimizer: bool = True) -> int:
    """Bytes that saving takes: weights, or the adapter's alone, and what the optimizer keeps for them."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = [p for p in model.parameters() if p.requires_grad or not hasattr(model, "peft_config")]
    states = trainer.optimizer.state.values() if with_optimizer else ()
    kept = [value for state in states for value in state.values()]
    reference = trainer.ref_model.parameters() if with_optimizer and trainer.has_moved_reference else ()
    tensors = [value for value in (*weights, *reference, *kept) if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def saying_what_room_it_needs(folder: RunFolder, size: int) -> Iterator[None]:
    """A failed write as an error that says how much room there should be.

    Raises:
        RunFailed: a file could not be written; what was half written is gone.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in TORCH_CANNOT_WRITE):
            raise
        for unfinished in (*folder.checkpoints.glob(f"{STAGING}*"), *folder.path.glob(f"{STAGING}*")):
            shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(folder.path).free
        why = getattr(error, "strerror", None) or " ".join(str(error).split())[:120]
        raise CannotWrite(
            f"Cannot save in {folder.path}: {why}\n"
            f"It takes about {_megabytes(size)}, and {_megabytes(free)} are free. What was saved before is whole:\n"
            "make room and go on with --resume."
        ) from error


class CannotWrite(RunFailed):
    """There is no room, or the folder has become read-only: nothing else can be saved either."""


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


class Return(TrainerCallback):  # type: ignore[misc]
    """Puts a resumed run where it was, after transformers has done its own part."""

    def __init__(self, checkpoint: Path, trainer: EpisodeTrainer, is_same: bool) -> None:
        self.checkpoint, self.trainer, self.is_same = checkpoint, trainer, is_same

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Once, before the first new step. A run that was changed begins its window anew, with its new rate: the
        optimizer's state holds the old one."""
        read_reference(self.trainer, self.checkpoint)
        if self.is_same:
            read_window(self.trainer, self.checkpoint)
        else:
            _take_rate(self.trainer, args.learning_rate)


def _take_rate(trainer: EpisodeTrainer, rate: float) -> None:
    scheduler = trainer.lr_scheduler
    change = rate / scheduler.base_lrs[0]
    scheduler.base_lrs = [base * change for base in scheduler.base_lrs]
    scheduler._last_lr = [last * change for last in scheduler.get_last_lr()]  # which is what is logged
    for group in trainer.optimizer.param_groups:
        group["lr"], group["initial_lr"] = group["lr"] * change, rate
