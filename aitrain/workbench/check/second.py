"""Checks that every process sees the same cases, and scores them the same way; and the second process that shows it:
`python -m aitrain.workbench.check.second` reads a request from standard input, and prints what it finds as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

from aitrain.environment.contract import Case
from aitrain.environment.dataset import build_cases, canonical_text
from aitrain.environment.tool_call_parser import short
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.workbench.check.subject import EnvFinding, NotCheckedError, Subject
from aitrain.workbench.opening import NoTokenizer, construct, open_environment, spread
from aitrain.workbench.player import Play, Player, reference_of

ROWS, REFERENCES = 2000, 64
SECONDS = 120.0
"""What a process may take at most."""
HASH_SEED = "1"
SEED_IT = "Use random.Random(seed) with a fixed seed, and sorted(...) where a set or a dict of sets is listed."


def in_second_process(subject: Subject, hash_seed: str, rank: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a second process finds with the options of the subject, see `main`.

    Raises:
        NotCheckedError: it failed, took too long, or cannot be sent the rows.
    """
    subject.check_time()
    command = [sys.executable, "-P", "-m", "aitrain.workbench.check.second"]
    variables = {**os.environ, "PYTHONHASHSEED": hash_seed}
    pipe = subprocess.PIPE
    try:
        given = pickle.dumps((subject.config.changed(), rank))
        done = subprocess.run(
            command, env=variables, input=given, stdout=pipe, stderr=pipe, timeout=min(SECONDS, subject.seconds_left)
        )
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise NotCheckedError(f"rows cannot be sent to another process: {error}") from error
    except subprocess.TimeoutExpired:
        raise NotCheckedError("a fresh process took too long to construct the environment") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reasons = [line for line in lines if not line.startswith("at ")]  # the place says less than what happened
        why = reasons[-1] if reasons else f"exit status {done.returncode}"
        raise NotCheckedError(short(f"a fresh process failed: {why}", 200))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def repeatable_dataset(subject: Subject) -> Iterator[EnvFinding]:
    """Fresh processes build the same rows and references."""
    own_seed = os.environ.get("PYTHONHASHSEED", "random")
    with ThreadPoolExecutor() as pool:
        same, other = pool.map(partial(in_second_process, subject), (own_seed, HASH_SEED))
    here = digests(subject.environment, subject.cases)
    spoiled = "A resumed run continues with other cases, and scores of two runs cannot be compared."
    if different := _differing(same["rows"], same["again"]):
        yield EnvFinding(
            "fail", f"build_dataset returns other rows when it is called again: {different}.", spoiled, SEED_IT
        )
        return
    for kind, what in (("rows", "rows"), ("references", "answers of reference")):
        if own_seed != "random" and (different := _differing(here[kind], same[kind])):
            yield EnvFinding("fail", f"A fresh process has other {what}: {different}.", spoiled, SEED_IT)
            return
        if different := _differing(here[kind], other[kind]):
            yield EnvFinding(
                "warning",
                f"With another PYTHONHASHSEED the environment has other {what}: {different}.",
                "Training sets PYTHONHASHSEED=0, but what builds the dataset elsewhere gets other cases.",
                SEED_IT,
            )
            return


def _differing(one: list[str], other: list[str]) -> str:
    """How two lists of digests differ; empty if they do not."""
    if len(one) != len(other):
        return f"{len(other)} instead of {len(one)}"
    count = sum(first != second for first, second in zip(one, other, strict=True))
    return f"{count} of {len(one)} differ" if count else ""


def two_ranks(subject: Subject) -> Iterator[EnvFinding]:
    """The second process of a run scores the first one's cases as the first does."""
    pairs = subject.referenced
    expected = [episode.score for episode in subject.play(pairs)]
    rank = {"attributes": attributes(subject.environment), "plays": pairs}
    scores = in_second_process(subject, os.environ.get("PYTHONHASHSEED", "random"), rank)["scores"]
    wrong = [
        (case, before, after)
        for (case, _), before, (after, is_unknown) in zip(pairs, expected, scores, strict=True)
        if before is not None and not is_unknown and (after is None or abs(before - after) > 1e-6)
    ]
    for case, before, after in wrong[:1]:
        yield EnvFinding(
            "fail",
            f"A second process scores {len(wrong)} of {len(pairs)} references differently: {before:g} and {after}.",
            "Rows come from the first process, and each process scores with its own environment: with several GPUs"
            " replies are scored against other cases.",
            "Keep what a score needs in the row, or make __init__ repeatable.",
            case.case_idx,
        )


def digests(environment: object, cases: Sequence[Case]) -> dict[str, list[str]]:
    """Digests of rows, and of references, spread over the dataset."""
    references = [reference_of(environment, case) for case in spread(cases, REFERENCES)]
    said = [script.replies if script else () for script in references]
    return {"rows": [_digest(case.row) for case in cases[:ROWS]], "references": list(map(_digest, said))}


def _digest(value: object) -> str:
    return hashlib.sha256(canonical_text(value).encode(errors="replace")).hexdigest()[:16]


def attributes(environment: object) -> dict[str, bytes]:
    """The environment's attributes that can be sent to another process."""
    found = {}
    for name, value in getattr(environment, "__dict__", {}).items():
        try:
            found[name] = pickle.dumps(value)
        except Exception:
            continue  # a lock, a client: each process has its own
    return found


# -- the second process


def main(options: Mapping[str, object], rank: Mapping[str, Any] | None) -> dict[str, Any]:
    """The rows and references that this process builds, or the scores of `plays` as the second process of a run, which
    gets the first one's `attributes`."""
    config = resolve(TrainConfig, None, options)
    if rank is None:
        opened, config = open_environment(config)
        again, _ = build_cases(opened.environment, NoTokenizer())
        return {**digests(opened.environment, opened.cases), "again": digests(None, again)["rows"]}
    environment, other = construct(config), construct(config)
    before = attributes(other)
    build_cases(other, NoTokenizer())
    # a rank gets what building the dataset changed on the first one
    changed = [name for name, value in attributes(other).items() if before.get(name) != value]
    sent = {name: pickle.loads(rank["attributes"][name]) for name in changed if name in rank["attributes"]}
    if sent:
        vars(environment).update(sent)
    with closing(Player(environment, config)) as player:
        played = player.play([Play(case, script) for case, script in rank["plays"]])
        return {"scores": [(episode.score, episode.is_unknown) for episode in played]}


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the environment prints
    given = pickle.load(sys.stdin.buffer)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    channel.write(json.dumps(main(*given)))
    channel.flush()
    os._exit(0)  # threads of the environment do not keep the process
