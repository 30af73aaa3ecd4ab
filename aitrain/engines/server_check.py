"""Checks before the training whether a vLLM server can be trained with."""

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from aitrain.engines.weight_sync import LOADED, weight_version_of
from aitrain.errors import ConfigError, RunFailed, ServerGoneError, ServerRefusedError
from aitrain.rollout.event_loop import event_loop
from aitrain.vllm.client import VLLMClient
from aitrain.vllm.server_arguments import EXTENSION, KEY_VARIABLE, needed_rank

CHECK_SECONDS = 60.0
"""Deadline of each call, one of which may be the server's first completion."""


@dataclass(frozen=True)
class ServerNeeds:
    """What a run needs of a server."""

    model: str
    """Name or folder, as in `--model`, or the server's name of it."""
    context: int
    """Maximum tokens of prompt and completion."""
    rank: int | None
    """Rank of the adapter that is loaded; None: all weights are loaded."""
    is_on_cpu: bool = False
    """Whether the server has no GPU."""
    trains: bool = True
    """Whether the run trains; if not, it needs no log-probabilities, and without an adapter loads no weights."""

    @property
    def keeps_weights(self) -> bool:
        """Whether the server's own weights are used, and none are loaded."""
        return not self.trains and self.rank is None

    @property
    def command(self) -> str:
        """The command that starts such a server."""
        before, after = "", ""
        if self.rank:
            before = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
            after = f" --enable-lora --max-lora-rank {needed_rank(self.rank)}"
        elif self.trains:
            before, after = "VLLM_SERVER_DEV_MODE=1 ", f" --worker-extension-cls {EXTENSION}" if self.is_on_cpu else ""
        on_cpu = " --no-enable-chunked-prefill" if self.is_on_cpu else ""
        logprobs = " --logprobs-mode processed_logprobs" if self.trains else ""
        options = f"--max-model-len {self.context} --generation-config vllm{logprobs}"
        return f"{before}vllm serve {self.model} {options}{on_cpu}{after}"


@dataclass(frozen=True)
class ServerModel:
    """The model that a server was started with."""

    name: str
    context: int
    is_on_cpu: bool = False
    """False also if unknown."""
    dtype: torch.dtype | None = None
    """Type of its weights; None if unknown, or if they are quantized."""
    is_quantized: bool = False
    """Whether its weights are quantized; False also if unknown."""


def check_servers(urls: Sequence[str], needs: ServerNeeds) -> ServerModel:
    """Check that servers can be trained with together; returns their model, with the smallest context of all.

    Raises:
        ConfigError: one does not answer, or lacks something; the message has the command that starts one. Or their
            models have different names.
    """
    with closing(event_loop()) as loop:
        models = [loop.run(_check(VLLMClient(url, deadline=CHECK_SECONDS), needs)) for url in urls]
    if len(names := sorted({model.name for model in models})) > 1:
        raise ConfigError(
            f"The vLLM servers differ in their model: {', '.join(names)}\nStart all with: {needs.command}"
        )
    return min(models, key=lambda model: model.context)


async def _check(client: VLLMClient, needs: ServerNeeds) -> ServerModel:
    config: dict[str, Any] = {}
    try:
        with suppress(ServerRefusedError):  # it is not in its development mode
            config = (await client.get("/server_info?config_format=json"))["vllm_config"]
        device, settings = config.get("device_config") or {}, config.get("model_config") or {}
        needs = replace(needs, is_on_cpu=device.get("device") == "cpu")
        cards = (await client.get("/v1/models"))["data"]
        bases = [card for card in cards if not card.get("parent") and needs.model in (card["id"], card["root"])]
        if not bases:
            names = ", ".join(str(card["id"]) for card in cards)
            lack = f"serves {names}, but the run {'plays' if needs.keeps_weights else 'trains'} {needs.model}"
        elif (longest := bases[0]["max_model_len"]) < needs.context:
            lack = f"takes {longest} tokens of prompt and completion, but the run needs {needs.context}"
        elif needs.is_on_cpu and config.get("speculative_config"):
            lack = "drafts tokens on the CPU, where vLLM samples them from another distribution"
        elif not (lack := await _lack(client, bases[0]["id"], needs)):
            is_quantized = settings.get("quantization") is not None
            dtype = None if is_quantized else getattr(torch, str(settings.get("dtype")).removeprefix("torch."), None)
            return ServerModel(bases[0]["id"], longest, needs.is_on_cpu, dtype, is_quantized)
    except (RunFailed, ServerGoneError, KeyError, TypeError) as error:
        lack = f"cannot be used ({type(error).__name__}: {error})"
        if isinstance(error, ServerRefusedError) and error.status == 401:
            lack = f"needs a key, and does not take that of {KEY_VARIABLE} in the environment"
    finally:
        await client.close()
    raise ConfigError(f"The vLLM server at {client.url} {lack}.\nStart it with: {needs.command}")


async def _lack(client: VLLMClient, model: str, needs: ServerNeeds) -> str:
    """What the server does not do, as part of a sentence; empty if nothing."""
    version = ""
    with suppress(ServerRefusedError):  # it is not in its development mode
        version = await weight_version_of(client)
    if needs.rank is None and not needs.keeps_weights:
        if not version:
            return "is not in its development mode"
    elif version.startswith(LOADED):
        return f"has lost its base weights: another run has loaded its own ({version})"
    elif not needs.keeps_weights:
        try:
            await client.post("/v1/load_lora_adapter", {"lora_name": "policy", "lora_path": "/nonexistent"})
        except (ServerGoneError, ServerRefusedError) as error:  # another one has no such file
            if "not enabled" in str(error) or "Not Found" in str(error):
                return "takes no adapters while it runs"
    if needs.trains:  # with top_k 1, log-probabilities after truncation are 0
        body = {"model": model, "prompt": [[n] for n in range(1, 9)], "max_tokens": 1, "logprobs": 0}
        response = await client.post("/v1/completions", body | {"temperature": 1.0, "top_k": 1})
        if any(choice["logprobs"]["token_logprobs"][0] < -1e-3 for choice in response["choices"]):
            return "returns log-probabilities before temperature and top-p, which training cannot use"
    return ""
