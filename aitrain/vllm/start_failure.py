"""Why a vLLM server did not start, from its log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from aitrain.errors import RunFailed, did_you_mean

if TYPE_CHECKING:
    from aitrain.vllm.server_process import ServerConfig

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
            what_to_do = advice.format(memory=plan.memory) + near
            return RunFailed(f"vLLM did not start: {_short(cause)}\n{what_to_do}\nSee {plan.log}")
    how = "was killed (out of memory?)" if code == -9 else f"exit code {code}"
    errors = [line for line in lines if ERROR.match(line) and not CONSEQUENCE.search(line)]
    last = errors[-1:] or lines[-3:]
    return RunFailed("\n".join([f"vLLM did not start: {how}", *map(_short, last), f"See {plan.log}"]))


def not_in_time(plan: ServerConfig, log_start: int) -> RunFailed:
    """The error for a server that was not healthy in time, with the last lines of its log."""
    last = [_short(line) for line in _meaningful_lines(plan.log, log_start)[-2:]]
    first = f"vLLM was not ready after {plan.timeout:.0f} s.{' It was at:' if last else ''}"
    return RunFailed("\n".join([first, *last, f"See {plan.log}"]))


def _meaningful_lines(log: Path, start: int, only_errors: bool = False) -> list[str]:
    """Log lines of this start without prefixes, from the last megabyte."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - 1_000_000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    kept = [line for line in lines if not (only_errors and NO_ERROR.match(line))]
    return [text for line in kept if len(text := PREFIX.sub("", line).strip()) > 3]


def _short(line: str) -> str:
    return line if len(line) <= 200 else line[:197] + "..."
