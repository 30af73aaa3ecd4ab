"""Generation that computes each token of a prompt once: for all rows of a group, and for all turns of an episode.

Equal prompts of a batch are computed once, and their cache is repeated. After a generation the cache is kept; the rows
of the next round, which are earlier ones with an answer and what the environment said to it, are computed from there.
The columns that a row does not use are holes in the attention mask; positions are counted without them.

Inside API of transformers 5.17 that it uses (tests/training/test_upstream.py):

    GenerationMixin.generate(past_key_values=)      later called `cache`: computes the columns of `input_ids` that are
                                                    not in it; its positions are those of the attention mask
    PreTrainedModel._is_stateful                    True of a model with a state that is no cache of keys and values
    DynamicCache.batch_select_indices(indices)      also repeats rows
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput

KNOWN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of a cache whose keys and values can be repeated; linear attention and state spaces have others."""
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
"""Name of a cache in the arguments and outputs of models."""
LEAST_SAVED = 512
"""Tokens that a shared prompt must save, so that the additional forward pass is worth it."""


@dataclass
class CachedRows:
    """Rows of a batch whose first columns are computed: `cache` holds fewer columns than `ids`."""

    ids: torch.Tensor
    """(rows, columns), padded on the left and in between."""
    mask: torch.Tensor
    """(rows, columns): 1 where there is a token of the row."""
    cache: DynamicCache | None = None
    tokens: tuple[tuple[int, ...], ...] = ()
    """The tokens of each row that are in the cache."""
    numbers: tuple[int, ...] = ()
    """The episode of each row."""


def padded(prompts: list[list[int]], pad: int, device: torch.device) -> CachedRows:
    """Prompts padded on the left, without a cache."""
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    ids = pad_sequence(rows, True, pad, padding_side="left")
    return CachedRows(ids, pad_sequence(list(map(torch.ones_like, rows)), True, padding_side="left"))


def distinct_prompts(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The different prompts of padded rows, their mask, and the number of each row's prompt."""
    marked, numbers = ids.masked_fill(mask == 0, -1).unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
    first = torch.stack([(numbers == number).nonzero()[0, 0] for number in range(len(marked))])
    return ids[first], mask[first], numbers


def with_prompts_once(model: Any, rows: CachedRows) -> CachedRows:
    """The rows with a cache in which equal ones were computed once, if that saves LEAST_SAVED tokens."""
    distinct, attended, numbers = distinct_prompts(rows.ids, rows.mask)
    if (len(rows.ids) - len(distinct)) * (rows.ids.shape[1] - 1) < LEAST_SAVED:
        return rows
    ids, mask = distinct[:, :-1], attended[:, :-1]
    cache = DynamicCache(config=model.config)
    given: dict[str, Any] = {CACHE: cache}
    if takes_positions(model):
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **given)
    if not cache.get_seq_length() or any(type(layer) not in KNOWN_LAYERS for layer in cache.layers):
        return rows
    cache.batch_select_indices(numbers)
    return CachedRows(rows.ids, rows.mask, cache)


def takes_positions(model: Any) -> bool:
    """Whether a model has positions, which then are those of `generate`."""
    innermost = model.get_base_model() if isinstance(model, PeftModel) else model
    return "position_ids" in inspect.signature(innermost.forward).parameters


def kept(
    rows: CachedRows, numbers: list[int], prompts: list[list[int]], answers: list[list[int]], output: Any
) -> CachedRows | None:
    """What the next round continues from, after a generation; None if this cache does not serve for that: the window of
    a sliding one would count the holes."""
    cache = output.get(CACHE)
    if not isinstance(cache, DynamicCache) or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    columns = cache.get_seq_length()
    inside = [answer[: columns - rows.ids.shape[1]] for answer in answers]
    said = [[1] * len(answer) + [0] * (columns - rows.ids.shape[1] - len(answer)) for answer in inside]
    mask = torch.cat([rows.mask, torch.tensor(said, dtype=rows.mask.dtype, device=rows.mask.device)], 1)
    tokens = tuple((*prompt, *answer) for prompt, answer in zip(prompts, inside, strict=True))
    return CachedRows(output.sequences[:, :columns], mask, cache, tokens, tuple(numbers))


def continued(before: CachedRows, numbers: list[int], prompts: list[list[int]], pad: int) -> CachedRows | None:
    """The rows of the next round on the kept cache, which this takes over; None if one of them is not an earlier row
    with more tokens."""
    place = {number: row for row, number in enumerate(before.numbers)}
    live = [place.get(number, -1) for number in numbers]
    if not live or min(live) < 0 or before.cache is None:
        return None
    pairs = [(before.tokens[row], prompt) for row, prompt in zip(live, prompts, strict=True)]
    if any(len(prompt) <= len(tokens) or tuple(prompt[: len(tokens)]) != tokens for tokens, prompt in pairs):
        return None
    more = padded([prompt[len(tokens) :] for tokens, prompt in pairs], pad, before.ids.device)
    chosen = torch.tensor(live, device=before.ids.device)
    if live != list(range(len(before.numbers))):
        before.cache.batch_select_indices(chosen)
    return CachedRows(
        torch.cat([before.ids[chosen], more.ids], 1), torch.cat([before.mask[chosen], more.mask], 1), before.cache
    )
