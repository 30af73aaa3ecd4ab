"""The vLLM servers of one run: started for it, restarted when they die, ended with it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aitrain.errors import RunFailed
from aitrain.events import SERVER_VARIABLE, Announce, Note, Phase
from aitrain.launch.preflight import RunPlan
from aitrain.packages import named_folder
from aitrain.runs.run_folder import RunFolder, write_json
from aitrain.vllm.server_arguments import (
    KEY_VARIABLE,
    common_arguments,
    new_key,
    training_arguments,
)
from aitrain.vllm.server_process import VLLMServer, running

RESTARTS = 3
"""How often a server is restarted when it dies."""
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
    servers = servers_of(plan, folder)
    announce(Phase("starting vLLM"))
    with running(servers), _restarting(servers, announce, folder):
        yield {SERVER_VARIABLE: ",".join(server.url for server in servers), KEY_VARIABLE: servers[0].key}


def servers_of(plan: RunPlan, folder: RunFolder) -> list[VLLMServer]:
    """The run's servers, each with its share of the GPUs."""
    config, count = plan.config, plan.config.vllm_servers
    context = config.model_max_length  # before the dataset is built, only the options are known; None: the model's
    if config.rl_max_prompt_length is not None and config.rl_max_episode_tokens is not None:
        context = config.rl_max_prompt_length + config.rl_max_episode_tokens
    key, rank = new_key(), config.lora_r if config.weight_sync == "adapter" else None
    arguments = common_arguments(config, str(named_folder(config.model) or config.model), plan.server_gpus, rank)
    arguments |= training_arguments(plan.server_gpus)
    arguments |= {} if context is None else {"max_model_len": context}
    arguments |= {name.replace("-", "_"): value for name, value in config.vllm_args.items()}
    return [
        VLLMServer(
            arguments,
            folder.path / ("vllm-server.log" if count == 1 else f"vllm-server-{number}.log"),
            plan.server_gpus[number * config.vllm_server_gpus :][: config.vllm_server_gpus],
            key=key,
        )
        for number in range(count)
    ]


@contextmanager
def _restarting(servers: list[VLLMServer], announce: Announce, folder: RunFolder) -> Iterator[None]:
    """Context in which servers that die are restarted, each at most RESTARTS times; when one is not, vllm-server.json
    says why, so that the training processes stop waiting for it."""
    over = threading.Event()

    def watch(server: VLLMServer) -> None:
        name, why = "vLLM's server" if len(servers) == 1 else f"The vLLM server at {server.url}", ""
        for restart in range(1, RESTARTS + 2):
            while (code := server.poll()) is None:
                if over.wait(LOOK):
                    return
            why = f"{name} ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
            if restart > RESTARTS:
                why = f"{why}, and is not restarted again."
                break
            announce(Note(f"{why}: restart {restart} of {RESTARTS}."))
            try:
                server.restart()
            except RunFailed as error:
                why = str(error)
                break
        if not over.is_set():
            announce(Note(why))
            write_json(folder.server, {"why": why}, durable=False)

    threads = [threading.Thread(target=watch, args=[server], name="vllm-watch", daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for server, thread in zip(servers, threads, strict=True):
            while thread.is_alive():
                server.ask_to_end()  # it may be starting, which can take minutes
                thread.join(LOOK)
