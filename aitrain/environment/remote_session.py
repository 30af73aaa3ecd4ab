"""Sessions in worker processes, and what stands in for the model and the tokenizer there."""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aitrain.environment.call_policy import CopyPlan
from aitrain.environment.judging import Bounds, ScoreResult
from aitrain.environment.session import AssistantTurn, EnvResponse, ResetResult, Session, session_for
from aitrain.execution.failure import CallFailed
from aitrain.execution.processes import ProcessPool, WorkerLease


def remote_session(processes: ProcessPool, plan: CopyPlan | None, bounds: Bounds) -> RemoteSession:
    """A session in a process of its own; where episodes write to the environment, each has a copy (`plan`)."""
    return RemoteSession(processes.lease(partial(_session_in_process, plan, bounds)))


@dataclass(frozen=True)
class RemoteSession:
    """A session in another process."""

    lease: WorkerLease

    def open(self, words: dict[str, Any]) -> ResetResult:
        opening: ResetResult = self.lease.call("open", words)
        return opening

    def answer(self, reply: AssistantTurn) -> EnvResponse:
        move: EnvResponse = self.lease.call("answer", reply)
        return move

    def score(self, words: dict[str, Any]) -> ScoreResult:
        scored: ScoreResult = self.lease.call("score", words)
        return scored

    def close(self) -> None:
        with suppress(CallFailed):
            self.lease.call("close")
        self.lease.release()


def _session_in_process(plan: CopyPlan | None, bounds: Bounds, environment: Any) -> Session:
    """In a process that plays several episodes one after another: where they write to it, each on a copy."""
    return session_for(environment if plan is None else plan.copy_of(environment), bounds)


# -- the model's side, as processes without a model see it


@dataclass(frozen=True)
class NoModel:
    """Stands for the model where the environment runs in processes of its own."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model is not in this process, so there is no model.{name}: use --rl-env-isolation thread"
        )


@dataclass(frozen=True)
class StoredTokenizer:
    """Stands for the tokenizer there: read from a file of ours when it is first used."""

    file: Path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_stored(self.file), name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The tokenizer's own call."""
        return _stored(self.file)(*arguments, **keywords)

    def __len__(self) -> int:
        return len(_stored(self.file))


_STORED: dict[Path, Any] = {}


def _stored(file: Path) -> Any:
    if file not in _STORED:
        _STORED[file] = pickle.loads(file.read_bytes())
    return _STORED[file]
