"""Presets: the settings of a paper's algorithm, as defaults of the options that they consist of.

They concern the loss, the rewards and the choice of cases. Learning rate, lengths, batch and group size depend on the
model and the task, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from aitrain.options.loss_types import OPTION_OF


class PresetOptions(Protocol):
    """The fields of TrainConfig that `described` reads by name; the others are those of the preset."""

    @property
    def rl_preset(self) -> str | None: ...
    @property
    def rl_max_new_tokens(self) -> int: ...
    @property
    def overlong_buffer(self) -> int | None: ...
    @property
    def trl(self) -> Mapping[str, object]: ...


@dataclass(frozen=True)
class Preset:
    """The settings of one paper."""

    source: str
    settings: Mapping[str, object]
    """Value by option."""
    overlong: bool = False
    """Whether the last fifth of a completion's tokens is the overlong buffer: 4,096 of 20,480 in DAPO."""


_CLIP = {"rl_clip_range": 0.2, "rl_clip_range_high": 0.2}
_NO_KL = {"rl_kl_coef": 0.0}

PRESETS = {
    "grpo": Preset(
        "DeepSeekMath, arXiv 2402.03300, section 4.2; its clip range is not stated: that of PPO",
        {
            "rl_loss_type": "grpo", "rl_importance_level": "token", **_CLIP, "rl_scale_rewards": "group",
            "rl_kl_coef": 0.04, "rl_kl_estimator": "k3", "rl_kl_in": "loss", "rl_updates_per_rollout": 1,
        },
    ),
    "dapo": Preset(
        "DAPO, arXiv 2503.14476, section 4.1",
        {
            "rl_loss_type": "dapo", "rl_importance_level": "token", "rl_clip_range": 0.2, "rl_clip_range_high": 0.28,
            "rl_scale_rewards": "group", **_NO_KL, "rl_sampling": "refill", "rl_updates_per_rollout": 16,
        },
        overlong=True,
    ),
    "dr-grpo": Preset(
        "Dr. GRPO, arXiv 2503.20783, section 3.2 and table 6; updates of the authors' training scripts",
        {
            "rl_loss_type": "dr_grpo", "rl_importance_level": "token", **_CLIP, "rl_scale_rewards": "none", **_NO_KL,
            "rl_updates_per_rollout": 8,  # 128 of 1,024 completions each
        },
    ),
    "gspo": Preset(
        "GSPO, arXiv 2507.18071, section 5.1, whose formulas omit the KL term",
        {
            "rl_loss_type": "grpo", "rl_importance_level": "sequence", "rl_clip_range": 3e-4,
            "rl_clip_range_high": 4e-4, "rl_scale_rewards": "group", **_NO_KL, "rl_updates_per_rollout": 4,
        },
    ),
    "cispo": Preset(
        "CISPO, arXiv 2506.13585 (MiniMax-M1), section 3.1; largest ratio of arXiv 2510.13786 (ScaleRL)",
        {
            "rl_loss_type": "cispo", "rl_importance_level": "token", "rl_clip_range_high": 5.0,
            "rl_scale_rewards": "group", **_NO_KL, "rl_sampling": "refill", "rl_updates_per_rollout": 16,
        },
        overlong=True,
    ),
}  # fmt: skip

FIELD_OF = {option: field for field, option in OPTION_OF.items()}


def overlong_buffer(name: str | None, max_new_tokens: int) -> int | None:
    """The overlong buffer of a preset for completions of up to this length; None if it has none. It is no default of
    the option, as an environment may declare the length later."""
    return max(1, max_new_tokens // 5) if name in PRESETS and PRESETS[name].overlong else None


def with_preset(values: Mapping[str, object], known: Container[str]) -> dict[str, object]:
    """The given values, and below them those of the preset that they name, as far as these are among the known options
    and `--trl` does not hold the field of the same meaning."""
    name, trl = values.get("rl_preset"), values.get("trl")
    if not isinstance(name, str) or name not in PRESETS:
        return dict(values)
    fields, settings = trl if isinstance(trl, dict) else {}, PRESETS[name].settings.items()
    return {**{key: value for key, value in settings if key in known and FIELD_OF.get(key) not in fields}, **values}


def described(config: PresetOptions) -> Iterator[str]:
    """The settings of the preset of a run, each with the value that the run has instead if one was given."""
    name = config.rl_preset
    if name is None:
        return
    yield f"{name}, the settings of {PRESETS[name].source}; given options win:"
    found = [(key, _own(config, key), value) for key, value in PRESETS[name].settings.items()]
    if (buffer := overlong_buffer(name, config.rl_max_new_tokens)) is not None:
        found.append(("rl_overlong_buffer", config.overlong_buffer, buffer))
    for key, own, value in found:
        yield f"{key} {_short(value)}" if own == value else f"{key} {own} (given; {name} has {_short(value)})"


def _own(config: PresetOptions, key: str) -> object:
    field = FIELD_OF.get(key)
    return config.trl[field] if field is not None and field in config.trl else getattr(config, key)


def as_markdown() -> str:
    """The rows of the table of docs/algorithms.md."""
    rows = []
    for name, preset in PRESETS.items():
        settings = [f"`{option}` {_short(value)}" for option, value in preset.settings.items()]
        settings += ["`rl_overlong_buffer` a fifth of the limit"] if preset.overlong else []
        rows.append(f"| `{name}` | {preset.source} | {', '.join(settings)} |")
    return "\n".join(rows) + "\n"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
