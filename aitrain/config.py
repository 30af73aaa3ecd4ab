"""What a run is: every option, once.

An option is a field: its type carries its bounds, its default stands beside it, and one sentence says what it does. Flags
(`--rl-num-generations`), YAML keys (`rl_num_generations`), Python arguments and docs/options.md are derived from here.
Names and defaults are AITraining's wherever it has the option; where we differ, the sentence says why.
"""

from __future__ import annotations

import os
import re
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from aitrain.errors import ConfigError
from aitrain.loss_types import LossSettings, contradictions, settle
from aitrain.values import (
    Address,
    JsonObject,
    Names,
    ScoreRange,
    Table,
    Texts,
    Trackers,
    as_meant,
    refusal,
    score_bounds,
)

__all__ = ["TrainConfig"]

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
"""In vLLM's bounds."""
SERVED_STOPS = 4
"""The most stop strings that a vLLM server takes in one request."""


def option(default: Any, sentence: str, section: str, *, may_change: bool = False) -> Any:
    """A field of TrainConfig: its default, its sentence, the section that it is listed under, and whether a resumed run
    may have another value: where that changes nothing of the training, or where what it names is compared itself."""
    return Field(
        default=default, description=sentence, json_schema_extra={"section": section, "may_change": may_change}
    )


class TrainConfig(BaseModel):
    """One run, fully described. Unknown names and values out of bounds raise ConfigError."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, defer_build=True)

    # -- Model
    model: str = option(
        "google/gemma-3-270m", "Hub name or folder of the model to train; `tiny` is the shipped one.", "Model"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Type of the weights; auto: bfloat16 for a frozen base under LoRA where the GPU has it, else float32.",
        "Model",
    )
    attn_implementation: str | None = option(
        None, "Attention kernel that transformers should use, such as sdpa or eager.", "Model"
    )
    chat_template: str | None = option(
        None, "chatml, zephyr, or a file with a Jinja template; unset: the tokenizer's own.", "Model"
    )
    model_max_length: PositiveInt | None = option(
        None, "Longest prompt plus answer in tokens; unset: what the model's configuration says.", "Model"
    )
    quantization: Literal["int4", "int8"] | None = option(
        None, "Load the base weights in 4 or 8 bits (CUDA, with --peft only).", "Model"
    )
    trust_remote_code: bool = option(
        False, "Run code that comes with the model; off, where AITraining has it on: it is a stranger's code.", "Model"
    )

    # -- Environment
    rl_env: str | None = option(
        None,
        "The environment in one word: path/to/file.py:Class, package.module:Class, or envs.gsm8k.",
        "Environment",
        may_change=True,
    )
    rl_env_module: str | None = option(None, "Module that holds the environment class.", "Environment", may_change=True)
    rl_env_class: str | None = option(
        None,
        "Name of the environment class; unset: the only class of the module that has build_dataset.",
        "Environment",
        may_change=True,
    )
    rl_env_config: JsonObject | None = option(
        None,
        "Keywords for the environment's constructor: a JSON object, or @file.json.",
        "Environment",
        may_change=True,
    )
    rl_env_workers: PositiveInt | None = option(
        None,
        "Calls to the environment that run at the same time; unset: 64 (in processes: 4 for each CPU core).",
        "Environment",
        may_change=True,
    )
    rl_env_isolation: Literal["thread", "process"] = option(
        "thread",
        "Where the environment's code runs: threads, or processes for code that hangs, crashes or holds the GIL.",
        "Environment",
        may_change=True,
    )
    rl_env_timeout: PositiveFloat = option(
        60.0,
        "Seconds that one call to the environment may take; the model's own time is not counted.",
        "Environment",
        may_change=True,
    )
    rl_env_retries: Annotated[int, Field(ge=0)] = option(
        0,
        "How often a failed start or score is tried again (steps and tools change the episode, and are not).",
        "Environment",
        may_change=True,
    )
    rl_score_range: ScoreRange = option(
        "0,1",
        "Lowest and highest score that an environment may return, as in -1,1; any: all finite numbers.",
        "Environment",
    )
    rl_max_failed: Annotated[float, Field(ge=0, le=1)] = option(
        0.5,
        "Share of failed episodes in a batch that is too much; three such batches in a row end the run.",
        "Environment",
        may_change=True,
    )

    # -- Run
    project_name: str = option("project-name", "Name of the run and of its folder.", "Run", may_change=True)
    output_dir: str = option("runs", "Folder that run folders are made in.", "Run", may_change=True)
    seed: Annotated[int, Field(ge=0, lt=2**32)] = option(
        42,
        "Seed of the dataset split, the shuffling, the sampling and the adapter (AITraining ignores its own).",
        "Run",
    )
    epochs: PositiveInt = option(1, "Passes over the training cases.", "Run")
    max_steps: PositiveInt | None = option(None, "Stop after this many optimizer steps, whatever the epochs.", "Run")
    stop_when_flat: PositiveInt | None = option(
        None,
        "Stop after this many steps in a row in which no group's completions differed in score: nothing is learned.",
        "Run",
        may_change=True,
    )
    stall_timeout: PositiveFloat = option(
        1800.0,
        "Seconds without a step, a token, a finished call or bytes saved after which a run counts as stalled and ends.",
        "Run",
        may_change=True,
    )
    telemetry: bool = option(
        False,
        "Let the libraries tell their makers how they are used; off, they are asked not to.",
        "Run",
        may_change=True,
    )
    logging_steps: int = option(-1, "Steps between two lines of metrics.jsonl; -1: every step.", "Run", may_change=True)
    log: Trackers = option(
        "none",
        "Trackers to report to as well: wandb, tensorboard, trackio, with commas; none, where AITraining has wandb: no"
        " account is needed to train.",
        "Run",
        may_change=True,
    )
    resume_from_checkpoint: str | None = option(
        None,
        "A checkpoint folder, or auto (short: --resume) for the newest whole one of this run's folder.",
        "Run",
        may_change=True,
    )

    resume_anyway: bool = option(
        False,
        "Resume even where options, environment or dataset have changed: the run goes on, but not exactly.",
        "Run",
        may_change=True,
    )

    # -- Batch
    rl_prompts_per_step: PositiveInt | None = option(
        None,
        "Prompts per optimizer step, over all processes; the accumulation is then derived from it and batch_size.",
        "Batch",
    )
    batch_size: PositiveInt = option(2, "Completions per forward pass and process.", "Batch")
    gradient_accumulation: PositiveInt = option(4, "Forward passes per optimizer step.", "Batch")
    rl_max_prompt_length: PositiveInt | None = option(
        None, "Cases with a longer prompt (in tokens) are dropped; unset: what the model's context leaves.", "Batch"
    )

    # -- Optimizer
    lr: PositiveFloat = option(
        1e-5, "Learning rate; 1e-5 as AITraining's docs advise, where its default is 3e-5.", "Optimizer"
    )
    optimizer: str = option("adamw_torch", "Optimizer, by its name in transformers.", "Optimizer")
    scheduler: str = option("linear", "Learning rate schedule, by its name in transformers.", "Optimizer")
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = option(
        0.1,
        "Share of the steps that warm the learning rate up, from 0 in the first one; a run of one step has no warm-up.",
        "Optimizer",
    )
    weight_decay: NonNegativeFloat = option(0.0, "Weight decay.", "Optimizer")
    max_grad_norm: NonNegativeFloat = option(1.0, "Gradients are clipped to this norm; 0: not clipped.", "Optimizer")

    # -- GRPO
    rl_num_generations: Annotated[int, Field(ge=2)] = option(
        4, "Completions per prompt: the group that a completion is compared with.", "GRPO"
    )
    rl_kl_coef: NonNegativeFloat = option(
        0.1, "Weight of the KL term to the initial model; 0 saves the reference model's memory.", "GRPO"
    )
    rl_loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = option(
        "grpo",
        "How token losses are formed and averaged; brings its paper's settings along (docs/losses.md).",
        "GRPO",
    )
    rl_clip_range: PositiveFloat | None = option(
        None,
        "How far the probability ratio may move from 1 before it is clipped; unset: by loss type, 0.2 for grpo. Without"
        " effect where each batch is used for one update: the ratio is then 1.",
        "GRPO",
    )
    rl_clip_range_high: PositiveFloat | None = option(
        None,
        "The same above 1 (clip-higher); for cispo the largest ratio; unset: by loss type, 0.28 for dapo, 5 for cispo.",
        "GRPO",
    )
    rl_importance_level: Literal["token", "sequence"] | None = option(
        None,
        "A probability ratio for each token, or one for the whole completion (GSPO); unset: by loss type.",
        "GRPO",
    )
    rl_scale_rewards: Literal["group", "batch", "none"] | None = option(
        None,
        "Standard deviation that advantages are divided by: the group's, the batch's, or none; unset: by loss type.",
        "GRPO",
    )
    rl_mask_truncated_completions: bool = option(
        False,
        "Leave episodes out of the loss that a limit ended: an answer cut off, no room for another one, rl_max_turns.",
        "GRPO",
    )

    # -- Generation
    rl_max_new_tokens: PositiveInt = option(
        128, "Most tokens in one answer; an episode may have several.", "Generation"
    )
    rl_max_turns: PositiveInt = option(16, "Most answers of the model in one episode.", "Generation")
    rl_max_episode_tokens: PositiveInt | None = option(
        None,
        "Most tokens of an episode after its prompt, answers and environment together; unset: what the context leaves.",
        "Generation",
    )
    rl_temperature: PositiveFloat = option(1.0, "Sampling temperature.", "Generation")
    rl_top_k: Annotated[int, Field(ge=0)] = option(
        0,
        "Sample from this many most likely tokens; 0: from all. AITraining uses 50, but the update is exact only for"
        " answers that are sampled from all tokens.",
        "Generation",
    )
    rl_top_p: Share = option(
        1.0, "Sample from the most likely tokens that hold this share of the probability; 1: from all.", "Generation"
    )
    rl_min_p: Annotated[float, Field(ge=0, le=1)] = option(
        0.0,
        "Sample from the tokens with at least this share of the most likely token's probability; 0: from all.",
        "Generation",
    )
    rl_repetition_penalty: PositiveFloat = option(
        1.0,
        "Divide the positive logits of tokens in the prompt or the answer by this, multiply the negative ones; 1: off.",
        "Generation",
    )
    rl_presence_penalty: Penalty = option(
        0.0, "Subtract this from the logit of each token that the answer already has; 0: off.", "Generation"
    )
    rl_frequency_penalty: Penalty = option(
        0.0, "Subtract this from a token's logit for each time that the answer has it; 0: off.", "Generation"
    )
    rl_min_new_tokens: Annotated[int, Field(ge=0)] = option(
        0, "Fewest tokens in one answer: until then nothing ends it but the token limit.", "Generation"
    )
    rl_stop: Texts | None = option(
        None,
        "End an answer with the token that completes this text, or one of several as a JSON list; the text stays in"
        " the answer.",
        "Generation",
    )

    # -- vLLM
    use_vllm: bool = option(False, "Generate with vLLM.", "vLLM")
    vllm_mode: Literal["colocate", "server"] = option(
        "colocate", "vLLM inside the training processes, or a server.", "vLLM"
    )
    vllm_gpu_memory_utilization: Share | None = option(
        None,
        "Share of each GPU's memory that vLLM takes; unset: 0.3 beside the model, 0.9 as a server.",
        "vLLM",
        may_change=True,
    )
    vllm_sleep_mode: bool = option(
        False,
        "Let a colocated vLLM give its GPU memory back while the model trains; costs time.",
        "vLLM",
        may_change=True,
    )
    vllm_server_url: Address | None = option(
        None,
        "Address of a vLLM server of yours, such as http://127.0.0.1:8000; unset: aitrain starts one.",
        "vLLM",
        may_change=True,
    )
    vllm_tensor_parallel_size: PositiveInt = option(
        1, "GPUs that one vLLM engine is split over.", "vLLM", may_change=True
    )
    vllm_server_gpus: PositiveInt = option(
        1,
        "GPUs of this machine, the last ones, that a vLLM server on it holds: training leaves them alone.",
        "vLLM",
        may_change=True,
    )
    vllm_sync: Literal["auto", "adapter", "disk", "nccl"] = option(
        "auto",
        "How a server gets the weights: the LoRA adapter alone, all weights as files (disk), or TRL's NCCL.",
        "vLLM",
        may_change=True,
    )
    vllm_max_restarts: Annotated[int, Field(ge=0)] = option(
        3, "How often a vLLM server that aitrain started is started again when it dies.", "vLLM", may_change=True
    )

    # -- LoRA
    peft: bool = option(False, "Train a LoRA adapter, not the weights themselves.", "LoRA")
    lora_r: PositiveInt = option(16, "Rank of the adapter.", "LoRA")
    lora_alpha: PositiveInt = option(32, "The adapter is scaled by lora_alpha / lora_r.", "LoRA")
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = option(
        0.0, "Dropout in the adapter; 0, where AITraining has 0.05: it also disturbs the sampling.", "LoRA"
    )
    target_modules: Names = option(
        "all-linear", "Layers that get an adapter: all-linear, or names with commas.", "LoRA"
    )
    merge_adapter: bool = option(
        True, "Also write base and adapter merged, into model/merged.", "LoRA", may_change=True
    )

    # -- Evaluation
    eval_cases: Annotated[int, Field(ge=0)] | None = option(
        None,
        "Held-out cases to score before and after; unset: a tenth of the dataset, at most 64; 0: none.",
        "Evaluation",
        may_change=True,
    )
    eval_samples: PositiveInt = option(
        1,
        "Samples of each held-out case: their mean is the case's score; with several, pass@K is reported besides.",
        "Evaluation",
        may_change=True,
    )
    eval_strategy: Literal["no", "steps", "epoch"] = option(
        "epoch", "When to score the held-out cases during training as well.", "Evaluation", may_change=True
    )
    eval_steps: PositiveInt = option(
        100, "Steps between two of those, with --eval-strategy steps.", "Evaluation", may_change=True
    )

    # -- Saving
    save_strategy: Literal["no", "steps", "epoch"] = option(
        "epoch", "When to write a checkpoint.", "Saving", may_change=True
    )
    save_steps: PositiveInt = option(
        500, "Steps between two checkpoints, with --save-strategy steps.", "Saving", may_change=True
    )
    save_total_limit: PositiveInt | None = option(
        1, "Checkpoints to keep; older ones are deleted.", "Saving", may_change=True
    )
    save_best: bool = option(
        False,
        "Keep the checkpoint with the best held-out score besides, and let model/ be the best one at the end,"
        " scored once more with new samples for the score that is reported.",
        "Saving",
        may_change=True,
    )
    push_to_hub: bool = option(
        False, "Upload model/ to the Hub at the end (token from HF_TOKEN or the hub login).", "Saving", may_change=True
    )
    username: str | None = option(
        None, "Hub user or organisation to upload to; unset: whose token it is.", "Saving", may_change=True
    )
    repo_id: str | None = option(
        None, "Hub repository to upload to; unset: username/project_name.", "Saving", may_change=True
    )
    hub_private: bool = option(True, "Make the Hub repository private.", "Saving", may_change=True)

    # -- Hardware
    num_processes: PositiveInt | None = option(
        None, "Training processes; unset: one for each visible GPU, one on CPU.", "Hardware", may_change=True
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = option(
        None, "Autocast of the forward pass; unset: bf16 where the GPU has it, else none.", "Hardware"
    )
    warm_up: bool = option(
        True,
        "On GPUs, begin with a forward and backward pass of the longest episodes: too little memory shows at once.",
        "Hardware",
        may_change=True,
    )
    disable_gradient_checkpointing: bool = option(
        False, "Keep all activations: faster, more memory.", "Hardware", may_change=True
    )
    ddp_timeout: PositiveInt = option(
        7200, "Seconds that one process waits for the others.", "Hardware", may_change=True
    )

    # -- TRL
    trl: Table = option({}, "Any other field of TRL's GRPOConfig, as KEY=VALUE; may be repeated.", "TRL")

    if not TYPE_CHECKING:  # type checkers see pydantic's own signature, with every option in it

        def __init__(self, **options: Any) -> None:
            _build()
            try:
                super().__init__(**options)
            except ValidationError as error:
                raise ConfigError(refusal(error, TrainConfig.model_fields)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: Any, info: ValidationInfo) -> Any:
        return as_meant(value, cls.model_fields[str(info.field_name)].annotation)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> TrainConfig:
        own = (self._about_the_run(), self._about_the_environment(), self._about_vllm(), self._about_sampling())
        for is_wrong, why in chain.from_iterable((*own, contradictions(self))):
            if is_wrong:
                raise ValueError(why)
        return self

    # What no single option shows: (is it so, what to say).

    def _about_the_run(self) -> list[tuple[bool, str]]:
        return [
            (
                not re.fullmatch(r"[\w.+-]{1,100}", self.project_name) or set(self.project_name) == {"."},
                f"project_name: {self.project_name!r} is not a folder name\nUse letters, digits, '-', '_' and '.';"
                " --output-dir says where the folder is made.",
            ),
            (self.logging_steps == 0 or self.logging_steps < -1, "logging_steps: give 1 or more, or -1 for every step"),
            (
                self.dtype == "float16" and not self.peft,
                "dtype: float16 weights cannot be trained themselves, their gradients overflow\n"
                "Say --mixed-precision fp16 and leave the weights in float32, or add --peft.",
            ),
            (
                self.quantization is not None and not self.peft,
                f"quantization: {self.quantization} weights cannot be trained themselves: add --peft",
            ),
            (
                self.save_best and (self.eval_strategy == "no" or self.eval_cases == 0),
                "save_best: nothing is scored during training\nSet --eval-strategy, and --eval-cases above 0.",
            ),
            (
                self.save_best and not self.trl.keys().isdisjoint({"deepspeed", "fsdp"}),
                "save_best: the best weights cannot be put back under DeepSpeed or FSDP\nLeave it out.",
            ),
        ]

    def _about_the_environment(self) -> list[tuple[bool, str]]:
        named_twice = (self.rl_env or "").partition(":")[2] not in ("", self.rl_env_class)
        return [
            (
                self.rl_env is not None and self.rl_env_module is not None,
                "rl_env and rl_env_module both name an environment: give one of them",
            ),
            (
                self.rl_env_class is not None and self.rl_env is None and self.rl_env_module is None,
                f"rl_env_class: {self.rl_env_class} in which module? Add --rl-env-module",
            ),
            (
                (self.rl_max_episode_tokens or self.rl_max_new_tokens) < self.rl_max_new_tokens,
                f"rl_max_episode_tokens: {self.rl_max_episode_tokens} is less than one answer of"
                f" {self.rl_max_new_tokens} tokens (rl_max_new_tokens)",
            ),
            (
                self.rl_min_new_tokens > self.rl_max_new_tokens,
                f"rl_min_new_tokens: {self.rl_min_new_tokens} is more than an answer may have,"
                f" {self.rl_max_new_tokens} (rl_max_new_tokens)",
            ),
            (
                self.rl_env_class is not None and named_twice,
                f"rl_env: {self.rl_env} and rl_env_class: {self.rl_env_class} name two classes: give one of them",
            ),
        ]

    def _about_vllm(self) -> list[tuple[bool, str]]:
        has_url, is_server = self.vllm_server_url is not None, self.vllm_mode == "server"
        return [
            (
                has_url and not (self.use_vllm and is_server),
                "vllm_server_url: a server is used with --use-vllm and --vllm-mode server only\n"
                "Add both, or leave the address out.",
            ),
            (
                self.vllm_sync == "adapter" and not self.peft,
                "vllm_sync: without --peft there is no adapter to hand over\nLeave it out, or say disk.",
            ),
            (
                self.vllm_sync == "nccl" and not has_url,
                "vllm_sync: nccl needs a server of yours that was started for it (--vllm-server-url)\n"
                "Leave it out: aitrain's own server needs no NCCL.",
            ),
            (
                self.quantization is not None
                and self.use_vllm
                and not (is_server and self.vllm_sync in ("auto", "adapter")),
                "quantization: a 4 or 8 bit base cannot be handed to vLLM (TRL's #3466)\n"
                "With --vllm-mode server only the adapter is, and that works; else leave one of the two out.",
            ),
        ]

    @property
    def loss(self) -> LossSettings:
        """The settings of the loss: what is given, and for the rest what the loss type brings along."""
        return settle(self)

    def _about_sampling(self) -> list[tuple[bool, str]]:
        return [
            (
                self.weight_sync is not None and len(self.rl_stop or ()) > SERVED_STOPS,
                f"rl_stop: a vLLM server takes {SERVED_STOPS} texts at most, not {len(self.rl_stop or ())}\n"
                "Leave some out, or use --vllm-mode colocate.",
            ),
            (
                self.weight_sync == "nccl" and bool(self.answer_sampling),
                f"{', '.join(self.answer_sampling)}: cannot be had with --vllm-sync nccl\n"
                "Use --vllm-sync disk or adapter, or leave them out.",
            ),
        ]

    @property
    def vllm_memory(self) -> float:
        """The share of each GPU's memory that vLLM takes."""
        return self.vllm_gpu_memory_utilization or (0.9 if self.vllm_mode == "server" else 0.3)

    @property
    def score_bounds(self) -> tuple[float, float]:
        """The lowest and the highest score of rl_score_range, for what has to know (judging, intervals); infinite ones
        for any."""
        return score_bounds(self.rl_score_range) or (0.0, 1.0)  # the option is checked: never None

    @property
    def weight_sync(self) -> str | None:
        """How a vLLM server gets the weights: adapter, disk or nccl; None where there is no server."""
        if not self.use_vllm or self.vllm_mode != "server":
            return None
        return ("adapter" if self.peft else "disk") if self.vllm_sync == "auto" else self.vllm_sync

    @property
    def reshaped_sampling(self) -> list[str]:
        """The options that make the sampling distribution another one than softmax(logits / temperature), as flags."""
        penalties = ("rl_repetition_penalty", "rl_presence_penalty", "rl_frequency_penalty", "rl_min_new_tokens")
        return self._set_flags("rl_top_k", "rl_top_p", "rl_min_p", *penalties)

    @property
    def answer_sampling(self) -> list[str]:
        """The options that look at all of an answer, its tokens or its text, as flags."""
        penalties = ("rl_repetition_penalty", "rl_presence_penalty", "rl_frequency_penalty", "rl_min_new_tokens")
        return self._set_flags(*penalties, "rl_stop")

    def _set_flags(self, *names: str) -> list[str]:
        """The options among these that are not at their defaults, as flags with their values."""
        values = {name: getattr(self, name) for name in names}
        defaults = {name: type(self).model_fields[name].default for name in names}
        return [f"--{name.replace('_', '-')} {value}" for name, value in values.items() if value != defaults[name]]

    @property
    def may_halve_base(self) -> bool:
        """Whether the base can be in half precision without loss: nobody adds small updates to it."""
        return self.peft and (not self.use_vllm or self.weight_sync == "adapter")

    def changed(self) -> dict[str, Any]:
        """The options of `written` that are not at their defaults."""
        return {name: value for name, value in self.written().items() if value != type(self).model_fields[name].default}

    def written(self) -> dict[str, Any]:
        """The options as config.yaml holds them: less what follows from another one, and what is for one start only."""
        options = self.model_dump(exclude={"resume_from_checkpoint", "resume_anyway"})
        if self.rl_prompts_per_step is not None:
            del options["gradient_accumulation"]  # derived; written down, it would contradict a changed flag
        return options


NO_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


def _build() -> None:
    """Build the validator of TrainConfig, once, without pydantic's plugins: to look for them would read the metadata of
    every installed package, a fifth of what `aitrain plan` costs."""
    if TrainConfig.__pydantic_complete__:
        return
    before = os.environ.get(NO_PLUGINS)
    os.environ[NO_PLUGINS] = "__all__"
    try:
        TrainConfig.model_rebuild()
    finally:
        del os.environ[NO_PLUGINS]
        if before is not None:
            os.environ[NO_PLUGINS] = before
