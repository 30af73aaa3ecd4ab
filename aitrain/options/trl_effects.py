"""Checks of `--trl`: fields of GRPOConfig that would change nothing in this run are refused."""

from __future__ import annotations

from collections.abc import Iterator

from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig
from aitrain.options.trl_fields import WITHOUT_EFFECT

OF_NCCL = ("vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port")
"""Fields of TRL's own client of a vLLM server."""

OPTION_FOR_LOADING = {
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "attn_implementation": "attn_implementation",
    "trust_remote_code": "trust_remote_code",
    "quantization_config": "quantization",
}
"""Keys that `model_init_kwargs` may not hold, and the option to use instead."""


def check_trl_effects(config: TrainConfig) -> None:
    """Refuse fields that this run would not use.

    Raises:
        ConfigError: for the first of them, with what to use in its place.
    """
    for name, what_to_do in _without_effect(config):
        raise ConfigError(f"trl: {name}: has no effect here\n{what_to_do[0].upper()}{what_to_do[1:]}.")


def _without_effect(config: TrainConfig) -> Iterator[tuple[str, str]]:
    yield from ((name, WITHOUT_EFFECT[name]) for name in config.trl if name in WITHOUT_EFFECT)
    for name in [name for name, value in config.trl.items() if value is not None and value is not False]:
        if name.startswith("vllm_") and not config.use_vllm:
            yield name, "add use_vllm, or leave it out"
        if name == "fsdp_config" and config.distributed_backend != "fsdp2":
            yield name, "add distributed_backend fsdp2, or leave it out"
        if name == "cache_implementation" and config.use_vllm:
            yield name, "it is for transformers, and here vLLM generates: leave it out"
        if name in OF_NCCL and config.weight_sync != "nccl":
            yield name, "it is for vllm_sync nccl: use vllm_server_url, or leave it out"
        if name == "vllm_model_impl" and config.vllm_mode == "server":
            yield name, "it is for vllm_mode colocate; a server of yours takes --model-impl"
    given = config.trl_table("model_init_kwargs")
    if given and config.use_vllm:
        yield "model_init_kwargs", "it would not reach vLLM: use a model folder whose config.json has these settings"
    for key in given:
        if key in OPTION_FOR_LOADING:
            yield f"model_init_kwargs: {key}", f"use {OPTION_FOR_LOADING[key]}"
