"""Starts a vLLM server for one run, checks its health, and stops it with all its processes; and what a server is
started with that has a trained model, an adapter beside its base, each by its own name.

It answers those who have its key, as other users reach 127.0.0.1, too.
"""

import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from aitrain.errors import ConfigError, RunFailed
from aitrain.execution.process_tree import ProcessTree
from aitrain.redaction import RedactedLog
from aitrain.runs.model_reference import ADAPTER_CONFIG, ModelReference
from aitrain.runs.run_folder import read_object
from aitrain.vllm.server_arguments import (
    KEY_VARIABLE,
    LOOPBACK,
    argument_words,
    can_bind,
    key_header,
    new_key,
)

PROGRAM = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server")
"""Not the `vllm` command, which some builds lack. -P prevents that a folder named `vllm` hides the library."""
GUARD = "--middleware=aitrain.vllm.extensions.KeyGuard"
"""Requires the key on all paths."""
PORTS = range(20_000, 32_000)
"""Below the ephemeral ports, as about ten seconds pass between choosing a port and listening on it."""
STOP_SECONDS = 15.0
"""Seconds for the server to exit by itself."""
KILL_SECONDS = 20.0
"""Additional seconds until what is left is killed."""
POLL_SECONDS = 0.25
HTTP_TIMEOUT = 5.0

ERROR = re.compile(
    r"(?!(?:\([^)]*pid=\d+\)\s*)?(?:DEBUG|INFO|WARNING) )"
    r"(?:\([^)]*pid=\d+\)\s*)?(?:(?:ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^]]*\]\s*)?"
    r"([\w.]*(?:Error|Exception|Interrupt|ExitCode)\b.*|.*\berror: .+)"
)
"""Matches the error in a line of vLLM's log, which may begin with process, level, time and location; lines of lower
levels do not match, such as a warning about a module that is not needed."""
CONSEQUENCE = re.compile("Engine core initialization failed|See root cause above|WorkerProc initialization failed")


