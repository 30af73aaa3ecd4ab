"""The time of each part of a step."""

from __future__ import annotations

import pytest

from aitrain.rollout import clock as rollout_clock
from aitrain.rollout.clock import RolloutClock
from aitrain.training import stopwatch
from aitrain.training.stopwatch import Stopwatch
from tests.finished_runs import FinishedRuns


class Clock:
    """Stands for time.monotonic, and moves only when it is told to."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stopwatch, "time", made)
    monkeypatch.setattr(rollout_clock, "time", made)
    return made


def play(watch: Stopwatch, clock: Clock) -> None:
    """A rollout of 1 + 2 + 4 seconds: generating, in between, the environment."""
    with watch.clock.running("rollout"):
        with watch.clock.running("generate"):
            clock.now += 1
        clock.now += 2
        with watch.clock.running("environment"):
            clock.now += 4


def test_a_line_of_several_steps_has_their_means_and_nothing_of_what_was_between(clock: Clock) -> None:
    watch = Stopwatch(RolloutClock())
    for seconds in (1, 3):
        play(watch, clock)  # held-out cases are scored
        watch.begin_step()
        clock.now += seconds
        watch.end_step()
        play(watch, clock)

    assert watch.take(0) == {
        "time/step": 2, "time/generate": 0, "time/environment": 0, "time/optimize": 2, "tokens_per_second": 0,
    }  # fmt: skip
    assert watch.take(0) == {}


def test_every_line_of_metrics_says_where_the_time_went(finished: FinishedRuns) -> None:
    """Of two steps on one batch, the second generates nothing."""
    steps = [line for line in finished("talk").history if "time/step" in line]
    assert [line["time/generate"] > 0 for line in steps] == [True, False, True, False]
    assert [line["tokens_per_second"] > 0 for line in steps] == [True, False, True, False]
    for line in steps:
        parts = line["time/generate"], line["time/environment"], line["time/optimize"]
        assert min(parts) >= 0
        assert sum(parts) <= line["time/step"] + 1e-5
