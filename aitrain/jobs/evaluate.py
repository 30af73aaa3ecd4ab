"""The eval job from top to bottom: prepare, keep what is recorded, play the rest, write the result."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from aitrain.engines.scopes import frozen_heap
from aitrain.errors import ConfigError, Interrupted
from aitrain.events import Ended, Evaluating
from aitrain.options.evaluate import EvalConfig
from aitrain.runs.checkpoint import clean_partial
from aitrain.runs.environment_source import files_of
from aitrain.runs.eval_result import (
    PHASE,
    EvalFacts,
    EvalResult,
    changed_since,
    eval_result,
    model_of,
    recorded_scores,
)
from aitrain.runs.json_values import as_float
from aitrain.runs.mixture import weighted_mean
from aitrain.runs.model_reference import read_model, weights_stamp
from aitrain.runs.rollout_record import RolloutRecord, read_rollouts, row_columns
from aitrain.runs.run_folder import RunFolder, append_lines, keep_lines, read_object, to_jsonable, write_json
from aitrain.training.distributed import explain_timeout
from aitrain.training.eval_preparation import PreparedEval, prepare_eval
from aitrain.training.evaluation import EvalPhase, RecordedScores, eval_batches, evaluate
from aitrain.training.provenance import describe_run, keep_sources
from aitrain.training.run_context import RunContext


def run(context: RunContext) -> EvalResult | None:
    """Score the cases that are not recorded yet, and write the result. Every rank must call this; the first one gets
    the result.

    Raises:
        AitrainError: the eval failed or was stopped; what was scored is saved.
    """
    config, is_first = context.config, os.environ.get("RANK", "0") == "0"
    assert isinstance(config, EvalConfig)
    with closing(context.runner), explain_timeout(config):
        if is_first:
            clean_partial(context.folder)
        prepared = prepare_eval(context, config, read_model(config.model))
        with frozen_heap(), closing(prepared.rollouts):
            return _play_and_score(context, config, prepared)


def _play_and_score(context: RunContext, config: EvalConfig, prepared: PreparedEval) -> EvalResult | None:
    is_main = PartialState().is_main_process
    if is_main:
        _describe(context, prepared)
    context.progress.pids = gather_object([os.getpid()])
    recorded = _recorded(context.folder, prepared)
    plan, step = replace(prepared.plan, recorded=recorded), prepared.reference.step or 0
    recorder = EvalRecorder(context, prepared, sum(map(len, recorded.values())))
    context.enter(f"scoring {len(plan.cases)} cases", moves_files=False)
    evaluate(prepared.rollouts, plan, EvalPhase(PHASE, step, step), recorder)
    context.progress.status, context.progress.ends_at = "finished", None
    if not is_main:
        return None
    facts = EvalFacts(
        context.runner.label,
        config.seed,
        len(plan.cases),
        plan.samples,
        plan.mixture,
        prepared.overlap,
        context.progress.seconds or 0.0,
    )
    result = eval_result(context.folder.path, prepared.reference, facts, _records(context.folder))
    result.write()
    context.announce(Ended("finished", recorder.done))
    return result


def _describe(context: RunContext, prepared: PreparedEval) -> None:
    """Write environment.json, with the model; a resumed eval must have the same weights and the same environment.

    Raises:
        ConfigError: one of them has changed since the eval began.
    """
    reference, runner = prepared.reference, context.runner
    facts, before = describe_run(runner), read_object(context.folder.environment)
    changed = changed_since(context.folder, reference)
    if not changed and before and any(before.get(name) != facts.get(name) for name in ("class", "sha256")):
        changed = f"environment: {facts['class']}"  # such as another one behind the same address
    if changed:
        raise ConfigError(f"{changed} has changed since this eval began\nStart another without --resume.")
    played = {
        "model": {**model_of(reference), "weights": weights_stamp(reference)},
        "files": [str(file) for part in runner.parts.values() for file in files_of(part.environment)],
    }
    write_json(context.folder.environment, {**facts, **played})
    keep_sources(runner, context.folder)


# -- records


@dataclass
class EvalRecorder:
    """Writes the records of each batch, shows the progress, and ends the eval between two batches."""

    context: RunContext
    prepared: PreparedEval
    done: int
    """Episodes that are recorded, over all ranks."""
    began: float = field(default_factory=time.monotonic)
    earlier: float = 0.0
    """Seconds of earlier starts."""
    played: int = 0
    failed: int = 0
    scores: dict[str, list[float]] = field(default_factory=dict)
    """By decoding, sum and number of the scores of this start, of one environment after the other."""

    def __post_init__(self) -> None:
        plan, progress = self.prepared.plan, self.context.progress
        each = sum(len(plan.numbers(name)) for name in plan.decodings)
        progress.step, progress.steps = self.done, len(plan.cases) * each
        self.earlier = (as_float(read_object(self.context.folder.status).get("seconds")) or 0.0) if self.done else 0.0
        progress.seconds = self.earlier

    def __call__(self, records: list[RolloutRecord]) -> None:
        """Take the records of this rank's part of a batch. Every rank must call this.

        Raises:
            EnvironmentFailed: too many episodes failed in consecutive batches.
            Interrupted: a process was asked to stop.
        """
        self._write(records)
        each = [
            [record.score for record in records if record.score is not None and record.environment == one.name]
            for one in self.prepared.plan.mixture
        ]
        dropped = sum(record.stop == "no_room" for record in records)
        own = [float(len(records)), sum(record.error is not None for record in records), dropped]
        own += [number for scores in each for number in (sum(scores), len(scores))]
        accelerator = self.prepared.rollouts.accelerator
        counts = torch.tensor(own, dtype=torch.float64 if accelerator.device.type != "mps" else torch.float32)
        played, failed, dropped, *sums = accelerator.reduce(counts.to(accelerator.device), "sum").tolist()
        self._show(records, int(played), int(failed), sums)
        self.prepared.rollouts.failures.after_batch(int(sum(sums[1::2])), int(failed), int(played - dropped))
        if self.context.stop.on_any_rank() and self.done < (self.context.progress.steps or 0):
            raise Interrupted(f"Stopped after {self.done} of {self.context.progress.steps} episodes.")

    def _write(self, records: list[RolloutRecord]) -> None:
        self.context.folder.check_owner()
        rollouts = self.context.folder.rollouts
        rollouts.mkdir(exist_ok=True)
        append_lines(rollouts / f"rank{PartialState().process_index}.jsonl", (record.to_json() for record in records))

    def _show(self, records: list[RolloutRecord], played: int, failed: int, sums: list[float]) -> None:
        progress = self.context.progress
        self.done, self.played, self.failed = self.done + played, self.played + played, self.failed + failed
        seconds = time.monotonic() - self.began
        left = seconds / max(1, self.played) * max(0, (progress.steps or 0) - self.done)
        progress.step, progress.seconds = self.done, round(self.earlier + seconds, 3)
        progress.ends_at = round(time.time() + left, 1)
        name = records[0].eval_phase.removeprefix(f"{PHASE}_") if records else ""
        before = self.scores.get(name, [0.0] * len(sums))
        self.scores[name] = sums = [old + new for old, new in zip(before, sums, strict=True)]
        each = zip(self.prepared.plan.mixture, sums[::2], sums[1::2], strict=True)
        mean = weighted_mean([(one.share, total / count) for one, total, count in each if count])
        share = self.failed / max(1, self.played)
        self.context.announce(Evaluating(self.done, progress.steps or 0, name, mean, left, share))


def _records(folder: RunFolder) -> Iterator[RolloutRecord]:
    """The records of all ranks."""
    for file in sorted(folder.rollouts.glob("*.jsonl")):
        yield from read_rollouts(file)


def _recorded(folder: RunFolder, prepared: PreparedEval) -> RecordedScores:
    """The scores of earlier starts, the same on every rank. Only whole batches are kept: a batch that was interrupted
    is played again, so that its completions are those of an eval that was not."""
    found: list[Any] = [None]
    if PartialState().is_main_process:
        plan = prepared.plan
        asked = {case.number: to_jsonable(case.prompt or row_columns(case.row)) for case in plan.cases}
        # a row whose content has changed is another case
        scores = recorded_scores(r for r in _records(folder) if (r.prompt or r.row) == asked.get(r.row_number or 0))
        whole = {name: _whole_batches(prepared, name, set(scores[name])) for name in plan.decodings}
        kept = {(f"{PHASE}_{name}", *key) for name, keys in whole.items() for key in keys}
        for file in folder.rollouts.glob("*.jsonl"):
            keep_lines(file, lambda values: _key(RolloutRecord.from_json(values)) in kept)
        found = [{name: {key: scores[name][key] for key in keys} for name, keys in whole.items()}]
    broadcast_object_list(found)
    recorded: RecordedScores = found[0]
    return recorded


def _whole_batches(prepared: PreparedEval, name: str, recorded: set[tuple[int, int]]) -> set[tuple[int, int]]:
    rollouts, plan = prepared.rollouts, prepared.plan
    size = plan.batch_size * rollouts.accelerator.num_processes
    batches = eval_batches(plan, name, size, rollouts.rollout.runner.scores_groups)
    keys = [{(sample.row, sample.number) for sample in batch} for batch in batches]
    return {key for batch in keys if batch <= recorded for key in batch}


def _key(record: RolloutRecord) -> tuple[str, int | None, int]:
    return record.eval_phase, record.row_number, record.sample or 0
