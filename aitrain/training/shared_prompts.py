"""Forward passes in which the prompt of several completions is computed once.

The prompts of a block, all but their last token, are forwarded once, and the keys and values of their cache are kept
with gradients. The completions are forwarded on that cache, in one or several passes. The backward pass of each ends in
the cache, where the gradients are accumulated, and after the last one they go through the prompts. So one graph of
prompts and one of a pass are held at a time. DDP exchanges gradients once, in the last backward pass of a step, which
continues through the prompts. The gradient is that of rows apart, to rounding.

With gradient checkpointing a layer is computed again in the backward pass, on the same cache, which it does not change.

A row has its prompt's padding on the left and its own on the right, as TRL has it.

Inside API of TRL 1.16 and transformers 5.17 that it uses (tests/training/test_upstream.py):

    model(labels=, fused_lm_head=True, past_key_values=)    TRL's head passes `use_cache=False`: layers use a cache that
                                                            is given all the same
    DynamicCache.layers, DynamicLayer.keys, .values         of shape (rows, heads, tokens, head_dim); `update` replaces
                                                            them, and writes into none
    GradientCheckpointingLayer._can_checkpoint_with_cache   set: else a checkpointed layer gets no cache
    FSDP2's hooks                                           gather weights for the backward pass of a layer when the
                                                            gradient of its output arrives
"""

import copy
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from aitrain.engines.sharded_tensors import is_sharded, whole
from aitrain.engines.shared_cache import CACHE, can_share, distinct_prompts
from aitrain.training.passes import log_probs_of_rows

ROUNDING = 0.25
"""Relative differences of gradients by rounding to bfloat16 are smaller: those of SmolLM2 are 0.06."""


