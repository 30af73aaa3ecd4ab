"""Compares a run with a repetition of it: their records, their metrics and their weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aitrain.options.yaml_text import read_yaml
from aitrain.runs.json_values import JsonObject, as_object, as_text
from aitrain.runs.metrics_line import MetricsLine, read_metrics
from aitrain.runs.model_reference import OWN_OPTIONS
from aitrain.runs.rollout_record import RolloutRecord, read_rollouts
from aitrain.runs.run_folder import RunFolder, read_object

Sameness = Literal["the same bits", "the same to rounding", "different", "not compared"]

ROUNDING = 1e-4
"""Largest relative difference of two numbers that counts as rounding: sums of float32 in another order, over a run."""
SMALL = 0.01
"""Numbers below it are compared as if they were this large: a loss is a sum in which most cancels out."""
TIMES = {"seconds", "step_time", "tokens_per_second"}
"""Numbers of records and metrics, with those called `time/...`, that are another in each run."""
TELLING = ("seed", "messages", "score", "learning_rate")
"""What is compared first: the rest follows from it."""
CONTEXT = 30
"""Characters that are shown of two texts, before and after the first that differs."""


@dataclass(frozen=True)
class Part:
    """One part of two runs that was compared."""

    name: str
    same: Sameness
    about: str
    """How much was compared, or where the first difference is."""


@dataclass(frozen=True)
class Reproduction:
    """A run and its repetition."""

    run: Path
    again: Path
    parts: tuple[Part, ...]
    facts: Mapping[str, tuple[str, str]]
    """Versions, hardware and options of both runs."""

    @property
    def is_same(self) -> bool:
        """Whether all that was compared has the same bits, or is the same to rounding."""
        return all(part.same != "different" for part in self.parts)

    @property
    def first_difference(self) -> Part | None:
        """The first part that differs: records come before what is computed from them."""
        return next((part for part in self.parts if part.same == "different"), None)

    @property
    def differing_facts(self) -> list[str]:
        """Names of the facts that are not the same."""
        return [name for name, (before, after) in self.facts.items() if before != after]

    def to_json(self) -> JsonObject:
        """The comparison for programs."""
        return {
            "run": str(self.run),
            "again": str(self.again),
            "is_same": self.is_same,
            **{part.name: {"same": part.same, "about": part.about} for part in self.parts},
            "facts": {name: {"run": before, "again": after} for name, (before, after) in self.facts.items()},
            "differing_facts": self.differing_facts,
        }


def compare_repetition(run: RunFolder, again: RunFolder) -> Reproduction:
    """Compare two runs as far as the first one came."""
    ends = [read_object(folder.result).get("model_step") for folder in (run, again)]
    last = read_object(run.result).get("steps") or 0
    records = [[record for record in _in_order(folder) if record.step <= last] for folder in (run, again)]
    if ends[0] != ends[1]:  # the scores after the training are those of other steps
        records = [[record for record in each if not record.eval_phase.startswith("after")] for each in records]
    metrics = [[line for line in read_metrics(folder.metrics) if line.step <= last] for folder in (run, again)]
    parts = (
        _compare_lines("records", "episodes", *records),
        _compare_lines("metrics", "lines", *metrics),
        _compare_weights(run, again, ends[0] or 0)
        if ends[0] == ends[1]
        else Part("weights", "not compared", f"of step {ends[0]}, and of step {ends[1]}"),
    )
    return Reproduction(run.path, again.path, parts, dict(_facts(run, again)))


def _in_order(folder: RunFolder) -> list[RolloutRecord]:
    """The records of all processes by step; those of one step in the order of the processes."""
    records = [record for file in sorted(folder.rollouts.glob("*.jsonl")) for record in read_rollouts(file)]
    return sorted(records, key=lambda record: (record.step, record.eval_phase))


Line = RolloutRecord | MetricsLine


def _compare_lines(name: str, unit: str, before: Sequence[Line], after: Sequence[Line]) -> Part:
    largest = 0.0
    for one, other in zip((line.to_json() for line in before), (line.to_json() for line in after), strict=False):
        for key in dict.fromkeys((*TELLING, *one, *other)):
            if key in TIMES or key.startswith("time/"):
                continue
            if (difference := _difference(one.get(key), other.get(key))) > ROUNDING:
                case = one.get("row_number")
                where = f"step {one['step']}" if case is None else f"step {one['step']}, case {case}"
                return Part(name, "different", f"{where}: {key} {_shown(one.get(key), other.get(key))}")
            largest = max(largest, difference)
    if len(before) != len(after):
        return Part(name, "different", f"{len(before):,} and {len(after):,} {unit}")
    return _alike(name, largest, f"{len(before):,} {unit}")


def _alike(name: str, largest: float, what: str) -> Part:
    if largest:
        return Part(name, "the same to rounding", f"{what}, largest relative difference {largest:.1e}")
    return Part(name, "the same bits", what)


def _difference(one: object, other: object) -> float:
    """The largest relative difference of the numbers in two JSON values; 1 or more if anything else differs."""
    if one == other:
        return 0.0
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) / max(abs(one), abs(other), SMALL)
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max(_difference(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max(map(_difference, one, other))
    return 1.0


def _shown(one: object, other: object) -> str:
    """Two JSON values as text, from shortly before the first difference on."""
    texts = [json.dumps(value, ensure_ascii=False) for value in (one, other)]
    same = next((place for place, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), 0)
    begin = max(0, same - CONTEXT)
    return " and ".join(text[begin : begin + 2 * CONTEXT] for text in texts)


def _compare_weights(run: RunFolder, again: RunFolder, step: int) -> Part:
    """Compare the files of model/, tensor by tensor if their bytes are not the same."""
    names = sorted(file.name for file in run.model.glob("*.safetensors"))
    if not names or names != sorted(file.name for file in again.model.glob("*.safetensors")):
        return Part("weights", "different" if names else "not compared", "the files of model/ are not the same")
    if all((run.model / name).read_bytes() == (again.model / name).read_bytes() for name in names):
        return Part("weights", "the same bits", f"model/ of step {step}")
    from safetensors.torch import load_file  # here, because most repetitions have the same bytes

    largest, worst = 0.0, ""
    for name in names:
        before, after = load_file(run.model / name), load_file(again.model / name)
        kinds = [{tensor: (one.shape, one.dtype) for tensor, one in each.items()} for each in (before, after)]
        if kinds[0] != kinds[1]:
            return Part("weights", "different", f"{name} has other tensors")
        for tensor, one in before.items():
            other = after[tensor].double()
            difference = float((one.double() - other).abs().max() / one.double().abs().max().clamp(min=1e-30))
            if not difference <= largest:  # NaN as well
                largest, worst = difference, tensor
    if not largest <= ROUNDING:
        return Part("weights", "different", f"step {step}: {worst} by {largest:.1e} of its largest value")
    return _alike("weights", largest, f"model/ of step {step}")


def _facts(run: RunFolder, again: RunFolder) -> Iterator[tuple[str, tuple[str, str]]]:
    """What the two were made with, by name."""
    before, after = read_object(run.environment), read_object(again.environment)
    packages = [as_object(facts.get("packages")) for facts in (before, after)]
    for name in sorted(packages[0].keys() | packages[1].keys()):
        yield name, (as_text(packages[0].get(name)) or "-", as_text(packages[1].get(name)) or "-")
    for name in ("python", "platform", "cpus", "gpus", "git_commit", "class", "sha256"):
        shown = "environment's source" if name == "sha256" else name
        yield shown, (as_text(before.get(name)) or "-", as_text(after.get(name)) or "-")
    options = [as_object(read_yaml(folder.config.read_text(encoding="utf-8"))) for folder in (run, again)]
    for name in sorted(options[0].keys() - OWN_OPTIONS):
        is_chosen = name == "num_processes" or name.startswith("rl_env")  # by the command
        if not is_chosen and options[0][name] != options[1].get(name):
            yield name, (as_text(options[0][name]) or "-", as_text(options[1].get(name)) or "-")
