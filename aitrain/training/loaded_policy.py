"""A model that plays episodes outside of a training: in evals, chats and checks, and before an export."""

from contextlib import suppress
from dataclasses import dataclass

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from aitrain.engines.hf import HFEngine
from aitrain.engines.sampling import Sampling
from aitrain.errors import ConfigError
from aitrain.execution.user_code import describe_error
from aitrain.options.train import TrainConfig
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.runs.model_reference import ModelReference
from aitrain.training.model import (
    check_vocabulary,
    choose_precision,
    context_length,
    count_forward_passes,
    load_model,
    load_tokenizer,
    model_path,
    model_without_weights,
)


@dataclass(frozen=True)
class LoadedPolicy:
    """A model in evaluation mode with its tokenizer."""

    config: TrainConfig
    """The options that it was loaded with; `model` is the base."""
    model: PreTrainedModel
    """On torch's meta device if its weights were not loaded."""
    tokenizer: PreTrainedTokenizerBase
    context: int | None
    """Maximum tokens of prompt and completion together."""
    end: EndOfTurn

    @property
    def sampling(self) -> Sampling:
        """How it samples."""
        return Sampling.of(self.config)

    def engine(self) -> HFEngine:
        """An engine that generates with transformers."""
        return HFEngine(self.model, self.tokenizer, self.sampling, self.end, self.context)


def load_policy(reference: ModelReference, config: TrainConfig, with_weights: bool = True) -> LoadedPolicy:
    """Load a model for playing, from safetensors only, in the dtype that a training with these options has.

    An adapter stays beside its base, as in training, so that completions are the same. Without weights, the model has
    only its shape: for an engine that loads them itself.

    Raises:
        ConfigError: it cannot be loaded.
    """
    transformers_logging.disable_progress_bar()
    adapter = reference.adapter
    config = config.model_copy(update={"model": reference.base, "peft": config.peft or adapter is not None})
    tokenizer = load_tokenizer(config, tokenizer_folder(reference))
    load = load_model if with_weights else model_without_weights
    model = load(config, choose_precision(config).dtype)
    check_vocabulary(tokenizer, model)
    context, generation = context_length(config, model.config), model.generation_config
    if with_weights:
        if adapter is not None:
            try:
                model = PeftModel.from_pretrained(model, str(adapter), use_safetensors=True)
            except Exception as error:
                raise ConfigError(f"model: cannot load the adapter {adapter}: {describe_error(error)}") from error
        model.eval()
        if torch.cuda.is_available() and config.quantization is None:
            model.to("cuda")
        count_forward_passes(model)
    else:
        with suppress(OSError):  # the model has none
            generation = GenerationConfig.from_pretrained(model_path(config.model))
    ends = generation.eos_token_id  # as in TRL, of the model and of the tokenizer
    ends = [*(ends if isinstance(ends, list) else [] if ends is None else [ends]), tokenizer.eos_token_id]
    end = EndOfTurn(list(dict.fromkeys(ends)), config.rl_stop or (), tokenizer)
    return LoadedPolicy(config, model, tokenizer, context, end)


def tokenizer_folder(reference: ModelReference) -> str | None:
    """The folder of the adapter, if a tokenizer was saved with it; None: that of the base."""
    adapter = reference.adapter
    return str(adapter) if adapter is not None and (adapter / "tokenizer_config.json").is_file() else None
