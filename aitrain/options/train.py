"""`TrainConfig`, the options of a training run, and what follows from them for FSDP2. Names and defaults are
AITraining's wherever it has the option.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aitrain.options.algorithms import (
    Algorithm,
    GRPOOptions,
    SamplingOptions,
    contradictions,
    overlong_buffer,
    settle,
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
    StoppingOptions,
    TRLOptions,
)

__all__ = ["TrainConfig"]

SERVED_STOPS = 4
"""Maximum number of stop strings that a vLLM server takes in one request."""

PASS_BY_PASS: dict[str, object] = {
    "use_adaptive_entropy": False, "top_entropy_quantile": 1, "pad_to_multiple_of": "auto",
}  # fmt: skip
"""Fields of GRPOConfig whose effect depends on which completions share a forward pass, with the value that has none."""


class TrainConfig(
    ModelOptions,
    EnvironmentOptions,
    RunOptions,
    LoggingOptions,
    BatchOptions,
    OptimizerOptions,
    GRPOOptions,
    SamplingOptions,
    GenerationOptions,
    VLLMOptions,
    LoRAOptions,
    EvaluationOptions,
    StoppingOptions,
    CheckpointOptions,
    HubOptions,
    HardwareOptions,
    DistributedOptions,
    TRLOptions,
):
    """The options of one training run. Unknown names and invalid values raise ConfigError."""

    @property
    def loss(self) -> Algorithm:
        """The algorithm, with the given settings of the loss in place of its own."""
        return settle(self)

    @property
    def learning_rate(self) -> float:
        """The learning rate: the given one, else that for what is trained."""
        return self.lr or (1e-5 if self.peft else 1e-6)

    @property
    def overlong_buffer(self) -> int | None:
        """Tokens of the overlong buffer: the given ones, else those of the preset; None: nothing is subtracted."""
        return self.rl_overlong_buffer or overlong_buffer(self.rl_preset, self.rl_max_new_tokens)

    @property
    def weight_sync(self) -> str | None:
        """How a vLLM server gets the weights: adapter or disk; None without a server."""
        if not self.use_vllm or self.vllm_mode != "server":
            return None
        return ("adapter" if self.peft else "disk") if self.vllm_sync == "auto" else self.vllm_sync

    @property
    def may_halve_base(self) -> bool:
        """Whether the base may be loaded in half precision: no small updates are added to it."""
        return self.peft and (not self.use_vllm or self.weight_sync == "adapter")

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
        yield from self._weight_rules()
        yield from self._vllm_rules()
        if self.rl_ahead > 0 and self.weight_sync is None:
            yield (
                "rl_ahead: needs a vLLM server, which samples while the model trains\n"
                "Add use_vllm and vllm_mode server."
            )
        if self.eval_strategy == "no" or self.eval_cases == 0:
            for name in ("save_best", "patience"):
                if getattr(self, name) not in (None, False):
                    yield f"{name}: nothing is scored during training\nSet eval_strategy, and eval_cases above 0."
        if self.launcher == "ray" and self.starts_vllm_servers:
            yield (
                "vllm_mode: with launcher ray aitrain starts no vLLM server\n"
                "Leave it out, so that vLLM runs in the training processes, or give vllm_server_url."
            )
        if self.launcher == "ray" and self.num_processes is None:
            yield "launcher: ray needs the number of training processes: add num_processes"
        if self.ray_address is not None and self.launcher != "ray" and not self.is_env_on_ray:
            yield "ray_address: nothing of this run is on Ray: add launcher ray or rl_env_workers ray:N"
        yield from fsdp_rules(self)
        yield from contradictions(self)

    def _weight_rules(self) -> Iterator[str]:
        if self.dtype == "float16" and not self.peft:
            yield (
                "dtype: float16 weights cannot be trained themselves, their gradients overflow\n"
                "Use mixed_precision fp16 and leave the weights in float32, or add peft."
            )
        if self.quantization is None:
            return
        if not self.peft:
            yield f"quantization: {self.quantization} weights cannot be trained themselves: add peft"
        is_adapter_sent = self.vllm_mode == "server" and self.vllm_sync in ("auto", "adapter")
        if self.use_vllm and not is_adapter_sent:
            yield (
                "quantization: a 4 or 8 bit base cannot be transferred to vLLM (TRL's #3466)\n"
                "With vllm_mode server only the adapter is, and that works; else leave one of the two out."
            )

    def _vllm_rules(self) -> Iterator[str]:
        if self.vllm_sync == "adapter" and not self.peft:
            yield "vllm_sync: without peft there is no adapter to transfer\nLeave it out, or use disk."
        if self.vllm_quantization is not None and self.weight_sync != "adapter":
            yield (
                "vllm_quantization: for a base that stays as it is, under an adapter\n"
                "Add peft, and leave vllm_sync out; or leave this out."
            )
        stops = len(self.rl_stop or ())
        if self.weight_sync is not None and stops > SERVED_STOPS:
            yield (
                f"rl_stop: a vLLM server takes at most {SERVED_STOPS} texts, not {stops}\n"
                "Leave some out, or use vllm_mode colocate."
            )


def pass_dependent(config: TrainConfig) -> bool:
    """Whether the result depends on which completions share a forward pass."""
    has_own_loss = config.rl_loss_type == "bnpo" or config.rl_entropy_coef > 0 or config.custom_loss is not None
    return has_own_loss or any(config.trl.get(field) not in (None, off) for field, off in PASS_BY_PASS.items())


# -- how FSDP2 shards a model, by its size, and what it cannot shard

FSDP_LARGE = 8_000_000_000
"""Weights above which one process neither loads a copy of its own nor gathers whole checkpoints."""
FSDP_SMALL = 1_000_000_000
"""Weights below which gathered layers are kept from the forward to the backward pass."""

FSDP_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop")
"""Optimizers that FSDP2 can shard: their state has one number, or several, for each weight, from the first step on.
That of adagrad exists before, for the weights that are replaced by sharded ones."""
FSDP_KEYS = ("reshard_after_forward", "cpu_ram_efficient_loading", "state_dict_type", "transformer_layer_cls_to_wrap")
"""Keys of `--trl fsdp_config` that may be set."""


@dataclass(frozen=True)
class FSDPSettings:
    """The settings of accelerate's FSDP plugin that depend on the size of the model."""

    reshard_after_forward: bool
    """Free the gathered weights of a layer after its forward pass, and gather them once more for the backward pass."""
    cpu_ram_efficient_loading: bool
    """Only the first process of a machine reads the weights, and sends each process its part."""
    sharded_checkpoints: bool
    """Each process writes its part of a checkpoint; else the first one gathers and writes all of it."""


