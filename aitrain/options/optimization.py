"""Options of optimization: batches, steps, and the optimizer."""

from pydantic import Field

from aitrain.options.section import Options, ResumeSafe
from aitrain.options.value_types import NonNegativeFloat, PositiveFloat, PositiveInt, ProperFraction, Table

COMPLETIONS_PER_PASS = 2
"""The default of --batch-size where nothing says how many fit."""


class BatchOptions(Options):
    """Prompts and completions per optimizer step, and steps per run."""

    section = "Batch"

    epochs: ResumeSafe[PositiveInt] = 1
    """Passes over the training cases."""
    max_steps: ResumeSafe[PositiveInt | None] = None
    """Stop after this many optimizer steps; overrides --epochs. With --resume, a larger number continues a finished
    run."""
    stop_when_flat: ResumeSafe[PositiveInt | None] = None
    """Stop after this many consecutive steps in which no group's completions differed in score: nothing is learned."""
    rl_prompts_per_step: PositiveInt | None = None
    """Prompts per optimizer step, over all processes; instead of --gradient-accumulation."""
    batch_size: PositiveInt | None = None
    """At most this many completions in a forward pass of a process. Unset: on a GPU as many as the memory estimate
    allows; on the CPU as many of a step's completions as need at most 2 GiB more; 2 where --gradient-accumulation is
    given."""
    gradient_accumulation: PositiveInt = 4
    """Without --rl-prompts-per-step, a step has this many times --batch-size completions on each process."""
    rl_trim_padding: bool = True
    """Sort the completions of a step by length into forward passes that are each padded to their own longest one only.
    The gradient is the same. Off by itself where it would not be: with rl_loss_type bnpo, an entropy bonus or quantile,
    a custom loss, the loss of a router, and with DeepSpeed."""
    share_prefixes: bool = True
    """Compute the prompt of a group's completions once, where that takes fewer tokens. The result is the same to
    rounding. Off by itself without --rl-trim-padding, with dropout or DeepSpeed, and for models that have other caches
    than keys and values."""
    tokens_per_pass: ResumeSafe[PositiveInt | None] = None
    """At most this many tokens in a forward pass of a process, padding included; without --batch-size, as many
    completions as fit."""
    rl_max_prompt_length: PositiveInt | None = None
    """Cases with a longer prompt (in tokens) are dropped; unset: what the model's context leaves."""

    @property
    def completions_per_pass(self) -> int:
        """`batch_size`, or its default."""
        return self.batch_size or COMPLETIONS_PER_PASS


def default_rate(is_lora: bool) -> float:
    """The learning rate of a run that names none."""
    return 1e-5 if is_lora else 1e-6


class OptimizerOptions(Options):
    """The optimizer and its schedule."""

    section = "Optimizer"

    lr: PositiveFloat | None = None
    """Learning rate; unset: 1e-5 with --peft, 1e-6 for all weights. A LoRA adapter needs about ten times the rate of
    full fine-tuning (Thinking Machines, LoRA Without Regret, 2025); 1e-6 is that of GRPO (arXiv 2402.03300), DAPO and
    Dr. GRPO, and with 1e-5 all weights of a pretrained model often collapse."""
    optimizer: str = "adamw_torch"
    """Optimizer, by its name in transformers."""
    scheduler: str = "linear"
    """Learning rate schedule, by its name in transformers."""
    warmup_ratio: ProperFraction = 0.1
    """Fraction of the steps that warm the learning rate up, from 0 in the first one; a run of one step has no
    warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this norm; 0: not clipped."""


class TRLOptions(Options):
    """Fields of TRL's GRPOConfig that no option exists for."""

    section = "TRL"

    trl: Table = Field({})
    """Any other field of TRL's GRPOConfig, as KEY=VALUE; may be repeated."""

    def trl_integer(self, name: str, default: int) -> int:
        """A field of `--trl` that counts something; its default where it is not given."""
        value = self.trl.get(name)
        return value if isinstance(value, int) else default

    def trl_table(self, name: str) -> dict[str, object]:
        """A field of `--trl` that is a table; empty where it is not given."""
        value = self.trl.get(name)
        return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}
