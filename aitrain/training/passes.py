"""Divides the rows of each optimizer step into forward passes, on all processes equally many.

TRL gives a process its rows of a step as one micro-batch; the passes are made here. A step's gradient is that of a
batch with the kept rows only: unscored episodes, and truncated ones that are masked, are left out. Let K be the kept
rows of a step over all P processes, whose gradients DDP averages, and n the rows of a pass:

* a mean over n rows, which TRL divides by a number of passes, is divided by K / (n P) instead;
* losses averaged over all tokens are divided by K times the mean number of tokens of the generation batch's kept rows;
* metrics of the loss are means over the step, weighted by tokens or rows of each pass.

Kept rows whose advantage is 0 count in K, but are not computed where the loss has no other term, as their gradient is
0. In a step without any advantage all are, for the metrics.

With every row kept and passes of equal size the gradient is TRL's own for as many micro-batches.

Rows stay in TRL's order, on their own process, and as wide as TRL has padded them; or, with `trims`, they are gathered
from all processes, sorted by length and divided again, so that a row may be trained on by another process than the one
that played it, and each pass is only as wide as its longest row. Losses that are averaged over the tokens of each pass
(bnpo, the entropy bonus) would depend on how the rows are sorted: `TrainConfig.trims_padding` is false for them.

With `shares` as well, the rows of one prompt come together where that takes fewer tokens: in blocks, whose prompts are
computed once (shared_prompts.py). A block is one prompt with one or several passes, or several prompts with one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import torch
from accelerate import Accelerator

from aitrain.batch import PassLimit
from aitrain.engines.shared_cache import distinct_prompts

T = TypeVar("T")
MicroBatch: TypeAlias = dict[str, torch.Tensor]
"""Inputs of TRL's loss; tensors have shape (B,), (B, tokens) or ()."""
Rows: TypeAlias = list[int]
"""Indices of the rows of one forward pass."""
Block: TypeAlias = list[Rows]
"""Passes of rows that have the same prompts, which are computed once; one pass if there are several prompts."""

KEPT = "kept"
"""Key of a step: which rows are in the loss, shape (B,)."""
OF_PROMPT = ("prompt_ids", "prompt_mask")
COST_OF_A_PASS = 256
"""Tokens of padding that a forward pass may have, as one more pass costs about as much."""
SHORTEST = 2
"""Tokens of the shortest prompt that is shared."""
LEAST_GAIN = 0.05
"""Part of the tokens that shared prompts must save."""


@dataclass(frozen=True)
class StepPasses:
    """The forward passes of this process in one step."""

    rows: list[MicroBatch]
    divisors: list[float]
    """The number of passes that the loss of each is divided by; infinite for one that only fills up."""
    weights: tuple[list[float], ...]
    """Tokens of each pass that are in the loss, and its rows: the weights of its metrics."""
    has_kept_rows: bool
    """Whether a row is in the loss, on any process."""
    begins: set[int]
    """The numbers of the passes that begin a block, and the number of all; empty where rows have their own prompts."""


def metric_of_step(name: str, of_passes: Iterable[tuple[float, float]]) -> float:
    """A metric of the step, given the weight and the value of each pass of all processes."""
    weighted = [(weight, value) for weight, value in of_passes if weight]
    values = [value for _, value in weighted]
    if not values:
        return math.nan  # TRL has 0; its log leaves out NaN
    if name.endswith(("_min", "_max")):
        return min(values) if name.endswith("_min") else max(values)
    return sum(weight * value for weight, value in weighted) / sum(weight for weight, _ in weighted)


