"""The algorithms that `--rl-loss-type` and `--rl-preset` name, one object each, and the loss that a run trains with.

An algorithm says how scores become advantages, which settings of the loss belong to it, and which paper they are from.
A preset says what a paper trains with beside them, as defaults of other options. Learning rate, lengths, batch and
group size depend on the model and the task, and are no part of it, but of `recommended`, our own choice. A new one is
one object here, or one class if its advantages are its own (docs/extending.md); docs/algorithms.md has them in tables.

A setting of the loss is the option that the user gave, else the algorithm's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from pydantic import ModelWrapValidatorHandler, model_validator

from aitrain.options.environment import DECLARED_OPTIONS
from aitrain.options.section import Options, ResumeSafe
from aitrain.options.value_types import (
    FunctionNames,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    TwoOrMore,
    ZeroOrOne,
)

if TYPE_CHECKING:
    from torch import Tensor

LossName = Literal["grpo", "dr_grpo", "dapo", "gspo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
PresetName = Literal["recommended", "grpo", "dr_grpo", "dapo", "gspo", "cispo"]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm of the GRPO family: its advantages, and the settings of its loss."""

    source: str
    loss_type: str = "grpo"
    """The loss of TRL that it uses."""
    level: str = "token"
    """token or sequence: a probability ratio for each token, or one for the completion (its tokens' geometric mean)."""
    clip: tuple[float, float] = (0.2, 0.2)
    """How far the ratio may fall below and rise above 1, in a loss that clips it."""
    scale: str = "group"
    """Standard deviation that advantages are divided by: the group's, the batch's, or none."""
    trl: Mapping[str, str] = field(default_factory=dict)
    """Further fields of GRPOConfig, for generation with vLLM."""

    def advantages(self, rewards: Tensor, size: int) -> Tensor | None:
        """The advantage of each episode; None: TRL's, the distance to the mean of the group, divided by `scale`.

        `rewards` has shape (episodes,), with the members of a group, `size` of them, next to each other; NaN for an
        episode without a score, whose advantage is not used.
        """
        return None


@dataclass(frozen=True)
class Preset:
    """What a paper trains with beside the loss, for `--rl-preset`."""

    source: str
    settings: Mapping[str, object]
    """Value by option; rl_loss_type is the preset's name unless it is here."""
    overlong: bool = False
    """Whether the last fifth of a completion's tokens is the overlong buffer: 4,096 of 20,480 in DAPO."""


CISPO_BOUND = 5.0

ALGORITHMS: dict[LossName, Algorithm] = {
    "grpo": Algorithm(source="GRPO, arXiv 2402.03300; clip range of TRL and AITraining"),
    "dr_grpo": Algorithm(source="Dr. GRPO, arXiv 2503.20783", loss_type="dr_grpo", scale="none"),
    "dapo": Algorithm(source="DAPO, arXiv 2503.14476, section 4.1", loss_type="dapo", clip=(0.2, 0.28)),
    "gspo": Algorithm(source="GSPO, arXiv 2507.18071, section 5.1", level="sequence", clip=(3e-4, 4e-4)),
    "bnpo": Algorithm(source="TRL's documentation of loss_type", loss_type="bnpo"),
    "cispo": Algorithm(
        source="CISPO, arXiv 2506.13585 (MiniMax-M1); largest ratio of arXiv 2510.13786 (ScaleRL)",
        loss_type="cispo",
        clip=(0.2, CISPO_BOUND),
    ),
    "sapo": Algorithm(source="SAPO, arXiv 2511.20347", loss_type="sapo"),
    "luspo": Algorithm(
        source="LUSPO, arXiv 2602.05261, section 5.1", loss_type="luspo", level="sequence", clip=(2e-3, 2.5e-3)
    ),
    "vespo": Algorithm(
        source="VESPO, arXiv 2602.10693", loss_type="vespo", trl={"vllm_importance_sampling_mode": "token_truncate"}
    ),
}

PAPERS: dict[str, Preset] = {
    "grpo": Preset(
        "DeepSeekMath, arXiv 2402.03300, section 4.2; its clip range is not stated: that of PPO",
        {"rl_kl_coef": 0.04, "rl_updates_per_rollout": 1},
    ),
    "dr_grpo": Preset(
        "Dr. GRPO, arXiv 2503.20783, section 3.2 and table 6; updates of the authors' training scripts",
        {"rl_kl_coef": 0.0, "rl_updates_per_rollout": 8},  # 128 of 1,024 completions each
    ),
    "dapo": Preset(
        "DAPO, arXiv 2503.14476, section 4.1",
        {"rl_kl_coef": 0.0, "rl_sampling": "refill", "rl_updates_per_rollout": 16},
        overlong=True,
    ),
    "gspo": Preset(
        "GSPO, arXiv 2507.18071, section 5.1, whose formulas omit the KL term",
        {"rl_kl_coef": 0.0, "rl_updates_per_rollout": 4},
    ),
    "cispo": Preset(
        "CISPO, arXiv 2506.13585 (MiniMax-M1), section 3.1; largest ratio of arXiv 2510.13786 (ScaleRL)",
        {"rl_kl_coef": 0.0, "rl_sampling": "refill", "rl_updates_per_rollout": 16},
        overlong=True,
    ),
}
"""Presets of papers."""
OF_PAPERS = frozenset(["rl_loss_type"]).union(*(preset.settings for preset in PAPERS.values()))
"""Options that they set."""
PRESETS: dict[str, Preset] = {
    "recommended": Preset(
        "ours, to begin with: clip-higher, and each token counts alike (DAPO, arXiv 2503.14476, 3.1 and 3.3); no KL"
        " term (DAPO, 2.3; Dr. GRPO, arXiv 2503.20783, 3.2; TRL's default); groups of Dr. GRPO's scripts and of TRL's"
        " default; few prompts, as LoRA learns less from large batches (LoRA Without Regret, 2025); TRL's default"
        " length, to which thinking adds",
        {
            "rl_loss_type": "dapo",
            "rl_kl_coef": 0.0,
            "rl_num_generations": 8,
            "rl_prompts_per_step": 16,
            "rl_max_new_tokens": 512,
        },
    ),
    **PAPERS,
}


