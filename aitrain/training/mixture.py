"""The environments of a run with several, as its held-out scores need them."""

from __future__ import annotations

from collections.abc import Sequence

from aitrain.environment.contract import Case
from aitrain.environment.mixed_runner import Runner
from aitrain.runs.held_out import bounds_of
from aitrain.runs.mixture import Mixture, ScoredEnv


def mixture_of(runner: Runner, held_out: Sequence[Case], train: Sequence[Case] = ()) -> Mixture:
    """The environments with their held-out cases; empty for a single one."""
    shares = runner.config.env_shares
    return tuple(
        ScoredEnv(
            name,
            shares[name],
            bounds_of(part.config.rl_score_range),
            frozenset(str(case.number) for case in held_out if case.env == name),
            sum(case.env == name for case in train),
        )
        for name, part in runner.parts.items()
        if name
    )
