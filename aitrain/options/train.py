"""`TrainConfig`, the options of a training run. Names and defaults are AITraining's wherever it has the option."""

from collections.abc import Iterable
from itertools import chain

from aitrain.options.algorithm import GRPOOptions, SamplingOptions
from aitrain.options.algorithms import LossSettings, contradictions, overlong_buffer, settle
from aitrain.options.distributed import DistributedOptions
from aitrain.options.environment import EnvironmentOptions
from aitrain.options.fsdp_settings import fsdp_rules
from aitrain.options.generation import GenerationOptions, VLLMOptions
from aitrain.options.model import LoRAOptions, ModelOptions
from aitrain.options.optimization import BatchOptions, OptimizerOptions, TRLOptions, default_rate
from aitrain.options.run import (
    CheckpointOptions,
    EvaluationOptions,
    HardwareOptions,
    HubOptions,
    LoggingOptions,
    RunOptions,
    StoppingOptions,
)
from aitrain.options.section import Rule

__all__ = ["TrainConfig"]

SERVED_STOPS = 4
"""Maximum number of stop strings that a vLLM server takes in one request."""

PASS_BY_PASS: dict[str, object] = {
    "entropy_coef": 0, "use_adaptive_entropy": False, "top_entropy_quantile": 1, "pad_to_multiple_of": "auto",
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
    def loss(self) -> LossSettings:
        """The settings of the loss: the given ones, and for the rest those of the loss type."""
        return settle(self)

    @property
    def learning_rate(self) -> float:
        """The learning rate: the given one, else that for what is trained."""
        return self.lr or default_rate(self.peft)

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
        is_one_graph = self.disable_gradient_checkpointing and self.distributed_backend == "ddp"
        return self.share_prefixes and self.trims_padding and is_one_graph

    def written(self) -> dict[str, object]:
        """The options as config.yaml holds them: without derived ones, and without those of a single start."""
        values = super().written()
        del values["resume_from_checkpoint"], values["resume_anyway"]
        if self.rl_prompts_per_step is not None:
            del values["gradient_accumulation"]  # written down, it would contradict a changed flag
        return values

    def rules(self) -> Iterable[Rule]:
        """Rules between sections."""
        return chain(
            self._weight_rules(),
            self._vllm_rules(),
            self._ahead_rules(),
            _best_rules(self),
            self._ray_rules(),
            self._case_rules(),
            fsdp_rules(self),
            contradictions(self),
        )

    def _weight_rules(self) -> list[Rule]:
        return [
            (
                self.dtype == "float16" and not self.peft,
                "dtype: float16 weights cannot be trained themselves, their gradients overflow\n"
                "Use --mixed-precision fp16 and leave the weights in float32, or add --peft.",
            ),
            (
                self.quantization is not None and not self.peft,
                f"quantization: {self.quantization} weights cannot be trained themselves: add --peft",
            ),
            (
                self.quantization is not None
                and self.use_vllm
                and not (self.vllm_mode == "server" and self.vllm_sync in ("auto", "adapter")),
                "quantization: a 4 or 8 bit base cannot be transferred to vLLM (TRL's #3466)\n"
                "With --vllm-mode server only the adapter is, and that works; else leave one of the two out.",
            ),
        ]

    def _vllm_rules(self) -> list[Rule]:
        return [
            (
                self.vllm_sync == "adapter" and not self.peft,
                "vllm_sync: without --peft there is no adapter to transfer\nLeave it out, or use disk.",
            ),
            (
                self.vllm_quantization is not None and self.weight_sync != "adapter",
                "vllm_quantization: for a base that stays as it is, under an adapter\n"
                "Add --peft, and leave --vllm-sync out; or leave this out.",
            ),
            (
                self.vllm_speculative is not None and self.rl_min_p > 0,
                "vllm_speculative: vLLM does not sample with min-p then\nLeave this or --rl-min-p out.",
            ),
            (
                self.weight_sync is not None and len(self.rl_stop or ()) > SERVED_STOPS,
                f"rl_stop: a vLLM server takes at most {SERVED_STOPS} texts, not {len(self.rl_stop or ())}\n"
                "Leave some out, or use --vllm-mode colocate.",
            ),
        ]

    def _ahead_rules(self) -> list[Rule]:
        return [
            (
                self.rl_ahead > 0 and self.weight_sync is None,
                "rl_ahead: needs a vLLM server, which samples while the model trains\n"
                "Add --use-vllm and --vllm-mode server.",
            ),
            (
                self.rl_ahead_turns and not self.rl_ahead,
                "rl_ahead_turns: without --rl-ahead 1 no episode is played while the model trains",
            ),
        ]

    def _ray_rules(self) -> list[Rule]:
        return [
            (
                self.launcher == "ray" and self.starts_vllm_servers,
                "vllm_mode: with --launcher ray aitrain starts no vLLM server\n"
                "Leave it out, so that vLLM runs in the training processes, or give --vllm-server-url.",
            ),
            (
                self.launcher == "ray" and self.num_processes is None,
                "launcher: ray needs the number of training processes: add --num-processes N",
            ),
            (
                self.ray_address is not None and self.launcher != "ray" and not self.is_env_on_ray,
                "ray_address: nothing of this run is on Ray: add --launcher ray or --rl-env-workers ray:N",
            ),
        ]

    def _case_rules(self) -> list[Rule]:
        return [
            (
                self.rl_sampling == "difficulty" and self.rl_score_range == "any",
                "rl_sampling: difficulty needs to know which scores are high\n"
                "Set --rl-score-range LOW,HIGH, or use --rl-sampling refill.",
            ),
            (
                self.rl_sampling == "difficulty" and self.custom_sampler is not None,
                "custom_sampler: --rl-sampling difficulty chooses the cases as well: leave one of the two out",
            ),
            (
                self.rl_env_weights is not None and self.custom_sampler is not None,
                "rl_env_weights: custom_sampler chooses the cases of all environments: leave one of the two out",
            ),
        ]


def pass_dependent(config: TrainConfig) -> list[str]:
    """The flags given whose result depends on which completions share a forward pass."""
    depends = {
        "--rl-loss-type bnpo": config.rl_loss_type == "bnpo",
        "--rl-entropy-coef": config.rl_entropy_coef > 0,
        "--custom-loss": config.custom_loss is not None,
        **{f"--trl {field}": config.trl.get(field) not in (None, off) for field, off in PASS_BY_PASS.items()},
    }
    return [flag for flag, is_given in depends.items() if is_given]


def _best_rules(config: TrainConfig) -> list[Rule]:
    return [
        *(
            (
                getattr(config, name) not in (None, False) and (config.eval_strategy == "no" or config.eval_cases == 0),
                f"{name}: nothing is scored during training\nSet --eval-strategy, and --eval-cases above 0.",
            )
            for name in ("save_best", "until", "patience")
        ),
    ]