def passes_of(
    step: MicroBatch,
    limit: PassLimit,
    trims: bool,
    accelerator: Accelerator,
    shares: bool = False,
    needs_advantage: bool = False,
) -> StepPasses:
    """Divide the rows of a step. In `step`, `num_items_in_batch` is the mean number of tokens of the generation batch's
    kept rows, times its steps; in the passes, it is the number of tokens in the loss of a generation batch whose other
    steps are like this one, over all processes. Every process must call this.

    `needs_advantage`: the loss has no other term than that of advantages, so that trimmed passes leave out rows with 0.
    """
    processes, rows, are_shared = accelerator.num_processes, dict(step), False
    for name, value in step.items() if trims and processes > 1 else ():
        if value.dim():
            padded = accelerator.pad_across_processes(value, dim=1, pad_first=name in OF_PROMPT)
            rows[name] = accelerator.gather(padded)
    kept = computed = rows[KEPT]  # other rows only fill up passes
    if trims:
        with_advantage = kept & (rows["advantages"] != 0)
        computed = with_advantage if needs_advantage and with_advantage.any() else kept
        parts = rows["prompt_ids"], rows["prompt_mask"], rows["completion_mask"]
        of_processes, are_shared = trimmed_blocks(*parts, computed.tolist(), limit, processes, shares)
        blocks = of_processes[accelerator.process_index]
    else:
        width = torch.tensor([step["prompt_mask"].shape[1] + step["completion_mask"].shape[1]], device=kept.device)
        most = limit.most(int(accelerator.gather(width).max()))
        kept = accelerator.gather(kept)
        largest = int(kept.view(processes, -1).sum(1).max())
        blocks = [[one] for one in _passes_in_order(computed.tolist(), most, largest)]
    total, own = int(kept.sum()), [one for block in blocks for one in block]
    tokens = (rows["completion_mask"] * rows["tool_mask"]).sum(1) * computed
    rows |= {
        "tool_mask": rows["tool_mask"] * computed.unsqueeze(1),
        "num_items_in_batch": (step["num_items_in_batch"] * total).float(),
    }
    return StepPasses(
        [{name: value[each] if value.dim() else value for name, value in rows.items()} for each in own],
        [total / (len(each) * processes) if computed[each].any() else math.inf for each in own],
        tuple([float(values[each].sum()) for each in own] for values in (tokens, computed)),
        total > 0,
        set(accumulate(map(len, blocks), initial=0)) if are_shared else set(),
    )


def _passes_in_order(kept: list[bool], most: int, largest: int) -> list[Rows]:
    """Passes of at most `most` rows of a process that are kept, in their order. One with fewer passes than that with
    the `largest` number of such rows has passes of one row that is not kept."""
    rows = [row for row, is_kept in enumerate(kept) if is_kept]
    spare = next((row for row, is_kept in enumerate(kept) if not is_kept), 0)
    passes = [rows[start : start + most] for start in range(0, len(rows), most)]
    return passes + [[spare] for _ in range(max(1, math.ceil(largest / most)) - len(passes))]


def trimmed_blocks(
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    completion_mask: torch.Tensor,
    computed: list[bool],
    limit: PassLimit,
    processes: int,
    shares: bool,
) -> tuple[list[list[Block]], bool]:
    """The blocks of each process with all rows to compute, and whether the prompts of a block are computed once. Else a
    block is one pass, and rows are sorted by length; where they are too few for as many passes on each process, others
    fill up."""
    of_prompts, of_completions = (mask.sum(1).tolist() for mask in (prompt_mask, completion_mask))
    lengths = [prompt + completion for prompt, completion in zip(of_prompts, of_completions, strict=True)]

    def cost(block: Block) -> int:
        return cost_of_passes(block, lengths)

    rows = [row for row, is_computed in enumerate(computed) if is_computed]
    others = sorted((row for row, is_computed in enumerate(computed) if not is_computed), key=lambda row: lengths[row])
    passes = plan_passes(rows or others[:processes], lengths, limit)
    apart = share_blocks([[one] for one in passes], processes, cost, others)
    assert apart is not None  # the rows of all processes are a multiple of their number
    if shares:
        _, _, prompts = distinct_prompts(prompt_ids, prompt_mask)
        most = (1 - LEAST_GAIN) * sum(cost(block) for share in apart for block in share)
        blocks = plan_blocks(rows, prompts.tolist(), of_prompts, of_completions, limit, processes, most)
        if blocks is not None:
            return blocks, True
    return apart, False


# -- passes with little padding


def plan_passes(rows: Rows, lengths: Sequence[int], limit: PassLimit) -> list[Rows]:
    """Forward passes of rows of similar lengths, the longest first. One ends at the limit, or where its next row would
    take more padding than COST_OF_A_PASS. `lengths`: of each row of the batch."""
    passes, padding = list[Rows](), 0
    for row in sorted(rows, key=lambda row: -lengths[row]):
        longest = lengths[passes[-1][0]] if passes else 0
        padding += longest - lengths[row]
        if not passes or padding > COST_OF_A_PASS or not limit.holds(len(passes[-1]) + 1, longest):
            passes.append([])
            padding = 0
        passes[-1].append(row)
    return passes


def cost_of_passes(passes: Sequence[Rows], lengths: Sequence[int]) -> int:
    """The tokens of passes, padding included, and COST_OF_A_PASS for each."""
    return sum(len(rows) * max(lengths[row] for row in rows) + COST_OF_A_PASS for rows in passes)


