"""Divides the rows of an optimizer step into forward passes with little padding, and the passes among processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from aitrain.batch import PassLimit

Rows: TypeAlias = list[int]
"""Indices of the rows of one forward pass, the longest first."""

COST_OF_A_PASS = 256
"""Cost of one more forward pass, in tokens of padding that it must save."""


def plan_passes(lengths: Sequence[int], limit: PassLimit, at_least: int = 1, multiple_of: int = 1) -> list[Rows]:
    """Forward passes of rows of similar lengths, with the least sum of padded tokens and of COST_OF_A_PASS.

    Their number is a multiple of `multiple_of`, for which there must be enough rows. Equal lengths give equal passes on
    all processes.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    costs, begins = [0], [0]
    for end in range(1, len(lengths) + 1):
        best = None
        for begin in range(end - 1, -1, -1):
            count, longest = end - begin, lengths[longest_first[begin]]
            if not limit.holds(count, longest):
                break
            cost = costs[begin] + count * longest + COST_OF_A_PASS
            if best is None or cost < best[0]:
                best = cost, begin
        assert best is not None  # a single row always fits
        costs.append(best[0])
        begins.append(best[1])
    passes, end = list[Rows](), len(lengths)
    while end:
        passes.append(longest_first[begins[end] : end])
        end = begins[end]
    while len(passes) < at_least or len(passes) % multiple_of:
        largest = max((one for one in passes if len(one) > 1), key=lambda one: padded_tokens(one, lengths))
        passes.remove(largest)
        passes += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return sorted(passes, key=lambda one: -padded_tokens(one, lengths))


def share_passes(lengths: Sequence[int], limit: PassLimit, processes: int) -> list[list[Rows]]:
    """The passes of each process: as many for each, the n-th ones of about equal size, and about as many tokens."""
    passes = plan_passes(lengths, limit, processes, processes)
    rounds = [passes[start : start + processes] for start in range(0, len(passes), processes)]
    in_turn = [one if number % 2 == 0 else one[::-1] for number, one in enumerate(rounds)]
    return [[one[process] for one in in_turn] for process in range(processes)]


def padded_tokens(rows: Rows, lengths: Sequence[int]) -> int:
    """Tokens of a forward pass, padding included."""
    return len(rows) * max(lengths[row] for row in rows)
