"""Arguments of vLLM's server: those that every server of aitrain has, and those that a user gives (`--vllm-args`), of
which the ones that aitrain sets are refused; vLLM checks the others when it starts. And its address and key.

What this uses of vLLM 0.31: the fields of EngineArgs, AsyncEngineArgs, BaseFrontendArgs and FrontendArgs are the
arguments of its server, with dashes; a boolean field is `--name` or `--no-name`, a list has its items as words.
"""

import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig

OPTION_OF = {
    "dtype": "--dtype",
    "enable_lora": "--peft",
    "gpu_memory_utilization": "--vllm-gpu-memory-utilization",
    "max_lora_rank": "--lora-r",
    "max_model_len": "--model-max-length",
    "model": "--model",
    "tensor_parallel_size": "--vllm-tensor-parallel-size",
    "trust_remote_code": "--trust-remote-code",
}
"""Arguments that an option of aitrain stands for."""

NOT_THE_USERS = (
    "api_key", "hf_token",  # secrets, which it gets by the environment
    "config", "generation_config", "host", "logprobs_mode", "model_tag", "port", "served_model_name",
    "worker_extension_cls", "api_server_count", "enable_ssl_refresh", "grpc", "headless", "nnodes", "root_path",
    "runner", "tokens_only", "uds", "quantization", "quantization_config",
)  # fmt: skip
OTHER_KINDS = ("data_parallel_", "master_", "node_", "spec", "ssl_")
"""Arguments, and beginnings of such, that a training needs as aitrain sets them, or of servers that it does not start:
on several machines, with several processes that answer requests, each with its own list of adapters, at other
addresses than http://HOST:PORT, or with speculative decoding, which may sample from another distribution."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank` of vLLM 0.31."""

EXTENSION = "aitrain.vllm.extensions.WorkerExtension"
"""Extension of vLLM's workers for weight updates on the CPU."""


def needed_rank(rank: int) -> int:
    """The smallest value of `--max-lora-rank` that an adapter of this rank fits in.

    Raises:
        ConfigError: vLLM serves none of this rank.
    """
    for possible in RANKS:
        if possible >= rank:
            return possible
    raise ConfigError(f"lora_r: vLLM serves adapters of rank {RANKS[-1]} at most, not {rank}")


def common_arguments(config: TrainConfig, model: str, gpus: Sequence[str], lora_rank: int | None) -> dict[str, object]:
    """The arguments of a server, whether it trains or not: its model, a folder or a Hub name, and what it has of this
    machine. `lora_rank` is the maximum rank of adapters, None for no adapters.

    On the CPU, vLLM 0.31 ends with an error when a prompt with a seed is processed in two parts.
    """
    adapters = {} if lora_rank is None else {"enable_lora": True, "max_lora_rank": needed_rank(lora_rank)}
    on_cpu = {"enforce_eager": True, "enable_chunked_prefill": False}
    return {
        "model": model,
        "dtype": config.dtype if gpus or config.dtype != "auto" else "float32",
        "tensor_parallel_size": config.vllm_tensor_parallel_size,
        **({"gpu_memory_utilization": config.vllm_memory} if gpus else on_cpu),
        **({"trust_remote_code": True} if config.trust_remote_code else {}),
        **adapters,
    }


def training_arguments(gpus: Sequence[str]) -> dict[str, object]:
    """The arguments of a server whose completions are trained on."""
    return {
        "generation_config": "vllm",  # its neutral sampling defaults, not the model's
        "logprobs_mode": "processed_logprobs",
        "disable_uvicorn_access_log": True,
        **({} if gpus else {"worker_extension_cls": EXTENSION}),
    }


def check_server_arguments(given: Mapping[str, object]) -> None:
    """Refuse an argument that aitrain sets, that is a secret, or that is of a server that aitrain does not start.

    Raises:
        ConfigError: for the first of them.
    """
    for key in given:
        name = key.replace("-", "_")
        if name in OPTION_OF:
            raise ConfigError(f"--vllm-args {key}: aitrain has an option for it: {OPTION_OF[name]}")
        if name in NOT_THE_USERS or (name.startswith(OTHER_KINDS) and name != "data_parallel_size"):
            raise ConfigError(
                f"--vllm-args {key}: aitrain sets it by itself, or does not start such servers\n"
                "Leave it out, or start the server yourself and give its address: --vllm-server-url."
            )


def argument_words(given: Mapping[str, object]) -> list[str]:
    """The arguments as words of vLLM's command line."""
    words = list[str]()
    for name, value in ((key.replace("_", "-"), value) for key, value in given.items()):
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(_text, value)]
        else:
            words.append(f"--{name}={_text(value)}")
    return words


def _text(value: object) -> str:
    return str(value) if value is None or isinstance(value, (str, int, float)) else json.dumps(value)


# -- addresses, and the key

LOOPBACK = "127.0.0.1"
KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's environment variable for the key that requests need."""


def new_key() -> str:
    """The key for servers that are started: that of the environment, else a random one."""
    return os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)


def key_header(key: str | None = None) -> dict[str, str]:
    """The header with a key for vLLM servers, by default that of the environment; empty if there is none."""
    key = key or os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def can_bind(host: str, port: int = 0) -> bool:
    """Whether a name or an address is this machine's, and the port is free; False if the name is unknown."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as attempt:
            attempt.bind((host, port))
    except (OSError, UnicodeError):
        return False
    return True


def is_here(url: str) -> bool:
    """Whether the host of an address is this machine."""
    return can_bind(urlsplit(url).hostname or LOOPBACK)
