"""The diagnosis of a run: conditions that keep it from learning, and signs of reward hacking and collapse, found in its
metrics line by line, while it trains. Each is reported once in a run, with what to do about it.

A rule is a function of a stretch of the run; its name is that of the condition in docs/diagnostics.md.

Trends compare the first with the last quarter of a stretch. Metrics of neighbouring steps are alike: the policy changes
slowly, and epochs repeat the same cases. So the error of a change, which takes them as independent, comes out too
small: rules ask for a large change as well.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import fmean, median, variance

from pydantic import TypeAdapter

from aitrain.environment.contract import Bounds
from aitrain.events import Announce, Note
from aitrain.options.train import TrainConfig
from aitrain.runs.held_out import bounds_of
from aitrain.runs.records import MetricsLine
from aitrain.runs.run_folder import RunFolder, append_lines, keep_lines, parsed_lines
from aitrain.runs.statistics import Z

LINES_IN_A_ROW = 5
"""Consecutive lines of metrics for which a condition must hold before it is reported."""
NEWEST, FIRST_LINES, MOST_OF_THEM = 20, 10, 0.75
"""MOST_OF_THEM is the fraction of the NEWEST lines that must meet the condition as well; in a run with fewer than
FIRST_LINES, all lines must: with few groups in a step, a few bad steps in a row come by chance."""
SOLVED_LEVEL = 0.9
"""Mean reward, as a fraction of the score range, above which equal scores and low entropy are expected."""
TOO_HARD_LEVEL = 0.05
"""Mean reward, as a fraction of the score range, below which the cases are reported as too hard."""
STRETCH = 40
"""Fewest lines with a trend. It is looked for in the whole run, its newer half, the newer half of that, and so on."""
LOOKS = 10
"""Lines of metrics after which a trend is looked for again."""
LONGER, SURELY_LONGER, LONGER_TOKENS = 1.5, 1.25, 4.0
"""Growth of completions that is reported: the estimate, its lower limit, and the tokens that it is at least."""
STAYS = 0.08
"""Upper limit of a rise that counts as none, as a fraction of the score range."""
RISES = 0.1
"""Change of the score that counts, as a fraction of the score range."""
TOP = 1e-6
"""Distance from the highest score, as a fraction of the range, that rounding explains."""
JUMP = 0.2
"""Distance from the highest score, as a fraction of the range, that all lines before a jump must have."""
BEFORE_A_JUMP = 10
"""Lines before a jump to the highest score that must be alike."""

Values = Mapping[str, float]
"""The metrics of a line that have a value."""


@dataclass(frozen=True)
class RunFinding:
    """A condition that was found: its name in docs/diagnostics.md, the step, and the advice on one line."""

    name: str
    step: int
    text: str


FINDING = TypeAdapter(RunFinding)


def quarters(values: Sequence[float]) -> tuple[float, float, float]:
    """Means of the first and of the last quarter of a series, and the standard error of their difference."""
    size = len(values) // 4
    first, last = values[:size], values[-size:]
    return fmean(first), fmean(last), math.sqrt((variance(first) + variance(last)) / size)


@dataclass
class Diagnosis:
    """Finds conditions in the metrics of one run up to now, and in all scorings of its held-out cases. Equal lines give
    equal findings, so a resumed run reads its own metrics again."""

    config: TrainConfig
    steps: list[int] = field(default_factory=list)
    rows: list[Values] = field(default_factory=list)
    scorings: list[MetricsLine] = field(default_factory=list)
    reported: set[str] = field(default_factory=set)
    """Names of the conditions that were reported, which are not looked for any more."""

    def see(self, line: MetricsLine) -> list[RunFinding]:
        """Add a line of metrics, or a scoring; returns what is found with it."""
        if line.is_scoring:
            others = [one for one in self.scorings if one.step != line.step]
            self.scorings = sorted((*others, line), key=lambda one: one.step)
        else:
            self.steps.append(line.step)
            self.rows.append({name: value for name, value in line.values.items() if value is not None})
        found = []
        for rule in (held_out,) if line.is_scoring else OF_LINES:
            name = rule.__name__
            if name not in self.reported and self.rows and (text := rule(self)):
                self.reported.add(name)
                found.append(RunFinding(name, line.step, text))
        return found

    @cached_property
    def bounds(self) -> Bounds | None:
        """Lowest and highest score; None for an unbounded range."""
        return bounds_of(self.config.rl_score_range)

    def level(self, values: Values) -> float:
        """Mean score of all that was played, discarded groups included, as a fraction of the score range, 0 to 1; the
        middle for an unbounded range."""
        if self.bounds is None:
            return 0.5
        low, high = self.bounds
        return (values.get("cases/mean_score", values.get("reward", 0.0)) - low) / (high - low)

    def is_solved(self, values: Values) -> bool:
        """Whether the mean reward is near the highest score."""
        return self.level(values) >= SOLVED_LEVEL

    def lasts(self, is_bad: Callable[[Values], bool]) -> bool:
        """Whether a condition lasts that each line meets or not."""
        rows = self.rows[-NEWEST:]
        if len(rows) < LINES_IN_A_ROW or not all(map(is_bad, rows[-LINES_IN_A_ROW:])):
            return False
        return sum(map(is_bad, rows)) >= (1.0 if len(rows) < FIRST_LINES else MOST_OF_THEM) * len(rows)

    @property
    def scale(self) -> float:
        """Size of the score range; 0 for an unbounded one, in which a change counts that noise does not explain."""
        low, high = self.bounds or (0.0, 0.0)
        return high - low


# -- what the newest lines show


def zero_variance(past: Diagnosis) -> str | None:
    """In most groups all completions score the same."""
    now = past.rows[-1]
    if not past.lasts(lambda row: row.get("frac_reward_zero_std", 0.0) >= 0.8 and not past.is_solved(row)):
        return None
    is_too_hard = past.level(now) < TOO_HARD_LEVEL
    why = ": the cases are too hard, or the policy has become worse (lower --lr)" if is_too_hard else ""
    return (
        f"In {now['frac_reward_zero_std']:.0%} of the groups all completions score the same, mostly near"
        f" {now.get('reward', 0.0):.2f}{why}. Such groups give no gradient: raise --rl-num-generations or"
        " --rl-temperature, give partial credit, use easier cases, or train on right answers first (docs/sft.md);"
        " --rl-sampling refill replaces such groups."
    )


def thinking(past: Diagnosis) -> str | None:
    """Many episodes end inside the thinking."""
    if not past.lasts(lambda row: row.get("thinking/without_answer", 0.0) > 0.5):
        return None
    now, remedy = past.rows[-1], "raise --rl-max-new-tokens, or end long thoughts with --thinking N, below it."
    if now.get("completions/clipped_ratio", 0.0) < 0.5:
        remedy = "the policy stops there by itself; begin with a model that was trained to think, or --thinking off."
    return (
        f"{now['thinking/without_answer']:.0%} of the episodes end inside the thinking, after"
        f" {now['thinking/tokens']:.0f} tokens of it, without an answer: {remedy}"
    )


def cut_off(past: Diagnosis) -> str | None:
    """Many episodes end with an answer that is cut off."""
    if not past.lasts(lambda row: row.get("completions/clipped_ratio", 0.0) > 0.5) or thinking(past):
        return None
    return (
        f"{past.rows[-1]['completions/clipped_ratio']:.0%} of the episodes end with an answer that is cut off: raise"
        " --rl-max-new-tokens, or ask for shorter answers."
    )


def unscored(past: Diagnosis) -> str | None:
    """Many episodes have no score."""
    if not past.lasts(lambda row: row.get("unscored", 0.0) > 0.25):
        return None
    return (
        f"{past.rows[-1]['unscored']:.0%} of the episodes have no score and give no gradient: failed/* in metrics.jsonl"
        " counts the reasons, rollouts/ has the tracebacks; see --rl-env-timeout and --rl-env-isolation."
    )


def unused_tools(past: Diagnosis) -> str | None:
    """Hardly an episode calls a tool, and the task is not solved."""
    if not past.lasts(lambda row: row.get("tools/unused", 0.0) > 0.98 and not past.is_solved(row)):
        return None
    return (
        f"{past.rows[-1]['tools/unused']:.0%} of the episodes that have tools call none: read some in rollouts/. Say in"
        " the prompt when to call them, or use a model that was trained with tools (--model)."
    )


def entropy(past: Diagnosis) -> str | None:
    """The policy says nearly the same every time, and the task is not solved."""
    lowest = min(0.1, 0.1 * past.rows[0].get("entropy", 0.0))
    if not past.lasts(lambda row: row.get("entropy", 1.0) < lowest and not past.is_solved(row)):
        return None
    now = past.rows[-1]
    return (
        f"The policy's entropy has collapsed to {now['entropy']:.3f}: its completions are nearly identical, with"
        f" reward {now.get('reward', 0.0):.2f}. Lower --lr, or raise --rl-temperature,"
        " --rl-kl-coef or --rl-entropy-coef."
    )


def importance_ratio(past: Diagnosis) -> str | None:
    """The importance ratio between vLLM and the trainer is far from 1."""
    name, now = "sampling/importance_sampling_ratio/mean", past.rows[-1]
    if not past.lasts(lambda row: row.get(name, 1.0) < 0.5):
        return None
    gap = now.get("sampling/sampling_logp_difference/mean", 0.0)
    return (
        f"The mean importance ratio between vLLM and the trainer is {now[name]:.2f}: the gradient shrinks."
        f" Log-probabilities of the same token differ by {gap:.3f} on average. Up to 0.1 is rounding, which the ratio"
        " multiplies over all tokens of an episode: use --trl vllm_importance_sampling_mode=token_truncate. Above it,"
        " vLLM has other weights (with --rl-ahead a rollout old: lower --lr), another number format (--dtype,"
        " --mixed-precision) or no adapter, or was started without --logprobs-mode processed_logprobs."
    )


def top_score(past: Diagnosis) -> str | None:
    """All scores are the highest one: from the first step, or from one step to the next."""
    if past.bounds is None or len(past.rows) < LINES_IN_A_ROW:
        return None
    top = past.bounds[1]
    rewards = [row.get("reward", -math.inf) for row in past.rows[-BEFORE_A_JUMP - LINES_IN_A_ROW - 1 :]]
    if min(rewards[-LINES_IN_A_ROW:]) < top - TOP * past.scale:
        return None
    advice = "Run aitrain env check, which looks for answers that should not score, and read some rollouts"
    if len(past.rows) == LINES_IN_A_ROW:
        return (
            f"All scores have been {top:g} since the first step: there is nothing to learn, or the scorer accepts any"
            f" answer. {advice}; use harder cases."
        )
    before = rewards[: -LINES_IN_A_ROW - 1]  # one line may be of both
    if len(before) < BEFORE_A_JUMP or max(before) > top - JUMP * past.scale or min(before) == -math.inf:
        return None
    return (
        f"All scores are {top:g} since step {past.steps[-LINES_IN_A_ROW]}, after {fmean(before):.2f} before: a"
        f" policy seldom learns this fast, so the scorer or a judge may accept any answer. {advice} of that step."
    )


# -- trends


def length(past: Diagnosis) -> str | None:
    """Completions have become longer and the reward no better; where cases are chosen by their scores, the reward says
    nothing of the policy."""
    name, lines = "completions/mean_length", len(past.rows)
    rows = [
        (at, row[name], row["reward"])
        for at, row in zip(past.steps, past.rows, strict=True)
        if name in row and "reward" in row
    ]
    if past.config.rl_sampling != "uniform" or lines % LOOKS:
        return None
    while len(rows) >= STRETCH:
        steps, lengths, rewards = zip(*rows, strict=True)
        short, long, error = quarters(lengths)
        is_longer = long > short + LONGER_TOKENS and long > LONGER * short and long - 2 * error > SURELY_LONGER * short
        before, after, error = quarters(rewards)
        if is_longer and after + 2 * error < before + STAYS * past.scale:
            averages = past.config.rl_loss_type in ("grpo", "gspo", "sapo")
            loss = "--rl-loss-type dr_grpo or dapo has no bias towards long wrong completions; " if averages else ""
            return (
                f"Completions have grown from {short:.0f} to {long:.0f} tokens since step {steps[0]}, and the reward"
                f" has not risen ({before:.2f}, then {after:.2f}): {loss}--rl-overlong-buffer makes long completions"
                " cost reward; and read some of them, whether they repeat themselves."
            )
        rows = rows[len(rows) // 2 :]
    return None


# -- scorings of the held-out cases


def held_out(past: Diagnosis) -> str | None:
    """The held-out score has fallen from an earlier one."""
    fall = _fall(past.scorings, past.scale)
    if fall is None:
        return None
    step, before, after = fall
    return (
        f"The held-out score has fallen from {before:.2f} around step {step} to {after:.2f}. If the reward has"
        " fallen as well, the policy has become worse: lower --lr, or raise --rl-kl-coef. If not, it learns what only"
        " the training cases reward: read the best-rewarded rollouts for a hack, use more cases or fewer --epochs."
        " --save-best and --patience keep the best step as the model."
    )


def _fall(scorings: Sequence[MetricsLine], scale: float) -> tuple[int, float, float] | None:
    """Step and score before a fall that noise does not explain, and the score now: means of a third of the scorings."""
    limits = [(one.step, one.eval_score, one.values.get("eval_low")) for one in scorings]
    known = [(step, score, score - low) for step, score, low in limits if score is not None and low is not None]
    size = max(1, len(known) // 3)
    means = [fmean(score for _, score, _ in known[start : start + size]) for start in range(len(known) - size + 1)]
    if len(means) <= size:
        return None
    best = means.index(max(means[:-size]))
    error = median(below for _, _, below in known) / Z / math.sqrt(size)
    fall = means[best] - means[-1]
    is_fall = fall > max(4 * math.sqrt(2) * error, RISES * scale)
    return (known[best + size // 2][0], means[best], means[-1]) if is_fall else None


# -- a run

Rule = Callable[[Diagnosis], str | None]
"""Returns the advice if its condition holds."""
OF_LINES: tuple[Rule, ...] = (
    zero_variance,
    thinking,
    cut_off,
    unscored,
    unused_tools,
    entropy,
    importance_ratio,
    top_score,
    length,
)


def recorded_diagnosis(folder: RunFolder, config: TrainConfig, announce: Announce) -> Callable[[MetricsLine], None]:
    """What looks at each line of metrics, and each scoring, of a run that trains. A finding is recorded before it is
    shown, so that a resumed run does not show it again."""
    folder.diagnostics.touch()
    keep_lines(folder.diagnostics, lambda _: True, FINDING.validate_json)  # a killed process may have left half a line
    diagnosis = Diagnosis(config, reported={finding.name for finding in findings_of(folder)})

    def see(line: MetricsLine) -> None:
        for finding in diagnosis.see(line):
            append_lines(folder.diagnostics, [asdict(finding)])
            announce(Note(finding.text))

    return see


def findings_of(folder: RunFolder) -> list[RunFinding]:
    """The findings that a run recorded."""
    return [finding for _, finding in parsed_lines(folder.diagnostics, FINDING.validate_json)]
