"""Conditions on the level of one metric that keep a run from learning, each with the options to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from aitrain.runs.intervals import UNIT, Bounds

LINES_IN_A_ROW = 5
"""Consecutive lines of metrics for which a condition must hold before it is reported."""
NEWEST, FIRST_LINES = 20, 10
"""Newest lines of which MOST_OF_THEM must meet the condition as well, and while a run has fewer than FIRST_LINES, all
of them: with few groups in a step, a few bad steps in a row come by chance."""
MOST_OF_THEM = 0.75


def lasts(held: Sequence[bool]) -> bool:
    """Whether a condition lasts, given whether it held in each of the newest lines."""
    share = 1.0 if len(held) < FIRST_LINES else MOST_OF_THEM
    return len(held) >= LINES_IN_A_ROW and all(held[-LINES_IN_A_ROW:]) and sum(held) >= share * len(held)


SOLVED_LEVEL = 0.9
"""Mean reward, as a fraction of the score range, above which equal scores and low entropy are expected."""
TOO_HARD_LEVEL = 0.05
"""Mean reward, as a fraction of the score range, below which the cases are reported as too hard."""
ROUNDING = 0.1
"""Largest mean difference of log-probabilities that rounding explains; bfloat16 causes up to about 0.05."""

Values: TypeAlias = Mapping[str, float]
"""The metrics of a line that have a value."""


@dataclass(frozen=True)
class RunTraits:
    """What diagnostics must know of the options of a run."""

    bounds: Bounds | None = UNIT
    """Lowest and highest score; None for an unbounded range."""
    samples_uniformly: bool = True
    """Whether rewards of different steps are of alike cases; --rl-sampling refill and difficulty choose them by their
    scores."""
    has_several_environments: bool = False
    loss_type: str = "grpo"
    ratio_by_sequence: bool = True
    """Whether the importance ratio is a product over the tokens of an episode."""
    samples_ahead: bool = False
    """Whether the weights that sample are older than those that are trained (--rl-ahead)."""
    reshaped_sampling: str = ""
    """Options that change the sampling distribution, comma-separated; may be empty."""

    def level(self, values: Values) -> float | None:
        """Mean score of all that was played, discarded groups included, as a fraction of the score range, 0 to 1; None
        for an unbounded range."""
        if self.bounds is None:
            return None
        return (values.get("cases/mean_score", values.get("reward", 0.0)) - self.bounds[0]) / (
            self.bounds[1] - self.bounds[0]
        )

    def is_solved(self, values: Values) -> bool:
        """Whether the mean reward is near the highest score."""
        level = self.level(values)
        return level is not None and level >= SOLVED_LEVEL


@dataclass(frozen=True)
class LevelRule:
    """A condition on one metric; `is_bad` and `advice` get the current values and the first ones of the run."""

    name: str
    metric: str
    is_bad: Callable[[Values, Values], bool]
    advice: Callable[[Values, Values], str]

    def is_triggered(self, now: Values, first: Values) -> bool:
        """Whether the condition holds for a line; never if the metric is missing."""
        return self.metric in now and self.metric in first and self.is_bad(now, first)


def _same_scores(traits: RunTraits, now: Values, first: Values) -> str:
    share, bounds, level, before = now["frac_reward_zero_std"], traits.bounds, traits.level(now), traits.level(first)
    where = f"mostly near {now.get('reward', 0.0):.2f}"
    if bounds is not None and level is not None and level < TOO_HARD_LEVEL:
        if before is not None and before > 2 * TOO_HARD_LEVEL:
            return (
                f"In {share:.0%} of the groups all completions score the same, at {bounds[0]:g}; the mean was"
                f" {first['reward']:.2f} in the first step, so the policy has become worse. Lower --lr, or raise"
                " --rl-kl-coef."
            )
        where = f"at {bounds[0]:g}: the cases are too hard"
    if now.get("unscored", 0.0) > 0:
        where += ", or fewer than two have a score"
    refill = " --rl-sampling refill replaces such groups;" if traits.samples_uniformly else ""
    return (
        f"In {share:.0%} of the groups all completions score the same, {where}. Such groups give no gradient: raise"
        f" --rl-num-generations or --rl-temperature, give partial credit, or use easier cases;{refill}"
        " --stop-when-flat ends such a run."
    )


def _cut_off(now: Values, _: Values) -> str:
    return (
        f"{now['completions/clipped_ratio']:.0%} of the episodes end with an answer that is cut off: raise"
        " --rl-max-new-tokens, or ask for shorter answers."
    )


def _unscored(now: Values, _: Values) -> str:
    return (
        f"{now['unscored']:.0%} of the episodes have no score and give no gradient: failed/* in metrics.jsonl counts"
        " the reasons, rollouts/ has the tracebacks; see --rl-env-timeout, --rl-env-retries, --rl-env-isolation."
    )


def _unused_tools(now: Values, _: Values) -> str:
    return (
        f"{now['tools/unused']:.0%} of the episodes that have tools call none: read some in rollouts/. Say in the"
        " prompt when to call them, or use a model that was trained with tools (--model)."
    )


def _low_entropy(now: Values, _: Values) -> str:
    return (
        f"The policy's entropy has collapsed to {now['entropy']:.3f}: its completions are nearly identical, with"
        f" reward {now.get('reward', 0.0):.2f}. Lower --lr, or raise --rl-temperature,"
        " --rl-kl-coef or --rl-entropy-coef."
    )


_RATIO = "sampling/importance_sampling_ratio/mean"
_GAP = "sampling/sampling_logp_difference/mean"
_SHIFT = "sampling/logprob_shift/mean"


def _ratio_advice(traits: RunTraits, now: Values, _: Values) -> str:
    """Why the importance ratio between vLLM and the trainer is far from 1."""
    gap, length, shift = now.get(_GAP, 0.0), now.get("completions/mean_length", 0.0), abs(now.get(_SHIFT, 0.0))
    intro = f"The mean importance ratio between vLLM and the trainer is {now[_RATIO]:.2f}: the gradient shrinks"
    if shift > 0.001 and abs(gap - shift) < 0.3 * shift:  # about the correction that is added for truncated sampling
        return (
            f"{intro}, because vLLM gives log-probabilities before {traits.reshaped_sampling}, and the trainer compares"
            " those after it: start the server with --logprobs-mode processed_logprobs."
        )
    if gap <= ROUNDING and traits.ratio_by_sequence:
        return (
            f"{intro}, because it is a product over {length:.0f} tokens of an episode, each of which differs by"
            f" {gap:.3f} only: use --trl vllm_importance_sampling_mode=token_truncate."
        )
    if traits.samples_ahead:
        return (
            f"{intro}, because log-probabilities of the same token differ by {gap:.2f} on average: the weights that"
            " sampled it are a rollout old, and have changed much since. Lower --lr or --rl-updates-per-rollout, or"
            " leave out --rl-ahead."
        )
    return (
        f"{intro}, because log-probabilities of the same token differ by {gap:.2f} on average, more than rounding"
        " does: vLLM has other weights or another number format (--dtype, --mixed-precision), or the server ignores"
        " the adapter."
    )


def level_rules(traits: RunTraits) -> tuple[LevelRule, ...]:
    """The conditions that are checked in every run."""
    return (
        LevelRule(
            "zero_variance",
            "frac_reward_zero_std",
            lambda now, _: now["frac_reward_zero_std"] >= 0.8 and not traits.is_solved(now),
            partial(_same_scores, traits),
        ),
        LevelRule(
            "cut_off", "completions/clipped_ratio", lambda now, _: now["completions/clipped_ratio"] > 0.5, _cut_off
        ),
        LevelRule("unscored", "unscored", lambda now, _: now["unscored"] > 0.25, _unscored),
        LevelRule(
            "unused_tools",
            "tools/unused",
            lambda now, _: now["tools/unused"] > 0.98 and not traits.is_solved(now),
            _unused_tools,
        ),
        LevelRule(
            "entropy",
            "entropy",
            lambda now, first: now["entropy"] < min(0.1, 0.1 * first["entropy"]) and not traits.is_solved(now),
            _low_entropy,
        ),
        LevelRule("importance_ratio", _RATIO, lambda now, _: now[_RATIO] < 0.5, partial(_ratio_advice, traits)),
    )
