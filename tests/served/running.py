"""A server of an environment in a thread of the test, and what plays on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from aitrain import TrainConfig
from aitrain.environment.env_service import EnvService
from aitrain.environment.served_environment import ServedEnvironment, connect
from aitrain.jobs.env_terminal import describe
from aitrain.workbench.opening import open_environment


class Running:
    """A server that runs."""

    def __init__(self, environment: Any, port: int = 0, **options: Any) -> None:
        opened = open_environment(TrainConfig(**options), None, environment)
        self.runner = opened.runner
        self.runner.is_watched = False
        self.service = EnvService(self.runner, opened.all_cases, describe(opened, None))
        self.service.port = port
        self.url, self._ready = "", threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()

        def on_ready(url: str) -> None:
            self.url = url
            self._ready.set()

        await self.service.serve(on_ready)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def episodes(self) -> int:
        """Number of open sessions."""
        return sum(episode.session is not None for episode in self.service._episodes.values())

    def run(self, coroutine: Any) -> Any:
        """The result of a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def close(self) -> None:
        """Stop the server; its sessions are gone."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.service.stop.set)
            self._thread.join(10)
        self.runner.close()


@contextmanager
def served(environment: Any, **options: Any) -> Iterator[ServedEnvironment]:
    """The environment behind a server."""
    with closing(Running(environment, **options)) as server:
        yield connect(server.url)
