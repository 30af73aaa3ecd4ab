"""Starts a vLLM server for one run, checks its health, and stops it with all its processes; and what a server is
started with that has a trained model, an adapter beside its base, each by its own name.

It answers those who have its key, as other users reach 127.0.0.1, too.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from aitrain.errors import ConfigError, RunFailed, did_you_mean
from aitrain.execution.process_tree import ProcessTree
from aitrain.redaction import RedactedLog
from aitrain.runs.model_reference import ADAPTER_CONFIG, ModelReference
from aitrain.runs.run_folder import read_object
from aitrain.vllm.server_arguments import (
    KEY_VARIABLE,
    LOOPBACK,
    argument_words,
    bound_address,
    key_header,
    local_address,
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

PREFIX = re.compile(r"^(\([^)]*pid=\d+\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^]]*\]\s*)?")
"""Prefix of vLLM's log lines: process, level, time, location."""
NO_ERROR = re.compile(r"^(\([^)]*pid=\d+\)\s*)?(DEBUG|INFO|WARNING) ")
"""Beginning of log lines that are no cause, such as a warning about a module that is not needed."""
ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt|ExitCode)\b.*|.*\berror: .+")
CONSEQUENCE = re.compile("Engine core initialization failed|See root cause above|WorkerProc initialization failed")

CAUSES = [
    (r"(?i)address already in use", "Another process has taken the port since it was chosen: start again."),
    (r"error: (ambiguous|argument |unrecognized arguments)", "Correct --vllm-args: vllm serve --help=all lists them."),
    (
        r"No available memory for the cache blocks",
        "Give vLLM more memory with --vllm-gpu-memory-utilization (it had {memory}), or more GPUs.",
    ),
    (
        r"KV cache is needed|larger than the maximum number of tokens",
        "Lower --model-max-length, or give vLLM more memory with --vllm-gpu-memory-utilization (it had {memory}).",
    ),
    (r"greater than the derived max_model_len", "Lower --model-max-length: the model itself allows no more."),
    (r"less than requested memory for kv", "Lower VLLM_CPU_KVCACHE_SPACE (GiB) in the environment."),
    (
        r"less than desired GPU memory utilization",
        "Lower --vllm-gpu-memory-utilization (it is {memory}), or stop other processes on the GPU.",
    ),
    (
        r"out of memory|OutOfMemoryError|Cannot allocate memory|MemoryError",
        "Lower --vllm-gpu-memory-utilization (it is {memory}) or --model-max-length, or use a smaller model.",
    ),
    (r"Cannot access gated repo|Access to model .* is restricted", "Ask for access on the Hub, then: hf auth login"),
    (
        r"is not a valid model identifier|Repository Not Found|Can't load the configuration|couldn't connect to"
        r"|LocalEntryNotFound|OfflineModeIsEnabled|outgoing traffic has been disabled|Invalid repository ID"
        r"|Repo id must be in the form",
        "Give --model a folder, or a Hub name that this machine can reach; for a private one: hf auth login",
    ),
    (
        r"not supported for now|has no vLLM implementation|[Hh]ead.?(size|dim).*support|support.*[Hh]ead.?(size|dim)"
        r"|No valid attention backend|Unsupported (model|quantization)",
        "vLLM cannot run this model here. Omit --use-vllm to generate with transformers.",
    ),
    (r"must be divisible by tensor parallel", "Choose another number of GPUs for vLLM."),
    (
        r"No module named|ImportError|cannot open shared object|undefined symbol|driver version is insufficient"
        r"|no kernel image|Failed to infer device type|NVIDIA driver on your system is too old",
        'vLLM does not fit this machine. Reinstall it: pip install "aitrain[vllm]"',
    ),
]
"""Patterns in the log, the likelier cause first, and advice."""


@dataclass(frozen=True)
class ServerConfig:
    """A vLLM server that is to be started."""

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
    host: str = LOOPBACK
    """Where clients reach it."""
    key: str = field(default_factory=new_key, repr=False)
    """What clients send; the server gets it as VLLM_API_KEY."""
    program: tuple[str, ...] = PROGRAM
    """Command, without the arguments."""

    def words(self, port: int, *names: str) -> list[str]:
        """Its command line, without the guard; `names` are further names of the model."""
        place = {"served_model_name": [self.name, *names], "host": bound_address(self.host), "port": port}
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


@contextmanager
def running(
    plans: Sequence[ServerConfig], notify: Callable[[str], None], port: int | None = None
) -> Iterator[list[VLLMServer]]:
    """Context in which servers run, all of which are healthy at its beginning; `notify` gets a progress message every
    second. Without a port, free ones are chosen.

    Raises:
        RunFailed: one exited, or was not healthy in time; the message has the cause from the log.
    """
    servers = [VLLMServer(plan, notify, port or _free_port(plan.host)) for plan in plans]
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_until_healthy()
        yield servers
    finally:
        for server in servers:
            server.ask_to_end()
        for server in servers:
            server.stop()


