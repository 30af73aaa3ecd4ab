"""The fast checks before every training, in a forked process: they change nothing of the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from aitrain.environment.contract import Case, env_kind, named_by
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.execution.failure import CallFailed
from aitrain.execution.forked_call import Answer, call_forked
from aitrain.execution.user_code import describe_error
from aitrain.options.train import TrainConfig
from aitrain.workbench.check.finding import NO_TIME, EnvFinding
from aitrain.workbench.check.outside import cut_connections, open_database, used, watch_connections
from aitrain.workbench.check.registry import CHECKS, FAST_CASES, CheckResult, run_checks
from aitrain.workbench.check.subject import CheckClock, Subject
from aitrain.workbench.opening import OpenedEnvironment

SECONDS = 5.0
"""Seconds after which the process of the checks is ended."""
CUDA_IN_FORK = "Cannot re-initialize CUDA in forked subprocess"
"""Message of torch, if this process has used the GPU before it was forked."""
MARGIN = 0.5
"""Seconds before that in which the process says what it has found so far."""
NEEDS_MODEL = "its scores need the model (aitrain env check --model checks them)"
Fields = dict[str, Any]
"""The fields of a FastCheck as a JSON object."""
SHOWN = 3
"""Findings that are noted."""


@dataclass(frozen=True)
class FastCheck:
    """What the fast checks have found; `skipped` says why they did not run."""

    skipped: str = ""
    passed: int = 0
    left_out: int = 0
    """Number of checks for which there was no time."""
    findings: tuple[EnvFinding, ...] = ()
    played: int = 0
    """Number of episodes that were played."""
    all_failed: str = ""
    """The first failure, if every episode failed."""

    @property
    def is_clean(self) -> bool:
        """Whether all checks were made and have nothing to say."""
        return not (self.skipped or self.left_out or any(finding.level != "info" for finding in self.findings))

    def lines(self) -> Iterator[str]:
        """The findings for the user, or one line if there are none."""
        if self.skipped:
            yield f"The environment was not checked: {self.skipped}."
        shown = [finding for finding in self.findings if finding.level != "info"]
        if (self.passed or self.left_out) and not shown:
            late = f", {self.left_out} left out for lack of time" if self.left_out else ""
            yield f"Environment checks: {self.passed} passed{late}."
        for finding in shown[:SHOWN]:
            case = "" if finding.case_idx is None else f" (case {finding.case_idx})"
            yield f"Environment check {finding.check}{case}: {' '.join(f'{finding.what} {finding.fix}'.split())}"
        if len(shown) > SHOWN:
            yield f"{len(shown) - SHOWN} more findings about the environment: aitrain env check shows all."


def check_quickly(
    environment: object, cases: Sequence[Case], config: TrainConfig, seconds: float = SECONDS
) -> FastCheck:
    """Run the fast checks in a forked process, within a time limit. Nothing that goes wrong here ends the run.

    No answer is scored that could cost something outside of this machine's memory: the process ends before its first
    connection, and environments that ask for the model are left out.
    """
    if isinstance(environment, ServedEnvironment):
        return FastCheck(skipped=f"a server has it (aitrain env check {config.rl_env} checks it)")
    try:
        names = named_by(getattr(environment, env_kind(environment)))
        if names is not None and "model" in names:
            return FastCheck(skipped=NEEDS_MODEL)
        if database := open_database():
            return FastCheck(skipped=f"it may use the open database {database}, which only the run may use")
        opened = OpenedEnvironment(environment, cases, [])
        return _read(cast("Fields", call_forked(partial(_check, opened, config, seconds), seconds)))
    except CallFailed as failed:
        return FastCheck(skipped=f"the checks' process {failed.failure.message}")
    except Exception as error:
        return FastCheck(skipped=f"the checks failed: {describe_error(error)}")


def _read(found: Fields) -> FastCheck:
    return FastCheck(**{**found, "findings": tuple(EnvFinding(**one) for one in found.get("findings", ()))})


def _check(opened: OpenedEnvironment, config: TrainConfig, seconds: float, answer: Answer) -> Fields:
    """In the forked process: run the checks, and return the fields of a FastCheck as JSON; after the time, those of the
    checks that have ended."""

    def stop(address: str) -> None:
        answer({"skipped": f"it connects to {address} (aitrain env check checks it, with real connections)"})

    cut = cut_connections(answer.connection.fileno())
    watch_connections(stop)
    subject = Subject(opened, config, limit=FAST_CASES, clock=CheckClock(seconds - 2 * MARGIN))
    checks, results = [check for check in CHECKS if check.is_fast], list[CheckResult]()

    def found() -> Fields:
        """The fields of a FastCheck, of the checks that have run so far."""
        if subject.model.used:
            return {"skipped": NEEDS_MODEL}
        if connection := next(used(cut), None):
            return {"skipped": f"it is connected to {connection}, which only the run may use"}
        failures = [episode.failure for episode in list(subject.episodes)]
        if any(failure and CUDA_IN_FORK in failure.trace for failure in failures):
            return {"skipped": "its scores use the GPU, which a forked process cannot (aitrain env check can)"}
        first = next(filter(None, failures), None)
        done = [result for result in list(results) if not result.skipped]
        return {
            "passed": sum(not result.findings for result in done),
            "left_out": len(checks) - len(results) + sum(result.skipped == NO_TIME for result in results),
            "findings": [finding.to_json() for result in done for finding in result.findings],
            "played": len(failures),
            "all_failed": first.message if first is not None and all(failures) else "",
        }

    timer = threading.Timer(seconds - MARGIN, lambda: answer(found()))
    timer.daemon = True
    timer.start()
    for result in run_checks(subject, checks):
        results.append(result)
    return found()
