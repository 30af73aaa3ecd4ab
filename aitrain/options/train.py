"""`TrainConfig`, the options of a training run, what follows from them for FSDP2, and `EvalConfig`, the options of an
eval: those of the training whose held-out cases it plays, and its own. Names and defaults are AITraining's wherever it
has the option.
"""

from collections.abc import Iterator
from typing import Literal

from aitrain.options.algorithms import (
    ALGORITHMS,
    CISPO_BOUND,
    PRESETS,
    GRPOOptions,
    SamplingOptions,
)
from aitrain.options.environment import EnvironmentOptions
from aitrain.options.generation import GenerationOptions, VLLMOptions
from aitrain.options.run import (
    BatchOptions,
    CheckpointOptions,
    DistributedOptions,
    EvaluationOptions,
    HardwareOptions,
    HubOptions,
    LoggingOptions,
    LoRAOptions,
    ModelOptions,
    OptimizerOptions,
    RunOptions,
    TRLOptions,
)
from aitrain.options.section import Options
from aitrain.options.value_types import PositiveInt

PASS_BY_PASS: dict[str, object] = {
    "use_adaptive_entropy": False, "top_entropy_quantile": 1, "pad_to_multiple_of": "auto",
}  # fmt: skip
"""Fields of GRPOConfig whose effect depends on which completions share a forward pass, with the value that has none."""
IGNORED_BY_CUSTOM_LOSS = ("off_policy_mask_threshold", "top_entropy_quantile")
"""Fields of GRPOConfig that weight the losses of TRL's own types."""


