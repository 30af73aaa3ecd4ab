"""The vLLM server of one run: started for it, restarted when it dies, ended with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aitrain.errors import RunFailed
from aitrain.events import Announce, Note, Phase
from aitrain.launch.preflight import RunPlan, starts_server
from aitrain.packages import PACKAGE
from aitrain.runs.run_folder import RunFolder, write_json
from aitrain.vllm.server_process import ServerConfig, VLLMServer

LOOK = 0.5
"""Seconds between two checks whether the server lives."""


@contextmanager
def managed_server(plan: RunPlan, folder: RunFolder, announce: Announce) -> Iterator[str | None]:
    """Run the vLLM server of a plan, and yield its address; None if the run starts no server.

    Raises:
        RunFailed: the server cannot be started.
    """
    folder.server.unlink(missing_ok=True)  # of a run that is resumed
    if not starts_server(plan.config):
        yield None
        return
    with (
        VLLMServer.start(_server_plan(plan, folder), lambda text: announce(Phase(text))) as server,
        _Restarter(server, plan.config.vllm_max_restarts, announce, folder).watching(),
    ):
        yield server.url


def _server_plan(plan: RunPlan, folder: RunFolder) -> ServerConfig:
    config = plan.config
    context = config.model_max_length  # before the dataset is built, only the options are known; None: the model's
    if config.rl_max_prompt_length is not None and config.rl_max_episode_tokens is not None:
        context = config.rl_max_prompt_length + config.rl_max_episode_tokens
    return ServerConfig(
        model=str(PACKAGE / "tiny_model") if config.model == "tiny" else config.model,
        log=folder.path / "vllm-server.log",
        gpus=plan.server_gpus,
        tensor_parallel=config.vllm_tensor_parallel_size,
        context=context,
        lora_rank=config.lora_r if config.weight_sync == "adapter" else None,
        memory=config.vllm_memory,
        dtype="float32" if not plan.server_gpus and config.dtype == "auto" else config.dtype,
        trust_remote_code=config.trust_remote_code,
        seed=config.seed,
    )


@dataclass
class _Restarter:
    """Restarts a server that has died, at most `restarts` times."""

    server: VLLMServer
    restarts: int
    announce: Announce
    folder: RunFolder
    over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the server in a thread."""
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
            self._say(f"vLLM's server ended ({_how(code)}): restart {restart} of {self.restarts}.")
            self._note("starting", restart)
            try:
                self.server.restart()
            except RunFailed as error:
                self._give_up(str(error), restart)
                return
            self._note("running", restart)
        if (code := self._wait_for_death()) is not None:
            why = f"vLLM's server ended ({_how(code)}), and is not restarted again (--vllm-max-restarts)."
            self._give_up(why, self.restarts)

    def _give_up(self, why: str, restarts: int) -> None:
        """Write the reason to vllm-server.json, so that the training processes stop waiting for the server."""
        self._say(why)
        self._note("ended", restarts, why)

    def _say(self, text: str) -> None:
        """Show a text on the screen, and write it to train.log."""
        self.announce(Note(text))
        with self.folder.log.open("a", encoding="utf-8") as log:
            log.write(f"{text}\n")

    def _note(self, state: str, restarts: int, why: str = "") -> None:
        write_json(self.folder.server, {"state": state, "restarts": restarts, "why": why}, durable=False)

    def _wait_for_death(self) -> int | None:
        """The server's exit code, or None if the run ends first."""
        while not self.over.wait(LOOK):
            code = self.server.poll()
            if code is not None:
                return code
        return None


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
