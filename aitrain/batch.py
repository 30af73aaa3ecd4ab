"""Batch arithmetic: prompts and completions of a step, divided over processes and forward passes.

One optimizer step trains on `prompts_per_step` groups of `generations` completions. They are divided evenly: each of
`processes` takes `accumulation` micro-batches of `micro_batch` completions.

    prompts_per_step x generations = processes x accumulation x micro_batch

Where the padding of forward passes is trimmed, a process takes its completions of a step in one micro-batch, and sorts
them into forward passes itself (training/micro_batches.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig

MAX_PROPOSED = 10_000
"""The largest batch_size that a message proposes."""


@dataclass(frozen=True)
class PassLimit:
    """The most that a forward pass of one process holds where padding is trimmed: completions, or tokens."""

    completions: int | None = None
    tokens: int | None = None
    """Padding included; a completion with more tokens has a pass of its own."""

    def holds(self, completions: int, longest: int) -> bool:
        """Whether a pass may have this number of completions, padded to the longest of them."""
        if self.completions is not None and completions > self.completions:
            return False
        return self.tokens is None or completions * longest <= self.tokens or completions == 1

    def largest(self, longest: int, rows: int) -> tuple[int, int]:
        """Completions of the largest pass and their length, if there are `rows` of up to `longest` tokens."""
        if self.tokens is None:
            return min(rows, self.completions or 1), longest
        completions = min(rows, math.ceil(self.tokens / longest))
        return completions, longest if completions == 1 else min(longest, self.tokens // completions)

    def __str__(self) -> str:
        if self.tokens is not None:
            return f"{self.tokens} tokens"
        return _counted(self.completions or 1, "completion")


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is divided; counts are of completions unless they say prompts."""

    processes: int
    accumulation: int
    micro_batch: int
    generations: int
    limit: PassLimit | None = None
    """Of forward passes whose padding is trimmed: micro-batches are then divided further. None: a micro-batch is one
    forward pass."""

    @property
    def completions_per_step(self) -> int:
        """Completions in one optimizer step, over all processes."""
        return self.processes * self.accumulation * self.micro_batch

    @property
    def prompts_per_step(self) -> int:
        """Groups in one optimizer step, over all processes."""
        return self.completions_per_step // self.generations

    def largest_pass(self, longest: int) -> tuple[int, int]:
        """Completions of the largest forward pass of a process and their length, if none is longer than `longest`."""
        return (self.micro_batch, longest) if self.limit is None else self.limit.largest(longest, self.micro_batch)

    def __str__(self) -> str:
        passes = f"{_counted(self.accumulation, 'forward pass')} of {self.micro_batch}"
        if self.limit is not None:
            passes = f"{self.micro_batch}, in forward passes of up to {self.limit}, sorted by length"
        return (
            f"{_counted(self.prompts_per_step, 'prompt')} x {self.generations} completions"
            f" = {self.completions_per_step} a step = {_counted(self.processes, 'process')} x {passes}"
        )


@dataclass(frozen=True)
class RolloutSize:
    """What is sampled at once, and the optimizer steps that train on it."""

    prompts: int
    generations: int
    steps: float
    """Optimizer steps on one rollout; below 1 if a step trains on several."""
    is_ahead: bool = False
    """Whether it is sampled while the one before is trained on."""

    @classmethod
    def of(cls, config: TrainConfig, plan: BatchPlan) -> RolloutSize:
        """The rollout of a run."""
        schedule = schedule_cases(config, plan, 1)
        steps = schedule.passes / schedule.accumulation
        return cls(schedule.prompts, plan.generations, steps, config.rl_ahead > 0)

    def __str__(self) -> str:
        sampled = self.prompts * self.generations
        size = f"{_counted(self.prompts, 'prompt')} x {self.generations} completions = {sampled}"
        if self.steps < 1:
            size += ", several for each optimizer step"
        else:
            size += ", for one optimizer step" if self.steps == 1 else f", for {self.steps:g} optimizer steps"
        if self.is_ahead:
            return f"{size}; all off-policy, as it is sampled ahead"
        if self.steps <= 1:
            return f"{size}; {'all ' if self.steps < 1 else ''}on-policy"
        later = "the later ones are" if self.steps != 2 else "the second is"
        return f"{size}; the first is on-policy, {later} off-policy"


@dataclass(frozen=True)
class CaseSchedule:
    """How epochs are cut into optimizer steps. A generation batch may hold the last cases of one epoch and the first of
    the next; the last batch of a run is filled up from one epoch more."""

    cases: int
    """Cases of one epoch."""
    prompts: int
    """Prompts of one generation batch, over all processes."""
    passes: int
    """Forward passes of each process on one generation batch."""
    accumulation: int
    """Forward passes of each process in one optimizer step."""
    epochs: int
    max_steps: int | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        batches = math.ceil(self.cases * self.epochs / self.prompts)
        return self.max_steps or math.ceil(batches * self.passes / self.accumulation)

    @property
    def window(self) -> int:
        """Optimizer steps after which a step begins with a new generation batch again."""
        return self.passes // math.gcd(self.passes, self.accumulation)

    @property
    def batches(self) -> int:
        """Generation batches of the run, the last of which may be used in part."""
        return math.ceil(self.steps * self.accumulation / self.passes)

    @property
    def filled(self) -> int:
        """Prompts beyond the last epoch, which fill up the last steps."""
        return 0 if self.max_steps else self.batches * self.prompts - self.cases * self.epochs

    def epochs_after(self, step: int) -> float:
        """Epochs that were done after a step, with the part of the next one."""
        done = step * self.accumulation * self.prompts / (self.passes * self.cases)
        return done if self.max_steps else min(done, float(self.epochs))

    def ends_epoch(self, step: int) -> bool:
        """Whether a step is the first one after which all cases of some epoch were trained on."""
        return self._whole_epochs(step) > self._whole_epochs(step - 1)

    def _whole_epochs(self, step: int) -> int:
        return step * self.accumulation // self.passes * self.prompts // self.cases

    def __str__(self) -> str:
        return (
            f"{_counted(self.epochs, 'epoch')} of {_counted(self.cases, 'case')} = {_counted(self.steps, 'step')};"
            f" the last is filled up with {_counted(self.filled, 'case')} of another epoch."
        )


