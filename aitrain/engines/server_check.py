"""Whether a vLLM server that somebody else started can be trained with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from aitrain.engines import tied_head
from aitrain.engines.weight_sync import PUSHED, weight_version_of
from aitrain.errors import ConfigError, RunFailed, ServerGoneError, ServerRefusedError, ServerTimeoutError
from aitrain.vllm.adapter_ranks import RANKS, served_rank
from aitrain.vllm.client import VLLMClient

CHECK_SECONDS = 60.0
"""Deadline of each question, one of which may be the server's first completion."""


@dataclass(frozen=True)
class ServerNeeds:
    """What a run needs of a server."""

    model: str
    """As in `--model`, or what the server calls it."""
    longest: int
    """Tokens of prompt and answer."""
    rank: int | None
    """Of the adapter that is handed over; None: all weights are."""
    is_on_cpu: bool = False
    """Whether the server has no GPU."""

    @property
    def command(self) -> str:
        """What starts such a server."""
        adapter = f" --enable-lora --max-lora-rank {served_rank(self.rank) or RANKS[-1]}" if self.rank else ""
        mode = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" if self.rank else "VLLM_SERVER_DEV_MODE=1"
        extension = f" --worker-extension-cls {tied_head.__name__}.WorkerExtension"
        adapter = adapter or (extension if self.is_on_cpu else "")
        options = f"--max-model-len {self.longest} --generation-config vllm --logprobs-mode processed_logprobs{adapter}"
        return f"{mode} vllm serve {self.model} {options}"


@dataclass(frozen=True)
class ServerModel:
    """The model that a server was started with."""

    name: str
    longest: int
    is_on_cpu: bool = False
    """As far as it tells."""


def check_server(url: str, wanted: ServerNeeds) -> ServerModel:
    """The server's model, if it can be trained with.

    Raises:
        ConfigError: there is none, or it lacks something; says how to start it.
    """
    server = VLLMClient(url, deadline=CHECK_SECONDS)
    try:
        details = _details(server)
        wanted = replace(wanted, is_on_cpu=_is_on_cpu(details))
        base = _base(server, wanted)
        lack = _lack(server, base, wanted) or _lack_in(details, wanted)
    except ServerGoneError as gone:
        lack = f"cannot be used ({gone})"
    except ServerTimeoutError:
        lack = f"did not answer within {CHECK_SECONDS:.0f} seconds"
    except (RunFailed, KeyError, TypeError) as error:
        lack = f"does not answer like one ({type(error).__name__}: {error})"
    if lack:
        raise ConfigError(f"The vLLM server at {url} {lack}.\nStart it with: {wanted.command}")
    assert base is not None
    return base


def check_for_nccl(url: str, model: str) -> None:
    """Whether there is a server for TRL's own way, which looks for one for minutes.

    Raises:
        ConfigError: no server answers.
    """
    if not VLLMClient(url).is_up():
        raise ConfigError(
            f"The vLLM server at {url} does not answer.\nStart it with: VLLM_SERVER_DEV_MODE=1 vllm serve {model}"
            """ --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs --max-logprobs -1"""
        )


def _base(server: VLLMClient, wanted: ServerNeeds) -> ServerModel | None:
    for card in server.get("/v1/models")["data"]:
        if not card.get("parent") and wanted.model in (card["id"], card["root"]):
            return ServerModel(card["id"], int(card["max_model_len"]), wanted.is_on_cpu)
    return None


def _lack(server: VLLMClient, base: ServerModel | None, wanted: ServerNeeds) -> str:
    """What is missing, or nothing."""
    if base is None:
        names = ", ".join(str(card["id"]) for card in server.get("/v1/models")["data"])
        return f"has {names}, and we train {wanted.model}"
    if base.longest < wanted.longest:
        return f"takes {base.longest} tokens of prompt and answer, and we need {wanted.longest}"
    if lack := _lacks_sync(server, wanted):
        return lack
    if _has_raw_logprobs(server, base):
        return "gives log-probabilities before temperature and top-p, which training cannot correct with"
    return ""


def _details(server: VLLMClient) -> dict[str, Any]:
    """How it was started, which it tells in its development mode only."""
    try:
        details: dict[str, Any] = server.get("/server_info?config_format=json")["vllm_config"]
    except ServerRefusedError:
        return {}
    return details


def _is_on_cpu(details: dict[str, Any]) -> bool:
    return bool((details.get("device_config") or {}).get("device") == "cpu")


def _lack_in(details: dict[str, Any], wanted: ServerNeeds) -> str:
    """What is missing by what it tells, or nothing."""
    rank = (details.get("lora_config") or {}).get("max_lora_rank")
    if wanted.rank and rank is not None and rank < wanted.rank:
        return f"takes adapters of rank {rank} at most, and we train one of rank {wanted.rank}"
    extension = (details.get("parallel_config") or {}).get("worker_extension_cls")
    if wanted.is_on_cpu and not wanted.rank and not extension:
        return "runs on the CPU and lacks what it needs there to be handed weights"
    return ""


def _lacks_sync(server: VLLMClient, wanted: ServerNeeds) -> str:
    if wanted.rank is None:
        return "" if _has(lambda: server.get("/weight_info")) else "is not in its development mode"
    if (version := _version_of(server)).startswith(PUSHED):
        return f"has no base any more: a run has handed it other weights ({version})"
    nothing = {"lora_name": "policy", "lora_path": "/nonexistent"}
    try:
        server.post("/v1/load_lora_adapter", nothing)
    except ServerGoneError as gone:
        return "takes no adapters" if "not enabled" in str(gone) else ""
    except ServerRefusedError as refused:
        return "does not load adapters while it runs" if "Not Found" in str(refused) else ""
    return ""


def _version_of(server: VLLMClient) -> str:
    """Nothing where it does not tell."""
    try:
        return weight_version_of(server)
    except ServerRefusedError:
        return ""


def _has(call: Callable[[], object]) -> bool:
    try:
        call()
    except ServerRefusedError:
        return False
    return True


def _has_raw_logprobs(server: VLLMClient, base: ServerModel) -> bool:
    """Where only the likeliest token may be drawn, it is certain; before that it was not."""
    body = {"model": base.name, "prompt": [[n] for n in range(1, 9)], "max_tokens": 1, "logprobs": 0}
    choices = server.post("/v1/completions", body | {"temperature": 1.0, "top_k": 1})["choices"]
    return any(choice["logprobs"]["token_logprobs"][0] < -1e-3 for choice in choices)
