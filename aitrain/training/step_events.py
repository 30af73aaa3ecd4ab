"""What comes before and after each optimizer step: its clock and its line of metrics, and the guard that skips it if
its gradient is NaN or inf, and ends the run if the weights are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from aitrain.engines.sharded_tensors import own_part
from aitrain.errors import DivergedError
from aitrain.events import Step
from aitrain.runs.records import MetricsLine, read_metrics

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer

MAX_SKIPPED_IN_A_ROW = 3
"""Consecutive skipped steps after which the run ends."""
MAX_SKIPPED_IN_A_ROW_FP16 = 20
"""The same for fp16: its loss scale starts at 2**16, and every overflow halves it."""


class StepEvents(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Times the steps of a trainer on this process, counts its epochs, and skips steps that are not finite. On the
    first process, writes metrics.jsonl, announces each step, and passes lines on for a diagnosis.

    Measured are the seconds in which episodes waited for the policy and for their environments, also those that are
    played ahead. With free-running episodes both clocks may run at the same time, so that the parts can add up to more
    than the step. `optimize` is the time of a step outside its rollout.
    """

    def __init__(self, trainer: EpisodeTrainer) -> None:
        self.trainer, self.run, self.recorder = trainer, trainer.run, trainer.recorder
        self.clock = trainer.rollouts.rollout.engine.clock
        self.restore: Callable[[], None] = lambda: None
        """Restores the state of a resumed run that transformers does not restore."""
        self._step_start = 0.0
        self.rollout_seconds = 0.0  # of this step, until its batch was there
        self.skipped = self.skipped_in_a_row = 0
        resumed = trainer.recorder.resumed_from
        self.seconds_before = resumed.seconds if resumed else 0.0  # of the training's earlier parts, with evaluations
        self._train_start: float | None = None

    @property
    def trained_seconds(self) -> float:
        """Seconds of the training, evaluations included, over all parts of a resumed run."""
        return self.seconds_before + (0.0 if self._train_start is None else time.monotonic() - self._train_start)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start the clock of the training; in a resumed run, restore the state, and look at the metrics up to the
        checkpoint."""
        self._train_start, self.first_step = time.monotonic(), state.global_step
        self.run.progress.step, self.run.progress.steps = state.global_step, state.max_steps
        self.restore()
        checkpoint = self.recorder.resumed_from
        for line in read_metrics(self.run.folder.metrics) if state.is_world_process_zero else ():
            if checkpoint is None or line.step <= checkpoint.step:
                self.run.diagnose(line)

    def on_train_end(self, *_: object, **__: object) -> None:
        """Stop it."""
        self.seconds_before, self._train_start = self.trained_seconds, None

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Reset the clocks: generation between steps, for held-out cases, belongs to no step."""
        self._step_start, self.rollout_seconds = time.monotonic(), 0.0
        self.clock.take()

    def on_optimizer_step(self, args: object, state: TrainerState, control: object, **parts: Any) -> None:
        """Check the weights, before anything is saved.

        Raises:
            DivergedError: one is not finite.
        """
        trained = (parameter for parameter in parts["model"].parameters() if parameter.requires_grad)
        if not self._everywhere(all_finite(trained, self.trainer.accelerator.device)):
            raise DivergedError(
                f"The weights are no longer finite after step {state.global_step + 1}: it was too large.\n"
                "Lower --lr or --max-grad-norm.",
                has_finite_weights=False,
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Runs before the step is logged and saved; the end of the run is handled by transformers. Adds the seconds of
        the step, sets the fractional epoch, and saves and logs at the end of each epoch as transformers does."""
        self.recorder.begin()
        self.run.progress.step = state.global_step
        seconds, parts = time.monotonic() - self._step_start, self.clock.take()
        parts |= {"step": seconds, "optimize": seconds - self.rollout_seconds}
        for part, spent in parts.items():
            self.trainer._metrics["train"][f"time/{part}"].append(round(spent, 6))
        schedule, step = self.trainer.schedule, state.global_step
        state.epoch = schedule.epochs_after(step)
        if not schedule.ends_epoch(step):
            return
        if step < state.max_steps:
            control.should_save |= args.save_strategy == IntervalStrategy.EPOCH
        # consumes the random number of plain TRL's new DataLoader; also in the last step, from which a run may continue
        torch.empty((), dtype=torch.int64).random_()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: object
    ) -> None:
        """Write one line per logging step; skips the summary that transformers logs at the end."""
        if not state.is_world_process_zero or "train_runtime" in logs or self._train_start is None:
            return
        elapsed = time.monotonic() - self._train_start
        values = {name: value for name, value in logs.items() if not name.startswith("rewards/")}  # as reward
        line = MetricsLine.of_logs(state.global_step, round(elapsed, 3), values)
        self.recorder.add_metrics(line)
        if "reward" in logs:
            pace = elapsed / max(1, state.global_step - self.first_step)
            left = pace * (state.max_steps - state.global_step)
            self.run.progress.ends_at = round(time.time() + left, 1)
            self.run.announce(
                Step(
                    state.global_step,
                    state.max_steps,
                    logs["reward"],
                    left,
                    flat_groups=logs.get("frac_reward_zero_std"),
                    truncated=logs.get("stopped/max_tokens", 0.0) + logs.get("stopped/truncated", 0.0),
                    failed=logs.get("stopped/env_error", 0.0) + logs.get("stopped/env_timeout", 0.0),
                    tokens_per_second=logs.get("tokens_per_second"),
                    seconds={name[5:]: value for name, value in logs.items() if name.startswith("time/")},
                )
            )
            self.run.diagnose(line)

    # -- NaN and inf, which are kept out of the weights and the optimizer state

    def before_step(self, model: torch.nn.Module, norm: float) -> None:
        """Clear the gradients if their norm is not finite on any rank.

        An optimizer skips parameters without a gradient: neither momentum nor weight decay applies. With fp16 the
        gradient scaler skips the step itself, for which it needs the gradients.

        Raises:
            DivergedError: too many steps in a row were skipped.
        """
        accelerator, step = self.trainer.accelerator, self.trainer.state.global_step + 1
        if self._everywhere(torch.tensor(math.isfinite(norm), device=accelerator.device)):
            self.skipped_in_a_row = 0
            return
        is_scaled = accelerator.scaler is not None
        if not is_scaled:
            model.zero_grad()
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped == 1 and not is_scaled:
            self.run.note(f"Skipped optimizer step {step}: non-finite gradient (skipped_steps in metrics.jsonl).")
        if self.skipped_in_a_row >= (MAX_SKIPPED_IN_A_ROW_FP16 if is_scaled else MAX_SKIPPED_IN_A_ROW):
            raise DivergedError(
                f"The gradient was NaN or inf in {self.skipped_in_a_row} steps in a row, up to step {step}.\n"
                f"None of them changed the weights: model/ has those of step {step - self.skipped_in_a_row}.\n"
                "Lower --lr, or use --dtype float32 or --mixed-precision no, and inspect the episodes in rollouts/.",
                has_finite_weights=True,
            )

    def _everywhere(self, is_finite: torch.Tensor) -> bool:
        """Whether it is true on every process: all of them skip a step or none, so that their weights stay equal."""
        wrong = self.trainer.accelerator.reduce((~is_finite).to(torch.int32), reduction="sum")
        return not wrong.item()


def all_finite(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Whether all values of all tensors are finite, as a scalar on the device; of a sharded tensor, those of this
    process's part. Allocates no copies of them."""
    parts = [part for tensor in tensors if (part := own_part(tensor.detach())).numel()]
    ends = [end.to(device, torch.float32) for part in parts for end in torch.aminmax(part)]
    return torch.isfinite(torch.stack([torch.zeros((), device=device), *ends])).all()
