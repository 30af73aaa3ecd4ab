"""Conditions on how a run has changed that are signs of reward hacking or collapse, each with what to do about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import TypeAlias

from aitrain.runs.intervals import Z
from aitrain.runs.level_rules import LINES_IN_A_ROW, RunTraits, Values
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.trends import SHORTEST, Change, change_over

LONGER, SURELY_LONGER, LONGER_TOKENS = 1.5, 1.25, 4.0
"""Growth of completions that is reported: the estimate, its lower limit, and the tokens that it is at least."""
STAYS = 0.08
"""Upper limit of a rise that counts as none, as a fraction of the score range."""
RISES = 0.1
"""Change of the score, or of a component's part in it, that counts, as a fraction of the score range."""
DEPENDS, DEPENDS_NO_MORE = 0.3, 0.15
"""Prompt dependence that a policy has had, and the upper limit of what one that has lost it has."""
MANY_SCORINGS = 6
"""From this number of scorings on, their noise is measured by how they differ from one to the next."""
TOP = 1e-6
"""Distance from the highest score, as a fraction of the range, that rounding explains."""
JUMP = 0.2
"""Distance from the highest score, as a fraction of the range, that all lines before a jump must have."""
BEFORE_A_JUMP = 10
"""Lines before a jump to the highest score that must be alike."""


@dataclass(frozen=True)
class Past:
    """A stretch of a run up to now: its metrics, line by line, and all scorings of the held-out cases."""

    traits: RunTraits
    steps: Sequence[int]
    rows: Sequence[Values]
    scorings: Sequence[MetricsLine] = field(default_factory=list)

    def values(self, name: str) -> list[float]:
        """The values of a metric, without lines that lack it."""
        return [row[name] for row in self.rows if name in row]

    def names(self, start: str) -> list[str]:
        """Names of the metrics that begin so."""
        return sorted({name for row in self.rows for name in row if name.startswith(start)})

    def change(self, name: str) -> Change | None:
        """How a metric has changed."""
        return change_over(self.values(name))

    @property
    def scale(self) -> float:
        """Size of the score range; of an unbounded one, four standard deviations within a group. 0 if unknown."""
        if self.traits.bounds is not None:
            return self.traits.bounds[1] - self.traits.bounds[0]
        deviations = self.values("reward_std")
        return 4 * fmean(deviations) if deviations else 0.0


def longer_without_gain(past: Past) -> str | None:
    """Completions have become longer and the score no better."""
    lengths = past.values("completions/mean_length")
    if len(lengths) < SHORTEST or min(lengths) <= 0:
        return None
    growth = change_over([math.log(length) for length in lengths])
    if growth is None or growth.mean < math.log(LONGER) or growth.low < math.log(SURELY_LONGER):
        return None
    before, after = math.exp(growth.before), math.exp(growth.after)
    scores = _scores_that_stay(past)
    if after - before < LONGER_TOKENS or scores is None:
        return None
    averages_by_length = past.traits.loss_type in ("grpo", "gspo", "sapo")
    loss = "--rl-loss-type dr_grpo or dapo has no bias towards long wrong completions; " if averages_by_length else ""
    return (
        f"Completions have grown from {before:.0f} to {after:.0f} tokens since step {past.steps[0]}, and {scores}:"
        f" {loss}--rl-overlong-buffer makes long completions cost reward; and read some of them, whether they repeat"
        " themselves."
    )


def _scores_that_stay(past: Past) -> str | None:
    """How the score has changed, in words, if it surely has not risen. Where cases are chosen by their scores, the
    reward says nothing of the policy, and held-out scores are taken."""
    if past.traits.samples_uniformly:
        change = past.change("reward")
        if change is None or past.scale == 0.0 or change.high > STAYS * past.scale:
            return None
        return f"the reward has not risen ({change.before:.2f}, then {change.after:.2f})"
    scores = [one.eval_score for one in past.scorings if one.step >= past.steps[0] and one.eval_score is not None]
    half = len(scores) // 2
    if half < 3 or fmean(scores[-half:]) - fmean(scores[:half]) > STAYS / 2 * past.scale:
        return None
    return f"the held-out score has not risen ({fmean(scores[:half]):.2f}, then {fmean(scores[-half:]):.2f})"


