"""Compares vLLM's log-probabilities with the trainer's: a server's, to detect weights that differ or did not arrive,
and those of each step's tokens by their position; and corrects those under truncated sampling.

vLLM's log-probabilities are those of the distribution that it samples from: after temperature and truncation,
normalized over the tokens that are kept. The trainer's are log_softmax(logits / temperature) over all
tokens. With equal weights they differ by the log of the probability of the kept tokens, and the product over a
completion's tokens would scale its gradient. So the trainer computes that term with its own logits and adds it to the
engine's log-probabilities: with equal weights the importance ratio is then 1.

Inside API of TRL 1.16 that it uses (tests/training/test_upstream.py):

    trl.trainer.utils._ChunkedLogProbFunction    replaced for one forward pass: the last function that sees hidden
                                                 states and head, here with its nine arguments, five results
    GRPOTrainer._get_per_token_logps_and_entropies(model, ids, mask, keep)    called: runs that forward pass
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from aitrain.engines.batching import BatchRow
from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import evaluation_mode
from aitrain.engines.server import VLLMServerEngine
from aitrain.environment.seeds import SampleSeed
from aitrain.errors import RunFailed

TEXTS = ("1 2 3 4 5", "Question: What is 7 * 8?\nAnswer:", "def add(a, b):", "The weights of a model")
TOKENS = 16
"""Maximum tokens of the server's completion of each text."""
BOUND = 0.2
"""Maximum mean difference of the log-probabilities of sampled tokens. Rounding to bfloat16 causes up to about 0.05,
float32 less than 0.001; those of another model differ by more than this."""

CLEAR = 2.0
"""Factor by which the policy's log-probabilities must have changed beyond the rounding noise before a comparison."""
LEAST_NOISE = 1e-5
"""Minimum rounding noise of log-probabilities, in float32."""
FOLLOWED = 0.5
"""Minimum share of the policy's change that the server must show: 1 if it has the weights, 0 if not."""

POSITIONS = tuple(1024 * 2**number for number in range(7))
"""Tokens before a sampled one that divide the KL by position."""

Rows = list[list[int]]


def kl_by_position(
    trained: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, prompts: torch.Tensor
) -> torch.Tensor:
    """Sum of the KL of sampled tokens, and their number, by the tokens before them: those of POSITIONS divide eight
    parts; of shape (8, 2).

    `trained`, `sampled`: log-probabilities by the trainer and by what sampled them, nan where unknown; `mask`: 1 where
    there is a sampled token, all of shape (rows, tokens of completions); `prompts`: tokens of the prompts, (rows,).
    The KL of a token is estimated as p / q - 1 - log(p / q) (J. Schulman, Approximating KL Divergence, 2020).
    """
    ratio = (trained - sampled).double()
    counted = mask.bool() & ratio.isfinite()
    places = prompts[:, None] + torch.arange(mask.shape[1], device=mask.device)
    parts = torch.bucketize(places[counted], places.new_tensor(POSITIONS), right=True)
    kl = ratio.expm1() - ratio
    sums = ratio.new_zeros(len(POSITIONS) + 1, 2)
    return sums.index_add_(0, parts, torch.stack([kl[counted], torch.ones_like(kl[counted])], 1))


@dataclass
class SharedForward:
    """Computes logits of a model, which may be sharded."""

    model: Any
    is_main: bool = True
    """Whether this process asks for forward passes; the others follow it."""
    is_shared: bool = False
    """Whether all processes take part."""

    @contextmanager
    def led_by_main(self) -> Iterator[None]:
        """Context in which the main process may call `logits`; the others follow it at the context's end. Every process
        must enter it."""
        try:
            yield
        finally:
            if self.is_shared:
                if self.is_main:
                    broadcast_object_list([None])
                else:
                    self._follow()

    def logits(self, rows: Rows, with_adapter: bool = True) -> torch.Tensor:
        """The model's logits for rows of token ids, padded on the right, without dropout."""
        if self.is_shared:
            broadcast_object_list([(rows, with_adapter)])
        return self._compute(rows, with_adapter)

    def _follow(self) -> None:
        while True:
            asked: list[tuple[Rows, bool] | None] = [None]
            broadcast_object_list(asked)
            if asked[0] is None:
                return
            self._compute(*asked[0])

    def _compute(self, rows: Rows, with_adapter: bool) -> torch.Tensor:
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(self.model.device)
        with evaluation_mode(self.model), nullcontext() if with_adapter else self.model.disable_adapter():
            logits: torch.Tensor = self.model(ids).logits  # causal attention: padding on the right has no effect
        return logits


Logprobs = dict[tuple[int, int], float]
"""Log-probabilities of tokens after contexts, by the number of the context and the token id."""


