"""The events of a run, sent from the training process to the screen as one JSON line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

from aitrain.redaction import redact


@dataclass(frozen=True)
class Started:
    """A training process is up."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Phase:
    """What the run is doing now; the next event replaces it on the screen."""

    text: str


NoteLevel: TypeAlias = Literal["info", "warning"]


@dataclass(frozen=True)
class Note:
    """A note for the user, which stays on the screen."""

    text: str
    level: NoteLevel = "warning"
    """`warning`: something may be wrong; `info`: nothing is."""

    @property
    def mark(self) -> str:
        """What a screen shows before the text."""
        return "! " if self.level == "warning" else ""


@dataclass(frozen=True)
class NotChecked:
    """Something that a dry run does not check."""

    text: str


@dataclass(frozen=True)
class Step:
    """Optimizer steps were done. `reward` is their mean score, None if nothing was scored; unknown values are None."""

    step: int
    steps: int
    reward: float | None
    seconds_left: float
    flat_groups: float | None = None
    """Share of the groups in which all scores are equal."""
    truncated: float | None = None
    """Share of the episodes that a limit on tokens ended."""
    failed: float | None = None
    """Share of the episodes that the environment failed on."""
    tokens_per_second: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of a step and of its parts: `step`, `generate`, `environment`, `optimize`."""


@dataclass(frozen=True)
class Evaluated:
    """The held-out cases were scored: the mean score of sampled and of greedy completions."""

    when: str
    sampled: float | None
    greedy: float | None
    environments: dict[str, float | None] = field(default_factory=dict)
    """The sampled score of each of several environments."""


@dataclass(frozen=True)
class Evaluating:
    """Episodes of an eval were played and scored: `done` of `episodes`; `score` is the mean of the present decoding."""

    done: int
    episodes: int
    decoding: str
    score: float | None
    seconds_left: float
    failed: float
    """Share of the episodes that the environment failed on."""


@dataclass(frozen=True)
class Playing:
    """Progress of a rollout that takes seconds: conversations that are over, of all that are played at the same time.
    `episodes` is 0 when it is over."""

    done: int
    episodes: int
    tokens_per_second: float | None
    """Tokens sampled per second since it began; None before the first ones."""


@dataclass(frozen=True)
class Failed:
    """The run has failed."""

    message: str
    exit_code: int
    status: str = "failed"
    """Status of the run for status.json: failed or stalled."""


@dataclass(frozen=True)
class Ended:
    """The run has ended and result.json is written; `status` is finished or stopped.

    `because` is the reason if the run stopped by itself; None after a stop request.
    """

    status: str
    step: int
    because: str | None = None


SERVER_VARIABLE = "AITRAIN_VLLM_SERVER"
"""Environment variable by which the parent passes the address of the run's own vLLM server to training processes."""

OWN_FOLDER_VARIABLE = "AITRAIN_OWN_FOLDER"
"""Environment variable that is set in training processes of a machine that does not see the run folder of node 0."""

Event: TypeAlias = Started | Phase | Note | NotChecked | Step | Evaluated | Evaluating | Playing | Failed | Ended
Announce: TypeAlias = Callable[[Event], None]

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (Started, Phase, Note, NotChecked, Step, Evaluated, Evaluating, Playing, Failed, Ended)
}


def encode(event: Event) -> str:
    """The event as one line of JSON, newline included, without secrets."""
    fields = {name: redact(value) if isinstance(value, str) else value for name, value in asdict(event).items()}
    return json.dumps({"event": type(event).__name__, **fields}) + "\n"


def decode(line: str) -> Event | None:
    """The event on a line; None if the line is something else, such as output of a library."""
    try:
        fields = json.loads(line)
        return _KINDS[fields.pop("event")](**fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