def share_blocks(
    blocks: Sequence[Block], processes: int, cost: Callable[[Block], int], others: Sequence[int] = ()
) -> list[list[Block]] | None:
    """The blocks of each process: as many for each, the n-th ones with as many passes, and of about equal cost; None if
    there are too few rows, with the `others`, which have a block each if they are needed."""
    spare = iter(others)
    blocks = [[*block] for block in blocks]
    while len(blocks) % processes:
        largest = max((block for block in blocks if sum(map(len, block)) > 1), key=cost, default=None)
        if largest is not None:
            blocks.remove(largest)
            blocks += _halves(largest) if len(largest) > 1 else [[part] for part in _halves(largest[0])]
        elif (row := next(spare, None)) is not None:
            blocks.append([[row]])
        else:
            return None
    blocks.sort(key=lambda block: (len(block), cost(block)), reverse=True)
    rounds = [blocks[start : start + processes] for start in range(0, len(blocks), processes)]
    for together in rounds:
        for block in together:
            while len(block) < len(together[0]):
                rows = max(block, key=len)
                if len(rows) == 1:
                    return None
                block.remove(rows)
                block += _halves(rows)
    # the first one of a round is the largest
    in_turn = [one if number % 2 == 0 else one[::-1] for number, one in enumerate(rounds)]
    return [list(each) for each in zip(*in_turn, strict=True)]


def _halves(rows: Sequence[T]) -> list[list[T]]:
    middle = len(rows) // 2
    return [[*rows[:middle]], [*rows[middle:]]]


# -- passes with shared prompts


def plan_blocks(
    rows: Rows,
    prompts: Sequence[int],
    of_prompts: Sequence[int],
    of_completions: Sequence[int],
    limit: PassLimit,
    processes: int,
    most: float,
) -> list[list[Block]] | None:
    """The blocks of each process, as `share_blocks` has them; None if they cost more than `most`.

    `prompts`: the prompt of each row of the batch; `of_prompts`, `of_completions`: tokens of each row's parts.
    """
    lengths = [prompt + completion for prompt, completion in zip(of_prompts, of_completions, strict=True)]
    groups: dict[int, Rows] = {}
    for row in sorted(rows, key=lambda row: -lengths[row]):
        groups.setdefault(prompts[row], []).append(row)
    if not groups or min(of_prompts[row] for row in rows) < SHORTEST:
        return None

    def cost(block: Block) -> int:
        """Tokens to compute: each prompt once, its last token with each completion."""
        own = {prompts[row]: of_prompts[row] for rows in block for row in rows}
        of_passes = cost_of_passes(block, [1 + one for one in of_completions])
        return len(own) * max(own.values()) + COST_OF_A_PASS + of_passes

    blocks = [plan_passes(group, lengths, limit) for group in groups.values()]
    alone = [[rows] for block in blocks for rows in block]
    if len(alone) == len(blocks):  # the prompts of small groups may share a pass
        blocks = alone[:1]
        for block in alone[1:]:
            joined = [blocks[-1][0] + block[0]]
            longest = sum(max(sizes[row] for row in joined[0]) for sizes in (of_prompts, of_completions))
            if limit.holds(len(joined[0]), longest) and cost(joined) < cost(blocks[-1]) + cost(block):
                blocks[-1] = joined
            else:
                blocks.append(block)
    shares = share_blocks(blocks, processes, cost) or share_blocks(alone, processes, cost)
    is_cheap = shares and sum(cost(block) for share in shares for block in share) <= most
    return shares if is_cheap else None


# -- rows without padding in front


def log_probs_of_rows(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, in_loss: torch.Tensor, with_router: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Log-probabilities and entropies of the tokens that are `in_loss`, of its shape, (rows, tokens of completions);
    the values of the others are 0. `ids`, `mask`: rows that may be padded on both sides, of shape (rows, tokens). The
    third value is the loss of the router, with `with_router`.

    TRL pads prompts on the left and passes no position ids. Here each row begins in the first column, so that also
    models with learned positions (GPT-2) or a recurrent state see each token at the position that it had during
    generation, and the batch is as wide as its longest row.
    """
    keep, width = in_loss.shape[1], max(2, int(mask.sum(1).max()))
    order = (mask == 0).long().argsort(dim=1, stable=True)[:, :width]  # tokens first, padding behind
    labels = ids.masked_fill(~torch.nn.functional.pad(in_loss, (ids.shape[1] - keep, 0)), -100)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    of_router = {"output_router_logits": True} if with_router else {}
    moved = {name: value.gather(1, order) for name, value in inputs.items()}
    output = model(**moved, **of_router, fused_lm_head=True)

    def moved_back(values: torch.Tensor) -> torch.Tensor:
        """Values of all tokens but the first ones, in the columns that these tokens had."""
        return values.new_zeros(ids.shape).scatter(1, order[:, 1:], values)[:, -keep:]

    entropy = None if output.entropy is None else moved_back(output.entropy)
    return moved_back(output.log_probs), entropy, output.aux_loss
