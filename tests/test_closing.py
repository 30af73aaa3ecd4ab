"""`close` of an environment: once in each process that called it, at the end, whatever happened."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from pathlib import Path

import pytest

from aitrain import TrainConfig
from aitrain.environment.runner import start_runner
from tests.rollout.scripted import Asks, Scripted, cases, play


class Closes(Asks):
    """Writes a line for each call of `close`."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def score_episode(self, case_idx: int) -> float:
        return 1.0

    async def close(self) -> None:
        await asyncio.sleep(0)
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()}\n")


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_each_process_that_called_it_closes_it_once(isolation: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    play(Closes(notes), Scripted(lambda _: "x$"), of=cases(4), rl_env_isolation=isolation)
    closed = [int(line) for line in notes.read_text().splitlines()]
    assert closed.count(os.getpid()) == 1
    assert len(closed) == len(set(closed))
    assert (len(closed) > 1) == (isolation == "process")


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_close_that_raises_is_shown_and_ends_nothing(isolation: str, tmp_path: Path) -> None:
    class Raises(Closes):
        def close(self) -> None:  # type: ignore[override]
            raise ValueError("no such file")

    shown = list[str]()
    with closing(start_runner(Raises(tmp_path), TrainConfig(rl_env_isolation=isolation))) as runner:
        runner.notify = shown.append
    assert len(shown) == 1
    assert "no such file" in shown[0]
