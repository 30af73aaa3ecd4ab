"""The kinds of sessions, by the method that plays an episode."""

from __future__ import annotations

from typing import Any

from aitrain.environment.contract import Case, env_kind
from aitrain.environment.rollout_session import RolloutSession
from aitrain.environment.score_parsing import ZERO_TO_ONE, Bounds
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.environment.session import GeneratorSession, ObjectSession, Session, SessionLike, SingleTurnSession

_SESSIONS: dict[str, type[Session]] = {
    "score_episode": SingleTurnSession,
    "episode": GeneratorSession,
    "start": ObjectSession,
    "rollout": RolloutSession,
}


def session_for(environment: Any, bounds: Bounds = ZERO_TO_ONE, case: Case | None = None) -> SessionLike:
    """The session of a new episode; `case` is needed for an environment that a server has."""
    if isinstance(environment, ServedEnvironment):
        return environment.session(case, bounds)
    return _SESSIONS[env_kind(environment)](environment, bounds)
