"""Requests to vLLM's /v1/completions: prompts as token ids, completions as token ids with log-probabilities.

What they use of vLLM 0.31 (tests/training/test_served.py runs against it):

    prompt              lists of token ids
    n, seed             completion k of a prompt is sampled with seed + k
    logprobs            0: of the sampled tokens; k: of the k most likely ones, too (prompt_logprobs would do more, and
                        ends the engine of a server on the CPU that has an adapter)
    return_token_ids    the ids as sampled, with the one that ended the completion
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aitrain.engines.sampling import CompletionBatch, Sampling
from aitrain.errors import RunFailed

CHUNK_PROMPTS, CHUNK_TOKENS = 64, 200_000
"""Maximum prompts and prompt tokens of one request, which is then a few megabytes large."""

Places = list[int]
"""Indices of a request's prompts in their batch."""


@dataclass(frozen=True)
class CompletionRequest:
    """A request for one completion of each prompt. With a seed all prompts are equal, and completion k is sampled with
    seed + k."""

    prompts: Sequence[list[int]]
    sampling: Sampling
    max_tokens: int
    seed: int | None = None
    top_logprobs: int = 0
    """Number of most likely tokens whose log-probabilities are returned, at each position."""
    has_logprobs: bool = True
    """Whether log-probabilities are returned at all."""

    @property
    def max_total_tokens(self) -> int:
        """Tokens of the prompts, and the most that are sampled."""
        return sum(len(prompt) + self.max_tokens for prompt in self.prompts)

    def body(self, model: str, cache_salt: str, eos_ids: Sequence[int]) -> dict[str, Any]:
        """Fields of the request, including all for which the server would use the model's generation_config.json.

        Requests share cached prefixes only if they have the same `cache_salt`.
        """
        sampling = self.sampling
        # as token ids, since the server would decode each token otherwise
        logprobs = {"logprobs": self.top_logprobs, "return_tokens_as_token_ids": True}
        seeded = {"prompt": self.prompts[:1], "n": len(self.prompts), "seed": self.seed}
        return {
            "model": model,
            "prompt": self.prompts,
            "max_tokens": self.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            **sampling.vllm_extras(eos_ids, self.max_tokens),
            "return_token_ids": True,
            "cache_salt": cache_salt,
            **(logprobs if self.has_logprobs else {}),
            **({} if self.seed is None else seeded),
        }

    def completions(self, response: dict[str, Any], url: str) -> list[tuple[list[int], list[float] | None]]:
        """Token ids and log-probabilities for each prompt, from a response of the server at `url`.

        Raises:
            RunFailed: the response does not fit the request.
        """
        choices = _in_order(response)
        if [choice["prompt_token_ids"] for choice in choices] != list(self.prompts):
            raise RunFailed(f"The vLLM server at {url} completed other prompts than those of the request.")
        cut = [len(choice["token_ids"]) for choice in choices if choice.get("finish_reason") == "length"]
        if cut and max(cut) < self.max_tokens:  # the max_new_tokens of its model's generation_config.json
            raise RunFailed(
                f"The vLLM server at {url} cuts completions at {max(cut)} tokens instead of {self.max_tokens}.\n"
                "Start it with --generation-config vllm: its model's own settings limit them otherwise."
            )
        if not self.has_logprobs:
            return [(choice["token_ids"], None) for choice in choices]
        sampled = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
        for ids, logprobs in sampled:
            if len(ids) != len(logprobs):
                raise RunFailed(f"The vLLM server gave {len(logprobs)} log-probabilities for {len(ids)} tokens.")
        return sampled


def first_token_logprobs(response: dict[str, Any]) -> list[dict[int, float]]:
    """For each prompt, log-probabilities of the most likely first tokens by token id."""
    return [
        {int(name.removeprefix("token_id:")): float(value) for name, value in logprobs.items()}
        for logprobs in (choice["logprobs"]["top_logprobs"][0] for choice in _in_order(response))
    ]


def _in_order(response: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(response["choices"], key=lambda choice: int(choice["index"]))


def room(prompt: list[int], max_tokens: int, context: int | None) -> int:
    """`max_tokens`, or fewer if the context is shorter: the server refuses requests that could exceed it."""
    return max(1, max_tokens if context is None else min(max_tokens, context - len(prompt)))


def split_batch(
    batch: CompletionBatch, context: int | None, servers: int = 1
) -> list[tuple[Places, CompletionRequest]]:
    """Split a batch into as few requests as possible, at least one for each server; with seeds, completions of one
    prompt with consecutive seeds form a request."""
    limits = [room(prompt, batch.max_tokens, context) for prompt in batch.prompts]
    seeds = batch.seeds if batch.sampling.temperature > 0 else None
    most = min(CHUNK_PROMPTS, -(-len(batch.prompts) // servers))
    chunks = _chunks(batch.prompts, limits, most) if seeds is None else _seeded_chunks(batch.prompts, seeds)
    return [
        (
            places,
            CompletionRequest(
                [batch.prompts[place] for place in places],
                batch.sampling,
                limits[places[0]],
                None if seeds is None else seeds[places[0]],
            ),
        )
        for places in chunks
    ]


def _chunks(prompts: list[list[int]], limits: list[int], most: int) -> list[Places]:
    """Prompts with the same limit, `most` at a time, up to CHUNK_TOKENS."""
    chunks: list[Places] = []
    tokens = 0
    for place in sorted(range(len(prompts)), key=limits.__getitem__):
        last, tokens = chunks[-1] if chunks else [], tokens + len(prompts[place])
        fits = len(last) < most and tokens <= CHUNK_TOKENS
        if last and limits[last[0]] == limits[place] and fits:
            last.append(place)
        else:
            chunks.append([place])
            tokens = len(prompts[place])
    return chunks


def _seeded_chunks(prompts: list[list[int]], seeds: list[int]) -> list[Places]:
    """Adjacent prompts that are equal and have consecutive seeds."""
    chunks: list[Places] = []
    for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        last = chunks[-1] if chunks else []
        if last and prompt == prompts[last[0]] and seed == seeds[last[0]] + len(last):
            last.append(place)
        else:
            chunks.append([place])
    return chunks
