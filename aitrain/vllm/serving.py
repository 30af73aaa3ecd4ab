"""Serves a trained model with vLLM: an adapter beside its base, each by its own name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from aitrain.errors import ConfigError
from aitrain.runs.json_values import as_int, as_object
from aitrain.runs.model_reference import ADAPTER_CONFIG, ModelReference
from aitrain.runs.run_folder import read_object
from aitrain.vllm.server_process import GUARD, PROGRAM, ServerConfig

CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class ServedModel(ServerConfig):
    """A model that users talk to; unlike the server of a training, it takes no weights and no adapters from clients."""

    name: str = ""
    """The name that clients ask for: of the adapter, or of a whole model."""
    adapter: Path | None = None

    base_name: str = ""
    """The name of the base beside an adapter."""
    modes: ClassVar[Mapping[str, str]] = {}

    def names(self, mark: str) -> tuple[str, ...]:
        """The name of the model that is loaded first; a mark is not needed, as nothing else listens on the port."""
        if self.adapter is None:
            return (self.name,)
        return (self.base_name if self.base_name != self.name else f"{self.base_name}-base",)

    def arguments(self, port: int, *names: str) -> list[str]:
        """Command-line arguments of vLLM; sampling defaults are those of the model's generation config."""
        words = [*self.common_arguments(port, *names), f"--max-model-len={self.context or 'auto'}"]
        if self.adapter is not None:
            words += ["--lora-modules", f"{self.name}={self.adapter.resolve()}"]
            template = self.adapter / CHAT_TEMPLATE
            if template.is_file():
                words.append(f"--chat-template={template.resolve()}")
        return words

    def command(self, port: int) -> str:
        """The command line that starts the server in a shell, also where aitrain is not installed."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables().items()]
        words = ["python", *PROGRAM[1:], *self.arguments(port, *self.names(""))]
        words.remove(GUARD)
        return " ".join([*variables, shlex.join(words)])


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
    ranks = map(as_int, (config.get("r"), *as_object(config.get("rank_pattern")).values()))
    return max((rank for rank in ranks if rank), default=1)
