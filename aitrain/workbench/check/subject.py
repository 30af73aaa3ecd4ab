"""The environment under check: its cases, the sample that is played, what its reference earns, played episodes."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from aitrain.environment.contract import Case, named_by
from aitrain.environment.runner import AbsentModel
from aitrain.environment.tools import function_part
from aitrain.errors import AitrainError, EnvironmentFailed
from aitrain.rollout.episode import Episode
from aitrain.ui.overview import evenly
from aitrain.workbench.check.replies import FORMS, core_of, text_of
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.player import EMPTY, JUNK, JUNK_TEXT, Player, Policy, Script, reference_of

Level = Literal["fail", "warning", "info"]
"""A run on an environment with a `fail` learns something wrong or ends; `info` is a fact that is worth knowing."""
LEVELS: tuple[Level, ...] = ("fail", "warning", "info")
PASS = 0.99
"""Share of what the reference earns from which a reply passes."""
SAMPLE = 16
"""Cases that are played."""
SLOW_SAMPLE = 4
"""Cases that are played if one episode takes longer than SLOW_SECONDS, and before a training."""
SLOW_SECONDS = 0.5
LONGEST_ANSWER = 200
"""Characters of a column's value up to which it is tried as an answer."""
EXAMPLES = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
"""Arguments of tools by their JSON types."""
COLUMNS = 4
"""Columns whose values are tried as answers where there is no reference."""
NO_TIME = "no time left"
"""Why a check was skipped after the time of all checks."""
NO_SCALE = "no such reply can be made: there is no reference, or it earns nothing or has no format"
"""Why replies were not tried."""


@dataclass(frozen=True)
class EnvFinding:
    """One finding about an environment."""

    level: Level
    what: str
    """What was found, in one or two sentences."""
    why: str = ""
    """Why it hurts training."""
    fix: str = ""
    """How to mend it."""
    case_idx: object = None
    """The case that shows it; None if it is about the whole."""


@dataclass(frozen=True)
class CheckResult:
    """What one check found; `skipped` says why it did not run."""

    name: str
    description: str
    findings: Sequence[EnvFinding]
    skipped: str


class NotCheckedError(AitrainError):
    """A check could not run, or not to its end; the message says why."""


