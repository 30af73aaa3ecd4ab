"""Whether a vLLM server says what the trainer's own model says: weights that did not arrive, or never were the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.weight_sync import AdapterSync
from aitrain.errors import RunFailed

TEXTS = ("1 2 3 4 5", "Question: What is 7 * 8?\nAnswer:", "def add(a, b):", "The weights of a model")
TOKENS = 16
"""That the server answers each of them with, at most."""
BOUND = 0.2
"""Most that the log-probabilities of the answers may differ on average. Rounding to bfloat16 makes up to about 0.05,
float32 less than 0.001; another model's differ by more than this, which no training makes up for."""
NEUTRAL = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "generation_kwargs": {},
}  # fmt: skip

EVERY = 10
"""Syncs from one comparison to the next, once it was seen that the server follows the policy."""
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
    pushes: int


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

    def __call__(self, served: VLLMServerEngine) -> None:
        """Compare the two, where it is time to.

        Raises:
            RunFailed: they are not the same model, or the weights did not arrive.
        """
        if self._last is None:
            self._compare_models(served)
            self._last = self._first_probe(served)
        if not self._follows or served.pushes - self._last.pushes >= EVERY:
            self._compare_movement(served, self._last)

    # -- the first time

    def _compare_models(self, served: VLLMServerEngine) -> None:
        gap = self.difference(served)
        if gap <= BOUND:  # not so for nan either
            return
        message = (
            f"The vLLM server at {served.server.url} does not have this run's weights: its log-probabilities differ"
            f" from the trainer's by {gap:.2f} on average, after they were handed over.\n{_advice(served)}"
        )
        if self.tell is None:
            raise RunFailed(message)
        self.tell(message)

    def difference(self, served: VLLMServerEngine) -> float:
        """Mean absolute difference between the log-probabilities of sampled tokens, the server's and the model's."""
        settings = NEUTRAL | {"max_completion_length": TOKENS, "seeds": list(range(len(self.prompts)))}
        before = {name: getattr(served, name) for name in settings}
        vars(served).update(settings)
        try:
            answers = served.generate_batch(self.prompts)
        finally:
            vars(served).update(before)
        self._rows = [prompt + ids for prompt, (ids, _) in zip(self.prompts, answers, strict=True)]
        own = self._logprobs()
        sampled = torch.tensor([token for ids, _ in answers for token in ids])
        said = torch.tensor([value for _, logprobs in answers for value in logprobs])
        return float((own.gather(-1, sampled[:, None])[:, 0] - said).abs().mean())

    def _first_probe(self, served: VLLMServerEngine) -> Probe:
        """What later ones are compared with: the base where the server still has it, so that the adapter of a resumed
        run is looked for at once; else the weights as they are."""
        if not isinstance(served.sync, AdapterSync):
            return self._probe(served, self._logprobs())
        return self._probe(served, self._logprobs(self.model.disable_adapter()), of_base=True)

    # -- later

    def _compare_movement(self, served: VLLMServerEngine, last: Probe) -> None:
        """Only once the policy has moved clearly: before that, one that was not handed over looks the same."""
        logprobs = self._logprobs()
        if not _rms(_differences(_at(logprobs, last.own), last.own)) > CLEAR * self._noise:
            return
        now = self._probe(served, logprobs)
        moved, followed = _differences(now.own, last.own), _differences(now.served, last.served)
        share = float(followed @ moved / (moved @ moved))
        if not share >= FOLLOWED:
            raise RunFailed(
                f"The vLLM server at {served.server.url} does not generate with the weights that it was given: the"
                f" trainer's log-probabilities have changed by {_rms(moved):.2g},"
                f" the server's by {max(share, 0.0):.0%} of that.\n"
                f"{_advice_to_a_server_that_stays(served)}"
            )
        self._last, self._follows = now, True

    def _probe(self, served: VLLMServerEngine, logprobs: torch.Tensor, of_base: bool = False) -> Probe:
        """`logprobs`: the model's own, of shape (contexts, vocabulary)."""
        contexts = [
            row[:length]
            for prompt, row in zip(self.prompts, self._rows, strict=True)
            for length in range(len(prompt), len(row))
        ]
        likeliest = served.likeliest(contexts, of_base)
        said = {(number, token): value for number, said in enumerate(likeliest) for token, value in said.items()}
        own = _at(logprobs, said)
        self._noise = min(self._noise, max(_rms(_differences(own, said)), LEAST_NOISE))
        return Probe(own, said, served.pushes)

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


def _advice(served: VLLMServerEngine) -> str:
    if isinstance(served.sync, AdapterSync):
        return "Only the adapter is handed over: restart the server with the very base that is trained (--model)."
    return "Does the server read the same files as the trainer, and is nobody else handing it weights?"


def _advice_to_a_server_that_stays(served: VLLMServerEngine) -> str:
    if isinstance(served.sync, AdapterSync):
        return "It loads the adapter and does not use it: try --vllm-sync disk, which hands over all weights."
    return "It reloads the files and keeps what it had: restart it, or use --vllm-mode colocate."