@dataclass
class VLLMServer:
    """A vLLM server process."""

    plan: ServerConfig
    notify: Callable[[str], None]
    port: int
    _tree: ProcessTree | None = None
    _mark: str = field(default_factory=lambda: f"server-{secrets.token_hex(8)}")
    """A served name, which shows that it is this server that answers on the port, where others may listen."""
    _launched: float = field(default=0.0, init=False)
    """Time of the last start."""
    _log: RedactedLog = field(init=False)
    _log_start: int = field(default=0, init=False)
    """Where the output of the last start begins in the log."""

    @property
    def url(self) -> str:
        """Base URL; the same after a restart."""
        host = self.plan.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def launch(self) -> None:
        """Start the process."""
        marks = [self._mark] if self.plan.takes_weights else []
        self._launched, variables = time.monotonic(), self.plan.environment()
        self._log_start = self.plan.log.stat().st_size if self.plan.log.exists() else 0
        self._log = RedactedLog(self.plan.log, variables)
        command = [*self.plan.words(self.port, *marks), GUARD]
        self._tree = ProcessTree(command, STOP_SECONDS, env=variables, stderr=self._log.pipe)

    def wait_until_healthy(self) -> None:
        """Wait until it answers.

        Raises:
            RunFailed: it exited, or was not healthy in time.
        """
        notified = -1
        while not self._is_healthy():
            seconds = int(time.monotonic() - self._launched)
            if seconds > notified:
                notified = seconds
                self.notify(f"starting vLLM, {seconds} s")
            code = self.poll()
            if code is not None:
                self._log.close()
                raise why_it_ended(self.plan, code, self._log_start)
            if time.monotonic() - self._launched > self.plan.timeout:
                last = [_short(line) for line in _meaningful_lines(self.plan.log, self._log_start)[-2:]]
                first = f"vLLM was not ready after {self.plan.timeout:.0f} s.{' It was at:' if last else ''}"
                raise RunFailed("\n".join([first, *last, f"See {self.plan.log}"]))
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
        """Whether this server, and not another one on the port, answers."""
        import httpx

        name = self._mark if self.plan.takes_weights else self.plan.name
        key = key_header(self.plan.key)
        try:
            with httpx.Client(
                base_url=self.url, headers=key, timeout=HTTP_TIMEOUT, trust_env=False, verify=False
            ) as client:
                models = client.get("/v1/models").json()["data"]
                return client.get("/health").is_success and name in [model["id"] for model in models]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False


def _free_port(host: str) -> int:
    address = bound_address(host)
    for port in random.SystemRandom().sample(PORTS, 100):
        if local_address(address, port) is not None:
            return port
    raise RunFailed(f"No port between {PORTS[0]} and {PORTS[-1]} is free for vLLM's server.")


# -- why it did not start


def why_it_ended(plan: ServerConfig, code: int, log_start: int) -> RunFailed:
    """The error for a server that has exited with this code, with the cause from its log."""
    lines = _meaningful_lines(plan.log, log_start, only_errors=True)
    for pattern, advice in CAUSES:
        found = [line for line in lines if re.search(pattern, line)]
        if found:
            cause = next((line for line in found if ERROR.match(line)), found[0])
            unknown = re.search(r"unrecognized arguments: --([\w-]+)", cause)
            known = re.findall(r"\[--([\w-]+)", "\n".join(lines))  # argparse shows its usage before the error
            near = did_you_mean(unknown[1], known) if unknown else ""
            what_to_do = advice.format(memory=plan.arguments.get("gpu_memory_utilization")) + near
            return RunFailed(f"vLLM did not start: {_short(cause)}\n{what_to_do}\nSee {plan.log}")
    how = "was killed (out of memory?)" if code == -9 else f"exit code {code}"
    errors = [line for line in lines if ERROR.match(line) and not CONSEQUENCE.search(line)]
    last = errors[-1:] or lines[-3:]
    return RunFailed("\n".join([f"vLLM did not start: {how}", *map(_short, last), f"See {plan.log}"]))


def _meaningful_lines(log: Path, start: int, only_errors: bool = False) -> list[str]:
    """Log lines of this start without prefixes, from the last megabyte."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - 1_000_000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    kept = [line for line in lines if not (only_errors and NO_ERROR.match(line))]
    return [text for line in kept if len(text := PREFIX.sub("", line).strip()) > 3]


def _short(line: str) -> str:
    return line if len(line) <= 200 else line[:197] + "..."


# -- a trained model

CHAT_TEMPLATE = "chat_template.jinja"


def adapter_arguments(reference: ModelReference, name: str) -> dict[str, object]:
    """The arguments of a server that has a model's adapter by this name, with its chat template; none without one."""
    if reference.adapter is None:
        return {}
    template = reference.adapter / CHAT_TEMPLATE
    own_template = {"chat_template": str(template.resolve())} if template.is_file() else {}
    return {"lora_modules": [f"{name}={reference.adapter.resolve()}"], **own_template}


def shell_command(plan: ServerConfig, port: int) -> str:
    """The command line that starts a server in a shell, also where aitrain is not installed."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in plan.variables().items()]
    return " ".join([*variables, shlex.join(["python", *plan.words(port)[1:]])])


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
