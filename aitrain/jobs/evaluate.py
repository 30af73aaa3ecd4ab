"""The eval job from top to bottom: prepare, keep what is recorded, play the rest, write the result."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import replace

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from aitrain.engines.scopes import frozen_heap
from aitrain.errors import ConfigError, Interrupted
from aitrain.events import Ended, Evaluating
from aitrain.options.evaluate import EvalConfig
from aitrain.runs.checkpoint import clean_partial
from aitrain.runs.environment_source import files_of
from aitrain.runs.eval_result import PHASE, EvalFacts, EvalResult, changed_since, eval_result, model_of
from aitrain.runs.held_out import Scoring
from aitrain.runs.json_values import as_float
from aitrain.runs.model_reference import read_model, weights_stamp
from aitrain.runs.rollout_record import RolloutRecord, read_rollouts
from aitrain.runs.run_folder import RunFolder, keep_lines, read_object, write_json
from aitrain.runs.statistics import mean_score
from aitrain.training.distributed import explain_timeout
from aitrain.training.eval_preparation import PreparedEval, prepare_eval
from aitrain.training.evaluation import EvalPhase, RecordedScores, evaluate, recorded_scores
from aitrain.training.provenance import describe_run, keep_sources
from aitrain.training.run_context import RunContext
from aitrain.training.run_recorder import RunRecorder
from aitrain.training.training_batch import PlayedEpisode


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
    progress, folder, reference = context.progress, context.folder, prepared.reference
    is_main = PartialState().is_main_process
    if is_main:
        _describe(context, prepared)
    progress.pids = gather_object([os.getpid()])
    known = [_whole_batches(folder, prepared) if is_main else {}]
    broadcast_object_list(known)
    plan = replace(prepared.plan, recorded=known[0])
    each = sum(len(plan.numbers(name)) for name in plan.decodings)
    steps, before = len(plan.cases) * each, sum(map(len, plan.recorded.values()))
    progress.steps, progress.step = steps, before
    earlier = (as_float(read_object(folder.status).get("seconds")) or 0.0) if before else 0.0
    progress.seconds, began, failed = earlier, time.monotonic(), 0

    def after_batch(decoding: str, played: list[PlayedEpisode], scores: Scoring) -> None:
        """Show the progress, and end the eval between two batches if it fails or is to stop."""
        nonlocal failed
        failures = sum(sample.failure is not None for sample in played)
        failed += failures
        done = progress.step = (progress.step or 0) + len(played)
        seconds = time.monotonic() - began
        left = seconds / max(1, done - before) * (steps - done)
        progress.seconds, progress.ends_at = round(earlier + seconds, 3), round(time.time() + left, 1)
        mean = mean_score(scores, plan.mixture)
        context.announce(Evaluating(done, steps, decoding, mean, left, failed / max(1, done - before)))
        scored = sum(sample.score is not None for sample in played)
        dropped = sum(sample.is_dropped for sample in played)
        prepared.rollouts.failures.after_batch(scored, failures, len(played) - dropped)
        if context.stop.on_any_rank() and done < steps:
            raise Interrupted(f"Stopped after {done} of {steps} episodes.")

    context.enter(f"scoring {len(plan.cases)} cases", moves_files=False)
    step, recorder = reference.step or 0, RunRecorder(folder, None)
    evaluate(prepared.rollouts, plan, EvalPhase(PHASE, step, step), recorder.add_rollouts, after_batch)
    progress.status, progress.ends_at = "finished", None
    if not is_main:
        return None
    facts = EvalFacts(
        context.runner.label,
        config.seed,
        len(plan.cases),
        plan.samples,
        plan.mixture,
        prepared.overlap,
        progress.seconds or 0.0,
    )
    records = (record for file in sorted(folder.rollouts.glob("*.jsonl")) for record in read_rollouts(file))
    result = eval_result(folder.path, reference, facts, records)
    result.write()
    context.announce(Ended("finished", progress.step))
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


def _whole_batches(folder: RunFolder, prepared: PreparedEval) -> RecordedScores:
    """The scores of earlier starts. Only whole batches are kept: a batch that was interrupted is played again, so that
    its completions are those of an eval that was not."""
    plan, found = prepared.plan, recorded_scores(folder, PHASE, prepared.plan.cases)
    whole = dict[str, dict[tuple[int, int], float | None]]()
    for name in plan.decodings:
        batches = [{(sample.row, sample.number) for sample in batch} for batch in plan.batches(name, prepared.rollouts)]
        whole[name] = {key: found[name][key] for keys in batches if keys <= found[name].keys() for key in keys}
    kept = {(f"{PHASE}_{name}", *key) for name, keys in whole.items() for key in keys}

    def is_kept(record: RolloutRecord) -> bool:
        return (record.eval_phase, record.row_number, record.sample or 0) in kept

    for file in folder.rollouts.glob("*.jsonl"):
        keep_lines(file, is_kept, RolloutRecord.from_json)
    return whole
