"""Starts a vLLM server for one run, checks its health, and stops it with all its processes.

It listens on 127.0.0.1 only. supervisor.py, a separate process, starts it and stops it even if aitrain is killed.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from aitrain.errors import RunFailed
from aitrain.vllm.adapter_ranks import needed_rank

if TYPE_CHECKING:
    import psutil

MODEL_NAME = "policy-base"
"""Served name of the base model; an adapter has the name with which it is loaded."""
PROGRAM = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server")
"""Not the `vllm` command, which some builds lack. -P prevents that a folder named `vllm` hides the library."""
SUPERVISOR = (sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py")))
HOST = "127.0.0.1"
UNCHUNKED = "--no-enable-chunked-prefill"
"""On the CPU, vLLM 0.31 ends with an error when a prompt with a seed is processed in two parts."""
EXTENSION = "--worker-extension-cls=aitrain.engines.tied_head.WorkerExtension"
"""Extension for weight updates on the CPU."""
PORTS = range(20_000, 32_000)
"""Below the ephemeral ports, as about ten seconds pass between choosing a port and listening on it."""
PORT_ATTEMPTS = 3
STOP_SECONDS = 15.0
"""Seconds for the server to exit by itself."""
SUPERVISOR_STOP_SECONDS = 20.0
"""Additional seconds for the supervisor to kill what is left."""
POLL_SECONDS = 0.25
HTTP_TIMEOUT = 5.0
ENVIRONMENT_MARK = "AITRAIN_SERVER"
"""Environment variable that identifies the processes of a server whose supervisor is gone."""


@dataclass(frozen=True)
class ServerConfig:
    """Configuration of a vLLM server."""

    model: str
    """A folder or a Hub name."""
    log: Path
    """File for the output of vLLM."""
    gpus: tuple[str, ...] = ()
    """In the notation of CUDA_VISIBLE_DEVICES; empty for CPU."""
    tensor_parallel: int = 1
    context: int | None = None
    """Maximum tokens of prompt and completion; None for that of the model."""
    lora_rank: int | None = None
    """Maximum LoRA rank; None for no adapters."""
    dtype: str = "auto"
    memory: float = 0.9
    """Fraction of each GPU's memory."""
    sequences: int | None = None
    """Maximum concurrent completions; None for vLLM's default."""
    trust_remote_code: bool = False
    seed: int = 0
    """Seed of requests without a seed."""
    timeout: float = 600.0
    """Seconds within which it must be healthy."""
    program: tuple[str, ...] = PROGRAM
    """Command, without the arguments."""

    def names(self, mark: str) -> tuple[str, ...]:
        """Served names of the model; the last one shows that it is this server that answers on the port."""
        return (MODEL_NAME, mark)

    def arguments(self, port: int, *names: str) -> list[str]:
        """Command-line arguments of vLLM; sampling defaults are vLLM's neutral ones, not the model's."""
        lora = [] if self.lora_rank is None else ["--enable-lora", f"--max-lora-rank={needed_rank(self.lora_rank)}"]
        return [
            f"--model={self.model}",
            "--served-model-name",
            *names,
            f"--host={HOST}",
            f"--port={port}",
            f"--dtype={self.dtype}",
            f"--seed={self.seed}",
            f"--tensor-parallel-size={self.tensor_parallel}",
            "--generation-config=vllm",
            "--logprobs-mode=processed_logprobs",
            "--max-logprobs=-1",
            "--disable-uvicorn-access-log",
            *(["--trust-remote-code"] if self.trust_remote_code else []),
            *([f"--gpu-memory-utilization={self.memory}"] if self.gpus else ["--enforce-eager", UNCHUNKED, EXTENSION]),
            *([] if self.context is None else [f"--max-model-len={self.context}"]),
            *([] if self.sequences is None else [f"--max-num-seqs={self.sequences}"]),
            *lora,
        ]

    def environment(self) -> dict[str, str]:
        """Environment variables of the server; without VLLM_API_KEY, which would require a key from us.

        Compilation is disabled on CPU: the first request for log-probabilities would take up to 13 s.
        """
        defaults = {"TOKENIZERS_PARALLELISM": "false"}
        on_cpu = {} if self.gpus else {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
        ours = {
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
            "PYTHONUNBUFFERED": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        }
        given = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
        return {**defaults, **on_cpu, **given, **ours}


class _PortTaken(RunFailed):
    """Another process took the port before vLLM did."""


@dataclass
class VLLMServer:
    """A vLLM server process; a context manager that stops it."""

    plan: ServerConfig
    notify: Callable[[str], None]
    port: int
    _supervisor: subprocess.Popen[bytes] | None = None
    _name: str = field(default_factory=lambda: f"server-{secrets.token_hex(8)}")
    """Marks the processes of this server; also a served name, which distinguishes it from another one on the port."""

    @property
    def url(self) -> str:
        """Base URL; the same after a restart."""
        return f"http://{HOST}:{self.port}"

    @classmethod
    def start(cls, plan: ServerConfig, notify: Callable[[str], None], port: int | None = None) -> VLLMServer:
        """Start a server and wait until it is healthy; `notify` gets a progress message every second. Without a port, a
        free one is chosen.

        Raises:
            RunFailed: it exited, or was not healthy in time; the message has the cause from the log.
        """
        for attempt in range(PORT_ATTEMPTS):
            server = cls(plan, notify, port or _free_port())
            try:
                server._begin()
            except _PortTaken:
                if port is not None or attempt == PORT_ATTEMPTS - 1:
                    raise
            else:
                return server
        raise AssertionError("unreachable")

    def restart(self) -> None:
        """Stop what is left of it and start it at the same address. Adapters must be loaded again.

        Raises:
            RunFailed: as for `start`.
        """
        self.stop()
        self._begin()

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self._supervisor is None:
            return 0
        code = self._supervisor.poll()
        return code if code is None or code <= 128 else 128 - code

    def stop(self) -> None:
        """Stop it and all its processes. No-op if it is stopped."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        assert supervisor.stdin is not None
        with suppress(BrokenPipeError), supervisor.stdin:  # it has exited already
            supervisor.stdin.write(b"end")  # closing is not enough: a forked process may hold the pipe, too
        try:
            supervisor.wait(STOP_SECONDS + SUPERVISOR_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        if supervisor.returncode < 0:  # it was killed and could not stop the server
            _end_marked(self._name, STOP_SECONDS)

    def __enter__(self) -> VLLMServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- starting

    def _begin(self) -> None:
        command = [*self.plan.program, *self.plan.arguments(self.port, *self.plan.names(self._name))]
        with self.plan.log.open("ab") as log:
            log_start = log.tell()
            self._supervisor = subprocess.Popen(
                [*SUPERVISOR, str(STOP_SECONDS), *command],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**self.plan.environment(), ENVIRONMENT_MARK: self._name},
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(log_start)
        except BaseException:
            self.stop()
            raise

    def _wait_until_healthy(self, log_start: int) -> None:
        began, notified = time.monotonic(), -1
        while not self._is_healthy():
            seconds = int(time.monotonic() - began)
            if seconds > notified:
                notified = seconds
                self.notify(f"starting vLLM, {seconds} s")
            code = self.poll()
            if code is not None:
                raise _why_it_ended(self, code, log_start)
            if time.monotonic() - began > self.plan.timeout:
                raise _not_in_time(self, log_start)
            time.sleep(POLL_SECONDS)

    def _is_healthy(self) -> bool:
        """Whether this server, and not another one on the port, answers."""
        import httpx

        key = self.plan.environment().get("VLLM_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            with httpx.Client(
                base_url=self.url, headers=headers, timeout=HTTP_TIMEOUT, trust_env=False, verify=False
            ) as client:
                if not client.get("/health").is_success:
                    return False
                return self.plan.names(self._name)[-1] in [
                    model["id"] for model in client.get("/v1/models").json()["data"]
                ]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False


def _end_marked(name: str, patience: float) -> None:
    """Wait for the processes of a server whose supervisor was killed, which have got SIGTERM; then kill those left."""
    import psutil

    deadline = time.monotonic() + patience
    while left := [process for process in psutil.process_iter() if _is_marked(process, name)]:
        if time.monotonic() > deadline:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(POLL_SECONDS)


def _is_marked(process: psutil.Process, name: str) -> bool:
    """Whether its environment has this name; False if it cannot be read."""
    import psutil

    try:
        return process.environ().get(ENVIRONMENT_MARK) == name
    except psutil.Error:
        return False


def _free_port() -> int:
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as attempt:
            try:
                attempt.bind((HOST, port))
            except OSError:
                continue
            return port
    raise RunFailed(f"No port between {PORTS[0]} and {PORTS[-1]} is free for vLLM's server.")


# -- why it did not start

PREFIX = re.compile(r"^(\([^)]*pid=\d+\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^]]*\]\s*)?")
"""Prefix of vLLM's log lines: process, level, time, location."""
PORT_TAKEN = re.compile("address already in use", re.IGNORECASE)
ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt|ExitCode)\b.*|.*\berror: .+")
CONSEQUENCE = re.compile("Engine core initialization failed|See root cause above|WorkerProc initialization failed")

