"""Options of a run: its model, folder, records, evaluation, checkpoints, uploads, hardware, processes and machines, and
of optimization: batches, steps, and the optimizer."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field, NonNegativeInt

from aitrain.options.section import Options, ResumeSafe
from aitrain.options.value_types import (
    Names,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    Seed,
    Table,
    Trackers,
)


class ModelOptions(Options):
    """Which model is loaded, and how."""

    section = "Model"

    model: str = "google/gemma-3-270m"
    """Hub name or folder of the model to train; `tiny` is the shipped one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto: bfloat16 for a frozen base under LoRA where the GPU has it, else float32."""
    attn_implementation: str | None = None
    """Attention implementation of transformers, such as sdpa or eager."""
    chat_template: str | None = None
    """chatml, zephyr, or a file with a Jinja template; unset: the tokenizer's own."""
    model_max_length: PositiveInt | None = None
    """Maximum length of prompt and completion together in tokens; unset: that of the model's configuration."""
    quantization: Literal["int4", "int8"] | None = None
    """Load the base weights in 4 or 8 bits (CUDA, with --peft only)."""
    trust_remote_code: bool = False
    """Run code that comes with the model; off, where AITraining has it on: it is a stranger's code."""


class LoRAOptions(Options):
    """The LoRA adapter."""

    section = "LoRA"

    peft: bool = False
    """Train a LoRA adapter instead of all weights."""
    lora_r: PositiveInt = 16
    """Rank of the adapter."""
    lora_alpha: PositiveInt = 32
    """The adapter is scaled by lora_alpha / lora_r."""
    lora_dropout: ProperFraction = 0.0
    """Dropout in the adapter; 0, where AITraining has 0.05: it also changes the sampling."""
    target_modules: Names = "all-linear"
    """Layers that get an adapter: all-linear, or names separated by commas."""
    merge_adapter: ResumeSafe[bool] = True
    """Also write base and adapter merged, into model/merged."""


class RunOptions(Options):
    """The run, its folder and its limits."""

    section = "Run"

    project_name: ResumeSafe[str] = "project-name"
    """Name of the run and of its folder."""
    output_dir: ResumeSafe[str] = "runs"
    """Folder in which run folders are made."""
    seed: Seed = 42
    """Seed of the dataset split, the shuffling, the sampling and the adapter (AITraining ignores its own)."""
    stall_timeout: ResumeSafe[PositiveFloat] = 1800.0
    """Seconds without a step, a token or a finished call after which a run counts as stalled and ends; four times
    as many while it loads or saves files."""

    def rules(self) -> Iterator[str]:
        """The name is that of a folder."""
        if not re.fullmatch(r"(?!\.+$)[\w.+-]{1,100}", self.project_name):  # dots alone are other folders
            yield (
                f"project_name: {self.project_name!r} is not a folder name\nUse letters, digits, '-', '_' and '.';"
                " output_dir says where the folder is made."
            )


class LoggingOptions(Options):
    """Metrics and trackers."""

    section = "Logging"
    resume_safe = True

    logging_steps: Annotated[int, Ge(-1)] = -1
    """Steps between two lines of metrics.jsonl; -1: every step."""
    log: Trackers = "none"
    """Trackers to report to as well: wandb, tensorboard, trackio, separated by commas; none, where AITraining has
    wandb: training needs no account."""


