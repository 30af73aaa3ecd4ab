"""All checks, in the order in which they run, and the function that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from aitrain.environment.contract import scores_groups
from aitrain.environment.judges import model_judge
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.errors import ConfigError, did_you_mean
from aitrain.execution.user_code import describe_error
from aitrain.workbench.check import effects, episodes, rows, scores, second
from aitrain.workbench.check.subject import EnvFinding, NotCheckedError, Subject
from aitrain.workbench.player import JUNK

NEEDS: dict[str, tuple[Callable[[Subject], object], str]] = {
    "scores": (lambda subject: True, ""),
    "scale": (lambda subject: any(map(subject.scale, subject.sample)), "uncalibrated: nothing earns a score"),
    "reference": (lambda subject: subject.referenced, "there is no reference"),
    "reply": (lambda subject: subject.answered, "there is no reference of one reply that earns anything"),
    "last reply": (lambda subject: subject.decided, "there is no reference whose last reply decides the score"),
    "groups": (lambda subject: scores_groups(subject.environment), "there is no score_group"),
}
"""What a check needs beside the rows, and why it does not run without it; all of these need scores."""


@dataclass(frozen=True)
class EnvCheck:
    """One check; `find` yields what is wrong, and nothing if all is well."""

    name: str
    description: str
    """What is well if there is no finding: `the reference earns full score`."""
    find: Callable[[Subject], Iterator[EnvFinding]]
    needs: str = "scores"
    """A key of NEEDS; or `rows` only, or several `turns`."""
    is_fast: bool = False
    """Whether it runs before every training."""
    of_process: bool = False
    """Whether it looks at the environment's own process, which is elsewhere if a server has the environment."""

    def reason_to_skip(self, subject: Subject) -> str:
        """Why the check cannot run on this environment; empty if it can."""
        if self.of_process and isinstance(subject.environment, ServedEnvironment):
            return "seen only where the environment runs: check it there"
        if self.needs == "rows":
            return ""
        if subject.model.used:
            return "the scorer uses the model"
        if self.needs == "turns":
            return "one turn only" if subject.kind == "score_episode" else ""
        if model_judge.not_asked:
            played = subject.play((case, subject.reference(case) or JUNK) for case in subject.sample)
            if all(one.score is None and one.failure is None for one in played):
                return "all scores are those of judges that were not asked (--ask-judges)"
        is_there, reason = NEEDS[self.needs]
        return "" if is_there(subject) else reason


@dataclass(frozen=True)
class CheckResult:
    """What one check found; `skipped` says why it did not run."""

    name: str
    description: str
    findings: Sequence[EnvFinding]
    skipped: str
    seconds: float


CHECKS: tuple[EnvCheck, ...] = (
    EnvCheck("dataset", "prompts, roles and case_idx are usable", rows.dataset, "rows", is_fast=True),
    # first of those that play: what an environment changes only once would not be seen later
    EnvCheck("side-effects", "episodes leave their process as it was", effects.side_effects, of_process=True),
    EnvCheck("duplicates", "prompts differ, held-out ones are apart", rows.duplicates, "rows", is_fast=True),
    EnvCheck("leaked-answer", "no prompt names its answer", rows.leaked_answer, "rows", is_fast=True),
    EnvCheck(
        "repeatable-dataset", "fresh processes build the same rows", second.repeatable_dataset, "rows", of_process=True
    ),
    EnvCheck("model-use", "the scorer does not generate", scores.model_use, "rows", is_fast=True),
    EnvCheck("concurrency", "episodes at the same time are scored alike", episodes.concurrency),
    EnvCheck("two-ranks", "a second process scores alike", second.two_ranks, "reference", of_process=True),
    EnvCheck("reference", "the reference earns the highest score", scores.reference, is_fast=True),
    EnvCheck("equivalent-forms", "the reference earns it in other forms", scores.equivalent, "reply"),
    EnvCheck("message-forms", "completions are read as they come", scores.message_forms, "reference", is_fast=True),
    EnvCheck("floor", "replies without content earn nothing", scores.floor, "scale", is_fast=True),
    EnvCheck("other-answer", "another case's answer does not pass", scores.other_answer, "reference", is_fast=True),
    EnvCheck("wrong-answer", "a wrong answer in the right format does not pass", scores.wrong_answer, "last reply"),
    EnvCheck("shotgun", "a list of answers does not pass", scores.shotgun, "last reply"),
    EnvCheck("denied-answer", "a rejected answer does not pass", scores.denied_answer, "last reply"),
    EnvCheck("template", "the empty format earns little", scores.template, "scale"),
    EnvCheck("lazy-policy", "no fixed strategy is enough", scores.lazy_policy, "scale"),
    EnvCheck("injection", "a reply cannot command the judge", scores.injection, "scale"),
    EnvCheck("tone", "confidence does not change a score", scores.tone, "reply"),
    EnvCheck("repeatable-score", "the same reply gets the same score", scores.repeatable_score),
    EnvCheck("repeatable-episode", "the same replies give the same conversation", episodes.repeatable_episode, "turns"),
    EnvCheck("isolation", "episodes do not disturb each other", episodes.isolation, "turns"),
    EnvCheck("episode-end", "episodes end by themselves", episodes.episode_end, "turns"),
    EnvCheck("tools", "tools are described and take wrong calls", episodes.tools, "rows"),
    EnvCheck("score-range", "all scores are numbers in the range", scores.score_range, is_fast=True),
    EnvCheck("exceptions", "no reply makes the environment raise", scores.exceptions, is_fast=True),
    EnvCheck("group-score", "score_group ranks the reference above nonsense", scores.group_score, "groups"),
    EnvCheck("network", "episodes need no network", effects.network, of_process=True),
    EnvCheck("signals", "episodes work outside of the main thread", effects.signals, of_process=True),
    EnvCheck("pickling", "rows and attributes can be sent to processes", rows.pickling, "rows", of_process=True),
    EnvCheck("latency", "steps wait little for the environment", episodes.latency),
)
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
    """Run the checks one after another; those for which there is no time are skipped."""
    for check in checks:
        start, found, skipped = time.monotonic(), list[EnvFinding](), ""
        try:
            subject.begin_check()
            skipped = check.reason_to_skip(subject)
            for finding in () if skipped else check.find(subject):
                found.append(replace(finding, check=check.name))
        except NotCheckedError as stopped:
            skipped = "" if found else str(stopped)
        except ConfigError:  # a run would be refused
            raise
        except Exception as error:  # one check that fails must not hide what the others find
            skipped = f"the check itself failed: {describe_error(error)}"
        yield CheckResult(check.name, check.description, found, skipped, time.monotonic() - start)
