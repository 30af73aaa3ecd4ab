"""The ranks of adapters that a vLLM server can be started for."""

from __future__ import annotations

from aitrain.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank`; tests/vllm/test_server.py keeps them equal to vLLM's."""


def needed_rank(rank: int) -> int:
    """The smallest value of `--max-lora-rank` that an adapter of this rank fits in.

    Raises:
        ConfigError: vLLM serves none of this rank.
    """
    for possible in RANKS:
        if possible >= rank:
            return possible
    raise ConfigError(f"lora_r: vLLM serves adapters of rank {RANKS[-1]} at most, not {rank}")
