"""Sessions in worker processes, and what stands in for the model and the tokenizer there."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aitrain.environment.call_policy import CopyPlan
from aitrain.environment.score_parsing import Bounds, ScoreResult
from aitrain.environment.session import AssistantTurn, EnvResponse, ResetResult, SessionLike
from aitrain.environment.session_kinds import session_for
from aitrain.execution.failure import CallFailed
from aitrain.execution.processes import CallPool, Lease


def remote_session(processes: CallPool, plan: CopyPlan | None, bounds: Bounds) -> RemoteSession:
    """A session in its own process, on a copy of the environment if there is a `plan`."""
    return RemoteSession(processes.lease(partial(_session_in_process, plan, bounds)))


@dataclass(frozen=True)
class RemoteSession:
    """A session in another process."""

    lease: Lease

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
        with suppress(CallFailed):
            self.lease.call("close")
        self.lease.release()


def _session_in_process(plan: CopyPlan | None, bounds: Bounds, environment: Any) -> SessionLike:
    """Make a session in a worker process, which plays several episodes one after another."""
    return session_for(environment if plan is None else plan.copy_of(environment), bounds)


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
    def of(cls, tokenizer: Any, share: Callable[[str], object]) -> StoredTokenizer:
        """Pickle a tokenizer into a temporary file; `share` makes the file readable in the processes."""
        handle, name = tempfile.mkstemp(prefix="aitrain-tokenizer-")
        with os.fdopen(handle, "wb") as file:
            pickle.dump(tokenizer, file)
        share(name)
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