def fsdp_settings(config: TrainConfig, weights: int) -> FSDPSettings:
    """The settings for a model with this number of weights; `--trl fsdp_config` overrides them."""
    given, is_small = config.trl_table("fsdp_config"), weights < FSDP_SMALL
    state = str(given.get("state_dict_type", "")).upper()
    return FSDPSettings(
        # peft switches an adapter off and on in the parameters that a module has then: the sharded or the gathered ones
        reshard_after_forward=bool(given.get("reshard_after_forward", config.peft or not is_small)),
        cpu_ram_efficient_loading=bool(given.get("cpu_ram_efficient_loading", not is_small)),
        sharded_checkpoints=state == "SHARDED_STATE_DICT" if state else weights > FSDP_LARGE and not config.peft,
    )


def fsdp_rules(config: TrainConfig) -> Iterator[str]:
    """Options that FSDP2 does not go together with."""
    if config.distributed_backend != "fsdp2":
        return
    given = config.trl_table("fsdp_config")
    if config.quantization is not None:
        yield "quantization: quantized weights cannot be sharded with fsdp2\nLeave one of the two out."
    if config.optimizer not in FSDP_OPTIMIZERS:
        known = ", ".join(FSDP_OPTIMIZERS)
        yield f"optimizer: the state of {config.optimizer} cannot be sharded with fsdp2\nUse {known}."
    if config.peft and given.get("reshard_after_forward") is False:
        yield "trl: fsdp_config: with peft reshard_after_forward is always true\nLeave it out."
    if config.peft and str(given.get("state_dict_type", "")).upper() == "SHARDED_STATE_DICT":
        yield "trl: fsdp_config: with peft checkpoints have the adapter, whole\nLeave state_dict_type out."
    for key in given:
        if key not in FSDP_KEYS:
            yield f"trl: fsdp_config: {key} is not for you to set\nWhat may be set is {', '.join(FSDP_KEYS)}."


OF_THE_RUN = {
    *(name for section in (ModelOptions, EnvironmentOptions, GenerationOptions) for name in section.model_fields),
    *(name for name in BatchOptions.model_fields if name not in ("epochs", "max_steps", "stop_when_flat")),
    *("seed", "eval_cases", "eval_samples", "save_best", "rl_num_generations", "peft"),
    "mixed_precision",
} - {"model"}
"""Options that an eval of a run takes over from it: they decide on its cases and episodes."""
