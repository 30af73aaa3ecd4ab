"""Loads a model to play episodes outside of training: base and adapter, tokenizer, what ends its completions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from aitrain.engines.hf import HFEngine, HFModel
from aitrain.engines.sampling import Sampling
from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig
from aitrain.rollout.limits import EndOfTurn, Limits
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

    @property
    def limits(self) -> Limits:
        """The limits of its episodes."""
        config = self.config
        return Limits(config.rl_max_turns, config.rl_max_new_tokens, config.rl_max_episode_tokens, self.context)

    def engine(self) -> HFEngine:
        """An engine that generates with transformers."""
        return HFEngine(HFModel(self.model, self.tokenizer), self.sampling, self.end, self.context)


def load_policy(reference: ModelReference, config: TrainConfig, with_weights: bool = True) -> LoadedPolicy:
    """Load a model for playing, from safetensors only, in the dtype that a training with these options has.

    An adapter stays beside its base, as in training, so that completions are the same. Without weights, the model has
    only its shape: for an engine that loads them itself.

    Raises:
        ConfigError: it cannot be loaded.
    """
    transformers_logging.disable_progress_bar()
    config = config.model_copy(update={"model": reference.base, "peft": config.peft or reference.adapter is not None})
    tokenizer = load_tokenizer(config, tokenizer_folder(reference))
    load = load_model if with_weights else model_without_weights
    model = load(config, choose_precision(config).dtype)
    check_vocabulary(tokenizer, model)
    context, end = context_length(config, model), _eos_ids(config, model, tokenizer)
    if with_weights:
        model = _with_adapter(model, reference.adapter).eval()
        if torch.cuda.is_available() and config.quantization is None:
            model.to("cuda")
        count_forward_passes(model)
    sampling = Sampling.of(config)
    return LoadedPolicy(config, model, tokenizer, context, EndOfTurn(end, sampling.stop_strings(tokenizer)))


def tokenizer_folder(reference: ModelReference) -> str | None:
    """The folder of the adapter, if a tokenizer was saved with it; None: that of the base."""
    adapter = reference.adapter
    return str(adapter) if adapter is not None and (adapter / "tokenizer_config.json").is_file() else None


def _with_adapter(model: PreTrainedModel, adapter: Path | None) -> PreTrainedModel:
    if adapter is None:
        return model
    try:
        wrapped: PreTrainedModel = PeftModel.from_pretrained(model, str(adapter), use_safetensors=True)
    except Exception as error:
        what = " ".join(str(error).split())[:200]
        raise ConfigError(f"model: cannot load the adapter {adapter}: {type(error).__name__}: {what}") from error
    return wrapped


def _eos_ids(config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a completion, as in TRL: those of the model, and the tokenizer's."""
    generation = model.generation_config
    if model.device.type == "meta":
        try:
            generation = GenerationConfig.from_pretrained(model_path(config.model))
        except OSError:  # the model has none
            generation = model.generation_config
    named: object = generation.eos_token_id
    of_model = named if isinstance(named, list) else [] if named is None else [named]
    return list(dict.fromkeys([*of_model, tokenizer.eos_token_id]))
