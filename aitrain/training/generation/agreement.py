"""Whether a vLLM server says what the trainer's own model says: weights that did not arrive, or never were the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from aitrain.errors import RunFailed
from aitrain.training.generation.served import AdapterSync, Served

TEXTS = ("1 2 3 4 5", "Question: What is 7 * 8?\nAnswer:", "def add(a, b):", "The weights of a model")
TOKENS = 16
"""That the server answers each of them with, at most."""
BOUND = 0.2
"""Most that the log-probabilities of the answers may differ on average. Rounding to bfloat16 makes up to about 0.05,
float32 less than 0.001; another model's differ by more than this, which no training makes up for."""
NEUTRAL = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "generation_kwargs": {},
}  # fmt: skip


@dataclass(frozen=True)
class Agreement:
    """What a server is asked when it was given the weights for the first time."""

    model: Any
    prompts: list[list[int]]
    tell: Callable[[str], None] | None = None
    """Who hears of a server that is not the same; None: that ends the run."""

    @classmethod
    def of(cls, model: Any, tokenizer: Any, tell: Callable[[str], None] | None = None) -> Agreement:
        """With a few short prompts."""
        return cls(model, [tokenizer(text)["input_ids"] for text in TEXTS], tell)

    def __call__(self, served: Served) -> None:
        """Compare the two.

        Raises:
            RunFailed: they are not the same model, or the weights did not arrive.
        """
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

    def difference(self, served: Served) -> float:
        """Mean absolute difference between the log-probabilities of sampled tokens, the server's and the model's."""
        before = {name: getattr(served, name) for name in (*NEUTRAL, "max_completion_length")}
        vars(served).update(NEUTRAL, max_completion_length=TOKENS)
        try:
            _, answers, logprobs, *_ = served.generate(self.prompts)
        finally:
            vars(served).update(before)
        gaps = [
            (self._logprobs(prompt, answer) - torch.tensor(said).reshape(-1)).abs()
            for prompt, answer, said in zip(self.prompts, answers, logprobs, strict=True)
        ]
        return float(torch.cat(gaps).mean())

    @torch.no_grad()
    def _logprobs(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """The model's own, of an answer's tokens, without dropout."""
        was_training = self.model.training
        self.model.eval()
        try:
            logits = self.model(torch.tensor([prompt + answer], device=self.model.device)).logits[0]
        finally:
            self.model.train(was_training)
        logprobs: torch.Tensor = logits[len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
        return logprobs.gather(-1, torch.tensor(answer)[:, None])[:, 0]


def _advice(served: Served) -> str:
    if isinstance(served.sync, AdapterSync):
        return "Only the adapter is handed over: start the server anew with the very base that is trained (--model)."
    return "Does the server read the same files as the trainer, and is nobody else handing it weights?"
