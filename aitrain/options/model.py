"""Options of the model and of its adapter."""

from typing import Literal

from aitrain.options.section import Options, ResumeSafe
from aitrain.options.value_types import Names, PositiveInt, ProperFraction


class ModelOptions(Options):
    """Which model is loaded, and how."""

    section = "Model"

    model: str = "google/gemma-3-270m"
    """Hub name or folder of the model to train; `tiny` is the shipped one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto: bfloat16 for a frozen base under LoRA where the GPU has it, else float32."""
    attn_implementation: str | None = None
    """Attention implementation of transformers, such as sdpa or eager."""
    chat_template: str | None = None
    """chatml, zephyr, or a file with a Jinja template; unset: the tokenizer's own."""
    model_max_length: PositiveInt | None = None
    """Maximum length of prompt and completion together in tokens; unset: that of the model's configuration."""
    quantization: Literal["int4", "int8"] | None = None
    """Load the base weights in 4 or 8 bits (CUDA, with --peft only)."""
    trust_remote_code: bool = False
    """Run code that comes with the model; off, where AITraining has it on: it is a stranger's code."""


class LoRAOptions(Options):
    """The LoRA adapter."""

    section = "LoRA"

    peft: bool = False
    """Train a LoRA adapter instead of all weights."""
    lora_r: PositiveInt = 16
    """Rank of the adapter."""
    lora_alpha: PositiveInt = 32
    """The adapter is scaled by lora_alpha / lora_r."""
    lora_dropout: ProperFraction = 0.0
    """Dropout in the adapter; 0, where AITraining has 0.05: it also changes the sampling."""
    target_modules: Names = "all-linear"
    """Layers that get an adapter: all-linear, or names separated by commas."""
    merge_adapter: ResumeSafe[bool] = True
    """Also write base and adapter merged, into model/merged."""