CAUSES = [
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


def _why_it_ended(server: VLLMServer, code: int, log_start: int) -> RunFailed:
    plan, lines = server.plan, _meaningful_lines(server.plan.log, log_start)
    if any(PORT_TAKEN.search(line) for line in lines):
        return _PortTaken(f"vLLM did not start: another process listens on port {server.port}.\nSee {plan.log}")
    for pattern, advice in CAUSES:
        found = [line for line in lines if re.search(pattern, line)]
        if found:
            cause = next((line for line in found if ERROR.match(line)), found[0])
            return RunFailed(
                f"vLLM did not start: {_short(cause)}\n{advice.format(memory=plan.memory)}\nSee {plan.log}"
            )
    how = "was killed (out of memory?)" if code == -9 else f"exit code {code}"
    return RunFailed("\n".join([f"vLLM did not start: {how}", *map(_short, _last_errors(lines)), f"See {plan.log}"]))


def _not_in_time(server: VLLMServer, log_start: int) -> RunFailed:
    last = [_short(line) for line in _meaningful_lines(server.plan.log, log_start)[-2:]]
    first = (
        f"vLLM was not ready after {server.plan.timeout:.0f} s. It was at:"
        if last
        else f"vLLM was not ready after {server.plan.timeout:.0f} s."
    )
    return RunFailed("\n".join([first, *last, f"See {server.plan.log}"]))


def _meaningful_lines(log: Path, start: int) -> list[str]:
    """Log lines of this start without prefixes, from the last megabyte."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - 1_000_000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return [text for line in lines if len(text := PREFIX.sub("", line).strip()) > 3]


def _last_errors(lines: list[str]) -> list[str]:
    """The last error that is not a consequence of another one, else the last lines."""
    errors = [line for line in lines if ERROR.match(line) and not CONSEQUENCE.search(line)]
    return errors[-1:] or lines[-3:]


def _short(line: str) -> str:
    return line if len(line) <= 200 else line[:197] + "..."
