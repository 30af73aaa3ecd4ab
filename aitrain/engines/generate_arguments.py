"""Interprets the arguments of `model.generate` calls, and finds the calls that can share a batch with the same results.

Inside API of transformers 5.17 that it uses (tests/training/test_upstream.py):

    model._prepare_generation_config(config, **arguments)       called: the settings that `generate` resolves
    GenerationConfig._get_default_generation_params()           called: default of each setting
    GenerationMixin._prepare_attention_mask_for_generation      done the same way: the mask of a call without one
    GenerationMixin._prepare_generated_length                   done the same way: maximum length of its completions
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedModel

from aitrain.engines.sampling import CompletionBatch, Sampling

ENGINE_SETTINGS = {
    "max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "num_return_sequences", "eos_token_id", "pad_token_id", "bos_token_id",
    "use_cache", "disable_compile", "transformers_version", "_from_model_config",
}  # fmt: skip
"""Settings that an engine supports, or can ignore."""

SHARED_SETTINGS = ENGINE_SETTINGS | {
    "min_new_tokens", "typical_p", "epsilon_cutoff", "eta_cutoff", "suppress_tokens",
    "renormalize_logits", "remove_invalid_values",
}  # fmt: skip
"""Settings whose effect on a row is independent of the other rows and of padding. Calls with any other setting (beams,
n-grams, ...) do not share a batch."""


@dataclass(frozen=True, eq=False)
class GenerateRequest:
    """A call of `generate` with ids, a mask, a generation config and plain values; calls of the same `kind` may share a
    batch."""

    ids: torch.Tensor
    """Shape (rows, tokens), padded on the left."""
    mask: torch.Tensor | None
    config: GenerationConfig | None
    rest: dict[str, object]
    """The other arguments."""
    kind: str

    @classmethod
    def of(cls, args: Sequence[object], kwargs: Mapping[str, object]) -> GenerateRequest | None:
        """The request with these arguments of `generate`; None if one of them is of another kind."""
        given = dict(zip(("inputs", "generation_config"), args, strict=False)) | dict(kwargs)
        if len(given) < len(args) + len(kwargs) or ("inputs" in given and "input_ids" in given):
            return None
        ids = given.pop("inputs", None) if "inputs" in given else given.pop("input_ids", None)
        mask, config = given.pop("attention_mask", None), given.pop("generation_config", None)
        if not isinstance(ids, torch.Tensor) or ids.dtype != torch.long or ids.dim() != 2 or ids.numel() == 0:
            return None
        if mask is not None and not isinstance(mask, torch.Tensor):
            return None
        if mask is not None and (mask.shape, mask.device) != (ids.shape, ids.device):
            return None
        if not (config is None or isinstance(config, GenerationConfig)) or not _is_plain(list(given.values())):
            return None
        settings = None if config is None else sorted(config.to_dict().items())
        return cls(ids, mask, config, given, repr((ids.device, settings, sorted(given.items()))))

    @property
    def width(self) -> int:
        """Tokens of a row, padding included."""
        return self.ids.shape[1]

    def widened(self, width: int) -> torch.Tensor:
        """The ids, padded on the left with each row's first token, which attention masks out, and which is no new token
        for a repetition penalty."""
        return torch.cat([self.ids[:, :1].expand(-1, width - self.width), self.ids], dim=1)

    def with_limit(self, tokens: int) -> dict[str, object]:
        """The arguments except ids and mask, with at most `tokens` new tokens."""
        rest = {name: value for name, value in self.rest.items() if name not in ("max_length", "max_new_tokens")}
        if self.config is None:
            return rest | {"max_new_tokens": tokens}
        config = copy.deepcopy(self.config)
        config.max_new_tokens, config.max_length = tokens, None
        return rest | {"generation_config": config}


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, (bool, int, float, str))


class GenerateSettings:
    """The settings that `generate` resolves from the arguments of one kind of request."""

    def __init__(self, model: PreTrainedModel, request: GenerateRequest) -> None:
        self._config, rest = model._prepare_generation_config(request.config, **request.rest)
        lengths = [request.rest.get("max_length"), request.config and request.config.max_length]
        self._has_length = {*lengths, model.generation_config.max_length} != {None}
        self._context = getattr(model.config, "max_position_embeddings", None)
        self._is_shared = not rest and _unusual(self._config) <= SHARED_SETTINGS
        self.ends = _as_list(self._config.eos_token_id)
        self.pad: int | None = next(iter([*_as_list(self._config.pad_token_id), *self.ends]), None)
        has_usual_ends = set(self.ends) == set(_as_list(model.generation_config.eos_token_id))
        self.is_for_engine = has_usual_ends and _unusual(self._config) <= ENGINE_SETTINGS
        self.rows: int = self._config.num_return_sequences
        """Completions of each prompt."""

    @classmethod
    def of(cls, model: PreTrainedModel, request: GenerateRequest) -> GenerateSettings | None:
        """The settings; None if they are invalid, for which `generate` itself raises the error."""
        try:
            return cls(model, request)
        except Exception:
            return None

    def allow(self, request: GenerateRequest) -> bool:
        """Whether it may share a batch."""
        return self._is_shared and self.limit(request) > 0

    def limit(self, request: GenerateRequest) -> int:
        """Maximum new tokens of each of its completions."""
        if self._config.max_new_tokens is not None:
            return int(self._config.max_new_tokens)
        if self._has_length or self._context is None:
            return int(self._config.max_length) - (request.width if self._has_length else 0)
        return min(int(self._config.max_length), int(self._context) - request.width)

    def mask(self, request: GenerateRequest, width: int) -> torch.Tensor:
        """Its attention mask, for ids of this width."""
        if request.mask is not None:
            mask = request.mask.long()
        elif self.pad is not None and self.pad not in self.ends:
            mask = request.ids.ne(self.pad).long()
        else:
            mask = torch.ones_like(request.ids)
        return pad(mask, (width - request.width, 0))

    def arguments(self, requests: list[GenerateRequest]) -> dict[str, object]:
        """Arguments of one `generate` for all requests, padded on the left to the widest."""
        width = max(request.width for request in requests)
        return {
            "input_ids": torch.cat([request.widened(width) for request in requests]),
            "attention_mask": torch.cat([self.mask(request, width) for request in requests]),
            **requests[0].with_limit(max(self.limit(request) for request in requests)),
        }

    def batch(self, requests: list[GenerateRequest], seeds: list[int] | None) -> CompletionBatch:
        """All requests as a batch of an engine; `seeds`: one for each completion."""
        prompts = [
            ids[mask.bool()].tolist()
            for request in requests
            for ids, mask in zip(request.ids, self.mask(request, request.width), strict=True)
            for _ in range(self.rows)
        ]
        return CompletionBatch(prompts, self._sampling(), max(self.limit(request) for request in requests), seeds)

    def _sampling(self) -> Sampling:
        config = self._config
        penalty = config.repetition_penalty or 1.0
        if not config.do_sample:
            return Sampling(repetition_penalty=penalty).greedy
        temperature = 1.0 if config.temperature is None else config.temperature
        return Sampling(temperature, config.top_k or 0, config.top_p or 1.0, config.min_p or 0.0, penalty)

    def lengths(self, generated: torch.Tensor) -> list[int]:
        """Length of each completion, including the token that ends it."""
        is_end = torch.isin(generated, torch.tensor(self.ends, dtype=generated.dtype, device=generated.device))
        until_end = is_end.int().argmax(dim=1) + 1
        lengths: list[int] = until_end.masked_fill(~is_end.any(dim=1), generated.shape[1]).tolist()
        return lengths

    def results(
        self, requests: list[GenerateRequest], generated: torch.Tensor, lengths: list[int]
    ) -> list[torch.Tensor]:
        """For each request, its prompts followed by its rows of `generated`, as wide as if it had been alone."""
        results, first = [], 0
        for request in requests:
            rows = slice(first, first + len(request.ids) * self.rows)
            width = min(self.limit(request), max(lengths[rows]))
            prompts = request.ids.repeat_interleave(self.rows, dim=0)
            results.append(torch.cat([prompts, generated[rows, :width]], dim=1))
            first = rows.stop
        return results


def _unusual(config: GenerationConfig) -> set[str]:
    """Names of the settings that differ from their defaults."""
    usual = vars(GenerationConfig()) | GenerationConfig._get_default_generation_params()
    return {name for name, value in vars(config).items() if name in usual and (value or None) != (usual[name] or None)}


def _as_list(tokens: int | list[int] | None) -> list[int]:
    if tokens is None:
        return []
    return [tokens] if isinstance(tokens, int) else list(tokens)