class Subject:
    """An environment under check; checks play episodes with it and do not call it otherwise."""

    def __init__(self, opened: OpenedEnvironment, limit: int = SAMPLE, seconds: float = math.inf) -> None:
        """`limit`: maximum number of cases that are played; `seconds`: what all checks together may take, from now
        on."""
        runner = opened.runner
        self.opened, self.cases = opened, opened.cases
        self.environment, self.config, self.kind = runner.environment, runner.config, runner.kind
        self.chosen = evenly(opened.cases, limit)
        """Cases spread evenly over the dataset, for checks that play nothing."""
        self.at_once = 8
        """Episodes that are played at the same time: they may share one processor, and each has a deadline; 1 if they
        disturb each other."""
        self.notes = list[str]()
        """What aitrain said about how the environment's calls run."""
        self.reference_errors = list[str]()
        """What `reference` raised."""
        self.episodes = list[Episode]()
        """The episodes that were played, in their order."""
        self.player = Player(runner)
        self.model: AbsentModel = runner.given["model"]
        self._end = time.monotonic() + seconds
        self._references = dict[int, Script | None]()
        self._cache = dict[tuple[int, Policy], Episode]()
        runner.notify = self.notes.append

    def close(self) -> None:
        """End the environment's threads and processes."""
        self.player.close()

    # -- cases and references

    @cached_property
    def sample(self) -> Sequence[Case]:
        """Cases that are played: those that are chosen, or few of them if episodes are slow."""
        return evenly(self.chosen, SLOW_SAMPLE) if self.episode_seconds > SLOW_SECONDS else self.chosen

    @cached_property
    def episode_seconds(self) -> float:
        """Seconds of the first episode, which is played alone."""
        case = self.chosen[0]
        return self.play_one(case, self.reference(case) or EMPTY).seconds

    def reference(self, case: Case) -> Script | None:
        """The reference's replies to a case; None if there is none, or it raised (see `reference_errors`)."""
        if case.number not in self._references:
            self._references[case.number] = None
            try:
                self._references[case.number] = reference_of(self.environment, case)
            except EnvironmentFailed as error:
                self.reference_errors.append(str(error))
        return self._references[case.number]

    def take_column(self) -> str:
        """Take a column whose values earn the highest score in most cases for the reference, in the cases in which they
        do; returns its name, empty if there is none."""
        names = [name for name, value in self.chosen[0].row.items() if name != "prompt" and may_be_answer(value)]
        taken, most = "", list[tuple[Case, Script]]()
        for name, form in product(names[:COLUMNS], FORMS):
            values = [(case, Script((form.format(case.row.get(name)),))) for case in self.sample]
            right = self._right(values) if self._right(values[:2]) else []  # a judge may be paid for each
            if len(right) > max(len(most), len(values) / 2):
                taken, most = name, right
        self._references |= {case.number: script for case, script in most}
        return taken

    def _right(self, pairs: Sequence[tuple[Case, Script]]) -> list[tuple[Case, Script]]:
        """Those that earn the highest score there can be."""
        high = self.config.score_bounds[1]
        return [pair for pair, one in zip(pairs, self.play(pairs), strict=True) if one.result.score == high]

    @property
    def referenced(self) -> list[tuple[Case, Script]]:
        """The cases of the sample that have a reference, with it."""
        return [(case, script) for case in self.sample if (script := self.reference(case)) and script.replies]

    @property
    def pairs(self) -> list[tuple[Case, Policy]]:
        """Each case of the sample with its reference, or a meaningless policy where there is none."""
        return [(case, self.reference(case) or JUNK) for case in self.sample]

    def core(self, case: Case) -> str | None:
        """The answer in the reference's last reply, without its format; None without a reference."""
        script = self.reference(case)
        return core_of(script.replies[-1]) if script and script.replies else None

    @cached_property
    def decided(self) -> list[tuple[Case, Script]]:
        """The cases of the sample whose reference's last reply decides the score, with the reference: those of a single
        reply, and conversations that earn less with a meaningless last one. A tool call is no answer."""
        answers = [pair for pair in self.referenced if "<tool_call>" not in pair[1].replies[-1] and self.scale(pair[0])]
        without = self.play((case, script.ending_in(JUNK_TEXT)) for case, script in answers)
        return [
            pair
            for pair, one in zip(answers, without, strict=True)
            if len(pair[1].replies) == 1 or (self.share(one) or 0.0) < PASS
        ]

    def asked(self, case: Case) -> str:
        """What the policy is asked first, as one text: the prompt, and what the environment says first."""
        return text_of(case.prompt if self.kind == "score_episode" else self.play_one(case, JUNK).prompt)

    @cached_property
    def tool_calls(self) -> list[str]:
        """Calls of each tool with arguments of the right types that mean nothing; numbers are also zero, by which a
        tool may divide."""
        reset, calls = self.play_one(self.sample[0], JUNK).reset, list[str]()
        for function in map(function_part, reset.tools if reset.runs_tools else ()):
            properties = (function.get("parameters") or {}).get("properties") or {}
            kinds = {name: str(schema.get("type")) for name, schema in properties.items()}
            example = {name: EXAMPLES.get(kind, "x") for name, kind in kinds.items()}
            zeros = {name: 0 for name, kind in kinds.items() if kind in ("integer", "number")}
            for arguments in (example, example | zeros) if zeros else (example,):
                call = {"name": function.get("name"), "arguments": arguments}
                calls.append(f"<tool_call>{json.dumps(call)}</tool_call>")
        return calls

    @cached_property
    def sees_the_case(self) -> bool:
        """Whether the scoring method asks for anything of the case, so that its score can depend on it."""
        names = named_by(getattr(self.environment, self.kind))
        return names is None or not set(names) <= {"completion", "text", "model", "tokenizer", "seed"}

    # -- playing

    def replay(self, pairs: Iterable[tuple[Case, Policy]], at_once: int | None = None) -> list[Episode]:
        """Play the policies on the cases, several at the same time; `at_once` takes the place of the attribute.

        Raises:
            NotCheckedError: the time is over.
        """
        wanted, first, at_once = list(pairs), len(self.episodes), at_once or self.at_once
        for place in range(0, len(wanted), at_once):
            if time.monotonic() > self._end:
                raise NotCheckedError(NO_TIME)
            self.episodes += self.player.play(wanted[place : place + at_once])
        return self.episodes[first:]

    def play(self, pairs: Iterable[tuple[Case, Policy]]) -> list[Episode]:
        """The same; episodes that were played before are taken from there.

        Raises:
            NotCheckedError: the time is over.
        """
        wanted = [((case.number, policy), (case, policy)) for case, policy in pairs]
        new = {key: pair for key, pair in wanted if key not in self._cache}
        self._cache.update(zip(new, self.replay(new.values()), strict=True))
        return [self._cache[key] for key, _ in wanted]

    def play_one(self, case: Case, policy: Policy) -> Episode:
        """Play one episode."""
        return self.play([(case, policy)])[0]

    # -- scores

    def scale(self, case: Case) -> tuple[float, float] | None:
        """The scores of this case that earn nothing and all: 0, or the lowest of a range without it, and the
        reference's, or without one the highest of the range. None if nothing earns."""
        low, high = self.config.score_bounds
        script = self.reference(case)
        full = self.play_one(case, script).result.score if script else high
        if full is None:
            return None
        zero = 0.0 if low <= 0.0 < full else low
        return (zero, full) if -math.inf < zero < full < math.inf else None

    def share(self, episode: Episode) -> float | None:
        """The score of an episode as a share of what the reference earns in its case; None if it is missing."""
        scale, score = self.scale(episode.case), episode.result.score
        return None if score is None or scale is None else (score - scale[0]) / (scale[1] - scale[0])


def may_be_answer(value: object) -> bool:
    """Whether a column's value is short enough to be an answer."""
    return isinstance(value, (str, int, float)) and 0 < len(str(value)) <= LONGEST_ANSWER


@dataclass(frozen=True)
class EnvCheck:
    """One check; `find` yields what is wrong, and nothing if all is well."""

    name: str
    description: str
    """What is well if there is no finding: `the reference earns full score`."""
    find: Callable[[Subject], Iterator[EnvFinding]]
    needs_scores: bool = True
    """Whether it plays for scores; otherwise it runs also where there are none."""