def one_component(past: Past) -> str | None:
    """One component of the score accounts for its rise, at the cost of another one, or without one that never came."""
    each = [name for name in past.names("env/") if name.endswith("/score")]
    texts = (_dominant(past, name) for name in (each if past.traits.has_several_environments else ["reward"]))
    return next((text for text in texts if text is not None), None)


def _dominant(past: Past, score: str) -> str | None:
    """The same for the mean score, or that of one of several environments."""
    reward, scale = past.change(score), past.scale
    if reward is None or scale == 0.0 or reward.mean < RISES * scale or reward.low < RISES / 2 * scale:
        return None
    parts = _components(past, score.removeprefix("env/").removesuffix("score") if score != "reward" else "")
    if len(parts) < 2:
        return None
    name, (weight, largest) = max(parts.items(), key=lambda part: part[1][0] * part[1][1].mean)
    gain = weight * largest.mean
    for other, (other_weight, change) in parts.items():
        if other == name or other_weight <= 0:
            continue
        loss = -other_weight * change.mean
        falls = loss >= RISES * scale and change.high < 0 and change.after < 0.75 * change.before
        if falls or (gain >= 0.9 * reward.mean and other_weight >= weight / 2 and _never_came(past, score, change)):
            fate = f"has fallen from {change.before:.2f}" if falls else f"stays at {change.before:.2f}, now"
            return (
                f"The component {name} dominates the score: since step {past.steps[0]} the reward has risen from"
                f" {reward.before:.2f} to {reward.after:.2f}, {gain:+.2f} of it by {name}, while {other} {fate}"
                f" {'to ' if falls else ''}{change.after:.2f}. Give {name} less weight, or let it count only where"
                f" {other} is right."
            )
    return None


def _components(past: Past, prefix: str) -> dict[str, tuple[float, Change]]:
    """Weight in the score and change of each of the environment's metrics that is a component of it."""
    parts = {}
    for found in past.names(f"score_weight/{prefix}"):
        name = found.removeprefix("score_weight/")
        weights, change = past.values(f"score_weight/{name}"), past.change(f"env/{name}")
        if len(weights) >= LINES_IN_A_ROW and change is not None and abs(median(weights)) > 0.01 * past.scale:
            parts[name] = median(weights), change
    return parts