def free_port() -> int:
    """A port on which nothing listens.

    Raises:
        RunFailed: there is none.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        if can_bind(LOOPBACK, port):
            return port
    raise RunFailed(f"No port between {PORTS[0]} and {PORTS[-1]} is free for vLLM's server.")


@dataclass
class VLLMServer:
    """A vLLM server process."""

    arguments: Mapping[str, object]
    """Of vLLM's command line, by their names with underscores; without those of its address."""
    log: Path
    """File for the output of vLLM."""
    gpus: tuple[str, ...] = ()
    """In the notation of CUDA_VISIBLE_DEVICES; empty for CPU."""
    name: str = "policy-base"
    """Served name of the model; an adapter has the name with which it is loaded."""
    takes_weights: bool = True
    """Whether clients may load weights and adapters."""
    timeout: float = 600.0
    """Seconds within which it must be healthy."""
    key: str = field(default_factory=new_key, repr=False)
    """What clients send; the server gets it as VLLM_API_KEY."""
    port: int = field(default_factory=free_port)
    program: tuple[str, ...] = PROGRAM
    """Command, without the arguments."""
    _tree: ProcessTree | None = field(default=None, init=False)
    _log: RedactedLog = field(init=False, repr=False)
    _log_start: int = field(default=0, init=False)
    """Where the output of the last start begins in the log."""

    @property
    def url(self) -> str:
        """Base URL; the same after a restart."""
        return f"http://{LOOPBACK}:{self.port}"

    def words(self) -> list[str]:
        """Its command line, without the guard."""
        place = {"served_model_name": [self.name], "host": LOOPBACK, "port": self.port}
        return [*self.program, *argument_words({**place, **self.arguments})]

    def variables(self) -> dict[str, str]:
        """The environment variables that this machine needs for vLLM; the user's own values win.

        Compilation is disabled on CPU: the first request for log-probabilities would take up to 13 s.
        """
        if self.gpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
        return {name: os.environ.get(name, value) for name, value in on_cpu.items()}

    def environment(self) -> dict[str, str]:
        """Environment variables of the server."""
        ours = {"CUDA_VISIBLE_DEVICES": "", **self.variables(), "PYTHONUNBUFFERED": "1", KEY_VARIABLE: self.key}
        modes = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if self.takes_weights else {}
        return {"TOKENIZERS_PARALLELISM": "false", **os.environ, **ours, **modes}

    def shell_command(self) -> str:
        """The command line that starts it in a shell, also where aitrain is not installed."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables().items()]
        return " ".join([*variables, shlex.join(["python", *self.words()[1:]])])

    def launch(self) -> None:
        """Start the process."""
        variables = self.environment()
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._log = RedactedLog(self.log, variables)
        command, log = [*self.words(), GUARD], self._log.pipe
        self._tree = ProcessTree(command, STOP_SECONDS, env=variables, stdout=log, stderr=log)

    def wait_until_healthy(self) -> None:
        """Wait until it answers.

        Raises:
            RunFailed: it exited, or was not healthy in time.
        """
        end = time.monotonic() + self.timeout
        while not self._is_healthy():
            if (code := self.poll()) is not None:
                self._log.close()
                raise why_it_ended(self.log, self._log_start, code)
            if time.monotonic() > end:
                raise RunFailed(f"vLLM was not ready after {self.timeout:.0f} s\nSee {self.log}")
            time.sleep(POLL_SECONDS)

    def restart(self) -> None:
        """Stop what is left of it and start it at the same address. Adapters must be loaded again.

        Raises:
            RunFailed: as for `wait_until_healthy`.
        """
        self.stop()
        self.launch()
        self.wait_until_healthy()

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return 0 if self._tree is None else self._tree.poll()

    def ask_to_end(self) -> None:
        """Ask it to end, without waiting. No-op if it is stopped."""
        if self._tree is not None:
            self._tree.ask_to_end()

    def stop(self) -> None:
        """Stop it and all its processes. No-op if it is stopped."""
        self.ask_to_end()
        tree, self._tree = self._tree, None
        if tree is not None:
            with suppress(subprocess.TimeoutExpired):
                tree.wait(STOP_SECONDS + KILL_SECONDS)
            tree.close()
            self._log.close()

    def _is_healthy(self) -> bool:
        import httpx

        try:
            answer = httpx.get(
                f"{self.url}/v1/models",
                headers=key_header(self.key),
                timeout=HTTP_TIMEOUT,
                trust_env=False,
                verify=False,
            )
            return self.name in [model["id"] for model in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False


@contextmanager
def running(servers: Sequence[VLLMServer]) -> Iterator[None]:
    """Context in which servers run, all of which are healthy at its beginning.

    Raises:
        RunFailed: one exited, or was not healthy in time; the message has the cause from the log.
    """
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_until_healthy()
        yield
    finally:
        for server in servers:
            server.ask_to_end()
        for server in servers:
            server.stop()


# -- why it did not start


def why_it_ended(log: Path, start: int, code: int) -> RunFailed:
    """The error for a server that has exited with this code: the last error in its log since this start, or the last
    lines."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - 1_000_000))
        lines = list(filter(None, map(str.strip, file.read().decode("utf-8", "replace").splitlines())))
    errors = [found[1] for line in lines if (found := ERROR.match(line)) and not CONSEQUENCE.search(line)]
    how = "was killed (out of memory?)" if code == -9 else f"exit code {code}"
    shown = (line[:200] for line in errors[-1:] or lines[-2:])
    settings = "Its settings are --vllm-gpu-memory-utilization, --model-max-length and --vllm-args."
    return RunFailed("\n".join([f"vLLM did not start: {how}", *shown, settings, f"See {log}"]))


# -- a trained model

CHAT_TEMPLATE = "chat_template.jinja"


def adapter_arguments(reference: ModelReference, name: str) -> dict[str, object]:
    """The arguments of a server that has a model's adapter by this name, with its chat template; none without one."""
    if reference.adapter is None:
        return {}
    template = reference.adapter / CHAT_TEMPLATE
    own_template = {"chat_template": str(template.resolve())} if template.is_file() else {}
    return {"lora_modules": [f"{name}={reference.adapter.resolve()}"], **own_template}


BEYOND_VLLM = (
    "use_dora", "modules_to_save", "lora_bias", "bias", "trainable_token_indices", "rank_pattern", "alpha_pattern"
)  # fmt: skip
"""Settings of an adapter that vLLM refuses, or leaves out: it scales all layers by lora_alpha / r."""


def adapter_rank(reference: ModelReference) -> int | None:
    """The rank of a model's adapter; None without an adapter.

    Raises:
        ConfigError: vLLM cannot load it beside its base.
    """
    if reference.adapter is None:
        return None
    config = read_object(reference.adapter / ADAPTER_CONFIG)
    odd = [name for name in BEYOND_VLLM if config.get(name) and config[name] != "none"]
    if config.get("peft_type") != "LORA" or odd:
        what = ", ".join(odd) or f"of type {config.get('peft_type')}"
        raise ConfigError(
            f"{reference.adapter}: vLLM cannot load an adapter with {what} beside its base\n"
            f"Merge it, and serve the result: aitrain export {reference.given}"
        )
    rank = config.get("r")
    return rank if isinstance(rank, int) else 1
