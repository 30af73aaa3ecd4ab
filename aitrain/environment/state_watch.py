"""What the watched calls of an environment have changed.

Calls are watched instead of reading their source. What cannot be compared, such as an open database, is unknown, which
does not mean unchanged.
"""

from __future__ import annotations

import builtins
import functools
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from aitrain.environment.object_walk import UnknownStateError, is_users_module
from aitrain.environment.state_snapshot import TORCH_SEED, StateChange, StateSnapshot
from aitrain.execution.user_code import is_users_file


@dataclass(eq=False)
class StateWatch:
    """What the watched calls of one environment changed."""

    environment: Any
    by_episode: bool = False
    """Whether all changes are wanted; otherwise the first one ends the watch."""
    changes: list[StateChange] = field(default_factory=list)
    changed: list[Any] = field(default_factory=list)
    """The objects of the changes, as far as they are objects."""
    unknown: str = ""
    """Why it cannot be known what calls change; empty if it can."""
    first: StateSnapshot | None = None
    """What was before the first change."""

    _unseen: dict[CodeType, set[int]] = field(default_factory=dict)  # lines that no watched call has reached
    _namespaces: dict[int, dict[str, Any]] = field(default_factory=dict)
    _files: set[str] = field(default_factory=set)

    @property
    def is_changed(self) -> bool:
        """Whether calls change something, or that cannot be known."""
        return bool(self.changes or self.unknown)

    @property
    def reason(self) -> str:
        """The beginning of a sentence that says what changes, or why that cannot be known."""
        name = type(self.environment).__name__
        if not self.changes:
            return f"What calls of {name} change cannot be known: {self.unknown}"
        place = f" ({self.changes[0].place})" if self.changes[0].place else ""
        return f"A call of {name} changes {self.changes[0].target}{place}"

    @property
    def advice(self) -> str:
        """A sentence about state that may well be a cache; empty about other state."""
        is_cache = bool(self.changes) and all(change.only_adds for change in self.changes)
        return f"{self.changes[0].target} only gains entries, as a cache does. " if is_cache else ""

    def clear(self) -> None:
        """Forget the changes, and not which lines were reached."""
        self.changes, self.changed, self.unknown, self.first = [], [], "", None

    def snapshot(self) -> StateSnapshot | None:
        """A new snapshot; None if it cannot be made, which is noted."""
        try:
            return StateSnapshot(self.environment, list(self._unseen), list(self._namespaces.values()))
        except UnknownStateError as error:
            self.unknown = self.unknown or str(error)
        except Exception as error:  # of a class of the user's, such as a property __dict__
            self.unknown = self.unknown or f"{type(error).__name__}: {error}"
        return None

    def unseen_lines(self, code: CodeType) -> set[int]:
        """Lines of a function that no watched call has reached."""
        if code not in self._unseen:
            self._unseen[code] = {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
        return self._unseen[code]

    def is_users(self, frame: FrameType) -> bool:
        """Whether a function is the user's, or is in the file of a class of the environment."""
        file = frame.f_code.co_filename
        if file.startswith("<"):  # made by `exec`, as dataclasses make methods
            module = sys.modules.get(str(frame.f_globals.get("__name__")))
            return module is None or module is builtins or is_users_module(module)
        return is_users_file(file) or file in self._files_of_classes

    @functools.cached_property
    def _files_of_classes(self) -> set[str]:
        modules = [sys.modules.get(kind.__module__) for kind in type(self.environment).__mro__]
        files = {str(getattr(module, "__file__", "")) for module in modules}
        return {file for file in files if "site-packages" in file}

    def note(self, snapshot: StateSnapshot, place: str = "", is_alone: bool = True, seeds_torch: bool = True) -> bool:
        """Note what differs from a snapshot; returns whether anything does that matters."""
        objects = snapshot.changed_objects()
        changes = [replace(snapshot.describe(item), place=place) for item in objects]
        if is_alone:  # beside others, libraries may change the state of the process
            shared = snapshot.changed_process_state()
            changes += [replace(each, place=place) for each in shared if seeds_torch or each.target != TORCH_SEED]
        if changes:
            self.first = self.first or snapshot
            self.changes += changes
            self.changed += objects
        return bool(changes)

    def note_files(self, written: set[str], place: str) -> None:
        """Note the files that this watched call wrote, and an earlier one too."""
        self.changes += [StateChange(f"the file {Path(name).name}", place) for name in sorted(written & self._files)]
        self._files |= written

    def reached(self, namespace: dict[str, Any]) -> bool:
        """Note the module of code that is called; returns whether it is new."""
        is_new = id(namespace) not in self._namespaces
        self._namespaces[id(namespace)] = namespace
        return is_new
