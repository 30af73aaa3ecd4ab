"""Methods for the workers of a vLLM on the CPU, and a repair of its sampling. vLLM's own processes import this module.

Inside API of vLLM 0.31 that it uses (tests/vllm/test_server.py):

    vllm.v1.sample.rejection_sampler.expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        replaced: speculative decoding takes from it the temperature, top-k and top-p of each draft token. On the CPU,
        it returns memory that was never written, so tokens would come from another distribution.
"""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from typing import Any

import torch

from aitrain.engines.tied_head import renew_tied_head


class WorkerExtension:
    """Methods that vLLM's workers get (`--worker-extension-cls`), callable over /collective_rpc."""

    model_runner: Any

    def renew_tied_head(self) -> None:
        """See `renew_tied_head`."""
        renew_tied_head(self.model_runner.get_model())


def expanded(
    values: torch.Tensor, ends: torch.Tensor, count: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """The value of each request once for each of its tokens; `ends` are the cumulative numbers of tokens."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    return torch.where(values == replace_from, replace_to, values).to(values.dtype).repeat_interleave(counts)[:count]


def repair_sampling() -> None:
    """Replace vLLM's function by `expanded`, where vLLM runs on the CPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        with suppress(ImportError):
            from vllm.v1.sample import rejection_sampler

            rejection_sampler.expand_batch_to_tokens = expanded


if importlib.util.find_spec("vllm") is not None:
    repair_sampling()
