"""The progress of a rollout: counted where episodes are played, added up over the ranks, shown while it lasts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aitrain import activity
from aitrain.activity import SLOT, Activity, Snapshot
from aitrain.events import Event, Playing
from aitrain.rollout.engine import Completion, GenerationRequest
from aitrain.runs.heartbeat import BEAT, Heartbeat, Progress
from aitrain.runs.run_folder import RunFolder
from tests.rollout.scripted import Asks, Scripted, cases, play


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> bytearray:
    """Memory of two ranks, of which this process is the first."""
    shared = bytearray(2 * SLOT)
    monkeypatch.setattr(activity, "own", Activity(shared))
    return shared


class Answers(Asks):
    """Asks the first case once, the others twice."""

    def episode(self, case_idx: int) -> Iterator[Any]:
        yield None
        if case_idx:
            yield "more"
        return 1.0


class Watched(Scripted):
    """Notes the progress at each request, and counts its tokens as engines do."""

    def __init__(self) -> None:
        super().__init__(lambda _: "ab$")
        self.seen: list[Snapshot] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.seen.append(activity.rollouts())
        completion = await super().generate(request)
        activity.own.add_tokens(len(completion.ids))
        return completion


def test_episodes_and_tokens_are_counted_while_they_are_played() -> None:
    engine = Watched()
    play(Answers(), engine, of=cases(3))
    seen = [(one.done, one.episodes, one.tokens) for one in engine.seen]
    assert seen[0] == (0, 3, 0)
    assert seen[-1][1:] == (3, 12)
    assert max(done for done, _, _ in seen) >= 1
    assert activity.rollouts().episodes == 0


def test_a_heartbeat_tells_of_the_rollouts_of_all_ranks_where_they_take_seconds(
    memory: bytearray, tmp_path: Path
) -> None:
    told: list[Event] = []
    heartbeat = Heartbeat(RunFolder(tmp_path), Progress(), announce=told.append)
    with activity.own.rollout(3), Activity(memory, 1).rollout(1):
        heartbeat.tell_rollout()
        assert told == []
        activity.own.slot.since -= 2 * BEAT
        activity.own.end_episode()
        heartbeat.tell_rollout()
        activity.own.add_tokens(100)
        heartbeat.tell_rollout()
    heartbeat.tell_rollout()
    first, second, last = told
    assert first == Playing(1, 4, None)
    assert isinstance(second, Playing)
    assert 0 < (second.tokens_per_second or 0) <= 100 / BEAT / 2
    assert last == Playing(0, 0, None)
