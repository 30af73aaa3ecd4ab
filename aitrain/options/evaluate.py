"""`EvalConfig`, the options of an eval: those of the training whose held-out cases it plays, and its own."""

from typing import Literal

from aitrain.options.environment import EnvironmentOptions
from aitrain.options.generation import GenerationOptions, VLLMOptions
from aitrain.options.run import EvaluationOptions, ModelOptions, RunOptions
from aitrain.options.section import Options
from aitrain.options.train import TrainConfig
from aitrain.options.value_types import PositiveInt


class EvalOptions(Options):
    """What an eval plays, and how."""

    section = "Eval"

    decoding: Literal["sampled", "greedy", "both"] = "both"
    """Play each case with sampled completions, with the likeliest ones (greedy), or both."""
    concurrency: PositiveInt | None = None
    """Episodes at a time in each process; unset: as many as a forward pass of the training has, and at least 32, with
    transformers, 256 with vLLM, 16 requests to an address."""
    model_name: str | None = None
    """The model's name at an OpenAI-compatible address, which needs one."""


class EvalConfig(TrainConfig, EvalOptions):
    """The options of one eval.

    Cases, seeds and episodes are those of a training with the same options, so that both give the same scores.
    """

    @property
    def decodings(self) -> tuple[str, ...]:
        """The decodings that are played."""
        return ("sampled", "greedy") if self.decoding == "both" else (self.decoding,)


_NOT_FOR_EVALS = {
    *("vllm_mode", "vllm_sleep_mode", "rl_check", "eval_strategy", "eval_steps"),
    *("batch_size", "gradient_accumulation", "epochs", "max_steps"),
}
_SECTIONS = (
    EvalOptions, ModelOptions, EnvironmentOptions, RunOptions, GenerationOptions, VLLMOptions, EvaluationOptions
)  # fmt: skip
EVAL_FLAGS = {
    *(name for section in _SECTIONS for name in section.model_fields if name not in _NOT_FOR_EVALS),
    *("rl_max_prompt_length", "rl_prompts_per_step", "num_processes", "mixed_precision", "ddp_timeout"),
}
"""Options of `aitrain eval`; the others of a training have no effect on an eval."""