class _UnchangedCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """A cache that layers do not change, as checkpointed ones are computed a second time in the backward pass."""

    updated: dict[int, Any] | None = None
    """What the layers would have become, if that is kept."""
    numbers: torch.Tensor | None = None
    """The prompt of each row of a pass, of shape (rows); None if the cache has its rows."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *more: Any, **named: Any
    ) -> Any:
        """Keys and values, earlier ones included."""
        layer = copy.copy(self.layers[layer_idx])
        if self.numbers is not None:
            layer.keys, layer.values = (one.index_select(0, self.numbers) for one in (layer.keys, layer.values))
        if self.updated is not None:
            self.updated[layer_idx] = layer
        return layer.update(key_states, value_states, *more, **named)


class SharedPrompts:
    """The cache of one block's prompts, on which the block's passes are computed."""

    def __init__(self, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """`ids`, `mask`: the prompts of the block's rows, padded on the left, of shape (rows, tokens)."""
        longest = int(mask.sum(1).max())
        ids, mask, _ = distinct_prompts(ids[:, -longest:], mask[:, -longest:])
        self.tokens = longest - 1
        """Tokens of the cache; a pass begins with the last token of the prompts."""
        self._cache = _UnchangedCache(config=getattr(model, "module", model).config)  # of DDP, the model inside
        self._cache.updated = updated = dict[int, Any]()
        given = {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1]}
        output = _forward(model, self._cache, **given, logits_to_keep=1)
        self._cache.updated = None
        self._layers = [updated[number] for number in range(len(self._cache.layers))]
        self._outputs = [output.logits] if is_sharded(model) else []
        self._computed = [tensor for layer in self._layers for tensor in (layer.keys, layer.values)]
        self._leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._computed]
        self.is_joined = False
        """Whether the backward pass of the next pass continues through the prompts."""

    def log_probs(
        self, model: Any, ids: torch.Tensor, mask: torch.Tensor, in_loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities and entropies of the completions' tokens, of shape (rows, tokens of completions).

        `ids`, `mask`: whole rows, whose prompts are all of the block's, of shape (rows, tokens). `in_loss`: the tokens
        of completions that are computed; the values of the others are 0.
        """
        cache, end = copy.copy(self._cache), ids.shape[1] - in_loss.shape[1]
        longest = max(1, int(mask[:, end:].sum(1).max()))
        ids, mask = (part[:, end - self.tokens - 1 : end + longest] for part in (ids, mask))
        _, _, cache.numbers = distinct_prompts(ids[:, : self.tokens + 1], mask[:, : self.tokens + 1])
        cache.layers = [copy.copy(layer) for layer in self._layers]
        if self.is_joined:
            for tensor, leaf in zip(self._computed, self._leaves, strict=True):
                if leaf.grad is not None:  # of earlier passes
                    tensor.register_hook(leaf.grad.add)
        tensors = iter(self._computed if self.is_joined else self._leaves)
        for layer in cache.layers:
            layer.keys, layer.values = next(tensors), next(tensors)
        own = ids[:, self.tokens :]
        labels = own.masked_fill(~torch.nn.functional.pad(in_loss[:, :longest], (1, 0)), -100)
        output = _forward(model, cache, input_ids=own, attention_mask=mask, labels=labels, fused_lm_head=True)
        widened = partial(torch.nn.functional.pad, pad=(0, in_loss.shape[1] - longest))
        return widened(output.log_probs), None if output.entropy is None else widened(output.entropy)

    def backward(self) -> None:
        """Continue the backward passes through the prompts. FSDP2 waits for a gradient of the output, which is 0."""
        computed = zip(self._computed, self._leaves, strict=True)
        pairs = [(tensor, leaf.grad) for tensor, leaf in computed if leaf.grad is not None]
        pairs += [(output, torch.zeros_like(output)) for output in self._outputs]
        if pairs:  # none for a gradient of 0
            tensors, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, gradients)


def _forward(model: Any, cache: DynamicCache, **inputs: Any) -> Any:
    """The output of a model on a cache that it does not change, which checkpointed layers are given as well."""
    GradientCheckpointingLayer._can_checkpoint_with_cache = True
    try:
        return model(**{CACHE: cache}, use_cache=False, **inputs)
    finally:
        GradientCheckpointingLayer._can_checkpoint_with_cache = False


def why_apart(model: PreTrainedModel | PeftModel, is_precise: bool) -> str:
    """Why this model computes each row with its own prompt; empty if it can share them.

    Two rows are computed both ways in training mode, with log-probabilities and gradients that must be the same, to
    rounding: to that of bfloat16 unless the model `is_precise`. The model's gradients are deleted.
    """
    if draws_dropout(model):
        return "dropout is drawn for each row"
    if not can_share(model):
        return "its keys and values cannot be shared"
    prompt, answer = 12, 6  # tokens of the two rows
    vocabulary, generator = model.get_input_embeddings().weight.shape[0], torch.Generator().manual_seed(0)
    # special tokens, which cause large rounding errors, are at the ends of a vocabulary
    ids = torch.randint(vocabulary // 4, vocabulary - vocabulary // 4, (2, prompt + answer), generator=generator)
    ids[1, :prompt] = ids[0, :prompt]
    ids = ids.to(model.device)
    mask = torch.ones_like(ids)
    mask[1, -answer // 2 :] = 0
    in_loss = mask[:, -answer:].bool()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad][:8]

    def results(shares: bool) -> list[torch.Tensor]:
        """Log-probabilities, and gradients of the first weights, in float64."""
        model.zero_grad()
        prompts = SharedPrompts(model, ids[:1, :prompt], mask[:1, :prompt]) if shares else None
        compute: Any = log_probs_of_rows if prompts is None else prompts.log_probs
        passes = ([0, 1],) if prompts is None else ([0], [1])
        logps = torch.cat([compute(model, ids[rows], mask[rows], in_loss[rows])[0] for rows in passes])
        torch.autograd.backward(logps.sum())
        if prompts is not None:
            prompts.backward()
        gradients = [whole(one.grad) for one in trained if one.grad is not None]
        return [one.double() for one in (logps.detach(), *gradients)]

    was_training = model.training
    model.train()
    try:
        pairs = list(zip(results(shares=False), results(shares=True), strict=True))
    except Exception as error:  # of any model's code
        return f"its cache cannot be shared: {type(error).__name__}"
    finally:
        model.train(was_training)
        model.zero_grad()
    most = 1e-3 if is_precise else ROUNDING
    differences = [float((one - other).norm() / one.norm().clamp(min=1e-12)) for one, other in pairs]
    return "" if all(difference <= most for difference in differences) else "its results would differ"


def draws_dropout(model: torch.nn.Module) -> bool:
    """Whether a model in training mode drops values at random, other ones in each row."""
    config = getattr(model, "config", None)
    dropouts = (module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    return bool(getattr(config, "attention_dropout", 0)) or any(dropouts)