def _never_came(past: Past, score: str, change: Change) -> bool:
    """Whether a component from 0 to 1 stays near 0 although the score rises no more."""
    scores = past.values(score)
    half = change_over(scores[len(scores) // 2 :])
    is_over = half is not None and half.high <= STAYS * past.scale and past.traits.samples_uniformly
    return is_over and max(change.before, change.after) <= 0.2 and change.high <= STAYS


def prompt_is_ignored(past: Past) -> str | None:
    """Completions depended on their prompt, and no longer do; of several environments, those of any."""
    texts = (_ignored(past, name) for name in past.names("prompt_dependence"))
    return next((text for text in texts if text is not None), None)


def _ignored(past: Past, name: str) -> str | None:
    change = past.change(name)
    if change is None or change.before < max(DEPENDS, 4 * change.error):
        return None
    if change.after + 2 * change.error > DEPENDS_NO_MORE or change.after > change.before / 4:
        return None
    env = name.removeprefix("prompt_dependence").removeprefix("/")
    reward = past.change(f"env/{env}/score" if env else "reward")
    where = f" in {env}" if env else ""
    text = (
        f"Completions{where} no longer depend on the prompt: of pairs of prompts, {change.before:.0%} could be told"
        f" apart by their completions around step {past.steps[0]}, now {max(0.0, change.after):.0%}."
    )
    if reward is not None and reward.mean > 2 * reward.error:
        return (
            f"{text} The reward has risen meanwhile, so one answer to all prompts scores well: run aitrain env check,"
            " and score what the prompt asks for."
        )
    return f"{text} Lower --lr, raise --rl-kl-coef, or sample cases whose scores differ (--rl-sampling refill)."


def held_out_falls(past: Past) -> str | None:
    """The held-out score has fallen from an earlier one."""
    fall = _fall(past.scorings, past.scale)
    if fall is None:
        return None
    step, before, after = fall
    rewards = [(at, row["reward"]) for at, row in zip(past.steps, past.rows, strict=True) if "reward" in row]
    since = [reward for at, reward in rewards if at > step]
    quarter = max(1, len(since) // 4)
    until = [reward for at, reward in rewards if at <= step][-quarter:]
    then, now = (
        fmean(until or since[:quarter] or [0.0]),
        fmean(since[-min(quarter, LINES_IN_A_ROW) :] or until or [0.0]),
    )
    change, rises = change_over([*until, *since]), RISES * past.scale
    much = max((before - after) / 2, rises)
    text = f"The held-out score has fallen from {before:.2f} around step {step} to {after:.2f}"
    means = f" ({then:.2f}, then {now:.2f})" if since else ""
    if now - then <= -much or (change is not None and change.high < 0):
        return (
            f"{text}, and so has the reward{means}: the policy has become worse, or has collapsed. The usual cause is a"
            " learning rate that is too high: lower --lr, or raise --rl-kl-coef; --save-best keeps the best step as the"
            " model."
        )
    has_stayed = now - then >= rises or (change is not None and change.low > -much)
    is_seen = past.traits.samples_uniformly and bool(since) and since[-1] > then - much  # a collapse may be a line old
    if has_stayed and is_seen:
        return (
            f"{text}, while the reward has not{means}: the policy learns what only the training cases reward."
            " --save-best or --patience keeps the best step; use more cases or fewer --epochs, raise --rl-kl-coef, and"
            " read the best-rewarded rollouts for a hack."
        )
    return (
        f"{text}; whether the reward has fallen with it cannot be told{means}. If it has, the policy has become worse:"
        " lower --lr. If not, the policy learns what only the training cases reward: read the best-rewarded rollouts,"
        " and use more cases. --save-best keeps the best step as the model."
    )


def _fall(scorings: Sequence[MetricsLine], scale: float) -> tuple[int, float, float] | None:
    """Step and score before a fall that noise does not explain, and the score now."""
    scores = [one.eval_score for one in scorings if one.eval_score is not None]
    if len(scores) != len(scorings) or len(scores) < 2:
        return None
    errors = [(s - one.eval_low) / Z for s, one in zip(scores, scorings, strict=True) if one.eval_low is not None]
    if len(scores) >= MANY_SCORINGS:
        size = len(scores) // 3
        means = [fmean(scores[start : start + size]) for start in range(len(scores) - size + 1)]
        best = max(range(len(means) - size), key=lambda start: means[start])
        # of a difference of two scorings; half of what the intervals say at least, as few differences are equal by luck
        noise = max(
            math.sqrt(fmean((one - other) ** 2 for one, other in pairwise(scores))),
            math.sqrt(2) * median(errors or [0.0]) / 2,
        )
        limit = 4 * noise / math.sqrt(size)
        found = scorings[best + size // 2].step, means[best], means[-1]
    else:
        best = max(range(len(scores) - 1), key=lambda place: scores[place])
        if len(errors) < len(scores):
            return None
        limit = 4 * math.hypot(errors[best], errors[-1])
        found = scorings[best].step, scores[best], scores[-1]
    return found if found[1] - found[2] > max(limit, RISES * scale) else None


def all_at_the_top(past: Past) -> str | None:
    """All scores are the highest one: from the first step, or from one step to the next."""
    if past.traits.bounds is None or len(past.rows) < LINES_IN_A_ROW:
        return None
    top = past.traits.bounds[1]
    rewards = [row.get("reward", -math.inf) for row in past.rows[-BEFORE_A_JUMP - LINES_IN_A_ROW - 1 :]]
    if any(reward < top - TOP * past.scale for reward in rewards[-LINES_IN_A_ROW:]):
        return None
    advice = "Run aitrain env check, which looks for answers that should not score, and read some rollouts"
    if len(past.rows) == LINES_IN_A_ROW:
        return (
            f"All scores have been {top:g} since the first step: there is nothing to learn, or the scorer accepts any"
            f" answer. {advice}; use harder cases."
        )
    earlier = rewards[:-LINES_IN_A_ROW]
    before = earlier[:-1]  # one line may be of both
    if len(before) < BEFORE_A_JUMP or max(before) > top - JUMP * past.scale or min(before) == -math.inf:
        return None
    half, noise = len(before) // 2, stdev(before)
    if top - fmean(before) < 3 * noise or fmean(before[half:]) - fmean(before[:half]) > noise:
        return None
    return (
        f"All scores are {top:g} since step {past.steps[-LINES_IN_A_ROW]}, after {fmean(before):.2f} before: a"
        f" policy seldom learns this fast, so the scorer or a judge may accept any answer. {advice} of that step."
    )


TrendRule: TypeAlias = Callable[[Past], str | None]
"""A condition on a stretch of a run; returns the advice if it holds."""
