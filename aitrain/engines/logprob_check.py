"""Compares a vLLM server's log-probabilities with the trainer's, to detect weights that differ or did not arrive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from aitrain.engines.sampling import CompletionBatch, Sampling
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.weight_sync import AdapterSync
from aitrain.errors import RunFailed

TEXTS = ("1 2 3 4 5", "Question: What is 7 * 8?\nAnswer:", "def add(a, b):", "The weights of a model")
TOKENS = 16
"""That the server answers each of them with, at most."""
BOUND = 0.2
"""Most that the log-probabilities of the answers may differ on average. Rounding to bfloat16 makes up to about 0.05,
float32 less than 0.001; another model's differ by more than this, which no training makes up for."""

EVERY = 10
"""Loads from one comparison to the next, once it was seen that the server follows the policy."""
CLEAR = 2.0
"""How many times the rounding noise the policy must have moved before it is asked whether the server has, too."""
LEAST_NOISE = 1e-5
"""Of log-probabilities, in float32."""
FOLLOWED = 0.5
"""Share of the policy's movement that the server must have made at least: 1 where it has the weights, 0 where not."""


Place = tuple[int, int]
"""A token after one of the contexts: (number of the context, token id)."""


@dataclass(frozen=True)
class Probe:
    """Log-probabilities of the same tokens at one moment, by the trainer's model and by the server."""

    own: dict[Place, float]
    served: dict[Place, float]
    loads: int
    """How often weights had been loaded."""


