"""The vLLM servers of one run: started for it, restarted when they die, ended with it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from aitrain.errors import RunFailed
from aitrain.events import SERVER_VARIABLE, Announce, Note, Phase
from aitrain.launch.preflight import RunPlan
from aitrain.named_models import named_folder
from aitrain.runs.run_folder import RunFolder, write_json
from aitrain.vllm.addresses import KEY_VARIABLE, LOOPBACK, new_key
from aitrain.vllm.server_arguments import argument_words
from aitrain.vllm.server_process import ServerConfig, VLLMServer, stop_all

LOOK = 0.5
"""Seconds between two checks whether a server lives."""


@contextmanager
def managed_server(plan: RunPlan, folder: RunFolder, announce: Announce) -> Iterator[dict[str, str]]:
    """Run the vLLM servers of a plan, and yield the environment variables with which training processes reach them:
    their addresses, with commas, and their key; none if the run starts none.

    Raises:
        RunFailed: a server cannot be started.
    """
    folder.server.unlink(missing_ok=True)  # of a run that is resumed
    if not plan.config.starts_vllm_servers:
        yield {}
        return
    plans = server_plans(plan, folder)
    many = f"{len(plans)} servers: " if len(plans) > 1 else ""
    with ExitStack() as stack:
        servers = VLLMServer.start_all(plans, lambda text: announce(Phase(f"{many}{text}")))
        stack.callback(stop_all, servers)
        states = _ServerStates(servers, announce, folder)
        for server in servers:
            stack.enter_context(_Restarter(server, plan.config.vllm_max_restarts, states).watching())
        yield {SERVER_VARIABLE: ",".join(server.url for server in servers), KEY_VARIABLE: plans[0].key}


def server_plans(plan: RunPlan, folder: RunFolder) -> list[ServerConfig]:
    """The configurations of the run's servers, each with its share of the GPUs."""
    config, count = plan.config, plan.config.vllm_servers
    context = config.model_max_length  # before the dataset is built, only the options are known; None: the model's
    if config.rl_max_prompt_length is not None and config.rl_max_episode_tokens is not None:
        context = config.rl_max_prompt_length + config.rl_max_episode_tokens
    dtype = "float32" if not plan.server_gpus and config.dtype == "auto" else config.dtype
    if dtype == "float32" and config.vllm_quantization is not None:
        dtype = "bfloat16"  # vLLM computes with FP8 weights in half precision only
    host, key = config.vllm_listen_address or (plan.nodes.address if plan.nodes else LOOPBACK), new_key()
    return [
        ServerConfig(
            model=str(named_folder(config.model) or config.model),
            log=folder.path / ("vllm-server.log" if count == 1 else f"vllm-server-{number}.log"),
            gpus=plan.server_gpus[number * config.vllm_server_gpus :][: config.vllm_server_gpus],
            tensor_parallel=config.vllm_tensor_parallel_size,
            data_parallel=config.vllm_data_parallel_size,
            quantization=config.vllm_quantization,
            speculative=config.vllm_speculative,
            more=config.vllm_args,
            context=context,
            lora_rank=config.lora_r if config.weight_sync == "adapter" else None,
            memory=config.vllm_memory,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            seed=config.seed,
            host=host,
            key=key,
        )
        for number in range(count)
    ]


def servers_in_words(plan: RunPlan) -> str:
    """The servers that a run starts, for its plan."""
    config = plan.config
    where = f"GPU {', '.join(plan.server_gpus)}" if plan.server_gpus else "the CPU"
    if config.launcher == "ray":
        where = "one machine of the Ray cluster"
    parts = [f"{config.vllm_servers} on {where}", f"weights by {config.weight_sync}"]
    if config.vllm_data_parallel_size > 1:
        parts.append(f"{config.vllm_data_parallel_size} copies of the model in each")
    if config.vllm_quantization is not None:
        parts.append(f"{config.vllm_quantization} base")
    if config.vllm_speculative is not None:
        parts.append(f"speculative decoding: {json.dumps(config.vllm_speculative)}")
    return ", ".join([*parts, *argument_words(config.vllm_args)])


class _ServerStates:
    """What is known of each server of a run, in vllm-server.json."""

    def __init__(self, servers: list[VLLMServer], announce: Announce, folder: RunFolder) -> None:
        self.servers, self.announce, self.folder = servers, announce, folder
        self.lock = threading.Lock()
        self.states = {server.url: {"state": "running", "restarts": 0, "why": ""} for server in servers}
        self._write()

    def name(self, server: VLLMServer) -> str:
        return "vLLM's server" if len(self.servers) == 1 else f"The vLLM server at {server.url}"

    def say(self, text: str) -> None:
        """Show a text on the screen, and write it to train.log."""
        self.announce(Note(text))
        with self.folder.log.open("a", encoding="utf-8") as log:
            log.write(f"{text}\n")

    def note(self, server: VLLMServer, state: str, restarts: int, why: str = "") -> None:
        """Write a server's state; once all have ended, with the reason, so that the training processes stop waiting."""
        with self.lock:
            self.states[server.url] = {"state": state, "restarts": restarts, "why": why}
            self._write()

    def _write(self) -> None:
        reasons = [state["why"] for state in self.states.values()]
        written = {"why": "\n".join(map(str, reasons[-2:])) if all(reasons) else "", "servers": self.states}
        write_json(self.folder.server, written, durable=False)


@dataclass
class _Restarter:
    """Restarts a server that has died, at most `restarts` times."""

    server: VLLMServer
    restarts: int
    states: _ServerStates
    over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the server in a thread."""
        thread = threading.Thread(target=self._watch, name="vllm-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            while thread.is_alive():
                self.server.ask_to_end()  # it may be starting, which can take minutes
                thread.join(LOOK)

    def _watch(self) -> None:
        server, states = self.server, self.states
        for restart in range(1, self.restarts + 1):
            code = self._wait_for_death()
            if code is None:
                return
            states.say(f"{states.name(server)} ended ({_how(code)}): restart {restart} of {self.restarts}.")
            states.note(server, "starting", restart)
            try:
                server.restart()
            except RunFailed as error:
                if not self.over.is_set():
                    self._give_up(str(error), restart)
                return
            states.note(server, "running", restart)
        if (code := self._wait_for_death()) is not None:
            why = f"{states.name(server)} ended ({_how(code)}), and is not restarted again (--vllm-max-restarts)."
            self._give_up(why, self.restarts)

    def _give_up(self, why: str, restarts: int) -> None:
        self.states.say(why)
        self.states.note(self.server, "ended", restarts, why)

    def _wait_for_death(self) -> int | None:
        """The server's exit code, or None if the run ends first."""
        while not self.over.wait(LOOK):
            code = self.server.poll()
            if code is not None:
                return code
        return None


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
