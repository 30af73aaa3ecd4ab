"""The vLLM server that a run generates with: started for it, watched, started again when it dies, and ended with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aitrain.config import TrainConfig
from aitrain.environment.finding import PACKAGE
from aitrain.errors import RunFailed
from aitrain.events import Announce, Note, Phase
from aitrain.launch.preflight import Plan, starts_server
from aitrain.launch.vllm_server import ServerPlan, VllmServer
from aitrain.run_folder import RunFolder, write_json

LOOK = 0.5
"""Seconds between two looks whether it lives."""


@contextmanager
def managed_server(plan: Plan, folder: RunFolder, announce: Announce) -> Iterator[str | None]:
    """The address of the run's own server, while this lasts; None for a run that has none.

    Raises:
        RunFailed: it cannot be started.
    """
    folder.server.unlink(missing_ok=True)  # of a run that is resumed
    if not starts_server(plan.config):
        yield None
        return
    with (
        VllmServer.start(_server_plan(plan, folder), lambda text: announce(Phase(text))) as server,
        _Watch(server, plan.config.vllm_max_restarts, announce, folder).watching(),
    ):
        yield server.url


def _server_plan(plan: Plan, folder: RunFolder) -> ServerPlan:
    config = plan.config
    return ServerPlan(
        model=str(PACKAGE / "tiny_model") if config.model == "tiny" else config.model,
        log=folder.path / "vllm-server.log",
        gpus=plan.server_gpus,
        tensor_parallel=config.vllm_tensor_parallel_size,
        context=_context(config),
        lora_rank=config.lora_r if config.weight_sync == "adapter" else None,
        memory=config.vllm_memory,
        dtype="float32" if not plan.server_gpus and config.dtype == "auto" else config.dtype,
        trust_remote_code=config.trust_remote_code,
        seed=config.seed,
    )


def _context(config: TrainConfig) -> int | None:
    """As far as the knobs tell before a dataset is built; None: what the model allows."""
    episode = config.rl_max_episode_tokens
    if config.rl_max_prompt_length is None or episode is None:
        return config.model_max_length
    return config.rl_max_prompt_length + episode


@dataclass
class _Watch:
    """Starts a server again that has died, so often and no more."""

    server: VllmServer
    restarts: int
    announce: Announce
    folder: RunFolder
    over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In a thread, while this lasts."""
        self._note("running", 0)
        thread = threading.Thread(target=self._watch, name="vllm-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join()

    def _watch(self) -> None:
        for restart in range(1, self.restarts + 1):
            code = self._wait_for_death()
            if code is None:
                return
            self._say(f"vLLM's server ended ({_how(code)}): starting it again, {restart} of {self.restarts}.")
            self._note("starting", restart)
            try:
                self.server.restart()
            except RunFailed as error:
                self._give_up(str(error), restart)
                return
            self._note("running", restart)
        if (code := self._wait_for_death()) is not None:
            why = f"vLLM's server ended ({_how(code)}), and is not started again (--vllm-max-restarts)."
            self._give_up(why, self.restarts)

    def _give_up(self, why: str, restarts: int) -> None:
        """The training processes read that, and wait no longer."""
        self._say(why)
        self._note("ended", restarts, why)

    def _say(self, text: str) -> None:
        """On the screen and in train.log, where the training processes say what they make of it."""
        self.announce(Note(text))
        with self.folder.log.open("a", encoding="utf-8") as log:
            log.write(f"{text}\n")

    def _note(self, state: str, restarts: int, why: str = "") -> None:
        write_json(self.folder.server, {"state": state, "restarts": restarts, "why": why}, durable=False)

    def _wait_for_death(self) -> int | None:
        """Its exit code, or None when the run is over before."""
        while not self.over.wait(LOOK):
            code = self.server.poll()
            if code is not None:
                return code
        return None


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
