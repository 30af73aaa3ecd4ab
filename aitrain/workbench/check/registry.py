"""All checks, in the order in which they run, and the function that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from aitrain.environment.contract import Case
from aitrain.errors import ConfigError, did_you_mean
from aitrain.options.train import TrainConfig
from aitrain.workbench.check.finding import EnvFinding
from aitrain.workbench.check.subject import Subject
from aitrain.workbench.opening import OpenedEnvironment

FAST_SECONDS = 4.0
"""What `fast_findings` may take before it leaves out the remaining checks."""
FAST_CASES = 4


@dataclass(frozen=True)
class EnvCheck:
    """One check; `find` yields what is wrong, and nothing if all is well."""

    name: str
    description: str
    """What is well if there is no finding: `the reference earns full score`."""
    find: Callable[[Subject], Iterator[EnvFinding]]
    is_fast: bool = False
    """Whether it runs before every training."""


@dataclass(frozen=True)
class CheckResult:
    """What one check found; `skipped` says why it did not run."""

    name: str
    description: str
    findings: tuple[EnvFinding, ...] = field(default=())
    skipped: str = ""
    seconds: float = 0.0


CHECKS: tuple[EnvCheck, ...] = ()
"""All checks that need no model and no tokenizer."""


def chosen(only: Iterable[str], checks: Sequence[EnvCheck] = CHECKS) -> list[EnvCheck]:
    """The checks with these names; all of them if no name is given.

    Raises:
        ConfigError: there is no such check.
    """
    by_name, names = {check.name: check for check in checks}, list(only)
    for name in names:
        if name not in by_name:
            near = did_you_mean(name, by_name)
            raise ConfigError(f"--only: there is no check {name}.{near}\nThere are: {', '.join(by_name)}")
    return [check for check in checks if not names or check.name in names]


def run_checks(subject: Subject, checks: Iterable[EnvCheck]) -> Iterator[CheckResult]:
    """Run the checks one after another, as long as the subject's budget allows."""
    for check in checks:
        start = time.monotonic()
        if subject.is_late:
            yield CheckResult(check.name, check.description, skipped="no time left")
            continue
        found = tuple(check.find(subject))
        yield CheckResult(check.name, check.description, found, seconds=time.monotonic() - start)


def fast_findings(environment: object, cases: Sequence[Case], config: TrainConfig) -> list[EnvFinding]:
    """The findings of the fast checks, which need no model and at most a few seconds, before a training.

    Call it in a process of its own: the environment's methods are called.
    """
    subject = Subject(OpenedEnvironment(environment, cases, []), config, limit=FAST_CASES, budget=FAST_SECONDS)
    try:
        fast = (check for check in CHECKS if check.is_fast)
        return [finding for result in run_checks(subject, fast) for finding in result.findings]
    finally:
        subject.close()