class EvaluationOptions(Options):
    """Scoring held-out cases, and ending a training by their scores."""

    section = "Evaluation"
    resume_safe = True

    eval_cases: NonNegativeInt | None = None
    """Held-out cases to score before and after; unset: those of a tenth of the prompts, or of 8 where a tenth is fewer
    (at most two fifths), and at most 64; 0: none."""
    eval_samples: PositiveInt = 1
    """Samples of each held-out case: their mean is the case's score; with several, pass@K is reported as well."""
    eval_strategy: Literal["no", "steps", "epoch"] = "epoch"
    """When to score the held-out cases during training as well."""
    eval_steps: PositiveInt = 100
    """Steps between two evaluations, with --eval-strategy steps."""
    patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without a better held-out score than all earlier ones."""


class CheckpointOptions(Options):
    """Checkpoints, and resuming from one."""

    section = "Checkpoints"
    resume_safe = True

    save_strategy: Literal["no", "steps", "epoch"] = "epoch"
    """When to write a checkpoint."""
    save_steps: PositiveInt = 500
    """Steps between two checkpoints, with --save-strategy steps."""
    save_total_limit: PositiveInt | None = 1
    """Checkpoints to keep; older ones are deleted."""
    save_best: bool = False
    """Also keep the checkpoint with the best held-out score, and make it model/ at the end: one half of the held-out
    cases chooses it, and the scores before and after are those of the other half."""
    resume_from_checkpoint: str | None = None
    """A checkpoint folder, or auto (short: --resume) for the newest complete one of this run's folder; the run starts
    from the beginning if there is none yet."""
    resume_anyway: bool = False
    """Resume even if options, environment or dataset have changed: the run continues, without exact
    reproducibility."""

    @property
    def resumes_newest(self) -> bool:
        """Whether to resume from the newest complete checkpoint of this run's folder."""
        return self.resume_from_checkpoint == "auto"


class HubOptions(Options):
    """Uploading the result."""

    section = "Hub"
    resume_safe = True

    push_to_hub: bool = False
    """Upload model/ to the Hub at the end (token from HF_TOKEN or the hub login)."""
    username: str | None = None
    """Hub user or organisation to upload to; unset: the owner of the token."""
    repo_id: str | None = None
    """Hub repository to upload to; unset: username/project_name."""
    hub_private: bool = True
    """Make the Hub repository private."""


class HardwareOptions(Options):
    """Processes, number formats and memory."""

    section = "Hardware"

    num_processes: ResumeSafe[PositiveInt | None] = None
    """Training processes; unset: one for each visible GPU, one on CPU."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """Autocast of the forward pass; unset: bf16 where the GPU has it, else none. A CPU that would emulate bf16 computes
    in float32."""
    warm_up: ResumeSafe[bool] = True
    """On GPUs, begin with a forward and backward pass of the longest possible episodes, so that a lack of memory shows
    before the first step."""
    disable_gradient_checkpointing: bool = False
    """Keep all activations: faster, more memory. Unset: on where the memory estimate allows it."""
    ddp_timeout: ResumeSafe[PositiveInt] = 7200
    """Seconds that one process waits for the others."""


class DistributedOptions(Options):
    """Several GPUs, several machines."""

    section = "Several GPUs and machines"
    resume_safe = True

    distributed_backend: Literal["ddp", "fsdp2"] = "ddp"
    """How several processes hold the model: ddp, each all of it; fsdp2, each a part."""
    nnodes: PositiveInt | None = None
    """Machines that train together; unset: one, or those of SLURM and other launchers."""
    node_rank: NonNegativeInt | None = None
    """Which of the machines this is, 0 to N-1; unset: that of the launcher."""
    master_addr: str | None = None
    """Address of machine 0, as the others reach it; unset: that of the launcher."""
    master_port: PositiveInt = 29400
    """Port on machine 0 where the machines meet."""
    launcher: Literal["local", "ray"] = "local"
    """What starts the training processes: this command, or Ray Train on a Ray cluster."""
    ray_address: str | None = None
    """Address of the Ray cluster, such as 10.0.0.1:6379 or auto; unset: RAY_ADDRESS, else a cluster on this machine."""

    def rules(self) -> Iterator[str]:
        """Options of one launcher are not given to another one."""
        is_here = self.nnodes in (None, 1) and self.node_rank is None and self.master_addr is None
        if self.launcher == "ray" and not is_here:
            yield "launcher: ray chooses the machines itself: leave out nnodes, node_rank and master_addr"


# -- optimization

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
    Without a KL term in the loss, completions with an advantage of 0 are left out. The gradient is the same. Off by
    itself where it would not be: with rl_loss_type bnpo, an entropy bonus or quantile, a custom loss, the loss of a
    router, and with DeepSpeed."""
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

    @property
    def repeated_updates(self) -> int:
        """How often each completion is trained on: num_iterations of `--trl`."""
        value = self.trl.get("num_iterations")
        return value if isinstance(value, int) else 1

    def trl_table(self, name: str) -> dict[str, object]:
        """A field of `--trl` that is a table; empty where it is not given."""
        value = self.trl.get(name)
        return value if isinstance(value, dict) else {}
