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

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import evaluation_mode
from aitrain.engines.server import VLLMServerEngine
from aitrain.environment.seeds import SampleSeed
from aitrain.errors import RunFailed
from aitrain.rollout.engine import Completion, GenerationRequest

TEXTS = ("1 2 3 4 5", "Question: What is 7 * 8?\nAnswer:", "def add(a, b):", "The weights of a model")
TOKENS = 16
"""Maximum tokens of the server's completion of each text."""
BOUND = 0.2
"""Maximum mean difference of the log-probabilities of sampled tokens. Rounding to bfloat16 causes up to about 0.05,
float32 less than 0.001; those of another model differ by more than this."""

CLEAR = 5.0
"""Factor by which the policy's log-probabilities must have changed beyond the rounding noise before a comparison."""
LEAST_NOISE = 1e-5
"""Minimum rounding noise of log-probabilities, in float32."""
BEHIND = 0.5
"""Maximum difference after a change of the policy, as a share of that change: 0 if the server has the weights, 1 if
not."""

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
class LogprobCheck:
    """Compares a server with the trainer's model after loads of weights: at the first load, whether both have the same
    model; later, whether the server's log-probabilities change with the policy's. The first rank asks the server, and
    all of them compare, as the model may be sharded."""

    model: Any
    tokenizer: Any
    notify: Callable[[str], None] | None = None
    """Gets the message about a server that does not have the same model; None: the run ends with it."""
    _first: tuple[Rows, torch.Tensor, float] | None = field(default=None, init=False)
    """What `_sample` has returned at the first load, of the server's base if it has one, so that the adapter of a
    resumed run is checked at once."""
    _follows: bool = field(default=False, init=False)
    """Whether the server's have changed with the policy's since."""

    def __post_init__(self) -> None:
        self.prompts: Rows = [self.tokenizer(text)["input_ids"] for text in TEXTS]

    async def compare(self, engine: VLLMServerEngine) -> None:
        """Compare server and model after a load, if a comparison is due. Every rank must call this.

        Raises:
            RunFailed: the server has another model, or did not get the weights.
        """
        if self._first is None:
            self._first = await self._sample(engine)
            if not self._first[2] <= BOUND:  # not so for nan either
                self._report(engine.servers[0].url, self._first[2])
            if engine.sync.is_adapter:
                self._first = await self._sample(engine, of_base=True)
        if self._follows:
            return
        answers, before, noise = self._first
        moved = _mean_difference(self._logprobs(answers), before)
        if not moved > CLEAR * max(noise, LEAST_NOISE):
            return
        _, _, gap = await self._sample(engine)
        if not gap <= BEHIND * moved:
            raise RunFailed(
                f"The vLLM server at {engine.servers[0].url} does not generate with the weights that it was sent: the"
                f" trainer's log-probabilities have changed by {moved:.2g}, and differ from the server's by"
                f" {gap:.2g}.\nRestart it, or try --vllm-mode colocate."
            )
        self._follows = True

    def _report(self, url: str, gap: float) -> None:
        differ = f"differ from the trainer's by {gap:.2f} on average after the weight sync"
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

    async def _sample(self, engine: VLLMServerEngine, of_base: bool = False) -> tuple[Rows, torch.Tensor, float]:
        """The server's completions of the prompts, the log-probabilities of their tokens by the trainer's model, and
        their mean absolute difference from the server's."""
        rows = [GenerationRequest(prompt, TOKENS, SampleSeed(number)) for number, prompt in enumerate(self.prompts)]
        asked = replace(engine, version="") if of_base else engine
        sampled = list[list[Completion]]([[]])
        with engine.failing_together():
            if engine.sync.writes:
                sampled = [await asked.complete(rows, Sampling())]
        broadcast_object_list(sampled)
        (answers,) = sampled
        ids = [answer.ids for answer in answers]
        own = self._logprobs(ids, with_adapter=not of_base)
        served = torch.tensor([value for answer in answers for value in answer.logprobs or ()])
        return ids, own, _mean_difference(own, served)

    def _logprobs(self, answers: Rows, with_adapter: bool = True) -> torch.Tensor:
        """The model's log-probabilities of the tokens of completions, without dropout."""
        pairs = list(zip(self.prompts, answers, strict=True))
        rows = [torch.tensor(prompt + ids) for prompt, ids in pairs]
        with evaluation_mode(self.model), nullcontext() if with_adapter else self.model.disable_adapter():
            # causal attention: padding on the right has no effect
            logits = self.model(pad_sequence(rows, batch_first=True).to(self.model.device)).logits
        return torch.cat(
            [
                row[len(prompt) - 1 :][: len(ids)].float().log_softmax(-1)[range(len(ids)), ids].cpu()
                for row, (prompt, ids) in zip(logits, pairs, strict=True)
            ]
        )


def _mean_difference(values: torch.Tensor, others: torch.Tensor) -> float:
    """Mean absolute difference on rank 0, broadcast so that all ranks decide alike."""
    found = [float((values - others).abs().mean())]
    broadcast_object_list(found)
    return found[0]


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
