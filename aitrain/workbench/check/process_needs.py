"""Checks whether rows and attributes can be sent to other processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, cast

from aitrain.execution.failure import CallFailed
from aitrain.execution.forked_call import Answer, call_forked
from aitrain.workbench.check.finding import EnvFinding
from aitrain.workbench.check.subject import Subject

LARGE = 500 << 20
SECONDS = 60.0
WHERE = "Training on several GPUs, or with --rl-env-isolation process, is refused."


def pickling(subject: Subject) -> Iterator[EnvFinding]:
    """Rows, and what build_dataset sets on the environment, can be sent to other processes."""
    for case in (*subject.cases, *subject.opened.held_out):
        for column, value in case.row.items():
            if (size := _size(value)) is None:
                yield EnvFinding(
                    "pickling",
                    "warning",
                    f"Column {column} holds a {type(value).__name__}, which cannot be pickled.",
                    "Training on several GPUs is refused: rows are sent to the other processes.",
                    "Keep plain data in rows: texts, numbers, lists, dicts.",
                    case.case_idx,
                )
                return
            del size
    yield from _attributes(subject)


def _attributes(subject: Subject) -> Iterator[EnvFinding]:
    sizes = {name: _size(value) for name, value in getattr(subject.environment, "__dict__", {}).items()}
    lost = [name for name, size in sizes.items() if size is None]
    own = _set_by_init(subject) if lost else []
    for name in lost:
        if name not in own:
            yield EnvFinding(
                "pickling",
                "warning",
                f"build_dataset sets self.{name}, which cannot be pickled.",
                WHERE,
                "Set it in __init__, which runs in every process.",
            )
            return
    whole = sum(size or 0 for size in sizes.values())
    if whole > LARGE:
        yield EnvFinding(
            "pickling",
            "info",
            f"The environment's attributes have {whole >> 20:,} MiB.",
            "Each training process keeps its own copy.",
            "Load large data once, with memory maps or from a file by row.",
        )


def _set_by_init(subject: Subject) -> list[str]:
    """Names of the attributes that the constructor sets, seen in a forked process."""

    def construct(_: Answer) -> list[str]:
        made = type(subject.environment)(**(subject.config.rl_env_config or {}))
        return list(getattr(made, "__dict__", {}))

    try:
        return cast("list[str]", call_forked(construct, SECONDS))
    except CallFailed:
        return list(vars(subject.environment))  # made in another way: unknown


def _size(value: Any) -> int | None:
    """Bytes of the pickled value; None if it cannot be pickled."""
    try:
        return len(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    except Exception:
        return None
