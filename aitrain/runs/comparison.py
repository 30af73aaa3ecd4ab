"""Compares scorings of the same cases, case by case: is a model better than another one, on which cases, and is the
gain more than format?

A case's score is the mean of its samples. Only cases that both scorings have and scored are compared. The verdict is
that at the end of a run: the interval of the mean change must leave out 0, and the p-value must be small, which is
corrected for the number of comparisons.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

from aitrain.environment.completion_parser import short
from aitrain.errors import ConfigError
from aitrain.options.generation import GenerationOptions
from aitrain.runs.held_out import (
    IntervalValues,
    ScoreTable,
    Scoring,
    Verdict,
    interval_text,
    titled_table,
    verdict_of,
    verdict_sentence,
)
from aitrain.runs.json_values import JsonObject
from aitrain.runs.recorded_scoring import Matched, RecordedCase, RecordedScoring, match_cases
from aitrain.runs.records import prompt_key
from aitrain.runs.rollout_index import LENIENT, IndexEntry
from aitrain.runs.statistics import (
    EQUAL,
    MOST_CASES,
    WANTED_POWER,
    Mixture,
    Power,
    case_values,
    holm,
    means_of,
    named,
    recorded_mixture,
    score_row,
    weighted_changes,
)

FORMAT = "format"
"""The score without the lenient one: what the format costs."""
COMPARED_OPTIONS = (*GenerationOptions.model_fields, "chat_template", "eval_samples")
"""Options that change what is sampled or scored; the model's own are what is compared."""
COMPARED_FACTS = ("class", "sha256", "package", "config", "environments")
"""What environment.json says of the environment and its source."""

Outcome = Literal["won", "lost", "equal"]


@dataclass(frozen=True)
class CasePair:
    """One case in both scorings, with its mean scores."""

    a: RecordedCase
    b: RecordedCase
    score_a: float
    score_b: float

    @property
    def difference(self) -> float:
        """Score of B less that of A."""
        return self.score_b - self.score_a

    @property
    def outcome(self) -> Outcome:
        """Whether B has the higher score."""
        return "equal" if abs(self.difference) < EQUAL else "won" if self.difference > 0 else "lost"


@dataclass(eq=False, repr=False)
class Comparison:
    """B compared with A; a change is B less A."""

    a: RecordedScoring
    b: RecordedScoring
    decoding: str
    """The decoding whose scores decide: sampled, or greedy if nothing was sampled."""
    pairs: list[CasePair]
    """The cases that both have a score for, the largest difference first."""
    rows: ScoreTable
    """`sampled`, `greedy`, `pass@K`, `lenient` and `format`, over the cases that both have a value for; A is before.
    The p-values of changes are corrected for the number of models that are compared with A."""
    notes: list[str]
    """What makes the comparison less certain, or less fair."""
    power: Power | None
    """The power of comparisons whose cases differ as these do."""

    @property
    def change(self) -> IntervalValues:
        """The change that decides."""
        change = self.rows[self.decoding]["change"]
        assert change is not None
        return change

    @property
    def verdict(self) -> Verdict:
        """Whether B is better than A."""
        return verdict_of(self.change) or "undetected"

    def cases(self, outcome: Outcome) -> list[CasePair]:
        """The cases with this outcome, the largest difference first."""
        return [pair for pair in self.pairs if pair.outcome == outcome]

    @property
    def counts(self) -> dict[str, int]:
        """How many cases have each outcome."""
        return {outcome: len(self.cases(outcome)) for outcome in get_args(Outcome)}

    def is_worse_by(self, margin: float) -> bool:
        """Whether B is worse than A by more than a margin, also at the interval's upper limit."""
        high, mean = self.change["high"], self.change["mean"]
        return self.verdict == "worse" and (mean if high is None else high) < -margin

    def format_sentence(self) -> str:
        """How much of a change is only format; empty without a lenient score."""
        if LENIENT not in self.rows:
            return ""
        lenient = self.rows[LENIENT]["change"]
        texts = [interval_text(change, True) for change in (self.change, lenient, self.rows[FORMAT]["change"])]
        parts = f"score {texts[0]} = lenient score {texts[1]} + format {texts[2]}"
        is_maybe_format = self.verdict == "better" and verdict_of(lenient) != "better"
        return f"The gain may be only format, as the lenient score shows none: {parts}" if is_maybe_format else parts

    def power_sentence(self) -> str:
        """Which difference these cases detect, and how many cases the measured difference needs."""
        power, count = self.power, self.change["count"] or 0
        detectable = power and power.detectable(count)
        if power is None or detectable is None:
            return ""
        text = f"Power: {count} cases detect a difference of {detectable:.3f} with a probability of {WANTED_POWER:.0%}"
        measured = self.change["mean"]
        if not measured:
            return text
        needed = power.cases_needed(measured)
        cases = f"more than {MOST_CASES:,}" if needed is None else f"{needed:,}"
        return f"{text}; for the measured {abs(measured):.3f}, {cases} are needed"

    def __repr__(self) -> str:
        """Its verdict, its rows with the scores of A and of B, and what they say."""
        verdict = f"{self.b.label} compared with {self.a.label}: {verdict_sentence(self.change)}"
        table = titled_table(self.rows, self.a.label, self.b.label)
        said = (verdict, table, self.format_sentence(), *self.notes)
        return "\n".join(filter(None, said))

    def to_json(self) -> JsonObject:
        """The comparison as JSON, with all cases."""
        power, count, difference = self.power, self.change["count"] or 0, self.change["mean"]
        return {
            "a": self.a.label,
            "b": self.b.label,
            "models": [self.a.model, self.b.model],
            "decoding": self.decoding,
            "verdict": self.verdict,
            "rows": {name: {**row, "verdict": verdict_of(row["change"])} for name, row in self.rows.items()},
            "format": self.format_sentence() or None,
            "counts": self.counts,
            "power": power and {"detectable": power.detectable(count), "cases_needed": power.cases_needed(difference)},
            "notes": self.notes,
            "cases": [
                {
                    "prompt": pair.a.prompt,
                    "a": {"case": pair.a.case, "score": pair.score_a},
                    "b": {"case": pair.b.case, "score": pair.score_b},
                    "difference": pair.difference,
                    "outcome": pair.outcome,
                }
                for pair in self.pairs
            ],
        }


