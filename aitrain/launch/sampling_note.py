"""What the user should know before training of options that change the sampling distribution."""

from __future__ import annotations

from aitrain.options.train import TrainConfig


def note_on_truncation(config: TrainConfig) -> str | None:
    """What is exact and what is not when the sampling distribution is not the model's own; None where it is."""
    flags = ", ".join(config.reshaped_sampling)
    if not flags:
        return None
    compared = (
        "vLLM's log-probabilities are compared with the trainer's under the same options, which is exact and costs"
        " one more forward pass; "
        if config.use_vllm
        else ""
    )
    return (
        f"Sampling with {flags}: {compared}the update itself uses log-probabilities over all tokens, so the gradient is"
        " that of the model's own distribution on samples of another one. Leave them out for an exact update."
    )
