"""What model judges said, and what they cost, in a file that several processes use at the same time."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from aitrain.execution.failure import CallFailed, Failure

BUSY_SECONDS = 30.0
TABLES = (
    "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, verdict TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS spent (judge TEXT PRIMARY KEY, calls INTEGER NOT NULL, tokens INTEGER NOT NULL)",
)


@dataclass(frozen=True)
class Budget:
    """The most that a judge may spend, over all runs that use the same file."""

    max_calls: int | None = None
    max_tokens: int | None = None

    def problem(self, calls: int, tokens: int) -> str:
        """Which limit is reached; empty if none is."""
        if self.max_calls is not None and calls >= self.max_calls:
            return f"its budget of {self.max_calls} calls is used up: raise max_calls"
        if self.max_tokens is not None and tokens >= self.max_tokens:
            return f"its budget of {self.max_tokens} tokens is used up ({tokens} were spent): raise max_tokens"
        return ""


@dataclass(frozen=True)
class VerdictStore:
    """Verdicts by the hash of what was asked, and what each judge has spent. No text of a policy is kept."""

    file: Path

    def find(self, key: str) -> list[float] | None:
        """The stored verdict; None if there is none."""
        with self._transaction("DEFERRED") as database:
            row = database.execute("SELECT verdict FROM verdicts WHERE key = ?", (key,)).fetchone()
        return None if row is None else [float(value) for value in json.loads(row[0])]

    def keep(self, key: str, verdict: list[float]) -> list[float]:
        """Store a verdict; returns the one that counts, which is the first for its key."""
        with self._transaction("IMMEDIATE") as database:
            database.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", (key, json.dumps(verdict)))
        return self.find(key) or verdict

    def reserve(self, judge: str, budget: Budget) -> None:
        """Count a call before it is made.

        Raises:
            CallFailed: the budget is used up.
        """
        with self._transaction("IMMEDIATE") as database:
            calls, tokens = self._spent(database, judge)
            problem = budget.problem(calls, tokens)
            if problem:
                advice = f"or move {self.file} away, as a new file starts a new budget"
                raise CallFailed(Failure("raised", f"the judge {judge}: {problem}, {advice}"))
            database.execute("INSERT OR REPLACE INTO spent VALUES (?, ?, ?)", (judge, calls + 1, tokens))

    def add_tokens(self, judge: str, tokens: int) -> None:
        """Count the tokens of a call that was reserved."""
        with self._transaction("IMMEDIATE") as database:
            database.execute("UPDATE spent SET tokens = tokens + ? WHERE judge = ?", (tokens, judge))

    def spent(self, judge: str) -> tuple[int, int]:
        """Calls and tokens that a judge has spent."""
        with self._transaction("DEFERRED") as database:
            return self._spent(database, judge)

    @staticmethod
    def _spent(database: sqlite3.Connection, judge: str) -> tuple[int, int]:
        row = database.execute("SELECT calls, tokens FROM spent WHERE judge = ?", (judge,)).fetchone()
        return row or (0, 0)

    @contextmanager
    def _transaction(self, kind: str) -> Iterator[sqlite3.Connection]:
        """A connection of its own, as threads and forked processes must not share one.

        Raises:
            CallFailed: the file cannot be read or written.
        """
        try:
            with closing(sqlite3.connect(self.file, timeout=BUSY_SECONDS, isolation_level=None)) as database:
                database.execute("PRAGMA synchronous = OFF")  # what a power failure loses is asked for again
                for table in TABLES:
                    database.execute(table)
                database.execute(f"BEGIN {kind}")
                yield database
                database.execute("COMMIT")
        except sqlite3.Error as error:
            message = (
                f"the judges' file {self.file} cannot be used: {error}\nName another one with cache, or delete it."
            )
            raise CallFailed(Failure("raised", message)) from error