def compare_all(scorings: Sequence[RecordedScoring]) -> list[Comparison]:
    """Each of the other scorings compared with the first, with p-values that are corrected for their number.

    Raises:
        ConfigError: two of them share no case, no decoding or no score, or have different score ranges.
    """
    comparisons = [_compare(scorings[0], other) for other in scorings[1:]]
    for name in {name for comparison in comparisons for name in comparison.rows}:
        changes = [change for one in comparisons if name in one.rows and (change := one.rows[name]["change"])]
        for change, corrected in zip(changes, holm([change["p_value"] or 0.0 for change in changes]), strict=True):
            change["p_value"] = corrected
    return comparisons


def _compare(a: RecordedScoring, b: RecordedScoring) -> Comparison:
    decodings = [name for name in a.decodings if name in b.decodings]
    if not decodings:
        raise ConfigError(
            f"No decoding was scored in both {a.label} and {b.label}\nEvaluate one of them with --decoding both."
        )
    both = match_cases(a.cases, b.cases)
    if not both:
        raise ConfigError(
            f"None of the {len(a.cases)} cases of {a.label} is among the {len(b.cases)} of {b.label}:"
            " cases are matched by prompt and row, never by number\n"
            "Score both models on the same cases: aitrain eval A B --rl-env ENV"
        )
    mixture = _mixture(a, b, both)
    rows = _score_rows(both, decodings, mixture, bool(a.lenient) and a.lenient == b.lenient)
    decoding = next((name for name in decodings if name in rows), None)
    if decoding is None:
        raise ConfigError(f"None of the {len(both)} cases of {a.label} and {b.label} has a score in both")
    first, second = map(means_of, _scorings(both, decoding))
    pairs = [CasePair(*both[int(place)], first[place], second[place]) for place in first if place in second]
    pairs.sort(key=lambda pair: -abs(pair.difference))
    power = Power.of(weighted_changes(first, second, mixture))
    return Comparison(a, b, decoding, pairs, rows, list(_notes(a, b, both)), power)


def telling_samples(comparison: Comparison, pair: CasePair) -> tuple[IndexEntry, IndexEntry]:
    """Of each model the episode that shows the difference best: of a won case A's lowest score and B's highest."""
    sign = -1.0 if pair.outcome == "lost" else 1.0

    def first(case: RecordedCase, sign: float) -> IndexEntry:
        samples = case.samples[comparison.decoding].values()
        return min(samples, key=lambda sample: (sample.score is None, sign * (sample.score or 0.0)))

    return first(pair.a, sign), first(pair.b, -sign)


