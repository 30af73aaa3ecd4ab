"""Learning alarms: what keeps a run from learning when it lasts, told in one line that says which option to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aitrain.options.train import TrainConfig

LASTS = 5
"""Lines of metrics in a row that must look bad: single batches do."""

SOLVED = 0.9
"""Part of the score range from which, for the mean reward, groups that agree and a policy that is sure are no reason to
worry."""
TOO_HARD = 0.05
"""Part of the score range below which hardly any completion has scored."""

Logs = Mapping[str, float]
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Alarm:
    """A metric that is bad when `is_bad` says so, given all metrics of a line and those of the run's first one."""

    metric: str
    is_bad: Callable[[Logs, Logs], bool]
    advice: Callable[[Logs], str]

    def rings(self, now: Logs, first: Logs) -> bool:
        """Whether this line looks bad; a metric that is not there does not."""
        return self.metric in now and self.metric in first and self.is_bad(now, first)


def _level(logs: Logs, bounds: Bounds | None) -> float | None:
    """The mean reward as a part of the score range, 0 to 1; None where the range has no ends."""
    return None if bounds is None else ((logs.get("reward") or 0.0) - bounds[0]) / (bounds[1] - bounds[0])


def _is_solved(logs: Logs, bounds: Bounds | None) -> bool:
    level = _level(logs, bounds)
    return level is not None and level >= SOLVED


def _same_scores(logs: Logs, bounds: Bounds | None) -> str:
    share, level = logs["frac_reward_zero_std"], _level(logs, bounds)
    where = f"mostly near {logs.get('reward') or 0.0:.2f}"
    if bounds is not None and level is not None and level < TOO_HARD:
        where = f"at {bounds[0]:g}: the cases are too hard"
    if logs.get("unscored", 0.0) > 0:
        where += ", or fewer than two have a score"
    return (
        f"In {share:.0%} of the groups all completions score the same, {where}. Such groups teach nothing: raise"
        " --rl-num-generations or --rl-temperature, give partial credit, or take easier cases;"
        " --stop-when-flat ends such a run."
    )


def _cut_off(logs: Logs) -> str:
    return (
        f"{logs['completions/clipped_ratio']:.0%} of the episodes end with an answer that is cut off: raise"
        " --rl-max-new-tokens, or ask for shorter answers."
    )


def _unscored(logs: Logs) -> str:
    return (
        f"{logs['unscored']:.0%} of the episodes have no score and teach nothing: failed/* in metrics.jsonl says why,"
        " rollouts/ shows them; see --rl-env-timeout, --rl-env-retries, --rl-env-isolation."
    )


def _sure(logs: Logs) -> str:
    return (
        f"The policy's entropy has collapsed to {logs['entropy']:.3f}: it says nearly the same every time, with reward"
        f" {logs.get('reward') or 0.0:.2f}. Lower --lr, or raise --rl-temperature or --rl-kl-coef."
    )


_RATIO = "sampling/importance_sampling_ratio/mean"
_GAP = "sampling/sampling_logp_difference/mean"
_SHIFT = "sampling/logprob_shift/mean"

ROUNDING = 0.1
"""Most that log-probabilities of a token differ on average between engines with the same weights: bfloat16 makes up to
about 0.05."""


@dataclass(frozen=True)
class OffPolicy:
    """Why the importance ratio between vLLM and the trainer is far from 1, from what the run and its metrics say."""

    by_sequence: bool = True
    """Whether the ratio is the product over an episode's tokens."""
    flags: str = ""
    """The options that make the sampling distribution another one than the model's; empty: none."""

    @classmethod
    def of(cls, config: TrainConfig, arguments: Any) -> OffPolicy:
        """As the run has them."""
        by_sequence = str(arguments.vllm_importance_sampling_mode).startswith("sequence")
        return cls(by_sequence, ", ".join(config.reshaped_sampling))

    def advice(self, logs: Logs) -> str:
        """In one line, with what to do about it."""
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
        """Whether what was added to vLLM's log-probabilities for the truncation is about what they now differ by."""
        shift = abs(logs.get(_SHIFT, 0.0))
        return shift > 0.001 and abs(gap - shift) < 0.3 * shift


def common_alarms(bounds: Bounds | None = (0.0, 1.0)) -> tuple[Alarm, ...]:
    """The alarms of every run, given its lowest and highest score; None: it has none (`--rl-score-range any`)."""
    return (
        Alarm(
            "frac_reward_zero_std",
            lambda now, _: now["frac_reward_zero_std"] >= 0.8 and not _is_solved(now, bounds),
            lambda logs: _same_scores(logs, bounds),
        ),
        Alarm("completions/clipped_ratio", lambda now, _: now["completions/clipped_ratio"] > 0.5, _cut_off),
        Alarm("unscored", lambda now, _: now["unscored"] > 0.25, _unscored),
        Alarm(
            "entropy",
            lambda now, first: now["entropy"] < min(0.1, 0.1 * first["entropy"]) and not _is_solved(now, bounds),
            _sure,
        ),
    )


@dataclass
class Watch:
    """Which alarms have looked bad for how long; each is told once in a run."""

    alarms: tuple[Alarm, ...] = field(default_factory=common_alarms)
    first: Logs = field(default_factory=dict)
    lasting: dict[str, int] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    def look(self, logs: Logs) -> list[str]:
        """What a new line of metrics gives reason to say."""
        self.first = {**logs, **self.first}
        advice = []
        for alarm in self.alarms:
            rings = alarm.rings(logs, self.first)
            self.lasting[alarm.metric] = self.lasting.get(alarm.metric, 0) + 1 if rings else 0
            if self.lasting[alarm.metric] >= LASTS and alarm.metric not in self.told:
                self.told.add(alarm.metric)
                advice.append(alarm.advice(logs))
        return advice


class Alarms(TrainerCallback):  # type: ignore[misc]
    """Watches the metrics, on the first process."""

    def __init__(self, tell: Callable[[str], None], off_policy: OffPolicy, bounds: Bounds | None = (0.0, 1.0)) -> None:
        self.tell = tell
        self.watch = Watch((*common_alarms(bounds), Alarm(_RATIO, lambda now, _: now[_RATIO] < 0.5, off_policy.advice)))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Logs, **_: object
    ) -> None:
        """Each line of metrics, but for the summary at the end."""
        if state.is_world_process_zero and "reward" in logs:
            for advice in self.watch.look(logs):
                self.tell(advice)
