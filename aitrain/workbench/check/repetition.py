"""Checks that every process sees the same cases, and scores them the same way."""

from __future__ import annotations

import linecache
import os
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aitrain.environment.tool_call_parser import short
from aitrain.execution.user_code import is_users_file
from aitrain.workbench.check.finding import EnvFinding
from aitrain.workbench.check.subject import NotCheckedError, Subject
from aitrain.workbench.fresh import FreshRun, FreshRunError, attributes, digests, results

HASH_SEEDS = ("1",)
SEED_IT = "Use random.Random(seed) with a fixed seed, and sorted(...) where a set or a dict of sets is listed."


@contextmanager
def unseeded_generators() -> Iterator[list[str]]:
    """Context that collects the user's lines that make `random.Random()` without a seed."""
    found, seed = list[str](), random.Random.seed

    def noted_seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_filename == random.__file__ and frame.f_back:
            frame = frame.f_back
        name, line = frame.f_code.co_filename, frame.f_lineno
        if a is None and is_users_file(name):
            found.append(f"at {name}, line {line}: {linecache.getline(name, line).strip()}")
        seed(self, a, version)

    random.Random.seed = noted_seed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        random.Random.seed = seed  # type: ignore[method-assign]


def repeatable_dataset(subject: Subject) -> Iterator[EnvFinding]:
    """Fresh processes build the same rows and references."""
    options, own_seed = subject.config.changed(), os.environ.get("PYTHONHASHSEED", "random")
    same, *others = _results(subject, [FreshRun(options, seed) for seed in (own_seed, *HASH_SEEDS)])
    here = digests(subject.environment, subject.cases)
    if same["again"] != same["rows"]:
        yield EnvFinding(
            "repeatable-dataset",
            "fail",
            f"build_dataset returns other rows when it is called again: {_differing(same['rows'], same['again'])}.",
            "A resumed run continues with other cases, and scores of two runs cannot be compared.",
            SEED_IT,
        )
        return
    for kind, what in (("rows", "rows"), ("references", "answers of reference")):
        different = _differing(here[kind], same[kind])
        if different and own_seed != "random":
            yield EnvFinding(
                "repeatable-dataset",
                "fail",
                f"A fresh process has other {what}: {different}.",
                "A resumed run continues with other cases, and scores of two runs cannot be compared.",
                SEED_IT,
            )
            return
        for other in others:
            different = _differing(here[kind], other[kind])
            if different:
                yield EnvFinding(
                    "repeatable-dataset",
                    "warning",
                    f"With another PYTHONHASHSEED the environment has other {what}: {different}.",
                    "Training sets PYTHONHASHSEED=0, but what builds the dataset elsewhere gets other cases.",
                    SEED_IT,
                )
                return


def _results(subject: Subject, runs: Sequence[FreshRun]) -> list[dict[str, Any]]:
    """What fresh processes find.

    Raises:
        NotCheckedError: one failed, or cannot be sent the rows.
    """
    subject.check_time()
    try:
        return results(runs, subject.clock.seconds_left)
    except FreshRunError as error:
        raise NotCheckedError(short(str(error), 200)) from error
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise NotCheckedError(f"rows cannot be sent to another process: {error}") from error


def _differing(one: list[str], other: list[str]) -> str:
    """How two lists of digests differ; empty if they do not."""
    if len(one) != len(other):
        return f"{len(other)} instead of {len(one)}"
    count = sum(first != second for first, second in zip(one, other, strict=True))
    return f"{count} of {len(one)} differ" if count else ""


def two_ranks(subject: Subject) -> Iterator[EnvFinding]:
    """The second process of a run scores the first one's cases as the first does."""
    pairs = [(case, script) for case in subject.sample if (script := subject.reference(case))]
    expected = [episode.score for episode in subject.play(pairs)]
    if not pairs:
        return
    rank = {
        "attributes": attributes(subject.environment),
        "plays": [(case, script.replies) for case, script in pairs],
    }
    own_seed = os.environ.get("PYTHONHASHSEED", "random")
    (found,) = _results(subject, [FreshRun(subject.config.changed(), own_seed, rank)])
    wrong = [
        (case, before, after)
        for (case, _), before, (after, unknown) in zip(pairs, expected, found["scores"], strict=True)
        if before is not None and not unknown and (after is None or abs(before - after) > 1e-6)
    ]
    if wrong:
        case, before, after = wrong[0]
        yield EnvFinding(
            "two-ranks",
            "fail",
            f"A second process scores {len(wrong)} of {len(pairs)} references differently: {before:g} and {after}.",
            "Rows come from the first process, and each process scores with its own environment: with several GPUs"
            " replies are scored against other cases.",
            "Keep what a score needs in the row, or make __init__ repeatable.",
            case.case_idx,
        )
