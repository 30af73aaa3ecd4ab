"""Options of optimization: batches, steps, and the optimizer."""

from collections.abc import Iterable
from typing import ClassVar

from pydantic import Field

from aitrain.options.section import Options, ResumeSafe, Rule
from aitrain.options.value_types import NonNegativeFloat, PositiveFloat, PositiveInt, ProperFraction, Table


class BatchOptions(Options):
    """Prompts and completions per optimizer step, and steps per run."""

    section = "Batch"
    replaces: ClassVar = {
        "rl_prompts_per_step": ("gradient_accumulation",),
        "gradient_accumulation": ("rl_prompts_per_step",),
        "tokens_per_pass": ("batch_size",),
        "batch_size": ("tokens_per_pass",),
    }

    epochs: ResumeSafe[PositiveInt] = 1
    """Passes over the training cases."""
    max_steps: ResumeSafe[PositiveInt | None] = None
    """Stop after this many optimizer steps; overrides --epochs. With --resume, a larger number continues a finished
    run."""
    stop_when_flat: ResumeSafe[PositiveInt | None] = None
    """Stop after this many consecutive steps in which no group's completions differed in score: nothing is learned."""
    rl_prompts_per_step: PositiveInt | None = None
    """Prompts per optimizer step, over all processes; the accumulation is then derived from it and batch_size."""
    batch_size: PositiveInt | None = None
    """Completions per forward pass and process. Unset: 2 on a GPU; on the CPU as many of a step's completions as need
    at most 2 GiB more, unless --gradient-accumulation is given."""
    gradient_accumulation: PositiveInt = 4
    """Forward passes per optimizer step."""
    rl_trim_padding: bool = False
    """Sort the completions of a step by length into forward passes of up to --batch-size, each padded to its own
    longest one instead of the longest of the batch. The gradient is the same."""
    tokens_per_pass: PositiveInt | None = None
    """Largest number of tokens in a forward pass of a process, padding included: trims padding like --rl-trim-padding,
    with as many completions in a pass as fit, instead of --batch-size. Needs --rl-prompts-per-step."""
    rl_max_prompt_length: PositiveInt | None = None
    """Cases with a longer prompt (in tokens) are dropped; unset: what the model's context leaves."""

    @property
    def completions_per_pass(self) -> int:
        """`batch_size`, or its default."""
        return self.batch_size or 2

    @property
    def trims_padding(self) -> bool:
        """Whether rows are sorted by length into forward passes, each padded to its own longest row."""
        return self.rl_trim_padding or self.tokens_per_pass is not None

    def rules(self) -> Iterable[Rule]:
        """What --tokens-per-pass needs and replaces."""
        given = [name for name in ("batch_size", "gradient_accumulation") if name in self.model_fields_set]
        return [
            (
                self.tokens_per_pass is not None and self.rl_prompts_per_step is None,
                "tokens_per_pass: needs the size of a step: add --rl-prompts-per-step",
            ),
            (
                self.tokens_per_pass is not None and bool(given),
                f"tokens_per_pass: contradicts {' and '.join(given)}, as a pass then has as many completions as fit\n"
                "Leave one of the two out.",
            ),
        ]


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
