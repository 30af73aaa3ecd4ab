"""Serves a trained model with vLLM: an adapter beside its base, each by its own name."""

from __future__ import annotations

import shlex

from aitrain.errors import ConfigError
from aitrain.runs.json_values import as_object
from aitrain.runs.model_reference import ADAPTER_CONFIG, ModelReference
from aitrain.runs.run_folder import read_object
from aitrain.vllm.server_process import ServerConfig

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


def adapter_rank(reference: ModelReference) -> int | None:
    """The rank of a model's adapter; None without an adapter.

    Raises:
        ConfigError: vLLM cannot load it beside its base.
    """
    if reference.adapter is None:
        return None
    config = read_object(reference.adapter / ADAPTER_CONFIG)
    odd = [name for name in ("use_dora", "modules_to_save", "lora_bias") if config.get(name)]
    if config.get("peft_type") != "LORA" or odd:
        what = ", ".join(odd) or f"of type {config.get('peft_type')}"
        raise ConfigError(
            f"{reference.adapter}: vLLM cannot load an adapter with {what} beside its base\n"
            f"Merge it, and serve the result: aitrain export {reference.given}"
        )
    ranks = (config.get("r"), *as_object(config.get("rank_pattern")).values())
    return max((rank for rank in ranks if isinstance(rank, int)), default=1)
