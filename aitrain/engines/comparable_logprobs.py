"""Corrects an engine's log-probabilities under truncated sampling, so that they compare with the trainer's.

vLLM's log-probabilities are those of the distribution that it samples from: after penalties, temperature and
truncation, normalized over the tokens that are kept. The trainer's are log_softmax(logits / temperature) over all
tokens. With equal weights they differ by the log of the probability of the kept tokens, and the product over a
completion's tokens would scale its gradient. So the trainer computes that term with its own logits and adds it to the
engine's log-probabilities: with equal weights the importance ratio is then 1.

Inside API of TRL 1.16 that it uses (tests/training/test_upstream.py):

    trl.trainer.utils._ChunkedLogProbFunction    replaced for one forward pass: the last function that sees hidden
                                                 states and head, here with its nine arguments, five results
    GRPOTrainer._get_per_token_logps_and_entropies(model, ids, mask, keep)    called: runs that forward pass
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from aitrain.engines.sampling import Sampling

POSITIONS = 64
"""Tokens whose logits are computed at a time: 64 for a vocabulary of 150,000 are 38 MB."""


@dataclass(frozen=True)
class SampledRow:
    """Token ids of an episode; `mask` is 1 for sampled tokens, `answers` has the start index of each completion."""

    prompt: list[int]
    ids: list[int]
    mask: list[int]
    answers: list[int]

    def sampled(self) -> list[int]:
        """Indices of the sampled tokens."""
        return [place for place, is_sampled in enumerate(self.mask) if is_sampled]


@dataclass
class LogprobShift:
    """Computes, for rows of one micro-batch, log p - log q of each sampled token: p over all tokens, q as sampled.

    It replaces TRL's function of hidden states and head for one forward pass, so that sharded weights are gathered as
    TRL does it.
    """

    sampling: Sampling
    eos_ids: Sequence[int]
    rows: Sequence[SampledRow]
    shifts: list[list[float]] = field(default_factory=list)
    """For each row, one value per token, 0 if it was not sampled."""

    def apply(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        *settings: Any,
    ) -> tuple[torch.Tensor, None, None, None, None]:
        """Compute `shifts`. `hidden`: (positions, width), see `_first_positions`; the return value is not used."""
        _temperature, _chunk_size, softcap, scale, _outputs = settings

        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)

        def logits(positions: torch.Tensor) -> torch.Tensor:
            values = linear(hidden[positions], weight, bias).float() * float(scale)
            return float(softcap) * torch.tanh(values / softcap) if softcap else values

        firsts = self._first_positions(len(hidden))
        self.shifts = [self._of(row, first, logits) for row, first in zip(self.rows, firsts, strict=True)]
        return torch.zeros(len(hidden), device=hidden.device), None, None, None, None

    def _first_positions(self, count: int) -> list[int]:
        """Position that predicts the first token after each prompt, in rows as `padded` makes them: TRL passes the
        positions of all tokens but each row's first one, on a GPU without the padding."""
        lengths = [len(row.prompt) + len(row.ids) - 1 for row in self.rows]
        rooms = lengths if count == sum(lengths) else [max(lengths)] * len(lengths)
        return [sum(rooms[:number]) + len(row.prompt) - 1 for number, row in enumerate(self.rows)]

    def _of(self, row: SampledRow, first: int, logits: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        shifts, sampled = [0.0] * len(row.ids), row.sampled()
        for start in range(0, len(sampled), POSITIONS):
            places = sampled[start : start + POSITIONS]
            values = logits(torch.tensor(places) + first)
            for place, shift in zip(places, self._shift(row, places, values).tolist(), strict=True):
                shifts[place] = shift
        return shifts

    def _shift(self, row: SampledRow, places: list[int], logits: torch.Tensor) -> torch.Tensor:
        tensor = partial(torch.tensor, device=logits.device)
        tokens = tensor([row.ids[place] for place in places])
        over_all = (logits / self.sampling.temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        ids, at = tensor(row.prompt + row.ids), torch.arange(len(row.prompt) + len(row.ids), device=logits.device)
        begins = [max(start for start in row.answers if start <= place) for place in places]
        is_context = at < len(row.prompt) + tensor(places)[:, None]
        is_answer = is_context & (at >= len(row.prompt) + tensor(begins)[:, None])
        logits = self.sampling.penalized(logits, ids, is_context, is_answer, self.eos_ids)
        shift: torch.Tensor = over_all - self.sampling.logprobs(logits, tokens)
        return shift


def padded(rows: Sequence[SampledRow], pad: int, device: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Token ids and attention mask of rows, and the number of tokens that get log-probabilities: all but the first.

    Rows are padded on the right, so that padding does not change the positions of tokens.
    """
    tokens = [torch.tensor(row.prompt + row.ids, device=device) for row in rows]
    ids = pad_sequence(tokens, batch_first=True, padding_value=pad)
    mask = pad_sequence(list(map(torch.ones_like, tokens)), batch_first=True)
    return ids, mask, ids.shape[1] - 1
