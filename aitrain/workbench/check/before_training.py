"""The fast checks before every training, in a forked process: they change nothing of the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from aitrain.environment.contract import Case, env_kind, named_by
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.execution.failure import CallFailed
from aitrain.execution.forked_call import Answer, call_forked
from aitrain.execution.user_code import describe_error
from aitrain.options.train import TrainConfig
from aitrain.workbench.check.effects import cut_connections, open_database, used, watch_connections
from aitrain.workbench.check.registry import CHECKS, CheckResult, run_checks
from aitrain.workbench.check.subject import NO_TIME, Subject
from aitrain.workbench.opening import OpenedEnvironment

SECONDS = 5.0
"""Seconds after which the process of the checks is ended."""
MARGIN = 0.5
"""Seconds before that in which the process says what it has found so far."""
CASES = 4
SHOWN = 3
"""Findings that are noted."""
CUDA_IN_FORK = "Cannot re-initialize CUDA in forked subprocess"
"""Message of torch, if this process has used the GPU before it was forked."""
NEEDS_MODEL = "its scores need the model (aitrain env check --model checks them)"


@dataclass(frozen=True)
class FastCheck:
    """What the fast checks have found; `skipped` says why they did not run."""

    skipped: str = ""
    passed: int = 0
    left_out: int = 0
    """Number of checks for which there was no time."""
    findings: list[str] = field(default_factory=list)
    """The findings as sentences, without those that are only worth knowing."""
    played: int = 0
    """Number of episodes that were played."""
    all_failed: str = ""
    """The first failure, if every episode failed."""

    @property
    def is_clean(self) -> bool:
        """Whether all checks were made and have nothing to say."""
        return not (self.skipped or self.left_out or self.findings)

    def lines(self) -> Iterator[str]:
        """The findings for the user, or one line if there are none."""
        if self.skipped:
            yield f"The environment was not checked: {self.skipped}."
        elif not self.findings:
            late = f", {self.left_out} left out for lack of time" if self.left_out else ""
            yield f"Environment checks: {self.passed} passed{late}."
        yield from self.findings[:SHOWN]
        if len(self.findings) > SHOWN:
            yield f"{len(self.findings) - SHOWN} more findings about the environment: aitrain env check shows all."


def check_quickly(
    environment: object, cases: Sequence[Case], config: TrainConfig, seconds: float = SECONDS
) -> FastCheck:
    """Run the fast checks in a forked process, within a time limit. Nothing that goes wrong here ends the run.

    No answer is scored that could cost something outside of this machine's memory: the process ends before its first
    connection, and environments that ask for the model are left out.
    """
    if isinstance(environment, ServedEnvironment):
        return FastCheck(f"a server has it (aitrain env check {config.rl_env} checks it)")
    try:
        names = named_by(getattr(environment, env_kind(environment)))
        if names is not None and "model" in names:
            return FastCheck(NEEDS_MODEL)
        if database := open_database():
            return FastCheck(f"it may use the open database {database}, which only the run may use")
        check = partial(_check, OpenedEnvironment(environment, cases), config, seconds)
        return FastCheck(*cast("list[Any]", call_forked(check, seconds)))
    except CallFailed as failed:
        return FastCheck(f"the checks' process {failed.failure.message}")
    except Exception as error:
        return FastCheck(f"the checks failed: {describe_error(error)}")


def _check(opened: OpenedEnvironment, config: TrainConfig, seconds: float, answer: Answer) -> list[object]:
    """In the forked process: run the checks, and return the fields of a FastCheck; after the time, those of the checks
    that have ended."""
    cut = cut_connections(answer.connection.fileno())
    watch_connections(
        lambda address: answer([f"it connects to {address} (aitrain env check checks it, with real connections)"])
    )
    subject = Subject(opened, config, limit=CASES, seconds=seconds - 2 * MARGIN)
    checks, results = [check for check in CHECKS if check.is_fast], list[CheckResult]()

    def found() -> list[object]:
        """The fields of a FastCheck, of the checks that have run so far."""
        failures = [episode.failure for episode in list(subject.episodes)]
        if subject.model.used:
            return [NEEDS_MODEL]
        if connection := next(used(cut), None):
            return [f"it is connected to {connection}, which only the run may use"]
        if any(failure and CUDA_IN_FORK in failure.trace for failure in failures):
            return ["its scores use the GPU, which a forked process cannot (aitrain env check can)"]
        done = [result for result in list(results) if not result.skipped]
        findings = [
            f"Environment check {one.check}{one.of_case}: {' '.join(f'{one.what} {one.fix}'.split())}"
            for result in done
            for one in result.findings
            if one.level != "info"
        ]
        late = len(checks) - len(results) + sum(result.skipped == NO_TIME for result in results)
        passed = sum(not result.findings for result in done)
        first = next(filter(None, failures), None)
        all_failed = first.message if first is not None and all(failures) else ""
        return ["", passed, late, findings, len(failures), all_failed]

    timer = threading.Timer(seconds - MARGIN, lambda: answer(found()))
    timer.daemon = True
    timer.start()
    results.extend(run_checks(subject, checks))
    return found()
