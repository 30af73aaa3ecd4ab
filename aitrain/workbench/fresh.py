"""A fresh process that constructs the environment again: `python -m aitrain.workbench.fresh REQUEST`.

Prints as JSON what its datasets and references are, and what it scores as the second process of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aitrain.environment.contract import Case
from aitrain.environment.dataset import build_cases, canonical_text
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.workbench.opening import NoTokenizer, construct, open_environment
from aitrain.workbench.player import Play, Player, Script, reference_of

ROWS = 2000
REFERENCES = 64
SECONDS = 120.0


@dataclass(frozen=True)
class FreshRun:
    """A request to a fresh process; `rank` are episodes to play as the second process of a run."""

    options: Mapping[str, object]
    hash_seed: str
    rank: Mapping[str, object] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process."""
        handle, name = tempfile.mkstemp(prefix="aitrain-fresh-")
        with os.fdopen(handle, "wb") as file:
            pickle.dump(self, file)
        environment = {**os.environ, "PYTHONHASHSEED": self.hash_seed}
        command = [sys.executable, "-P", "-m", "aitrain.workbench.fresh", name]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def results(runs: Sequence[FreshRun]) -> list[dict[str, Any]]:
    """What the processes print, which run at the same time; empty for one that failed or took too long."""
    children = [run.start() for run in runs]
    found = []
    for child in children:
        try:
            said = child.communicate(timeout=SECONDS)[0]
            found.append(json.loads(said) if child.returncode == 0 else {})
        except (subprocess.TimeoutExpired, ValueError):
            child.kill()
            found.append({})
    return found


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


def _as_second_rank(environment: Any, config: TrainConfig, rank: Mapping[str, Any]) -> list[float | None]:
    """Scores of the first process's episodes, on an environment that was constructed here and got what building the
    dataset changed there."""
    other = construct(config)
    before = attributes(other)
    build_cases(other, NoTokenizer())
    changed = [name for name, value in attributes(other).items() if before.get(name) != value]
    sent: Mapping[str, bytes] = rank["attributes"]
    vars(environment).update({name: pickle.loads(sent[name]) for name in changed if name in sent})
    plays = [Play(case, Script(replies)) for case, replies in rank["plays"]]
    with closing(Player(environment, config)) as player:
        return [episode.score for episode in player.play(plays)]


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
    request = Path(sys.argv[1])
    given: FreshRun = pickle.loads(request.read_bytes())
    request.unlink()
    channel.write(json.dumps(main(given)))
    channel.flush()
    os._exit(0)  # threads of the environment do not keep the process
