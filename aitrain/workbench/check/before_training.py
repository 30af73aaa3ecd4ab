"""The fast checks before every training, in a forked process: they change nothing of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from aitrain.environment.contract import Case, level_of, named_by
from aitrain.execution.failure import CallFailed
from aitrain.execution.forked_call import Answer, call_forked
from aitrain.options.train import TrainConfig
from aitrain.workbench.check.finding import EnvFinding
from aitrain.workbench.check.outside import cut_connections, open_connections, watch_connections
from aitrain.workbench.check.registry import CHECKS, FAST_CASES, FAST_SECONDS, run_checks
from aitrain.workbench.check.subject import Subject
from aitrain.workbench.opening import OpenedEnvironment

SECONDS = 5.0
"""Seconds after which the process of the checks is ended."""


SHOWN = 3
"""Findings that are noted."""


@dataclass(frozen=True)
class FastCheck:
    """What the fast checks have found; `skipped` says why they did not run."""

    skipped: str = ""
    passed: int = 0
    findings: tuple[EnvFinding, ...] = ()
    played: int = 0
    """Number of episodes that were played."""
    all_failed: str = ""
    """The first failure, if every episode failed."""

    def lines(self) -> Iterator[str]:
        """The findings for the user, or one line if there are none."""
        if self.skipped:
            yield f"The environment was not checked: {self.skipped}."
        shown = [finding for finding in self.findings if finding.level != "info"]
        if self.passed and not shown:
            yield f"Environment checks: {self.passed} passed."
        for finding in shown[:SHOWN]:
            case = "" if finding.case_idx is None else f" (case {finding.case_idx})"
            yield f"Environment check {finding.check}{case}: {' '.join(f'{finding.what} {finding.fix}'.split())}"
        if len(shown) > SHOWN:
            yield f"{len(shown) - SHOWN} more findings about the environment: aitrain env check shows all."


def check_quickly(environment: Any, cases: Sequence[Case], config: TrainConfig, seconds: float = SECONDS) -> FastCheck:
    """Run the fast checks in a forked process, for at most so many seconds.

    No answer is scored that could cost something outside of this machine's memory: the process ends before its first
    connection, and environments that ask for the model are left out.
    """
    names = named_by(getattr(environment, level_of(environment)))
    if names is not None and "model" in names:
        return FastCheck(skipped="its scores need the model (aitrain env check --model checks them)")
    if connected := open_connections():
        return FastCheck(skipped=f"it is connected to {connected[0]}, which only the run may use")
    try:
        found = call_forked(lambda answer: _check(environment, cases, config, answer), seconds)
    except CallFailed as failed:
        return FastCheck(skipped=f"the checks' process {failed.failure.message}")
    return _read(cast("dict[str, Any]", found))


def _read(found: dict[str, Any]) -> FastCheck:
    return FastCheck(**{**found, "findings": tuple(EnvFinding(**one) for one in found.get("findings", ()))})


def _check(environment: Any, cases: Sequence[Case], config: TrainConfig, answer: Answer) -> dict[str, Any]:
    """In the forked process: run the checks, and return the fields of a FastCheck as JSON."""

    def stop(address: str) -> None:
        answer({"skipped": f"it connects to {address} (aitrain env check checks it, with real connections)"})

    cut_connections()
    watch_connections(stop)
    subject = Subject(OpenedEnvironment(environment, cases, []), config, limit=FAST_CASES, budget=FAST_SECONDS)
    results = list(run_checks(subject, [check for check in CHECKS if check.is_fast]))
    if subject.model.used:
        return {"skipped": "its scores need the model (aitrain env check --model checks them)"}
    failures = [episode.failure for episode in subject.episodes]
    first = next(filter(None, failures), None)
    return {
        "passed": sum(not result.findings and not result.skipped for result in results),
        "findings": [finding.to_json() for result in results for finding in result.findings],
        "played": len(failures),
        "all_failed": first.message if first is not None and all(failures) else "",
    }
