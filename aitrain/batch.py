"""Batch arithmetic: prompts and completions of a step, divided over processes and forward passes.

One optimizer step trains on `prompts_per_step` groups of `generations` completions, an equal share on each process:

    prompts_per_step x generations = processes x share

A process takes its share through the model in forward passes of at most `limit` (training/passes.py).
"""

import math
from dataclasses import dataclass

from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig


@dataclass(frozen=True)
class PassLimit:
    """The most that a forward pass of one process holds: completions, and tokens, padding included."""

    completions: int
    tokens: int | None = None
    """A completion with more tokens has a pass of its own."""

    def most(self, longest: int) -> int:
        """Completions that a pass holds which are padded to the same length."""
        by_tokens = self.completions if self.tokens is None else self.tokens // max(1, longest)
        return max(1, min(self.completions, by_tokens))

    def holds(self, completions: int, longest: int) -> bool:
        """Whether a pass may have this number of completions, padded to the longest of them."""
        return completions <= self.most(longest)

    def largest(self, longest: int, rows: int) -> tuple[int, int]:
        """Completions of the largest pass and their length, if there are `rows` of up to `longest` tokens."""
        rows = min(rows, self.completions)
        if self.tokens is None:
            return rows, longest
        completions = min(rows, math.ceil(self.tokens / longest))
        return completions, longest if completions == 1 else min(longest, self.tokens // completions)

    def __str__(self) -> str:
        return _counted(self.completions, "completion") if self.tokens is None else f"{self.tokens} tokens"


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is divided; counts are of completions unless they say prompts."""

    processes: int
    share: int
    """Completions of one process."""
    generations: int
    limit: PassLimit = PassLimit(1)

    @property
    def completions_per_step(self) -> int:
        """Completions in one optimizer step, over all processes."""
        return self.processes * self.share

    @property
    def prompts_per_step(self) -> int:
        """Groups in one optimizer step, over all processes."""
        return self.completions_per_step // self.generations

    def largest_pass(self, longest: int) -> tuple[int, int]:
        """Completions of the largest forward pass of a process and their length, if none is longer than `longest`."""
        return self.limit.largest(longest, self.share)

    def passes(self, tokens: int) -> int:
        """Forward passes of a process whose completions all have this many tokens."""
        return math.ceil(self.share / self.limit.most(tokens))

    def __str__(self) -> str:
        return (
            f"{_counted(self.prompts_per_step, 'prompt')} x {self.generations} completions"
            f" = {self.completions_per_step} a step = {_counted(self.processes, 'process')} x {self.share},"
            f" in forward passes of up to {self.limit}"
        )


@dataclass(frozen=True)
class CaseSchedule:
    """How epochs are cut into optimizer steps. A generation batch may hold the last cases of one epoch and the first of
    the next; the last batch of a run is filled up from one epoch more."""

    cases: int
    """Cases of one epoch."""
    prompts: int
    """Prompts of one generation batch, over all processes."""
    updates: int
    """Optimizer steps on one generation batch."""
    epochs: int
    max_steps: int | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.max_steps or math.ceil(self.cases * self.epochs / self.prompts) * self.updates

    @property
    def batches(self) -> int:
        """Generation batches of the run, the last of which may be used in part."""
        return math.ceil(self.steps / self.updates)

    def epochs_after(self, step: int) -> float:
        """Epochs that were done after a step, with the part of the next one."""
        done = step * self.prompts / (self.updates * self.cases)
        return done if self.max_steps else min(done, float(self.epochs))

    def ends_epoch(self, step: int) -> bool:
        """Whether a step is the first one after which all cases of some epoch were trained on."""
        return self._whole_epochs(step) > self._whole_epochs(step - 1)

    def _whole_epochs(self, step: int) -> int:
        return step // self.updates * self.prompts // self.cases


def schedule_cases(config: TrainConfig, plan: BatchPlan, cases: int = 1) -> CaseSchedule:
    """The schedule of a number of training cases."""
    return CaseSchedule(
        cases=cases,
        prompts=plan.prompts_per_step * config.rl_updates_per_rollout,
        updates=config.rl_updates_per_rollout * config.repeated_updates,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )


def plan_batch(config: TrainConfig, processes: int) -> BatchPlan:
    """The plan for a number of processes.

    Raises:
        ConfigError: the numbers do not divide, or contradict each other.
    """
    generations, prompts = config.rl_num_generations, config.rl_prompts_per_step
    by_passes = config.gradient_accumulation * config.completions_per_pass
    completions = processes * by_passes if prompts is None else prompts * generations
    share, rest = divmod(completions, processes)
    if rest or completions % generations:
        smallest = math.lcm(processes, generations) // generations
        fitting = smallest * math.ceil(completions / (smallest * generations))
        others = f", or another multiple of {smallest}" if smallest > 1 else ""
        raise ConfigError(
            f"rl_prompts_per_step: {completions} completions a step cannot be divided into groups of {generations}"
            f" and among {_counted(processes, 'process')}\n"
            f"Use --rl-prompts-per-step {fitting}{others}."
        )
    if prompts is not None and "gradient_accumulation" in config.model_fields_set and by_passes != share:
        raise ConfigError(
            f"gradient_accumulation: {config.gradient_accumulation} passes of {config.completions_per_pass} contradict"
            f" rl_prompts_per_step, which makes {share} completions a process\nLeave one of the two out."
        )
    has_tokens_only = config.batch_size is None and config.tokens_per_pass is not None
    most = share if has_tokens_only else min(share, config.completions_per_pass)
    return BatchPlan(processes, share, generations, PassLimit(most, config.tokens_per_pass))


def _counted(count: int, name: str) -> str:
    """`1 process`, `2 processes`."""
    plural = name + ("es" if name.endswith("s") else "s")
    return f"{count} {name if count == 1 else plural}"
