"""Continues a run with another number of steps, and says what becomes of its learning rate."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from transformers.trainer_callback import TrainerState
from trl import GRPOConfig

from aitrain.engines.scopes import replaced
from aitrain.errors import ConfigError
from aitrain.runs.checkpoint import step_of
from aitrain.training.trl_arguments import learning_rates


def steps_before(checkpoint: Path) -> int:
    """Number of steps that the run which wrote a checkpoint was to have."""
    steps: int = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).max_steps
    return steps


def note_on_steps(checkpoint: Path, arguments: GRPOConfig) -> str | None:
    """What becomes of the learning rate of a run that continues with another number of steps; None if it is the same
    number. Call it before the warm-up is fitted to the new number.

    Raises:
        ConfigError: the checkpoint has more steps.
    """
    done, before, steps = step_of(checkpoint), steps_before(checkpoint), arguments.max_steps
    if steps < done:
        raise ConfigError(
            f"max_steps: {checkpoint} has {done} steps behind it, more than {steps}\n"
            f"Use --max-steps {done} or more, or --resume-from-checkpoint with an earlier checkpoint."
        )
    if steps == before:
        return None
    scheduler, start = arguments.lr_scheduler_type.value, f"Continues after step {done} of {before} to step {steps}"
    old, new = _rates(arguments, before, done + 1), _rates(arguments, steps, done + 1)
    if old[:done] == new[:done]:
        return f"{start}; with scheduler {scheduler} the learning rates are those of a run of {steps} steps."
    rate = f": {new[done]:.3g} in step {done + 1}" if len(new) > done else ""
    return (
        f"{start}. The learning rate was {old[done - 1]:.3g} in step {done}; from here scheduler {scheduler} sets it as"
        f" for {steps} steps{rate}.\nSo the result is not that of {steps} steps at once, as with --scheduler constant."
    )


def _rates(arguments: GRPOConfig, steps: int, count: int) -> list[float]:
    """The learning rates of the first steps; without a warm-up that takes the whole run (`fit_warmup`)."""
    warmup = {} if any(learning_rates(arguments, steps)) else {"warmup_steps": 0}
    with replaced(arguments, warmup):
        return list(islice(learning_rates(arguments, steps), count))
