"""Episodes that do not wait for each other, as with a vLLM server."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Generator
from contextlib import closing
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.engines import live_servers
from aitrain.environment.contract import Case
from aitrain.environment.runner import start_runner
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.engine import Completion, GenerationRequest
from aitrain.rollout.episode import Rollout
from aitrain.rollout.limits import Limits
from tests.rollout import scripted
from tests.training.test_served import END, Fake, by, run


def test_an_episode_does_not_wait_for_another_one() -> None:
    """The first one's environment answers only when the other one is over; in rounds it would never."""
    is_over = threading.Event()

    class Last:
        concurrent = True

        def build_dataset(self) -> list[Any]:
            return []

        def episode(self, case_idx: int) -> Generator[str | None, str, float]:
            yield None
            assert case_idx or is_over.wait(60)
            yield "more "
            is_over.set()
            return 1.0

    with closing(start_runner(Last(), TrainConfig())) as runner:
        engine = scripted.Scripted(lambda _: "a$")
        rollout = Rollout(runner, engine, ChatFormat(scripted.Letters()), Limits(8, 99), scripted.END)
        episodes = asyncio.run(rollout.play([Case(number, "?", {}) for number in range(2)], range(2)))
    assert [episode.result.score for episode in episodes] == [1.0, 1.0]


def test_an_interrupt_ends_the_wait_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_servers, "POLL_SECONDS", 0.05)
    fake = Fake()
    engine = by(fake)
    fake.stop()

    async def interrupted() -> Completion:
        asyncio.get_running_loop().call_later(0.05, signal.raise_signal, signal.SIGINT)
        return await engine.generate(GenerationRequest([1], 4))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(interrupted())
        fake.start()
        assert run(engine.generate(GenerationRequest([1], 4))).ids == [1, END]
    finally:
        signal.signal(signal.SIGINT, before)
        fake.stop()
