"""Checks how long the environment makes each training step wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import cycle, islice

from aitrain.batch import plan_batch
from aitrain.environment.contract import Case
from aitrain.workbench.check.finding import EnvFinding
from aitrain.workbench.check.subject import Subject
from aitrain.workbench.player import JUNK, Policy

SLOW = 1.0
"""Seconds per step from which the environment is called slow."""
BUDGET = 10.0
"""Seconds that the measurement may take, about."""
NEAR = 0.5
"""Share of --rl-env-timeout from which an episode is called slow."""


def latency(subject: Subject) -> Iterator[EnvFinding]:
    """The episodes of a step take little time beside generation."""
    batch = plan_batch(subject.config, subject.config.num_processes or 1)
    wanted = batch.completions_per_step // batch.processes
    each = max(episode.seconds for episode in subject.play((case, JUNK) for case in subject.sample[:2]))
    count = max(1, min(wanted, int(BUDGET / max(each, 1e-6))))
    pairs: list[tuple[Case, Policy]] = [(case, subject.reference(case) or JUNK) for case in subject.sample]
    start = time.monotonic()
    played = subject.play_together(islice(cycle(pairs), count))
    seconds = (time.monotonic() - start) * wanted / count
    slowest = max(played, key=lambda episode: episode.seconds)
    text = f"The environment adds {seconds:.2g} seconds to each step of {wanted} episodes"
    if seconds > SLOW:
        yield EnvFinding(
            "latency",
            "warning",
            f"{text}; the slowest took {slowest.seconds:.2g} seconds.",
            "The GPU waits for it in every step.",
            "Load data once in __init__; write calls that wait as `async def`; use --rl-env-isolation process for"
            " code that computes.",
            slowest.play.case.case_idx,
        )
    else:
        yield EnvFinding("latency", "info", f"{text}.")
    limit = subject.config.rl_env_timeout
    if slowest.failure is None and slowest.seconds > NEAR * limit:
        yield EnvFinding(
            "latency",
            "warning",
            f"An episode took {slowest.seconds:.3g} seconds of the environment's time; --rl-env-timeout is {limit:g}.",
            "On a busy machine calls time out, and their episodes are missing data.",
            "Make it faster, or raise --rl-env-timeout.",
            slowest.play.case.case_idx,
        )
