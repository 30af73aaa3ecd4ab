"""Sessions in worker processes, and what stands in for the model and the tokenizer there."""

from __future__ import annotations

import os
import pickle
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aitrain.environment.rollout_session import session_for
from aitrain.environment.score_parsing import Bounds, ScoreResult
from aitrain.environment.session import AssistantTurn, EnvResponse, ResetResult, SessionLike
from aitrain.environment.state_watch import StateSnapshot, UnknownStateError
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.failure import CallFailed
from aitrain.execution.processes import ProcessPool, WorkerLease


def remote_session(processes: ProcessPool, by_episode: bool, bounds: Bounds) -> RemoteSession:
    """A session in its own process. `by_episode`: the process ends after an episode that changed its environment, so
    that the next one begins with an environment as build_dataset left it."""
    return RemoteSession(processes.lease(partial(_session_in_process, by_episode, bounds)))


@dataclass(frozen=True)
class RemoteSession:
    """A session in another process."""

    lease: WorkerLease

    def open(self, arguments: dict[str, Any]) -> ResetResult:
        reset: ResetResult = self.lease.call("open", arguments)
        return reset

    def respond(self, turn: AssistantTurn) -> EnvResponse:
        response: EnvResponse = self.lease.call("respond", turn)
        return response

    def score(self, arguments: dict[str, Any]) -> ScoreResult:
        result: ScoreResult = self.lease.call("score", arguments)
        return result

    def close(self) -> None:
        is_changed = False
        with suppress(CallFailed):
            is_changed = bool(self.lease.call("close"))
        self.lease.release(is_changed)


@dataclass
class _SessionInProcess:
    """A session in a worker process, which plays several episodes one after another."""

    session: SessionLike
    environment: Any
    before: StateSnapshot | None
    """The environment before the first episode; None if it cannot be compared."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def close(self) -> bool:
        """Close the session, and an environment that may have changed; returns whether it may."""
        self.session.close()
        is_changed = self.before is None or (self.before.is_changed() and bool(self.before.changed_objects()))
        if is_changed and callable(close := getattr(self.environment, "close", None)):
            with suppress(Exception):
                run_if_async(close())
        return is_changed


def _session_in_process(by_episode: bool, bounds: Bounds, environment: Any) -> SessionLike | _SessionInProcess:
    session = session_for(environment, bounds)
    if not by_episode or getattr(environment, "concurrent", False) is True:
        return session
    if not _BEFORE:
        try:
            _BEFORE.append(StateSnapshot(environment))
        except UnknownStateError:
            _BEFORE.append(None)
    return _SessionInProcess(session, environment, _BEFORE[0])


_BEFORE: list[StateSnapshot | None] = []
"""The environment of this process, as it was before the first episode."""


# -- model and tokenizer in processes without a model


@dataclass(frozen=True)
class NoModel:
    """The `model` argument in processes without the model; every use raises AttributeError with the advice."""

    advice: str = "use --rl-env-isolation thread"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the model is not in this process, so there is no model.{name}: {self.advice}")


@dataclass(frozen=True)
class StoredTokenizer:
    """The `tokenizer` argument in worker processes; unpickled from a file on first use."""

    file: Path

    @classmethod
    def of(cls, tokenizer: Any) -> StoredTokenizer | None:
        """Pickle a tokenizer, if there is one, into a temporary file."""
        if tokenizer is None:
            return None
        handle, name = tempfile.mkstemp(prefix="aitrain-tokenizer-")
        with os.fdopen(handle, "wb") as file:
            pickle.dump(tokenizer, file)
        return cls(Path(name))

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