@dataclass
class LogprobCheck:
    """What a server is asked when it was given weights: the first time whether it has the same model, later whether it
    follows the policy as that changes."""

    model: Any
    prompts: list[list[int]]
    tell: Callable[[str], None] | None = None
    """Who hears of a server that does not have the same model; None: that ends the run."""
    _rows: list[list[int]] = field(default_factory=list, init=False)
    """The prompts and what the server answered the first time."""
    _last: Probe | None = field(default=None, init=False)
    _noise: float = field(default=math.inf, init=False)
    """What rounding makes of a log-probability, as a root of the mean square: the least that was seen, as weights that
    did not arrive make it more."""
    _follows: bool = field(default=False, init=False)

    @classmethod
    def of(cls, model: Any, tokenizer: Any, tell: Callable[[str], None] | None = None) -> LogprobCheck:
        """With a few short prompts."""
        return cls(model, [tokenizer(text)["input_ids"] for text in TEXTS], tell)

    async def compare(self, engine: VLLMServerEngine) -> None:
        """Compare the two after a load, if it is time to.

        Raises:
            RunFailed: they are not the same model, or the weights did not arrive.
        """
        if self._last is None:
            await self._compare_models(engine)
            self._last = await self._first_probe(engine)
        if not self._follows or engine.weights.loads - self._last.loads >= EVERY:
            await self._compare_movement(engine, self._last)

    # -- the first time

    async def _compare_models(self, engine: VLLMServerEngine) -> None:
        gap = await self.difference(engine)
        if gap <= BOUND:  # not so for nan either
            return
        message = (
            f"The vLLM server at {engine.url} does not have this run's weights: its log-probabilities differ"
            f" from the trainer's by {gap:.2f} on average, after they were handed over.\n{_advice(engine)}"
        )
        if self.tell is None:
            raise RunFailed(message)
        self.tell(message)

    async def difference(self, engine: VLLMServerEngine) -> float:
        """Mean absolute difference between the log-probabilities of sampled tokens, the server's and the model's."""
        seeds = list(range(len(self.prompts)))
        answers = await engine.generate_batch(CompletionBatch(self.prompts, Sampling(), TOKENS, seeds))
        self._rows = [prompt + answer.ids for prompt, answer in zip(self.prompts, answers, strict=True)]
        own = self._logprobs()
        sampled = torch.tensor([token for answer in answers for token in answer.ids])
        said = torch.tensor([value for answer in answers for value in answer.logprobs or ()])
        return float((own.gather(-1, sampled[:, None])[:, 0] - said).abs().mean())

    async def _first_probe(self, engine: VLLMServerEngine) -> Probe:
        """What later ones are compared with: the base where the server still has it, so that the adapter of a resumed
        run is looked for at once; else the weights as they are."""
        if not isinstance(engine.weights.sync, AdapterSync):
            return await self._probe(engine, self._logprobs())
        return await self._probe(engine, self._logprobs(self.model.disable_adapter()), of_base=True)

    # -- later

    async def _compare_movement(self, engine: VLLMServerEngine, last: Probe) -> None:
        """Only once the policy has moved clearly: before that, one that was not handed over looks the same."""
        logprobs = self._logprobs()
        if not _rms(_differences(_at(logprobs, last.own), last.own)) > CLEAR * self._noise:
            return
        now = await self._probe(engine, logprobs)
        moved, followed = _differences(now.own, last.own), _differences(now.served, last.served)
        share = float(followed @ moved / (moved @ moved))
        if not share >= FOLLOWED:
            raise RunFailed(
                f"The vLLM server at {engine.url} does not generate with the weights that it was given: the"
                f" trainer's log-probabilities have changed by {_rms(moved):.2g},"
                f" the server's by {max(share, 0.0):.0%} of that.\n"
                f"{_advice_to_a_server_that_stays(engine)}"
            )
        self._last, self._follows = now, True

    async def _probe(self, engine: VLLMServerEngine, logprobs: torch.Tensor, of_base: bool = False) -> Probe:
        """`logprobs`: the model's own, of shape (contexts, vocabulary)."""
        contexts = [
            row[:length]
            for prompt, row in zip(self.prompts, self._rows, strict=True)
            for length in range(len(prompt), len(row))
        ]
        likeliest = await engine.top_logprobs(contexts, of_base)
        said = {(number, token): value for number, said in enumerate(likeliest) for token, value in said.items()}
        own = _at(logprobs, said)
        self._noise = min(self._noise, max(_rms(_differences(own, said)), LEAST_NOISE))
        return Probe(own, said, engine.weights.loads)

    @torch.no_grad()
    def _logprobs(self, variant: AbstractContextManager[Any] | None = None) -> torch.Tensor:
        """The model's own, of every token at each place of the answers, without dropout: (places, vocabulary)."""
        was_training = self.model.training
        self.model.eval()
        ids = pad_sequence([torch.tensor(row) for row in self._rows], batch_first=True).to(self.model.device)
        try:
            with variant or nullcontext():
                logits = self.model(ids).logits  # padding comes after the tokens, which do not see it
        finally:
            self.model.train(was_training)
        answers = [
            each[len(prompt) - 1 : len(row) - 1]
            for prompt, row, each in zip(self.prompts, self._rows, logits, strict=True)
        ]
        return torch.cat(answers).float().log_softmax(-1).cpu()


def _at(logprobs: torch.Tensor, places: Iterable[Place]) -> dict[Place, float]:
    return {place: float(logprobs[place]) for place in places}


def _differences(values: dict[Place, float], others: dict[Place, float]) -> torch.Tensor:
    """Where both have one."""
    return torch.tensor([values[place] - others[place] for place in sorted(values.keys() & others.keys())])


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def _advice(engine: VLLMServerEngine) -> str:
    if isinstance(engine.weights.sync, AdapterSync):
        return "Only the adapter is handed over: restart the server with the very base that is trained (--model)."
    return "Does the server read the same files as the trainer, and is nobody else handing it weights?"


def _advice_to_a_server_that_stays(engine: VLLMServerEngine) -> str:
    if isinstance(engine.weights.sync, AdapterSync):
        return "It loads the adapter and does not use it: try --vllm-sync disk, which hands over all weights."
    return "It reloads the files and keeps what it had: restart it, or use --vllm-mode colocate."
