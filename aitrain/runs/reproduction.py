"""Compares a run with a repetition of it: their records, their metrics and their weights."""

import filecmp
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aitrain.runs.json_values import JsonObject, as_object, as_text
from aitrain.runs.records import MetricsLine, RolloutRecord, read_metrics, read_rollouts
from aitrain.runs.run_folder import RunFolder, read_object

ROUNDING = 1e-4
"""Largest relative difference of two numbers that counts as rounding: sums of float32 in another order, over a run."""
SMALL = 0.01
"""Numbers below it are compared as if they were this large: a loss is a sum in which most cancels out."""
TIMES = {"seconds", "step_time", "tokens_per_second", "gpu_memory_gib"}
"""Numbers of records and metrics, with those called `time/...`, that are another in each run."""
TELLING = ("seed", "messages", "score", "learning_rate")
"""What is compared first: the rest follows from it."""
CONTEXT = 30
"""Characters that are shown of two texts, before and after the first that differs."""


Answer = tuple[str, str]
"""Whether two runs are the same in something: the same bits, the same to rounding, different, or not compared; and how
much was compared, or where the first difference is."""


@dataclass(frozen=True)
class Reproduction:
    """A run and its repetition."""

    run: Path
    again: Path
    parts: Mapping[str, Answer]
    """Records, metrics and weights."""
    facts: Mapping[str, tuple[str, str]]
    """Versions, hardware and source of the run and of its repetition."""

    @property
    def first_difference(self) -> str | None:
        """The first part that differs: records come before what is computed from them."""
        return next((name for name, (same, _) in self.parts.items() if same == "different"), None)

    def to_json(self) -> JsonObject:
        """The comparison for programs."""
        return {
            "run": str(self.run),
            "again": str(self.again),
            "is_same": self.first_difference is None,
            **{name: {"same": same, "about": about} for name, (same, about) in self.parts.items()},
            "facts": self.facts,
        }


def compare_repetition(run: RunFolder, again: RunFolder) -> Reproduction:
    """Compare two runs as far as the first one came."""
    ends = [read_object(folder.result).get("model_step") for folder in (run, again)]
    last = read_object(run.result).get("steps") or 0
    left_out = "after" if ends[0] != ends[1] else "none"  # the scores after the training are those of other steps
    records = [
        sorted(
            (one for one in read_rollouts(folder.path) if one.step <= last and not one.eval_phase.startswith(left_out)),
            key=lambda one: (one.step, one.eval_phase),  # those of one step stay in the order of the processes
        )
        for folder in (run, again)
    ]
    metrics = [
        # a scoring that a resumed run made up for comes after its step
        sorted(filter(lambda line: line.step <= last, read_metrics(folder.metrics)), key=lambda line: line.is_scoring)
        for folder in (run, again)
    ]
    parts = {
        "records": _compare_lines("episodes", *records),
        "metrics": _compare_lines("lines", *metrics),
        "weights": _compare_weights(run, again, ends[0] or 0)
        if ends[0] == ends[1]
        else ("not compared", f"of step {ends[0]}, and of step {ends[1]}"),
    }
    before, after = map(_made_with, (run, again))
    facts = {name: (before.get(name, "-"), after.get(name, "-")) for name in {**before, **after}}
    return Reproduction(run.path, again.path, parts, facts)


Line = RolloutRecord | MetricsLine


def _compare_lines(unit: str, before: Sequence[Line], after: Sequence[Line]) -> Answer:
    largest = 0.0
    if not (before and after):  # deleted to save space
        return "not compared", f"a run has no {unit} any more"
    for one, other in zip((line.to_json() for line in before), (line.to_json() for line in after), strict=False):
        for key in dict.fromkeys((*TELLING, *one, *other)):
            if key in TIMES or key.startswith("time/"):
                continue
            if (difference := _difference(one.get(key), other.get(key))) > ROUNDING:
                case = one.get("row_number")
                where = f"step {one['step']}" if case is None else f"step {one['step']}, case {case}"
                return "different", f"{where}: {key} {_shown(one.get(key), other.get(key))}"
            largest = max(largest, difference)
    if len(before) != len(after):
        return "different", f"{len(before):,} and {len(after):,} {unit}"
    return _alike(largest, f"{len(before):,} {unit}")


def _alike(largest: float, what: str) -> Answer:
    if largest:
        return "the same to rounding", f"{what}, largest relative difference {largest:.1e}"
    return "the same bits", what


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
    begin = max(0, len(os.path.commonprefix(texts)) - CONTEXT)  # noqa: RUF071  # not of paths
    return " and ".join(text[begin : begin + 2 * CONTEXT] for text in texts)


def _compare_weights(run: RunFolder, again: RunFolder, step: int) -> Answer:
    """Compare the files of model/, tensor by tensor if their bytes are not the same."""
    names, others = (sorted(file.name for file in one.model.glob("*.safetensors")) for one in (run, again))
    if not (names and others):
        return "not compared", "a run has no model/ any more"
    if names != others:
        return "different", "the files of model/ are not the same"
    if filecmp.cmpfiles(run.model, again.model, names, shallow=False)[0] == names:
        return "the same bits", f"model/ of step {step}"
    from safetensors.torch import load_file  # here, because most repetitions have the same bytes

    largest, worst = 0.0, ""
    for name in names:
        before, after = load_file(run.model / name), load_file(again.model / name)
        kinds = [{tensor: (one.shape, one.dtype) for tensor, one in each.items()} for each in (before, after)]
        if kinds[0] != kinds[1]:
            return "different", f"{name} has other tensors"
        for tensor, one in before.items():
            other = after[tensor].double()
            difference = float((one.double() - other).abs().max() / one.double().abs().max().clamp(min=1e-30))
            if not difference <= largest:  # NaN as well
                largest, worst = difference, tensor
    if not largest <= ROUNDING:
        return "different", f"step {step}: {worst} by {largest:.1e} of its largest value"
    return _alike(largest, f"model/ of step {step}")


def _made_with(folder: RunFolder) -> dict[str, str]:
    """Versions, hardware and source of a run, by name."""
    made = read_object(folder.environment)
    facts = {
        name: made.get(name) for name in ("python", "platform", "cpus", "gpus", "git_commit", "class", "chat_template")
    }
    facts = {**as_object(made.get("packages")), **facts, "environment's source": made.get("sha256")}
    return {name: as_text(value) or "-" for name, value in facts.items()}