# -- rows


def _mixture(a: RecordedScoring, b: RecordedScoring, pairs: Sequence[Matched]) -> Mixture:
    """The environments of the pairs, by their places: those of A, or of B if only B has several.

    Raises:
        ConfigError: the scorings have different score ranges.
    """
    cases = {
        str(place): (one.record.environment or two.record.environment, prompt_key(one.record.prompt))
        for place, (one, two) in enumerate(pairs)
    }
    first, second = (recorded_mixture(one.environment, one.options, cases) for one in (a, b))
    for one, other in product(first, second):
        if one.name == other.name and one.bounds != other.bounds:
            ranges = f"{one.bounds or 'any'} in {a.label} and {other.bounds or 'any'} in {b.label}"
            raise ConfigError(f"The score ranges differ: {ranges}\nScore both with the same environment and range.")
    return tuple(one for one in (first if named(first) else second) if one.prompts)


def _score_rows(pairs: Sequence[Matched], decodings: Sequence[str], mixture: Mixture, is_split: bool) -> ScoreTable:
    """The rows; with those of the lenient score and of the format, if the score is split. Values that only one scoring
    has are left out, and so are rows without values."""
    rows = list[tuple[str, list[dict[str, float]], Mixture]]()
    for name in decodings:
        scorings = _scorings(pairs, name)
        rows += case_values(name, scorings, mixture, min(max(map(len, scoring.values())) for scoring in scorings))
    if is_split:
        means, parts = (list(map(means_of, _scorings(pairs, decodings[0], kind))) for kind in (False, True))
        forms = [{case: of[case] - part[case] for case in of} for of, part in zip(means, parts, strict=True)]
        free = tuple(replace(one, bounds=None) for one in mixture)  # a metric may have any value
        rows += [(LENIENT, parts, free), (FORMAT, forms, free)]
    table = {}
    for name, values, envs in rows:
        first, second = ({case: side[case] for case in values[0] if case in values[1]} for side in values)
        row = score_row(first, second, envs)
        if row["change"]:
            table[name] = row
    return table


def _scorings(pairs: Sequence[Matched], decoding: str, is_lenient: bool = False) -> list[Scoring]:
    """The scores of the cases of A and of B, by their places."""
    sides = zip(*pairs, strict=True)
    return [{str(place): case.scores(decoding, is_lenient) for place, case in enumerate(side)} for side in sides]


# -- what makes a comparison less fair or less certain


def _notes(a: RecordedScoring, b: RecordedScoring, matched: Sequence[Matched]) -> Iterator[str]:
    if other_seeds := sum(one.record.seed != other.record.seed for one, other in matched):
        yield (
            f"{other_seeds} of {len(matched)} cases were played with another seed of the environment: in an environment"
            " that uses it, they are not the same cases"
        )
    for scoring in (a, b):
        if left_out := len(scoring.cases) - len(matched):
            yield f"{left_out} of {len(scoring.cases)} cases are only in {scoring.label}: they are left out"
        if damaged := scoring.rollouts.damaged:
            yield f"{damaged} lines of the rollout files of {scoring.label} are damaged: they are left out"
        samples = [samples for case in scoring.cases.values() for samples in case.samples.values()]
        scores = [sample.score for each in samples for sample in each.values()]
        if unscored := scores.count(None):
            yield f"{unscored} of {len(scores)} episodes of {scoring.label} have no score: they are left out"
        if scoring.status not in ("unknown", "finished"):
            yield f"{scoring.label} is {scoring.status}: it may lack episodes"
    if differing := _differing(COMPARED_OPTIONS, a.options, b.options):
        yield f"Options differ, which may be a part of the change: {differing}"
    if differing := _differing(COMPARED_FACTS, a.environment, b.environment):
        yield (
            f"The environments differ: {differing}; the change may be one of the scorer."
            " Apply one scorer to both: aitrain env rescore RUN"
        )


def _differing(names: Sequence[str], a: JsonObject, b: JsonObject) -> str:
    """What differs of these values, where both are known, as `rl_temperature (1.0 and 0.5)`; long ones are cut."""
    return ", ".join(
        f"{name} ({short(json.dumps(a[name]))} and {short(json.dumps(b[name]))})"
        for name in names
        if name in a and name in b and a[name] != b[name]
    )