@dataclass
class LogprobCheck:
    """Compares a server with the trainer's model after loads of weights: at the first load, whether both have the same
    model; later, whether the server's log-probabilities change with the policy's."""

    forward: SharedForward
    tokenizer: Any
    notify: Callable[[str], None] | None = None
    """Gets the message about a server that does not have the same model; None: the run ends with it."""
    _rows: Rows = field(default_factory=list, init=False)
    """The prompts, each followed by the server's completion at the first load."""
    _own: Logprobs = field(default_factory=dict, init=False)
    _served: Logprobs = field(default_factory=dict, init=False)
    """Those of the trainer's model and of the server at the first load."""
    _follows: bool = field(default=False, init=False)
    """Whether the server's have changed with the policy's since."""

    def __post_init__(self) -> None:
        self.prompts: Rows = [self.tokenizer(text)["input_ids"] for text in TEXTS]

    async def compare(self, engine: VLLMServerEngine) -> None:
        """Compare server and model after a load, if a comparison is due.

        Raises:
            RunFailed: the server has another model, or did not get the weights.
        """
        is_adapter = engine.sync.is_adapter
        if not self._own:
            await self._compare_models(engine)
            # of the base if the server has it, so that the adapter of a resumed run is checked at once
            self._served = await self._served_logprobs(engine, of_base=is_adapter)
            self._own = _at(self._logprobs(with_adapter=not is_adapter), self._served)
        if not self._follows:
            await self._compare_movement(engine)

    async def difference(self, engine: VLLMServerEngine) -> float:
        """Mean absolute difference between the log-probabilities of sampled tokens, the server's and the model's."""
        rows = [BatchRow(prompt, seed=SampleSeed(number)) for number, prompt in enumerate(self.prompts)]
        answers = await engine.complete(rows, Sampling(), TOKENS)
        self._rows = [prompt + answer.ids for prompt, answer in zip(self.prompts, answers, strict=True)]
        own = self._logprobs()
        sampled = torch.tensor([token for answer in answers for token in answer.ids])
        served = torch.tensor([value for answer in answers for value in answer.logprobs or ()])
        return float((own.gather(-1, sampled[:, None])[:, 0] - served).abs().mean())

    async def _compare_models(self, engine: VLLMServerEngine) -> None:
        gap = await self.difference(engine)
        if gap <= BOUND:  # not so for nan either
            return
        url, differ = engine.servers[0].url, f"differ from the trainer's by {gap:.2f} on average after the weight sync"
        if self.notify is None:
            raise RunFailed(
                f"The vLLM server at {url} does not have this run's weights: its log-probabilities {differ}.\n"
                "Check that the server reads the same files as the trainer, that no other run syncs weights to it, and"
                "\nwith --peft that it was started with the same base model as the run (--model)."
            )
        self.notify(
            f"The log-probabilities of the vLLM server at {url} {differ}: its base is rounded in another way."
            " Importance weights correct that; a small metric sampling/importance_sampling_ratio/mean means that the"
            " rounding is too coarse for this model."
        )

    async def _compare_movement(self, engine: VLLMServerEngine) -> None:
        """Compare the changes since the first load, if the policy's is larger than the rounding noise."""
        logprobs, noise = self._logprobs(), max(_rms(_differences(self._own, self._served)), LEAST_NOISE)
        if not _rms(_differences(_at(logprobs, self._own), self._own)) > CLEAR * noise:
            return
        served = await self._served_logprobs(engine)
        moved, followed = _differences(_at(logprobs, served), self._own), _differences(served, self._served)
        share = float(followed @ moved / (moved @ moved))
        if not share >= FOLLOWED:
            raise RunFailed(
                f"The vLLM server at {engine.servers[0].url} does not generate with the weights that it was sent: the"
                f" trainer's log-probabilities have changed by {_rms(moved):.2g},"
                f" the server's by {max(share, 0.0):.0%} of that.\n"
                "Restart it, or try --vllm-mode colocate."
            )
        self._follows = True

    async def _served_logprobs(self, engine: VLLMServerEngine, of_base: bool = False) -> Logprobs:
        """The server's log-probabilities of its likeliest tokens."""
        contexts = [
            row[:length]
            for prompt, row in zip(self.prompts, self._rows, strict=True)
            for length in range(len(prompt), len(row))
        ]
        likeliest = await engine.top_logprobs(contexts, of_base)
        return {(number, token): value for number, tokens in enumerate(likeliest) for token, value in tokens.items()}

    def _logprobs(self, with_adapter: bool = True) -> torch.Tensor:
        """The model's log-probabilities for the completions, without dropout, shape (positions, vocabulary)."""
        logits = self.forward.logits(self._rows, with_adapter)
        answers = [
            each[len(prompt) - 1 : len(row) - 1]
            for prompt, row, each in zip(self.prompts, self._rows, logits, strict=True)
        ]
        return torch.cat(answers).float().log_softmax(-1).cpu()


def _at(logprobs: torch.Tensor, places: Iterable[tuple[int, int]]) -> Logprobs:
    return {place: float(logprobs[place]) for place in places}


def _differences(values: Logprobs, others: Logprobs) -> torch.Tensor:
    """Differences at the places that both have."""
    return torch.tensor([values[place] - others[place] for place in sorted(values.keys() & others.keys())])


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


# -- log-probabilities under truncated sampling

POSITIONS_AT_ONCE = 64
"""Tokens whose logits are computed at a time: 64 for a vocabulary of 150,000 are 38 MB."""


@dataclass(frozen=True)
class LogprobShift:
    """Computes log p - log q of tokens, p over all tokens, q as sampled: the log of the probability of what is kept.

    It replaces TRL's function of hidden states and head, whose log-probabilities then are these differences: sharded
    weights are gathered, and rows divided into passes, as for those.
    """

    sampling: Sampling

    def apply(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        *settings: Any,
    ) -> tuple[torch.Tensor, None, None, None, None]:
        """The differences for tokens `labels` after hidden states, of shape (positions, width)."""
        _temperature, _chunk_size, softcap, scale, _outputs = settings
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        shifts = []
        for start in range(0, len(hidden), POSITIONS_AT_ONCE):
            part = slice(start, start + POSITIONS_AT_ONCE)
            logits = linear(hidden[part], weight, bias).float() * float(scale)
            logits = float(softcap) * torch.tanh(logits / softcap) if softcap else logits
            shifts.append(self.sampling.log_kept_share(logits / self.sampling.temperature, labels[part]))
        return torch.cat([*shifts, hidden.new_zeros(0)]), None, None, None, None
