"""Sorts the rows of each optimizer step by length into forward passes with little padding, over all processes.

TRL pads a generation batch to its longest prompt and completion, and trains on the padding. Here a step's rows are
gathered from all processes, sorted, and divided again (pass_plan.py), so that a row may be trained on by another
process than the one that played it. Rows that are not in the loss are left out. The step's gradient equals TRL's. Let K
be the kept rows of a step over all P processes, whose gradients DDP averages, and n the rows of a pass:

* a mean over n rows, which TRL divides by a number of passes, is divided by K / (n P) instead;
* losses averaged over all tokens are divided by K times the mean number of tokens of the generation batch's kept rows;
* metrics of the loss are means over the step, weighted by tokens or rows of each pass.

Losses that are averaged over the tokens of each pass (bnpo, the entropy bonus) would depend on how the rows are sorted;
`TrainConfig.rules` refuses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from aitrain.batch import PassLimit
from aitrain.training.kept_rows import KEPT, MicroBatch, Pieces
from aitrain.training.pass_plan import Rows, share_passes

PASSES = "rows_of_passes"
"""Key of a step: number of rows in each forward pass of this process, shape (passes,); its rows are in their order."""
DIVISORS = "divisors"
"""Key of a step: for each pass, the number of passes that its loss is divided by."""
ITEMS = "items"
"""Key of a step: for each pass, the number of tokens that TRL takes the generation batch to have."""
WEIGHTS = "weights"
"""Key of a step: weights of the passes in means over tokens and in means over rows, shape (2, passes)."""
OF_PROMPT = ("prompt_ids", "prompt_mask")


@dataclass(frozen=True)
class RankRows:
    """The processes of a run, for what is done with the rows of all of them."""

    count: int
    index: int
    gather: Callable[[torch.Tensor, bool], torch.Tensor]
    """The rows of all processes, padded to the longest one: on the left if the second argument is true."""


def in_passes(pieces: Pieces, limit: PassLimit, ranks: RankRows) -> Pieces:
    """The steps of a new generation batch, `pieces` as TRL made them, each with this process's rows of all forward
    passes. Every process must call this."""
    steps = [_of_all(piece, ranks) for piece in pieces]
    kept = [step[KEPT] for step in steps]
    tokens = [_loss_tokens(step) for step in steps]
    rows = max(1, sum(int(one.sum()) for one in kept))
    tokens_of_a_row = sum(float(one.sum()) for one in tokens) / rows
    return [
        _share(step, count, limit, ranks, tokens_of_a_row * len(steps))
        for step, count in zip(steps, tokens, strict=True)
    ]


def micro_batches(step: MicroBatch) -> Iterator[tuple[MicroBatch, float]]:
    """The forward passes of a step, each trimmed to its own longest row, with the number of passes to divide its loss
    by."""
    begin = 0
    for number, count in enumerate(step[PASSES].tolist()):
        rows = trimmed(_rows_of(step, torch.arange(begin, begin + count, device=step[PASSES].device)))
        yield rows | {"num_items_in_batch": step[ITEMS][number]}, float(step[DIVISORS][number])
        begin += count


def has_kept_rows(step: MicroBatch) -> bool:
    """Whether a step has a row that is in the loss, on any process."""
    return bool(step[DIVISORS].isfinite().all())


def padding_share(step: MicroBatch) -> float:
    """Share of the tokens in this process's forward passes that is padding."""
    lengths: list[int] = (step["prompt_mask"].sum(1) + step["completion_mask"].sum(1)).tolist()
    counts: list[int] = step[PASSES].tolist()
    ends = accumulate(counts, initial=0)
    padded = sum((end - begin) * max(lengths[begin:end]) for begin, end in pairwise(ends))
    return 1 - sum(lengths) / float(padded)


