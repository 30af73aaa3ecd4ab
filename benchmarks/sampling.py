"""What it takes to learn if most cases teach nothing: `python -m benchmarks.sampling [--pairs N]`; exits 1 if not met.

Of 200 cases, 160 have groups without advantages: half of these are always solved, half never. The other 40 are of 20
kinds, each with its own right answer, and so are the held-out cases. The policy is a table with a row for each kind,
trained on the advantages of GRPO; the cases are chosen by the code of a run. AdamW is shown beside plain gradient
descent, as its steps do not shrink with the gradient: batches of which most teaches nothing cost it less.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.measuring import Bounds, Row, options, show

if TYPE_CHECKING:
    import torch

    from aitrain.training.case_order import CaseOrder

CASES, KINDS, ANSWERS = 200, 20, 4
GROUPS, SIZE, TOKENS = 8, 8, 32
"""Groups of a batch, completions of a group, tokens of a completion."""
GOAL = 0.9
REFILLS = 10
RATES = {"SGD": 1.0, "AdamW": 0.02}
"""Learning rates."""
WAYS = ("uniform", "difficulty", "refill")


def main() -> int:
    """Train with each way of sampling, with as many seeds as pairs."""
    pairs = options("Sampled tokens and steps until the held-out score is 0.9.").parse_args().pairs
    rows = []
    for optimizer in RATES:
        plain, *others = ([learn(way, optimizer, seed) for seed in range(pairs)] for way in WAYS)
        for way, found in zip(WAYS[1:], others, strict=True):
            bounds = {"tokens": Bounds(0.5)} if (way, optimizer) == ("difficulty", "SGD") else {}
            for measure in ("tokens", "steps"):
                ours, theirs = ([float(getattr(one, measure)) for one in side] for side in (found, plain))
                rows.append(Row(f"{way}, {optimizer}: {measure}", ours, theirs, bounds.get(measure)))
    print(f"{CASES} cases, of which 80 % teach nothing; until the held-out score is {GOAL}; {pairs} seeds\n")
    return 0 if show(rows, "uniform", "ours") else 1


def kind_of(case: int) -> int | None:
    """The kind of a case that teaches, None for one that does not."""
    return case // 5 % KINDS if case % 5 == 0 else None


@dataclass(frozen=True)
class Learned:
    """What a run took."""

    tokens: int
    steps: int


def learn(way: str, optimizer_name: str, seed: int) -> Learned:
    """Train until the held-out score is reached."""
    import torch

    torch.set_num_threads(1)
    table, source = torch.zeros(KINDS, ANSWERS, requires_grad=True), torch.Generator().manual_seed(seed)
    kind = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[optimizer_name]
    optimizer: torch.optim.Optimizer = kind([table], lr=RATES[optimizer_name], weight_decay=0.0)  # type: ignore[operator]
    order, step, played, held_out = order_of(way, seed), 0, 0, 0.0
    right = torch.arange(KINDS) % ANSWERS
    while held_out < GOAL:
        groups = [Group.sampled(case, table.detach(), source) for case in order.batch(step)]
        everything = list(groups)
        for _ in range(REFILLS if way == "refill" else 0):
            flat = [place for place, group in enumerate(groups) if group.is_flat]
            cases = refilled(order, [groups[place].case for place in flat], {group.case for group in everything})
            more = [Group.sampled(case, table.detach(), source) for case in cases]
            everything += more
            for place, group in zip(flat, more, strict=False):
                groups[place] = group
        see(order, everything)
        loss = -sum((group.advantages * group.logprobs(table)).mean() for group in groups) / len(groups)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step, played = step + 1, played + len(everything)
        held_out = table.detach().softmax(1)[torch.arange(KINDS), right].mean().item()
    return Learned(played * SIZE * TOKENS, step)


def order_of(way: str, seed: int) -> CaseOrder:
    """What chooses the cases in a run with `--rl-sampling`."""
    from aitrain.training.case_order import DifficultyOrder, UniformOrder

    if way == "difficulty":
        return DifficultyOrder(CASES, GROUPS, seed, (0.0, 1.0))
    return UniformOrder(CASES, GROUPS, seed)


def refilled(order: CaseOrder, replaced: list[int], used: set[int]) -> list[int]:
    """The cases that take the places of others."""
    from aitrain.training.case_order import UniformOrder

    assert isinstance(order, UniformOrder)
    return order.others(replaced, used)


def see(order: CaseOrder, groups: list[Group]) -> None:
    """Show the order what was played."""
    from aitrain.training.case_order import PlayedGroup

    order.see([PlayedGroup(group.case, tuple(group.scores.tolist())) for group in groups])


@dataclass(frozen=True)
class Group:
    """The completions of one case."""

    case: int
    answers: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def sampled(cls, case: int, table: torch.Tensor, source: torch.Generator) -> Group:
        """Answers of the table, and their scores; a case that teaches nothing always has the same."""
        import torch

        kind = kind_of(case)
        answers = torch.multinomial(table[kind or 0].softmax(0), SIZE, replacement=True, generator=source)
        same = torch.full((SIZE,), float(case % 2))
        return cls(case, answers, same if kind is None else (answers == kind % ANSWERS).float())

    @property
    def is_flat(self) -> bool:
        """Whether all scores are equal."""
        return bool((self.scores == self.scores[0]).all())

    @property
    def advantages(self) -> torch.Tensor:
        """GRPO's."""
        return (self.scores - self.scores.mean()) / (self.scores.std() + 1e-4)

    def logprobs(self, table: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the answers."""
        return table[kind_of(self.case) or 0].log_softmax(0)[self.answers]


if __name__ == "__main__":
    sys.exit(main())
