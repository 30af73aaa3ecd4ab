"""Loss types of GRPO, each with the settings of the paper that introduced it, and the settings that a run trains with.

A setting is the option that the user gave, else the field given with `--trl`, else the loss type's own.
docs/algorithms.md holds the table below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class LossType:
    """The settings of a loss type, as texts that docs/algorithms.md shows unchanged."""

    level: str
    """token or sequence: a probability ratio for each token, or one for the completion (its tokens' geometric mean)."""
    clip: tuple[float, float] | None
    """How far the ratio may fall below and rise above 1; None: the loss does not clip it."""
    scale: str
    """Standard deviation that advantages are divided by: the group's, the batch's, or none."""
    averaged: str
    """How token losses become one number."""
    source: str
    trl: Mapping[str, str] = field(default_factory=dict)
    """Further fields of GRPOConfig, for generation with vLLM."""


CISPO_BOUND = 5.0

LOSS_TYPES = {
    "grpo": LossType(
        "token", (0.2, 0.2), "group", "over each completion's tokens, then over completions",
        "GRPO, arXiv 2402.03300; clip range of TRL and AITraining",
    ),
    "dr_grpo": LossType(
        "token", (0.2, 0.2), "none", "sum of tokens, divided by completions x rl_max_new_tokens",
        "Dr. GRPO, arXiv 2503.20783",
    ),
    "dapo": LossType(
        "token", (0.2, 0.28), "group", "over all tokens of the step", "DAPO, arXiv 2503.14476, section 4.1"
    ),
    "bnpo": LossType(
        "token", (0.2, 0.2), "group", "over the tokens of each forward pass", "TRL's documentation of loss_type"
    ),
    "cispo": LossType(
        "token", (0.2, CISPO_BOUND), "group", "over all tokens of the step",
        "CISPO, arXiv 2506.13585 (MiniMax-M1); largest ratio of arXiv 2510.13786 (ScaleRL)",
    ),
    "sapo": LossType(
        "token", None, "group", "over each completion's tokens, then over completions", "SAPO, arXiv 2511.20347"
    ),
    "luspo": LossType(
        "sequence", (2e-3, 2.5e-3), "group", "sum of each completion's tokens, then over completions",
        "LUSPO, arXiv 2602.05261, section 5.1",
    ),
    "vespo": LossType(
        "token", None, "group", "over all tokens of the step", "VESPO, arXiv 2602.10693",
        {"vllm_importance_sampling_mode": "token_truncate"},
    ),
}  # fmt: skip

GSPO = LossType("sequence", (3e-4, 4e-4), "group", LOSS_TYPES["grpo"].averaged, "GSPO, arXiv 2507.18071, section 5.1")
"""What grpo becomes with `--rl-importance-level sequence`."""

OPTION_OF = {
    "importance_sampling_level": "rl_importance_level",
    "epsilon_high": "rl_clip_range_high",
    "scale_rewards": "rl_scale_rewards",
    "delta": "rl_dual_clip",
    "entropy_coef": "rl_entropy_coef",
}
"""Fields of GRPOConfig that `--trl` may set although an option sets them, too."""

DEFAULTS = {"rl_entropy_coef": 0.0}
"""Those of these options that are never unset."""

SEQUENCE_SUMS_TOKENS = ("bnpo", "dr_grpo", "dapo", "cispo")
"""Loss types that sum token losses: with one ratio a completion, each completion counts by its length."""


class LossOptions(Protocol):
    """The fields of TrainConfig that determine the loss."""

    @property
    def rl_loss_type(self) -> str: ...
    @property
    def rl_importance_level(self) -> str | None: ...
    @property
    def rl_clip_range(self) -> float | None: ...
    @property
    def rl_clip_range_high(self) -> float | None: ...
    @property
    def rl_scale_rewards(self) -> str | None: ...
    @property
    def rl_dual_clip(self) -> float | None: ...
    @property
    def rl_kl_coef(self) -> float: ...
    @property
    def rl_kl_estimator(self) -> str: ...
    @property
    def rl_kl_in(self) -> str: ...
    @property
    def rl_max_new_tokens(self) -> int: ...
    @property
    def overlong_buffer(self) -> int | None: ...
    @property
    def rl_overlong_penalty(self) -> float: ...
    @property
    def custom_loss(self) -> str | None: ...
    @property
    def use_vllm(self) -> bool: ...
    @property
    def trl(self) -> Mapping[str, object]: ...


@dataclass(frozen=True)
class LossSettings:
    """The settings of the loss that a run trains with."""

    loss_type: str
    level: str
    low: float
    high: float
    scale: str
    trl: Mapping[str, str]

    def as_trl(self) -> dict[str, object]:
        """Fields of GRPOConfig."""
        return {
            "loss_type": self.loss_type,
            "importance_sampling_level": self.level,
            "epsilon": self.low,
            "epsilon_high": self.high,
            "scale_rewards": self.scale,
            **self.trl,
        }

    def __str__(self) -> str:
        scaled = "not scaled" if self.scale == "none" else f"scaled by the {self.scale}'s standard deviation"
        clipped = f" clipped between {1 - self.low:g} and {1 + self.high:g}"
        if self.loss_type == "cispo":
            clipped = f" of at most {self.high:g}"
        elif LOSS_TYPES[self.loss_type].clip is None:
            clipped = ""
        return f"{self.loss_type}, a ratio for each {self.level}{clipped}, scores {scaled}"


def settle(options: LossOptions) -> LossSettings:
    """The settings of the loss: the given ones, and for the rest those of the loss type."""
    given = options.trl
    level = options.rl_importance_level or _text(given.get("importance_sampling_level"))
    kind = LOSS_TYPES[options.rl_loss_type]
    if options.rl_loss_type == "grpo" and level == "sequence":
        kind = GSPO
    low, high = kind.clip or (0.2, 0.2)
    if options.rl_clip_range is not None:
        low, high = options.rl_clip_range, max(high, options.rl_clip_range) if low != high else options.rl_clip_range
    scale = given.get("scale_rewards")
    if isinstance(scale, bool):  # TRL takes it as well
        scale = "group" if scale else "none"
    high_field = given.get("epsilon_high")
    return LossSettings(
        options.rl_loss_type,
        level or kind.level,
        low,
        options.rl_clip_range_high or (high_field if isinstance(high_field, (int, float)) else None) or high,
        options.rl_scale_rewards or _text(scale) or kind.scale,
        {name: value for name, value in kind.trl.items() if options.use_vllm and name not in given},
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def contradictions(options: LossOptions) -> Iterator[tuple[bool, str]]:
    """Rules about the loss: whether each is broken, and the message; each assumes that the earlier ones hold."""
    for name, option in OPTION_OF.items():
        both = name in options.trl and getattr(options, option) != DEFAULTS.get(option)
        yield both, f"{option}: also given as --trl {name}: give one of them"
    yield from _wrong_fields(options)
    yield from _wrong_parts(options)
    loss, level = options.rl_loss_type, settle(options).level
    yield (
        loss == "luspo" and level != "sequence",
        "rl_importance_level: luspo needs one ratio for each completion, not for each token\n"
        "Leave it out, or use --rl-loss-type grpo or dapo with it.",
    )
    yield (
        loss == "vespo" and level != "token",
        "rl_importance_level: vespo computes a completion's ratio from its tokens' ratios\nLeave it out.",
    )
    yield (
        loss == "cispo" and settle(options).high < 1,
        f"rl_clip_range_high: for cispo it is the largest ratio, and {settle(options).high:g} would shrink every"
        f" gradient\nGive 1 or more, or leave it out for {CISPO_BOUND:g}.",
    )
    mode = options.trl.get("vllm_importance_sampling_mode", "token_truncate")
    corrects = options.use_vllm and bool(options.trl.get("vllm_importance_sampling_correction", True))
    yield (
        loss == "vespo" and corrects and mode not in ("token_truncate", "token_mask"),
        f"--trl vllm_importance_sampling_mode: vespo needs a ratio for each token, {mode} has one for each completion\n"
        "Leave it out, or give token_truncate or token_mask.",
    )


_CHOICES: dict[str, tuple[str | bool, ...]] = {
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}


def _wrong_fields(options: LossOptions) -> Iterator[tuple[bool, str]]:
    """Values that TRL refuses only after the first batch is generated."""
    for name, choices in _CHOICES.items():
        words = ", ".join(choice for choice in choices if isinstance(choice, str))
        value = options.trl.get(name, choices[0])
        yield value not in choices, f"--trl {name}: must be one of {words}, not {value!r}"
    high = options.trl.get("epsilon_high")
    is_bound = high is None or (isinstance(high, (int, float)) and not isinstance(high, bool) and high > 0)
    yield not is_bound, f"--trl epsilon_high: must be a number above 0, not {high!r}"


IGNORED_BY_CUSTOM_LOSS = ("off_policy_mask_threshold", "top_entropy_quantile")
"""Fields of GRPOConfig that weight the losses of TRL's own types."""


def _wrong_parts(options: LossOptions) -> Iterator[tuple[bool, str]]:
    """Parts of the algorithm that do not fit the others."""
    high, dual = settle(options).high, options.rl_dual_clip
    yield (
        dual is not None and _clips(options) and dual <= 1 + high,
        f"rl_dual_clip: {dual} is within the clip range, which ends at {1 + high:g}\nGive more; its paper has 3.",
    )
    buffer = options.overlong_buffer
    yield (
        buffer is None and options.rl_overlong_penalty != 1.0,
        "rl_overlong_penalty: nothing is subtracted without --rl-overlong-buffer\nAdd it, or leave this out.",
    )
    yield (
        buffer is not None and buffer > options.rl_max_new_tokens,
        f"rl_overlong_buffer: {buffer} tokens are more than a completion may have, {options.rl_max_new_tokens}"
        " (rl_max_new_tokens)",
    )
    for name in IGNORED_BY_CUSTOM_LOSS:
        yield (
            options.custom_loss is not None and name in options.trl,
            f"custom_loss: --trl {name} weights the losses of TRL's own types only\nLeave one of the two out.",
        )


def _clips(options: LossOptions) -> bool:
    """Whether the loss is the clipped one of PPO, which has a dual clip."""
    return options.custom_loss is None and options.rl_loss_type not in ("cispo", "sapo", "vespo")


def remarks(options: LossOptions) -> Iterator[str]:
    """Notes about combinations that are allowed."""
    settings = settle(options)
    if settings.level == "sequence" and settings.loss_type in SEQUENCE_SUMS_TOKENS:
        yield (
            f"rl_importance_level sequence with {settings.loss_type}: each completion counts by its length; GSPO's own"
            " setting is --rl-loss-type grpo."
        )
    ignored = ["rl_clip_range"] if settings.loss_type == "cispo" else []
    if LOSS_TYPES[settings.loss_type].clip is None or options.custom_loss is not None:
        ignored = ["rl_clip_range", "rl_clip_range_high"]
    by = settings.loss_type if options.custom_loss is None else "custom_loss"
    for option in [*ignored, *([] if _clips(options) else ["rl_dual_clip"])]:
        if getattr(options, option) is not None:
            yield f"{option} has no effect: {by} does not clip the ratio that way."
    if options.rl_kl_coef == 0 and (options.rl_kl_estimator, options.rl_kl_in) != ("k3", "loss"):
        yield "rl_kl_estimator and rl_kl_in have no effect: rl_kl_coef is 0."
    is_k1_loss = options.rl_kl_coef and (options.rl_kl_estimator, options.rl_kl_in) == ("k1", "loss")
    if is_k1_loss and options.trl.get("use_bias_correction_kl") is False:
        yield "rl_kl_estimator k1 without use_bias_correction_kl: the KL term has no gradient on average."


def as_markdown() -> str:
    """The table of docs/algorithms.md."""
    head = "| loss type | ratio for each | clip range, low and high | scores scaled by | tokens averaged | source |"
    rows = {**LOSS_TYPES, "grpo with `--rl-importance-level sequence`": GSPO}
    lines = [head, "|---|---|---|---|---|---|"]
    for name, kind in rows.items():
        clip = "not clipped" if kind.clip is None else f"{kind.clip[0]:g}, {kind.clip[1]:g}"
        if name == "cispo":
            clip = f"ratio at most {CISPO_BOUND:g}"
        extra = "".join(f"; with vLLM `{field}={value}`" for field, value in kind.trl.items())
        title = f"`{name}`" if " " not in name else name.replace("grpo ", "`grpo` ", 1)
        lines.append(f"| {title} | {kind.level} | {clip}{extra} | {kind.scale} | {kind.averaged} | {kind.source} |")
    return "\n".join(lines) + "\n"
