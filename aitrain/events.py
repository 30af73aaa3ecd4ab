"""The events of a run, sent from the training process to the screen as one JSON line each."""

from __future__ import annotations  # docs/events.md has the types as they are written here

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias, get_args

from aitrain.redaction import redact


@dataclass(frozen=True)
class RunStarted:
    """The run has a folder. The first event for programs (`--json`); the parent makes it."""

    folder: str
    """The run folder."""
    schema: int = 1
    """Version of the events' form."""


@dataclass(frozen=True)
class RunResult:
    """The run has ended; the last event for programs, unless it is Failed. The parent makes it."""

    folder: str
    """The run folder."""
    result: dict[str, object]
    """result.json."""


@dataclass(frozen=True)
class Phase:
    """What the run is doing now; the next event replaces it on the screen."""

    text: str
    """What it does, in a few words."""


NoteLevel: TypeAlias = Literal["info", "warning"]


@dataclass(frozen=True)
class Note:
    """A note for the user, which stays on the screen."""

    text: str
    """What was noticed, and what to do about it."""
    level: NoteLevel = "warning"
    """`warning`: something may be wrong; `info`: nothing is."""

    @property
    def mark(self) -> str:
        """What a screen shows before the text."""
        return "! " if self.level == "warning" else ""


@dataclass(frozen=True)
class Step:
    """Optimizer steps were done; in an eval, episodes were played. Unknown values are None."""

    step: int
    """Optimizer steps done, or episodes."""
    steps: int
    """Optimizer steps of the whole run, or episodes of the eval."""
    reward: float | None
    """Mean score of the episodes; None if nothing was scored."""
    seconds_left: float
    """Estimated seconds until the last step."""
    flat_groups: float | None = None
    """Share of the groups in which all scores are equal."""
    truncated: float | None = None
    """Share of the episodes that a limit on tokens ended."""
    failed: float | None = None
    """Share of the episodes that the environment failed on."""
    tokens_per_second: float | None = None
    """Tokens sampled per second of the step."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of a step and of its parts: `step`, `generate`, `environment`, `optimize`."""


@dataclass(frozen=True)
class Evaluated:
    """The held-out cases were scored."""

    when: str
    """The scoring, such as before, step 50 or after."""
    sampled: float | None
    """Mean score of sampled completions."""
    greedy: float | None
    """Mean score of greedy completions."""
    environments: dict[str, float | None] = field(default_factory=dict)
    """The sampled score of each of several environments."""


@dataclass(frozen=True)
class Playing:
    """Progress of a rollout that takes seconds."""

    done: int
    """Episodes that are over."""
    episodes: int
    """Episodes that are played at the same time; 0 when the rollout is over."""
    tokens_per_second: float | None
    """Tokens sampled per second since it began; None before the first ones."""


@dataclass(frozen=True)
class Failed:
    """The run has failed."""

    message: str
    """What happened, where, and what to do next."""
    exit_code: int
    """The exit code of the command."""
    status: str = "failed"
    """Status of the run for status.json: failed or stalled."""


@dataclass(frozen=True)
class Ended:
    """The run has ended and result.json is written."""

    status: str
    """finished or stopped."""
    step: int
    """Optimizer steps done."""
    because: str | None = None
    """The reason if the run stopped by itself; None after a stop request."""


SERVER_VARIABLE = "AITRAIN_VLLM_SERVER"
"""Environment variable by which the parent passes the address of the run's own vLLM server to training processes."""

DRY_RUN_VARIABLE = "AITRAIN_DRY_RUN"
"""Environment variable with the number of training processes of a run that one process checks."""
STORE_VARIABLE = "AITRAIN_STORE"
"""Environment variable with the file descriptor of the socket on which rank 0 runs torch's store."""
LAUNCHER_VARIABLE = "AITRAIN_LAUNCHER"
"""Environment variable with the id of the process, such as torchrun, that started a training process."""
COMMAND_VARIABLE = "AITRAIN_COMMAND"
"""Environment variable with the id of the child of a launched training process that is the command of its machine."""
BYE = "\0bye "
"""Begins the last line of a launched training process, which ends with its rank."""

Event: TypeAlias = RunStarted | Phase | Note | Step | Evaluated | Playing | Failed | Ended | RunResult
Announce: TypeAlias = Callable[[Event], None]

_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


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
