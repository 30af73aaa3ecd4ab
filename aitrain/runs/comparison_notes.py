"""What makes a comparison of two scorings less fair or less certain, in sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from aitrain.options.generation import GenerationOptions
from aitrain.runs.json_values import as_object, as_text
from aitrain.runs.recorded_scoring import RecordedCase, RecordedScoring

COMPARED_OPTIONS = (*GenerationOptions.model_fields, "chat_template", "eval_samples")
"""Options that change what is sampled or scored; the model's own are what is compared."""


def notes_on(a: RecordedScoring, b: RecordedScoring, matched: Sequence[tuple[RecordedCase, RecordedCase]]) -> list[str]:
    """The sentences; empty if nothing is to be said."""
    return [*_about_cases(a, b, matched), *_about_episodes(a, b), *_about_conditions(a, b)]


def _about_cases(
    a: RecordedScoring, b: RecordedScoring, matched: Sequence[tuple[RecordedCase, RecordedCase]]
) -> Iterator[str]:
    for scoring in (a, b):
        left_out = len(scoring.cases) - len(matched)
        if left_out:
            yield f"{left_out} of {len(scoring.cases)} cases are only in {scoring.label}: they are left out"
    other_seeds = sum(one.key.seed != other.key.seed for one, other in matched)
    if other_seeds:
        yield (
            f"{other_seeds} of {len(matched)} cases were played with another seed of the environment: in an environment"
            " that uses it, they are not the same cases"
        )


def _about_episodes(a: RecordedScoring, b: RecordedScoring) -> Iterator[str]:
    for scoring in (a, b):
        episodes = list(scoring.samples)
        unscored = sum(sample.score is None for sample in episodes)
        if unscored:
            yield f"{unscored} of {len(episodes)} episodes of {scoring.label} have no score: they are left out"
        if scoring.status not in ("", "finished"):
            yield f"{scoring.label} is {scoring.status}: it may lack episodes"
    only = set(a.decodings) ^ set(b.decodings)
    if only:
        yield f"Only one of them has {' and '.join(sorted(only))} completions: those are left out"


def _about_conditions(a: RecordedScoring, b: RecordedScoring) -> Iterator[str]:
    names = [name for name in COMPARED_OPTIONS if name in a.options and name in b.options]
    differing = [name for name in names if a.options[name] != b.options[name]]
    if differing:
        texts = [f"{name} ({json.dumps(a.options[name])} and {json.dumps(b.options[name])})" for name in differing]
        yield f"Options differ, which may be a part of the change: {', '.join(texts)}"
    shares = [
        {name: as_object(facts).get("share") for name, facts in as_object(one.environment.get("environments")).items()}
        for one in (a, b)
    ]
    if all(shares) and shares[0] != shares[1]:
        yield f"The environments have other shares in {b.label}: those of {a.label} weigh both scores"
    facts = ("class", "sha256", "package", "config")
    if a.environment and b.environment and any(a.environment.get(one) != b.environment.get(one) for one in facts):
        yield (
            f"The environments differ: {_environment(a)} and {_environment(b)}; the change may be one of the scorer."
            " Apply one scorer to both: aitrain env rescore RUN"
        )


def _environment(scoring: RecordedScoring) -> str:
    found = scoring.environment
    config = f" {json.dumps(found['config'])}" if found.get("config") else ""
    source = [as_text(found.get("sha256"))[:8], as_text(found.get("package"))]
    return f"{' '.join(filter(None, [as_text(found.get('class')), *source]))}{config}"


def missing_match(a: RecordedScoring, b: RecordedScoring) -> str:
    """The error of two scorings without a common case, with the columns in which cases of the same prompt differ."""
    text = (
        f"None of the {len(a.cases)} cases of {a.label} is among the {len(b.cases)} of {b.label}:"
        " cases are matched by prompt and row, never by number\n"
    )
    columns = _differing_columns(a, b)
    if columns:
        return f"{text}Cases with the same prompt have another row: {', '.join(columns)}"
    return f"{text}Score both models on the same cases: aitrain eval A B --rl-env ENV"


def _differing_columns(a: RecordedScoring, b: RecordedScoring) -> list[str]:
    """The columns in which the first cases with the same prompt differ."""
    rows = {}
    for scoring in (a, b):
        records = [scoring.record(next(case.all_samples)) for case in scoring.cases.values()]
        rows[scoring] = {json.dumps(record.prompt): record.row for record in records}
    for prompt, row in rows[a].items():
        other = rows[b].get(prompt)
        if other is not None:
            return sorted(name for name in row.keys() | other.keys() if row.get(name) != other.get(name))
    return []
