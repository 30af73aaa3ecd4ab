"""Generation that computes each token once: a prompt for all rows of a group, and a turn for all turns after it.

Equal prompts of a batch are computed once, and their cache is repeated. After a generation the keys and values of each
row are kept. The rows of the next round are those with an answer and what the environment said to it: they are computed
from where they differ from what was kept.

All rows are padded on the left and computed from the same column on. Where a row has fewer new tokens than another one,
the last of its kept tokens are computed again.

Inside API of transformers 5.17 that it uses (tests/training/test_upstream.py):

    GenerationMixin.generate(past_key_values=)      later called `cache`: computes the columns of `input_ids` that are
                                                    not in it; its positions are those of the attention mask
    PreTrainedModel._is_stateful                    True of a model with a state that is no cache of keys and values
    DynamicCache(config=)                           has the layers that generate's own cache has
    DynamicCache.batch_select_indices(indices)      also repeats rows
    DynamicCache.update(keys, values, layer)        of shape (rows, heads, tokens, head_dim); each layer calls it
"""

import inspect
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput

from aitrain.engines.scopes import innermost
from aitrain.machine import free_memory
from aitrain.rollout.engine import GenerationRequest

KNOWN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of a cache whose keys and values can be repeated; linear attention and state spaces have others."""
BY_LENGTH = {"dynamic", "longrope"}
"""Rotary positions that rotate the keys of a prompt in another way where a completion makes the row longer."""
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
"""Name of a cache in the arguments and outputs of models."""
LEAST_SAVED = 512
"""Tokens that a shared prompt must save, so that the additional forward pass is worth it."""


class AutocastCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """Keeps keys and values in the number format of autocast, to which attention would convert all of them for each new
    token: rotary positions make float32 of the keys."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *more: Any, **named: Any
    ) -> Any:
        """Keys and values of the layer, earlier ones included."""
        if torch.is_autocast_enabled(device := key_states.device.type):
            key_states, value_states = (one.to(torch.get_autocast_dtype(device)) for one in (key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *more, **named)


@dataclass(frozen=True)
class PaddedRows:
    """Padded rows of a batch. Their first columns may be computed: `cache` holds fewer than all."""

    ids: torch.Tensor
    """(rows, columns)."""
    mask: torch.Tensor
    """(rows, columns): 1 where there is a token of the row."""
    cache: DynamicCache | None = None


@dataclass(frozen=True)
class KeptRow:
    """The tokens of a row that were computed, and their keys and values."""

    tokens: list[int]
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """(tokens, heads, head_dim)."""

    def common(self, tokens: list[int]) -> int:
        """Number of first tokens that are the same."""
        pairs = zip(self.tokens, tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def can_share(model: Any) -> bool:
    """Whether a model takes position ids, and has a cache of keys and values that do not depend on the length of the
    row, and whose rows can be repeated and removed."""
    rotary = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rotary, *rotary.values()) if isinstance(one, dict)}
    known = inspect.signature(innermost(model).forward).parameters
    if model._is_stateful or not {CACHE, "position_ids"} <= known.keys() or kinds & BY_LENGTH:
        return False
    return all(type(layer) in KNOWN_LAYERS for layer in DynamicCache(config=model.config).layers)


def padded(tokens: list[list[int]], pad: int, device: torch.device, side: str = "left") -> PaddedRows:
    """Rows of tokens padded on one side, without a cache."""
    rows = [torch.tensor(row, device=device) for row in tokens]
    ids = pad_sequence(rows, True, pad, padding_side=side)
    return PaddedRows(ids, pad_sequence(list(map(torch.ones_like, rows)), True, padding_side=side))


def distinct_prompts(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The different prompts of padded rows, their mask, and the number of each row's prompt."""
    marked, numbers = ids.masked_fill(mask == 0, -1).unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
    first = torch.stack([(numbers == number).nonzero()[0, 0] for number in range(len(marked))])
    return ids[first], mask[first], numbers


def cache_of_prompts(model: Any, rows: PaddedRows) -> DynamicCache | None:
    """A cache of all columns but the last, in which equal rows were computed once, if that saves LEAST_SAVED tokens."""
    distinct, attended, numbers = distinct_prompts(rows.ids, rows.mask)
    if (len(rows.ids) - len(distinct)) * (rows.ids.shape[1] - 1) < LEAST_SAVED:
        return None
    ids, mask, cache = distinct[:, :-1], attended[:, :-1], AutocastCache(config=model.config)
    given = {CACHE: cache, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}  # those of `generate`
    model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **given)
    cache.batch_select_indices(numbers)
    return cache


def with_running_rows(rows: PaddedRows, output: Any, running: list[int]) -> PaddedRows:
    """The rows that go on after a generation, with the tokens that it added to all."""
    chosen = torch.tensor(running, device=rows.ids.device)
    ids, cache = output.sequences[chosen], output.get(CACHE)
    if cache is not None:
        cache.batch_select_indices(chosen)
    new = torch.ones_like(ids[:, rows.ids.shape[1] :])
    return PaddedRows(ids, torch.cat([rows.mask[chosen], new], 1), cache)


def keep_rows(
    cache: DynamicCache | None, mask: torch.Tensor, rows: dict[int, GenerationRequest], is_last: bool
) -> dict[int, KeptRow]:
    """What is kept, by their index, of rows that are given by their place in the cache; `mask` is that of their
    beginnings.

    No row is kept if a sliding window has left some tokens, or not as much memory is free as they take. With `is_last`
    the cache is emptied.
    """
    if cache is None or not rows:
        return {}
    columns, layers, starts = cache.get_seq_length(), cache.layers, mask.argmax(1).tolist()
    kept = {row.index: KeptRow(row.prompt_ids[: columns - starts[place]], []) for place, row in rows.items()}
    size = sum(tensor[0, :, 0].nbytes for layer in layers for tensor in (layer.keys, layer.values))
    free = free_bytes(layers[0].keys.device)
    is_short = free is not None and size * sum(len(row.tokens) for row in kept.values()) > free
    if is_short or any(layer.keys.shape[2] < columns for layer in layers):
        return {}
    for layer in layers:
        for place, row in rows.items():
            part = place, slice(None), slice(starts[place], starts[place] + len(kept[row.index].tokens))
            keys, values = (tensor[part].transpose(0, 1).clone() for tensor in (layer.keys, layer.values))
            kept[row.index].layers.append((keys, values))
        if is_last:
            layer.keys = layer.values = None
    return kept


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated on a device; None if unknown."""
    if device.type != "cuda":
        return free_memory()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def cache_of_kept(model: Any, prompts: list[list[int]], kept: list[KeptRow | None]) -> DynamicCache | None:
    """A cache of what was kept of each row, which this takes over; None if that leaves out no token of the prompts."""
    common = [row.common(prompt) if row else 0 for row, prompt in zip(kept, prompts, strict=True)]
    new = max(max(1, len(prompt) - count) for prompt, count in zip(prompts, common, strict=True))
    counts = [max(0, len(prompt) - new) for prompt in prompts]
    layers = [row.layers for row in kept if row]
    if not layers or not any(counts):
        return None
    cache, empty = AutocastCache(config=model.config), [(keys[:0], values[:0]) for keys, values in layers[0]]
    for layer, none in enumerate(empty):
        parts = [row.layers.pop(0) if row else none for row in kept]
        keys, values = (
            pad_sequence([part[which][:count] for part, count in zip(parts, counts, strict=True)], True, 0.0, "left")
            for which in (0, 1)
        )
        cache.update(keys.transpose(1, 2), values.transpose(1, 2), layer)
    return cache
