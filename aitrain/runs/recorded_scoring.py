"""A scoring of cases as a run folder has recorded it: an eval, or the scoring before or after a training."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from aitrain.environment.completion_parser import short
from aitrain.errors import ConfigError
from aitrain.runs.heartbeat import state_of
from aitrain.runs.held_out import DECODINGS, grouped
from aitrain.runs.json_values import JsonObject, as_object
from aitrain.runs.model_reference import read_options
from aitrain.runs.records import RolloutRecord, prompt_key
from aitrain.runs.rollout_index import EXCERPT, IndexEntry, RolloutIndex, prompt_excerpt
from aitrain.runs.run_folder import RunFolder, read_object


@dataclass(slots=True)
class RecordedCase:
    """A case with its episodes."""

    case: str
    """Its row number in its own run."""
    record: RolloutRecord
    """The record of its first episode, without the conversation."""
    env_key: str
    """Name of the environment; of the only one of a run, its class."""
    samples: dict[str, dict[int | None, IndexEntry]] = field(default_factory=lambda: {name: {} for name in DECODINGS})
    """By decoding and number of the sample; one that was recorded twice is the later one."""

    @property
    def prompt(self) -> str:
        """The beginning of the prompt."""
        return prompt_excerpt(self.record)

    def scores(self, decoding: str, is_lenient: bool = False) -> list[float]:
        """The scores of the samples that have one, or their lenient parts."""
        return [
            one.lenient if is_lenient and one.lenient is not None else one.score
            for one in self.samples[decoding].values()
            if one.score is not None
        ]


Matched = tuple[RecordedCase, RecordedCase]
"""A case in two scorings."""


def match_cases(a: Mapping[str, RecordedCase], b: Mapping[str, RecordedCase]) -> list[Matched]:
    """Pairs of cases with equal content, prompt and row, in the order of `a`, each case at most once.

    Of rows that repeat, those with equal seeds belong together, as a seed may decide what is asked. The others are
    matched in the order in which they come. An environment that both have may share rows with others, and is never
    matched with these.
    """
    found = dict[str, RecordedCase]()
    in_both = {one.env_key for one in a.values()} & {one.env_key for one in b.values()}

    def alike(one: RecordedCase, has_seed: bool) -> tuple[str, str, int | None]:
        content = prompt_key([one.record.prompt, one.record.row])
        return content, one.env_key if one.env_key in in_both else "", one.record.seed if has_seed else None

    for has_seed in (True, False):
        taken = {one.case for one in found.values()}
        last_first = reversed(list(b.values()))  # as the first is taken from the end
        free = grouped((alike(one, has_seed), one) for one in last_first if one.case not in taken)
        for case, one in a.items():
            if case not in found and (others := free.get(alike(one, has_seed))):
                found[case] = others.pop()
    return [(one, found[case]) for case, one in a.items() if case in found]


@dataclass(eq=False)
class RecordedScoring:
    """The cases of one scoring, and what it was made with."""

    folder: Path
    label: str
    """A short name in tables."""
    rollouts: RolloutIndex
    options: JsonObject
    environment: JsonObject
    status: str
    model: str
    """What was scored: a model's name, and its step in a run."""
    lenient: set[str] = field(default_factory=set)
    """Names of the environments that say the score without the answer's format."""
    cases: dict[str, RecordedCase] = field(default_factory=dict)

    @property
    def decodings(self) -> list[str]:
        """The decodings that any case has episodes of."""
        return [name for name in DECODINGS if any(case.samples[name] for case in self.cases.values())]


def read_scorings(folders: Sequence[Path]) -> list[RecordedScoring]:
    """The scorings to compare: of one run those before and after its training, of several the last one of each.

    Raises:
        ConfigError: a folder has no such scoring.
    """
    if len(folders) == 1:
        return [_read(folders[0], phase, [phase]) for phase in ("before", "after")]
    names = [folder.resolve().name for folder in folders]
    labels = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]
    return [_read(folder, label, ["eval", "after"]) for folder, label in zip(folders, labels, strict=True)]


def _read(folder: Path, label: str, wanted: Sequence[str]) -> RecordedScoring:
    """The first of the wanted scorings that the folder has."""
    run, rollouts = RunFolder(folder), RolloutIndex(folder / "rollouts")
    rollouts.refresh()
    status, result, options = read_object(run.status), read_object(run.result), read_options(run.config)
    state = state_of(run, status)
    phases = {entry.eval_phase.rpartition("_")[0] for entry in rollouts.entries}
    phase = next((phase for phase in wanted if phase in phases), None)
    if phase is None:
        if "eval" in phases:
            raise ConfigError(f"{folder} is an eval of one model\nName what it is compared with: aitrain compare A B")
        raise ConfigError(
            f"{folder} has no scores of held-out cases {wanted[-1]} its training (status {state})"
            f"\nIf it has a model, score that with: aitrain eval {shlex.quote(str(folder))}"
        )
    evaluated = as_object(result.get("model")).get("given")  # that of a training is a path
    model = str(evaluated or options.get("model") or result.get("base_model") or "")
    step = result.get("model_step") if phase == "after" else None
    name = short(model, EXCERPT) + ("" if step is None else f", step {step}")
    scoring = RecordedScoring(folder, label, rollouts, options, read_object(run.environment), state, name)
    only = str(scoring.environment.get("class") or "")
    for entry in sorted(rollouts.entries, key=lambda entry: (len(entry.case), entry.case)):  # in the order of the rows
        of_phase, _, decoding = entry.eval_phase.rpartition("_")
        if of_phase == phase and decoding in DECODINGS:
            if entry.case not in scoring.cases:
                record = rollouts.record(entry)
                record = replace(record, messages=record.messages[:1], tools=[])
                scoring.cases[entry.case] = RecordedCase(entry.case, record, entry.environment or only)
            if entry.lenient is not None:
                scoring.lenient.add(entry.environment)
            scoring.cases[entry.case].samples[decoding][entry.sample] = entry
    return scoring