class TrainConfig(
    # the last one first, in the help and in files
    TRLOptions,
    DistributedOptions,
    HardwareOptions,
    HubOptions,
    CheckpointOptions,
    EvaluationOptions,
    LoRAOptions,
    VLLMOptions,
    GenerationOptions,
    SamplingOptions,
    GRPOOptions,
    OptimizerOptions,
    BatchOptions,
    LoggingOptions,
    RunOptions,
    EnvironmentOptions,
    ModelOptions,
):
    """The options of one training run. Unknown names and invalid values raise ConfigError."""

    @property
    def loss(self) -> dict[str, object]:
        """Fields of GRPOConfig: the algorithm's, with the given settings of the loss in place of its own."""
        kind = ALGORITHMS[self.rl_loss_type]
        low, high = kind.clip
        if (given := self.rl_clip_range) is not None:
            low, high = given, max(high, given) if low != high else given
        return {
            "loss_type": kind.loss_type,
            "importance_sampling_level": kind.level,
            "epsilon": low,
            "epsilon_high": self.rl_clip_range_high or high,
            "scale_rewards": self.rl_scale_rewards or kind.scale,
            **{name: value for name, value in kind.trl.items() if self.use_vllm and name not in self.trl},
        }

    @property
    def learning_rate(self) -> float:
        """The learning rate: the given one, else that for what is trained."""
        return self.lr or (1e-5 if self.peft else 1e-6)

    @property
    def overlong_buffer(self) -> int | None:
        """Tokens of the overlong buffer: the given ones, else those of the preset; None: nothing is subtracted. No
        default of the option, as an environment may declare the length later."""
        has_one = self.rl_preset is not None and PRESETS[self.rl_preset].overlong
        return self.rl_overlong_buffer or (max(1, self.completion_tokens // 5) if has_one else None)

    @property
    def weight_sync(self) -> str | None:
        """How a vLLM server gets the weights: adapter or disk; None without a server."""
        if not self.use_vllm or self.vllm_mode != "server":
            return None
        return "adapter" if self.peft else "disk"

    @property
    def may_halve_base(self) -> bool:
        """Whether the base may be loaded in half precision: no small updates are added to it."""
        return self.peft and not (self.use_vllm and self.vllm_mode == "colocate")

    @property
    def trims_padding(self) -> bool:
        """Whether rows are sorted by length into forward passes, each padded to its own longest row."""
        return self.rl_trim_padding and "deepspeed" not in self.trl and not pass_dependent(self)

    @property
    def shares_prompts(self) -> bool:
        """Whether the prompt of a group is computed once, if the model can."""
        return self.share_prefixes and self.trims_padding

    def written(self) -> dict[str, object]:
        """The options as config.yaml holds them: without derived ones, and without those of a single start."""
        values = super().written()
        del values["resume_from_checkpoint"], values["resume_anyway"]
        if self.rl_prompts_per_step is not None:
            del values["gradient_accumulation"]  # written down, it would contradict a changed flag
        return values

    def rules(self) -> Iterator[str]:
        """Rules between sections."""
        if self.rl_ahead > 0 and self.weight_sync is None:
            yield (
                "rl_ahead: needs a vLLM server, which samples while the model trains\n"
                "Add use_vllm and vllm_mode server."
            )
        if self.save_best and self.eval_cases == 0:
            yield "save_best: nothing is scored: set eval_cases above 0"
        if self.patience and (self.eval_cases == 0 or self.eval_strategy == "no"):
            yield "patience: nothing is scored during the training: set eval_cases above 0, and eval_strategy"
        if self.launcher == "ray" and self.starts_vllm_servers:
            yield (
                "vllm_mode: with launcher ray aitrain starts no vLLM server\n"
                "Leave it out, so that vLLM runs in the training processes, or give vllm_server_url."
            )
        if self.launcher == "ray" and self.num_processes is None:
            yield "launcher: ray needs the number of training processes: add num_processes"
        if self.dtype == "float16" and not self.peft:
            yield (
                "dtype: float16 weights cannot be trained themselves, their gradients overflow\n"
                "Use mixed_precision fp16 and leave the weights in float32, or add peft."
            )
        if self.quantization is not None and not self.peft:
            yield f"quantization: {self.quantization} weights cannot be trained themselves: add peft"
        if self.quantization is not None and self.use_vllm and self.vllm_mode == "colocate":
            yield (
                "quantization: a 4 or 8 bit base cannot be transferred to vLLM (TRL's #3466)\n"
                "With vllm_mode server only the adapter is, and that works; else leave one of the two out."
            )
        shards = self.distributed_backend == "fsdp2"
        if shards and self.quantization is not None:
            yield "quantization: quantized weights cannot be sharded with fsdp2\nLeave one of the two out."
        if shards and self.optimizer not in FSDP_OPTIMIZERS:
            known = ", ".join(FSDP_OPTIMIZERS)
            yield f"optimizer: the state of {self.optimizer} cannot be sharded with fsdp2\nUse {known}."
        for name in IGNORED_BY_CUSTOM_LOSS:
            if self.custom_loss is not None and name in self.trl:
                yield f"custom_loss: trl {name} weights the losses of TRL's own types only\nLeave one of the two out."
        high = self.rl_clip_range_high
        if self.rl_loss_type == "cispo" and high is not None and high < 1:
            yield (
                f"rl_clip_range_high: for cispo it is the largest ratio, and {high:g} would shrink every gradient\n"
                f"Give 1 or more, or leave it out for {CISPO_BOUND:g}."
            )


def pass_dependent(config: TrainConfig) -> bool:
    """Whether the result depends on which completions share a forward pass."""
    has_own_loss = config.rl_loss_type == "bnpo" or config.rl_entropy_coef > 0 or config.custom_loss is not None
    return has_own_loss or any(config.trl.get(field) not in (None, off) for field, off in PASS_BY_PASS.items())


# -- how FSDP2 shards a model, by its size, and what it cannot shard

FSDP_SMALL = 1_000_000_000
"""Weights below which gathered layers are kept from the forward to the backward pass."""

FSDP_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop")
"""Optimizers that FSDP2 can shard: their state has one number, or several, for each weight, from the first step on.
That of adagrad exists before, for the weights that are replaced by sharded ones."""


def reshards_after_forward(config: TrainConfig, weights: int) -> bool:
    """Whether FSDP2 frees the gathered weights of a layer after its forward pass, and gathers them once more for the
    backward pass, in a model with this number of weights."""
    # peft switches an adapter off and on in the parameters that a module has then: the sharded or the gathered ones
    return config.peft or weights >= FSDP_SMALL


# -- an eval


class EvalOptions(Options):
    """What an eval plays, and how."""

    section = "Eval"

    decoding: Literal["sampled", "greedy", "both"] = "both"
    """Play each case with sampled completions, with the likeliest ones (greedy), or both."""
    concurrency: PositiveInt | None = None
    """Episodes at a time in each process; unset: as many as a forward pass of the training has, and at least 32, with
    transformers, 256 with vLLM, 16 requests to an address."""
    model_name: str | None = None
    """The model's name at an OpenAI-compatible address, which needs one."""


class EvalConfig(TrainConfig, EvalOptions):
    """The options of one eval.

    Cases, seeds and episodes are those of a training with the same options, so that both give the same scores.
    """

    @property
    def decodings(self) -> tuple[str, ...]:
        """The decodings that are played."""
        return ("sampled", "greedy") if self.decoding == "both" else (self.decoding,)


def names_of(*sections: type[Options]) -> set[str]:
    """The names of the options of sections."""
    return {name for section in sections for name in section.model_fields}


EVAL_FLAGS = (
    names_of(
        EvalOptions,
        ModelOptions,
        EnvironmentOptions,
        RunOptions,
        GenerationOptions,
        VLLMOptions,
        EvaluationOptions,
    )
    | {"rl_max_prompt_length", "rl_prompts_per_step", "num_processes", "mixed_precision", "ddp_timeout"}
) - {"model", "vllm_mode", "vllm_sleep_mode", "rl_check", "eval_strategy", "eval_steps", "patience"}
"""Options of `aitrain eval`; the others of a training have no effect on an eval."""

OF_THE_RUN = (
    names_of(ModelOptions, EnvironmentOptions, GenerationOptions, BatchOptions)
    | {"seed", "eval_cases", "eval_samples", "save_best", "rl_num_generations", "peft", "mixed_precision"}
) - {"model", "epochs", "max_steps"}
"""Options that an eval of a run takes over from it: they decide on its cases and episodes."""
