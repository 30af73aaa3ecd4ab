"""Detects conditions that keep a run from learning, and reports each in one line with the option to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig

from aitrain.options.train import TrainConfig

LINES_IN_A_ROW = 5
"""Consecutive lines of metrics for which a condition must hold before it is reported."""

SOLVED_LEVEL = 0.9
"""Mean reward, as a fraction of the score range, above which equal scores and low entropy are expected."""
TOO_HARD_LEVEL = 0.05
"""Mean reward, as a fraction of the score range, below which the cases are reported as too hard."""

Logs = Mapping[str, float]
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Diagnostic:
    """A condition on one metric; `is_bad` and `advice` get the current line of metrics and the first one of the run."""

    metric: str
    is_bad: Callable[[Logs, Logs], bool]
    advice: Callable[[Logs, Logs], str]

    def is_triggered(self, now: Logs, first: Logs) -> bool:
        """Whether the condition holds for a line; never if the metric is missing."""
        return self.metric in now and self.metric in first and self.is_bad(now, first)


def _level(logs: Logs, bounds: Bounds | None) -> float | None:
    """Mean reward as a fraction of the score range, 0 to 1; None for an unbounded range."""
    return None if bounds is None else ((logs.get("reward") or 0.0) - bounds[0]) / (bounds[1] - bounds[0])


def _is_solved(logs: Logs, bounds: Bounds | None) -> bool:
    level = _level(logs, bounds)
    return level is not None and level >= SOLVED_LEVEL


def _same_scores(logs: Logs, first: Logs, bounds: Bounds | None) -> str:
    share, level, before = logs["frac_reward_zero_std"], _level(logs, bounds), _level(first, bounds)
    where = f"mostly near {logs.get('reward') or 0.0:.2f}"
    if bounds is not None and level is not None and level < TOO_HARD_LEVEL:
        if before is not None and before > 2 * TOO_HARD_LEVEL:
            return (
                f"In {share:.0%} of the groups all completions score the same, at {bounds[0]:g}; the mean was"
                f" {first['reward']:.2f} in the first step, so the policy has become worse. Lower --lr, or raise"
                " --rl-kl-coef."
            )
        where = f"at {bounds[0]:g}: the cases are too hard"
    if logs.get("unscored", 0.0) > 0:
        where += ", or fewer than two have a score"
    return (
        f"In {share:.0%} of the groups all completions score the same, {where}. Such groups give no gradient: raise"
        " --rl-num-generations or --rl-temperature, give partial credit, or use easier cases;"
        " --stop-when-flat ends such a run."
    )


def _cut_off(logs: Logs, _: Logs) -> str:
    return (
        f"{logs['completions/clipped_ratio']:.0%} of the episodes end with an answer that is cut off: raise"
        " --rl-max-new-tokens, or ask for shorter answers."
    )


def _unscored(logs: Logs, _: Logs) -> str:
    return (
        f"{logs['unscored']:.0%} of the episodes have no score and give no gradient: failed/* in metrics.jsonl counts"
        " the reasons, rollouts/ has the tracebacks; see --rl-env-timeout, --rl-env-retries, --rl-env-isolation."
    )


def _low_entropy(logs: Logs, _: Logs) -> str:
    return (
        f"The policy's entropy has collapsed to {logs['entropy']:.3f}: its completions are nearly identical, with"
        f" reward {logs.get('reward') or 0.0:.2f}. Lower --lr, or raise --rl-temperature or --rl-kl-coef."
    )


_RATIO = "sampling/importance_sampling_ratio/mean"
_GAP = "sampling/sampling_logp_difference/mean"
_SHIFT = "sampling/logprob_shift/mean"

ROUNDING = 0.1
"""Largest mean difference of log-probabilities that rounding explains; bfloat16 causes up to about 0.05."""


@dataclass(frozen=True)
class RatioAdvice:
    """Explains why the importance ratio between vLLM and the trainer is far from 1."""

    by_sequence: bool = True
    """Whether the ratio is a product over the tokens of an episode."""
    flags: str = ""
    """Options that change the sampling distribution, comma-separated; may be empty."""

    @classmethod
    def of(cls, config: TrainConfig, arguments: GRPOConfig) -> RatioAdvice:
        """The advice for the settings of a run."""
        by_sequence = str(arguments.vllm_importance_sampling_mode).startswith("sequence")
        return cls(by_sequence, ", ".join(config.reshaped_sampling))

    def advice(self, logs: Logs, _: Logs) -> str:
        """One line: the cause, and what to change."""
        gap, length = logs.get(_GAP, 0.0), logs.get("completions/mean_length", 0.0)
        intro = f"The mean importance ratio between vLLM and the trainer is {logs[_RATIO]:.2f}: the gradient shrinks"
        if self._gap_is_the_shift(gap, logs):
            return (
                f"{intro}, because vLLM gives log-probabilities before {self.flags}, and the trainer compares those"
                " after it: start the server with --logprobs-mode processed_logprobs."
            )
        if gap <= ROUNDING and self.by_sequence:
            return (
                f"{intro}, because it is a product over {length:.0f} tokens of an episode, each of which differs by"
                f" {gap:.3f} only: use --trl vllm_importance_sampling_mode=token_truncate."
            )
        return (
            f"{intro}, because log-probabilities of the same token differ by {gap:.2f} on average, more than rounding"
            " does: vLLM has other weights or another number format (--dtype, --mixed-precision), or the server ignores"
            " the adapter."
        )

    def _gap_is_the_shift(self, gap: float, logs: Logs) -> bool:
        """Whether the difference is about as large as the correction that was added for truncated sampling."""
        shift = abs(logs.get(_SHIFT, 0.0))
        return shift > 0.001 and abs(gap - shift) < 0.3 * shift


def common_diagnostics(bounds: Bounds | None = (0.0, 1.0)) -> tuple[Diagnostic, ...]:
    """The conditions checked in every run; `bounds` are the lowest and highest score, None for an unbounded range."""
    return (
        Diagnostic(
            "frac_reward_zero_std",
            lambda now, _: now["frac_reward_zero_std"] >= 0.8 and not _is_solved(now, bounds),
            lambda now, first: _same_scores(now, first, bounds),
        ),
        Diagnostic("completions/clipped_ratio", lambda now, _: now["completions/clipped_ratio"] > 0.5, _cut_off),
        Diagnostic("unscored", lambda now, _: now["unscored"] > 0.25, _unscored),
        Diagnostic(
            "entropy",
            lambda now, first: now["entropy"] < min(0.1, 0.1 * first["entropy"]) and not _is_solved(now, bounds),
            _low_entropy,
        ),
    )


@dataclass
class DiagnosticsState:
    """Counts for how many lines each condition has held, and reports each once in a run."""

    diagnostics: tuple[Diagnostic, ...] = field(default_factory=common_diagnostics)
    first: Logs = field(default_factory=dict)
    streaks: dict[str, int] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    def update(self, logs: Logs) -> list[str]:
        """Add a line of metrics; returns the advice of conditions that are newly reported."""
        self.first = {**logs, **self.first}
        advice = []
        for diagnostic in self.diagnostics:
            is_triggered = diagnostic.is_triggered(logs, self.first)
            streak = self.streaks.get(diagnostic.metric, 0) + 1 if is_triggered else 0
            self.streaks[diagnostic.metric] = streak
            if streak >= LINES_IN_A_ROW and diagnostic.metric not in self.reported:
                self.reported.add(diagnostic.metric)
                advice.append(diagnostic.advice(logs, self.first))
        return advice


class DiagnosticsCallback(TrainerCallback):  # type: ignore[misc]
    """Checks each line of metrics on the first process."""

    def __init__(
        self, notify: Callable[[str], None], off_policy: RatioAdvice, bounds: Bounds | None = (0.0, 1.0)
    ) -> None:
        self.notify = notify
        self.state = DiagnosticsState(
            (*common_diagnostics(bounds), Diagnostic(_RATIO, lambda now, _: now[_RATIO] < 0.5, off_policy.advice))
        )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Logs, **_: object
    ) -> None:
        """Check a line of metrics; the summary at the end of training has no reward."""
        if state.is_world_process_zero and "reward" in logs:
            for advice in self.state.update(logs):
                self.notify(advice)