def of_step(name: str, values: list[float], step: MicroBatch, over_rows: bool) -> float:
    """A metric of the step, given its value in each pass."""
    if name.endswith(("_min", "_max")):
        return min(values) if name.endswith("_min") else max(values)
    weights: list[float] = step[WEIGHTS][int(over_rows)].tolist()
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def trimmed(rows: MicroBatch) -> MicroBatch:
    """Rows without the columns that are padding in all of them: of prompts on the left, of completions on the right."""
    prompt, completion = (max(1, int(rows[name].sum(1).max())) for name in ("prompt_mask", "completion_mask"))
    width = rows["completion_mask"].shape[1]

    def cut(name: str, value: torch.Tensor) -> torch.Tensor:
        if name in OF_PROMPT:
            return value[:, -prompt:]
        return value[:, :completion] if value.dim() == 2 and value.shape[1] == width else value

    return {name: cut(name, value) for name, value in rows.items()}


def _of_all(piece: MicroBatch, ranks: RankRows) -> MicroBatch:
    if ranks.count == 1:
        return piece
    return {name: ranks.gather(value, name in OF_PROMPT) if value.dim() else value for name, value in piece.items()}


def _share(
    step: MicroBatch, tokens: torch.Tensor, limit: PassLimit, ranks: RankRows, tokens_of_rows: float
) -> MicroBatch:
    """This process's rows of a step, pass by pass, and the numbers of each pass."""
    lengths = (step["prompt_mask"].sum(1) + step["completion_mask"].sum(1)).tolist()
    chosen = _in_the_loss(step[KEPT].tolist(), lengths, ranks.count)
    shares = share_passes([lengths[row] for row in chosen], limit, ranks.count)
    passes: list[list[Rows]] = [[[chosen[row] for row in one] for one in share] for share in shares]
    own, kept = passes[ranks.index], int(step[KEPT].sum())
    device = step[KEPT].device

    def numbers(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    divisors = [kept / (len(rows) * ranks.count) if kept else math.inf for rows in own]
    items = [tokens_of_rows * kept / divisor if kept else 1.0 for divisor in divisors]
    everywhere = [[row for share in passes for row in share[number]] for number in range(len(own))]
    in_means = torch.stack([_weights(one, everywhere) for one in (tokens, step[KEPT])])
    rows = trimmed(_rows_of(step, torch.tensor([row for rows in own for row in rows], device=device)))
    rows["tool_mask"] = rows["tool_mask"] * rows[KEPT].unsqueeze(1)
    return rows | {
        PASSES: torch.tensor([len(one) for one in own], device=device),
        DIVISORS: numbers(divisors),
        ITEMS: numbers(items).float(),
        WEIGHTS: in_means,
    }


def _in_the_loss(kept: list[bool], lengths: list[int], processes: int) -> Rows:
    """The rows that are in the loss, and the shortest others that are needed for as many on each process."""
    rows = [row for row, is_kept in enumerate(kept) if is_kept]
    others = sorted((row for row, is_kept in enumerate(kept) if not is_kept), key=lambda row: lengths[row])
    return rows + others[: -len(rows) % processes if rows else processes]


def _weights(values: torch.Tensor, passes: list[Rows]) -> torch.Tensor:
    """The part that each pass has in the sum of a value of each row; equal parts if that is 0."""
    sums = torch.stack([values[rows].sum() for rows in passes]).double()
    return sums / sums.sum() if sums.sum() else torch.full_like(sums, 1 / len(passes))


def _rows_of(rows: Mapping[str, torch.Tensor], which: torch.Tensor) -> MicroBatch:
    of_rows = {name: value for name, value in rows.items() if name not in (PASSES, DIVISORS, ITEMS, WEIGHTS)}
    return {name: value[which] if value.dim() else value for name, value in of_rows.items()}


def _loss_tokens(step: MicroBatch) -> torch.Tensor:
    tokens: torch.Tensor = (step["completion_mask"] * step["tool_mask"]).sum(1) * step[KEPT]
    return tokens
