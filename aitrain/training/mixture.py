"""The environments of a run, as its held-out scores need them."""

from __future__ import annotations

from collections.abc import Sequence

from aitrain.environment.contract import Case
from aitrain.environment.mixed_runner import Runner
from aitrain.runs.case_key import prompt_key
from aitrain.runs.held_out import bounds_of
from aitrain.runs.mixture import Mixture, ScoredEnv, cases_of
from aitrain.runs.run_folder import to_jsonable
from aitrain.runs.significance import FEWEST_CASES

FEW_CASES = 16
"""With fewer cases, what a verdict can show is said before the training."""


def note_on_few_cases(mixture: Mixture) -> str | None:
    """What a verdict on so few cases can show at best; None for many, and for no case."""
    count = cases_of(mixture)
    if not 0 < count < FEW_CASES:
        return None
    said = f"Different held-out cases: {count}. A verdict needs {FEWEST_CASES} whose score changes"
    end = "so there will be none" if count < FEWEST_CASES else "so small gains will not show"
    return f"{said}, {end}; --eval-cases holds out more."


def mixture_of(runner: Runner, held_out: Sequence[Case], train: Sequence[Case] = ()) -> Mixture:
    """The environments with their held-out cases."""
    shares = runner.config.env_shares
    return tuple(
        ScoredEnv(
            name,
            shares[name],
            bounds_of(part.config.rl_score_range),
            {str(case.number): prompt_key(to_jsonable(case.prompt)) for case in held_out if case.env == name},
            sum(case.env == name for case in train) if name else len(train),
        )
        for name, part in runner.parts.items()
    )
