"""What a dry run leaves to the run."""

from __future__ import annotations

from collections.abc import Iterator

from aitrain.launch.model_shape import folder_of
from aitrain.launch.preflight import RunPlan


def not_checked(plan: RunPlan, *, with_environment: bool = True) -> Iterator[str]:
    """What a dry run of this plan leaves to the run."""
    config = plan.config
    if not with_environment:
        yield "the environment, its dataset, the tokenizer, and what TRL refuses (--options-only)"
    is_here = folder_of(config.model) is not None
    yield f"the {'weights' if is_here else 'download'} of {config.model}"
    yield f"memory of the {'GPUs' if plan.gpus else 'CPU'}, beyond the estimate of aitrain plan"
    if with_environment:
        yield "how the environment takes the model's own answers (aitrain env check tries many)"
    if plan.checkpoint is not None:
        yield f"the weights and states in {plan.checkpoint}, and whether another process trains there"
    if plan.batch.processes > 1:
        yield f"the {plan.batch.processes} training processes and their connections"
    if config.use_vllm:
        urls = config.vllm_server_urls
        servers = f"the vLLM server{'s' if len(urls) > 1 else ''} at {', '.join(urls)}"
        yield servers if urls else "vLLM, which was not started"
    if config.quantization is not None:
        yield f"the quantization of the weights ({config.quantization})"
    if config.push_to_hub:
        yield "whether the token may write to the Hub"
    if config.log != "none":
        yield f"the login of {config.log}"