def schedule_cases(config: TrainConfig, plan: BatchPlan, cases: int) -> CaseSchedule:
    """The schedule of a number of training cases, with the generation batch of `rl_updates_per_rollout` or `--trl`."""
    pass_size = plan.processes * plan.micro_batch  # completions of one forward pass, over all processes
    from_size = config.trl_integer("generation_batch_size", 0) // pass_size
    per_batch = config.trl_integer("steps_per_generation", 0) or from_size
    per_batch = per_batch or plan.accumulation * config.rl_updates_per_rollout
    return CaseSchedule(
        cases=cases,
        prompts=per_batch * pass_size // plan.generations,
        passes=per_batch * config.trl_integer("num_iterations", 1),
        accumulation=plan.accumulation,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )


def plan_batch(config: TrainConfig, processes: int) -> BatchPlan:
    """The plan for a number of processes.

    Raises:
        ConfigError: the numbers do not divide, or contradict each other.
    """
    if config.tokens_per_pass is not None:
        return _plan_of_tokens(config, processes)
    if config.rl_prompts_per_step is None:
        accumulation = config.gradient_accumulation
    else:
        accumulation = _derived_accumulation(config, processes)
    plan = BatchPlan(processes, accumulation, config.completions_per_pass, config.rl_num_generations)
    if plan.completions_per_step % plan.generations:
        raise ConfigError(_does_not_divide(plan))
    if not config.rl_trim_padding:
        return plan
    return replace(plan, accumulation=1, micro_batch=accumulation * plan.micro_batch, limit=PassLimit(plan.micro_batch))


def _plan_of_tokens(config: TrainConfig, processes: int) -> BatchPlan:
    prompts, generations = config.rl_prompts_per_step or 0, config.rl_num_generations
    share, rest = divmod(prompts * generations, processes)
    if rest:
        raise ConfigError(
            f"rl_prompts_per_step: {prompts} prompts x {generations} completions = {prompts * generations} cannot be"
            f" divided among {_counted(processes, 'process')}.\n"
            f"Use --rl-prompts-per-step {_fewest_prompts(processes, generations)} or a multiple of it."
        )
    return BatchPlan(processes, 1, share, generations, PassLimit(tokens=config.tokens_per_pass))


def _derived_accumulation(config: TrainConfig, processes: int) -> int:
    completions = (config.rl_prompts_per_step or 0) * config.rl_num_generations
    accumulation, rest = divmod(completions, processes * config.completions_per_pass)
    if rest or accumulation == 0:
        raise ConfigError(
            f"rl_prompts_per_step: {config.rl_prompts_per_step} prompts x {config.rl_num_generations} completions ="
            f" {completions} cannot be divided among {_counted(processes, 'process')} in micro-batches of"
            f" {config.completions_per_pass}.\n{_way_out(config, processes)}"
        )
    if "gradient_accumulation" in config.model_fields_set and config.gradient_accumulation != accumulation:
        raise ConfigError(
            f"gradient_accumulation: {config.gradient_accumulation} contradicts rl_prompts_per_step, which makes it"
            f" {accumulation} ({completions} completions / {_counted(processes, 'process')} /"
            f" {config.completions_per_pass} a pass)\nLeave one of the two out."
        )
    return accumulation


def _way_out(config: TrainConfig, processes: int) -> str:
    """Advice: the largest smaller batch_size that divides the completions, and the smallest prompt count that does."""
    share, rest = divmod((config.rl_prompts_per_step or 0) * config.rl_num_generations, processes)
    fitting = next(
        (
            size
            for size in range(min(config.completions_per_pass, share, MAX_PROPOSED), 0, -1)
            if rest + share % size == 0
        ),
        None,
    )
    smaller = f"--batch-size {fitting}, or " if fitting else ""
    prompts = _fewest_prompts(processes * config.completions_per_pass, config.rl_num_generations)
    return f"Use {smaller}--rl-prompts-per-step {prompts} or a multiple of it."


def _fewest_prompts(completions: int, generations: int) -> int:
    """Smallest prompt count whose groups fill whole micro-batches on every process."""
    return math.lcm(completions, generations) // generations


def _does_not_divide(plan: BatchPlan) -> str:
    prompts = _fewest_prompts(plan.processes * plan.micro_batch, plan.generations)
    return (
        f"rl_num_generations: {plan.completions_per_step} completions a step cannot be divided into groups of"
        f" {plan.generations}.\nThey come from batch_size {plan.micro_batch} x gradient_accumulation"
        f" {plan.accumulation} x {_counted(plan.processes, 'process')}.\n"
        f"Use --rl-prompts-per-step {prompts} or a multiple of it instead: gradient_accumulation is then derived."
    )


def _counted(count: int, name: str) -> str:
    """`1 process`, `2 processes`."""
    plural = name + ("es" if name.endswith("s") else "s")
    return f"{count} {name if count == 1 else plural}"
