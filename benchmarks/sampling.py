"""What it takes to learn if most cases teach nothing: `python -m benchmarks.sampling [--pairs N]`; exits 1 if not met.

Of 200 cases, 160 have groups without advantages: half of these are always solved, half never. The other 40 are of 20
kinds, each with its own right answer, and so are the held-out cases. The policy is a table with a row for each kind,
trained on the advantages of GRPO; batches are chosen, played, refilled and seen by the code of a run. With AdamW, too:
its steps do not shrink with the gradient, so that batches of which most teaches nothing cost it less.
"""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from benchmarks.measuring import Bounds, Row, options, show

CASES, KINDS, ANSWERS = 200, 20, 4
GROUPS, SIZE, TOKENS = 8, 8, 32
"""Groups of a batch, completions of a group, tokens of a completion."""
GOAL = 0.9
MOST = 4_000
"""Batches after which a run is given up."""
RATES = {"SGD": 2.0, "AdamW": 0.02}
"""Learning rates."""
WAYS = ("uniform", "difficulty", "refill")


def kind_of(case: int) -> int | None:
    """The kind of a case that teaches, None for one that does not."""
    return case // 5 % KINDS if case % 5 == 0 else None


class Table:
    """The environment: right, or always the same score."""

    def score_episode(self, completion: str, case_idx: int) -> float:
        """1 for the answer of the case's kind."""
        kind = kind_of(case_idx)
        return float(case_idx % 2) if kind is None else float(int(completion) == kind % ANSWERS)


def main() -> int:
    """Train with each way of sampling, with as many seeds as pairs."""
    pairs = options("Sampled tokens until the held-out score is 0.9.").parse_args().pairs
    import torch

    torch.set_num_threads(1)
    rows = []
    for optimizer in RATES:
        plain, *others = ([learn(way, optimizer, seed) for seed in range(pairs)] for way in WAYS)
        for way, found in zip(WAYS[1:], others, strict=True):
            bound = Bounds(0.5) if (way, optimizer) == ("difficulty", "SGD") else None
            for measure in ("tokens", "steps"):
                ours, theirs = ([float(getattr(one, measure)) for one in side] for side in (found, plain))
                rows.append(Row(f"{way}, {optimizer}: {measure}", ours, theirs, bound if measure == "tokens" else None))
    print(f"{CASES} cases, of which 80 % teach nothing; until the held-out score is {GOAL}; {pairs} seeds\n")
    return 0 if show(rows, "uniform", "ours") else 1


@dataclass
class Learned:
    """What a run took."""

    tokens: int
    steps: int


def learn(way: str, optimizer_name: str, seed: int) -> Learned:
    """Train until the held-out score is reached."""
    import torch

    from aitrain.environment.dataset import Cases
    from aitrain.environment.failure_count import FailureCount
    from aitrain.environment.runner import start_runner
    from aitrain.options.train import TrainConfig
    from aitrain.rollout.chat_format import ChatFormat
    from aitrain.rollout.engine import Completion, GenerationRequest, Leave
    from aitrain.rollout.episode import Rollout
    from aitrain.rollout.limits import EndOfTurn, Limits
    from aitrain.training.batch_source import BatchPlace, BatchSource
    from aitrain.training.case_order import CaseOrder, DifficultyOrder, UniformOrder
    from aitrain.training.policy_rollouts import PolicyRollouts
    from aitrain.training.refill import BatchCompletion, Refill

    table = torch.zeros(KINDS, ANSWERS, requires_grad=True)
    kind = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[optimizer_name]
    optimizer: Any = kind([table], lr=RATES[optimizer_name], weight_decay=0.0)

    class Sampler:
        """The engine: samples an answer from the table."""

        async def generate(self, request: GenerationRequest) -> Completion:
            assert request.seed is not None
            kind = kind_of(int("".join(map(chr, request.prompt_ids))))
            chances = table[kind or 0].softmax(0).tolist()
            (answer,) = random.Random(request.seed.seed).choices(range(ANSWERS), chances)
            return Completion([ord(str(answer)), ord("$")], [0.0, 0.0], "stop", 0)

        @asynccontextmanager
        async def batch(self, episodes: int) -> AsyncIterator[Leave]:
            yield lambda: None

    config = TrainConfig(seed=seed)
    with closing(start_runner(Table(), config)) as runner:
        rollout = Rollout(runner, Sampler(), ChatFormat(Letters()), Limits(1, 9), EndOfTurn([ord("$")]))
        rollouts = PolicyRollouts(
            rollout, SimpleNamespace(num_processes=1, process_index=0), seed, print, FailureCount(), nullcontext,
            lambda: 0, gather=list,
        )  # fmt: skip
        cases = Cases([{"prompt": str(number)} for number in range(CASES)], range(CASES))
        uniform = UniformOrder(CASES, GROUPS, seed)
        order: CaseOrder = DifficultyOrder(CASES, GROUPS, seed, (0.0, 1.0)) if way == "difficulty" else uniform
        refill = Refill(uniform, 10, GROUPS) if way == "refill" else None
        source = BatchSource(rollouts, cases, BatchCompletion(cases, order, False, refill), SIZE)
        tokens = 0
        own = slice(0, GROUPS * SIZE)
        with closing(rollouts):
            for step in range(MOST):
                batch = source.take(BatchPlace(step, step, range(own.stop), own))
                tokens += TOKENS * len(batch.played)
                scores = torch.tensor(batch.scores()).view(-1, SIZE)
                advantages = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)
                kinds = torch.tensor([kind_of(number) or 0 for number in batch.numbers])
                answers = torch.tensor([int(episode.transcript.text) for episode in batch.episodes])
                logprobs = table.log_softmax(1)[kinds, answers]
                optimizer.zero_grad()
                (-(advantages.view(-1) * logprobs).mean()).backward()
                optimizer.step()
                right = torch.arange(KINDS) % ANSWERS
                if table.softmax(1)[torch.arange(KINDS), right].mean().item() >= GOAL:
                    return Learned(tokens, step + 1)
    raise RuntimeError(f"{way}: the held-out score was not reached in {MOST} batches")


class Letters:
    """A tokenizer whose tokens are characters."""

    pad_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The characters."""
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], **_: bool) -> str:
        """The text without its end."""
        return "".join(map(chr, token_ids)).removesuffix("$")


if __name__ == "__main__":
    sys.exit(main())
