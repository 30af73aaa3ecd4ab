"""A fresh process that constructs the environment again: `python -m aitrain.workbench.fresh`.

Reads a FreshRun from standard input. Prints as JSON what its datasets and references are, or what it scores as the
second process of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import IO, Any

from aitrain.environment.contract import Case
from aitrain.environment.dataset import build_cases, canonical_text
from aitrain.errors import AitrainError
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.workbench.opening import NoTokenizer, construct, open_environment
from aitrain.workbench.player import Play, Player, Script, is_unknown, reference_of

ROWS = 2000
REFERENCES = 64
SECONDS = 120.0
"""What a process may take at most."""


class FreshRunError(AitrainError):
    """A fresh process failed or took too long; the message says how."""


@dataclass(frozen=True)
class FreshRun:
    """A request to a fresh process; `rank` are episodes to play as the second process of a run."""

    options: Mapping[str, object]
    hash_seed: str
    rank: Mapping[str, object] | None = None

    def start(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start the process; what it and the environment print goes to `output`, but for the result."""
        environment = {**os.environ, "PYTHONHASHSEED": self.hash_seed}
        command = [sys.executable, "-P", "-m", "aitrain.workbench.fresh"]
        with tempfile.TemporaryFile() as request:
            request.write(pickle.dumps(self))
            request.seek(0)
            return subprocess.Popen(command, env=environment, stdin=request, stdout=subprocess.PIPE, stderr=output)


def results(runs: Sequence[FreshRun], seconds: float = SECONDS) -> list[dict[str, Any]]:
    """What the processes print. They run at the same time, for at most this many seconds.

    Raises:
        FreshRunError: one failed, or took too long.
    """
    with ExitStack() as stack:
        end, children = time.monotonic() + min(seconds, SECONDS), list[tuple[subprocess.Popen[bytes], IO[bytes]]]()
        for run in runs:
            output = stack.enter_context(tempfile.TemporaryFile())
            child = run.start(output)
            stack.callback(_end, child)
            children.append((child, output))
        return [_result(child, output, end) for child, output in children]


def _result(child: subprocess.Popen[bytes], output: IO[bytes], end: float) -> dict[str, Any]:
    try:
        said = child.communicate(timeout=max(0.0, end - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        raise FreshRunError("a fresh process took too long to construct the environment") from None
    if child.returncode:
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
        reasons = [line for line in lines if not line.startswith("at ")]  # the place says less than what happened
        raise FreshRunError(f"a fresh process failed: {reasons[-1] if reasons else f'exit status {child.returncode}'}")
    found: dict[str, Any] = json.loads(said)
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def digests(environment: Any, cases: Sequence[Case]) -> dict[str, list[str]]:
    """Digests of rows and of references, spread over the dataset."""
    some = cases[:: max(1, len(cases) // REFERENCES)][:REFERENCES]
    references = [reference_of(environment, case) for case in some] if hasattr(environment, "reference") else []
    return {
        "rows": [_digest(case.row) for case in cases[:ROWS]],
        "references": [_digest(script.replies if script else ()) for script in references],
    }


def _digest(value: object) -> str:
    return hashlib.sha256(canonical_text(value).encode(errors="replace")).hexdigest()[:16]


def attributes(environment: object) -> dict[str, bytes]:
    """The environment's attributes that can be sent to another process."""
    found = {}
    for name, value in vars(environment).items() if hasattr(environment, "__dict__") else ():
        try:
            found[name] = pickle.dumps(value)
        except Exception:
            continue  # a lock, a client: each process has its own
    return found


def _as_second_rank(environment: Any, config: TrainConfig, rank: Mapping[str, Any]) -> list[tuple[float | None, bool]]:
    """Scores of the first process's episodes, and whether each is unknown, on an environment that was constructed here
    and got what building the dataset changed there."""
    other = construct(config)
    before = attributes(other)
    build_cases(other, NoTokenizer())
    changed = [name for name, value in attributes(other).items() if before.get(name) != value]
    sent: Mapping[str, bytes] = rank["attributes"]
    vars(environment).update({name: pickle.loads(sent[name]) for name in changed if name in sent})
    plays = [Play(case, Script(replies)) for case, replies in rank["plays"]]
    with closing(Player(environment, config)) as player:
        return [(episode.score, is_unknown(episode)) for episode in player.play(plays)]


def main(run: FreshRun) -> dict[str, Any]:
    """What this process finds."""
    config = resolve(TrainConfig, None, run.options)
    if run.rank is not None:
        return {"scores": _as_second_rank(construct(config), config, run.rank)}
    opened, config = open_environment(config)
    found: dict[str, Any] = digests(opened.environment, opened.cases)
    again, _ = build_cases(opened.environment, NoTokenizer())
    return {**found, "again": digests(None, again)["rows"]}


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the environment prints
    given: FreshRun = pickle.load(sys.stdin.buffer)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    channel.write(json.dumps(main(given)))
    channel.flush()
    os._exit(0)  # threads of the environment do not keep the process
