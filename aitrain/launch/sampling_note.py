"""The note before training about options that change the sampling distribution."""

from __future__ import annotations

from aitrain.options.train import TrainConfig


def note_on_truncation(config: TrainConfig) -> str | None:
    """What is inexact when options change the sampling distribution; None if no option does."""
    flags = ", ".join(config.reshaped_sampling)
    if not flags:
        return None
    compared = (
        "vLLM's log-probabilities are corrected for these options, which is exact and costs one more forward pass; "
        if config.use_vllm
        else ""
    )
    return (
        f"Sampling with {flags}: {compared}the update itself uses log-probabilities over all tokens, so the gradient is"
        " that of the unmodified distribution, on samples of the modified one. Omit these options for an exact update."
    )