# -- presets


def preset_settings(name: object) -> dict[str, object]:
    """The values that a preset of this name sets, by option; none if there is no such preset."""
    preset = PRESETS.get(str(name))
    return {"rl_loss_type": name, **preset.settings} if preset else {}


# -- options


class GRPOOptions(Options):
    """The group and the loss."""

    section = "GRPO"

    rl_num_generations: TwoOrMore = 4
    """Completions per prompt: the group that a completion is compared with."""
    rl_kl_coef: NonNegativeFloat = 0.1
    """Weight of the KL term to the initial model; 0 saves the reference model's memory."""
    rl_loss_type: LossName = "grpo"
    """How token losses are formed and averaged; brings the settings of its paper along (docs/algorithms.md)."""
    rl_clip_range: PositiveFloat | None = None
    """How far the probability ratio may move from 1 before it is clipped; unset: by loss type, 0.2 for grpo. Without
    effect where each batch is used for one update: the ratio is then 1."""
    rl_clip_range_high: PositiveFloat | None = None
    """How far the ratio may rise above 1 (clip-higher); for cispo the largest ratio; unset: by loss type, 0.28 for
    dapo, 5 for cispo."""
    rl_scale_rewards: Literal["group", "batch", "none"] | None = None
    """Standard deviation that advantages are divided by: the group's, the batch's, or none; unset: by loss type."""
    rl_mask_truncated_completions: bool = False
    """Leave out of the loss the episodes that a limit ended: a truncated completion, a full context, rl_max_turns."""
    rl_preset: PresetName | None = None
    """The settings of one paper together, or recommended, the ones to begin with, as defaults of other options: an
    option that is given itself wins (docs/algorithms.md)."""
    rl_overlong_buffer: PositiveInt | None = None
    """Tokens before the limit of a completion (--rl-max-new-tokens) over which the reward falls linearly, by 1 at the
    limit (soft overlong punishment of DAPO, arXiv 2503.14476, section 3.4); unset: off, or that of --rl-preset."""
    rl_entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the mean entropy of the policy over the tokens, which training then increases (A3C,
    arXiv 1602.01783)."""
    rl_updates_per_rollout: PositiveInt = 1
    """Optimizer steps per rollout: a rollout samples for this number of steps, all but the first of which are
    off-policy; 16 in DAPO (arXiv 2503.14476), 4 in GSPO (arXiv 2507.18071)."""
    custom_loss: FunctionNames | None = None
    """Your loss of each token, as module:function or file.py:function; its mean is taken over all tokens of a step
    (docs/extending.md)."""
    custom_callbacks: ResumeSafe[FunctionNames | None] = None
    """Your callbacks of the trainer, as module:function or file.py:Class, several with commas
    (docs/extending.md)."""

    def changed(self) -> dict[str, object]:
        """Those that differ from their defaults, and what a preset sets, as its values are no defaults."""
        of_preset = {*preset_settings(self.rl_preset), "gradient_accumulation"} if self.rl_preset else set[str]()
        return {name: value for name, value in self.written().items() if name in of_preset} | super().changed()

    @model_validator(mode="wrap")
    @classmethod
    def _fill_in_preset(cls, values: dict[str, object], make: ModelWrapValidatorHandler[Self]) -> Self:
        settings = preset_settings(values.get("rl_preset"))
        if "gradient_accumulation" in values:  # which says the same in another way
            settings.pop("rl_prompts_per_step", None)
        options = make({**{name: settings[name] for name in settings if name in cls.model_fields}, **values})
        options.model_fields_set.difference_update(DECLARED_OPTIONS.values() - values.keys())  # an environment's win
        return options


class SamplingOptions(Options):
    """Which cases are sampled, and when."""

    section = "Cases"

    rl_sampling: Literal["uniform", "refill"] = "uniform"
    """How the cases of a batch are chosen: uniform, each once per epoch; refill, which replaces groups whose scores are
    all equal by groups of other cases, up to ten times (dynamic sampling of DAPO, arXiv 2503.14476)."""
    rl_ahead: ZeroOrOne = 0
    """1: sample the next rollout while this one trains, with weights that are one rollout old; importance weights
    correct for that. Needs --vllm-mode server."""
