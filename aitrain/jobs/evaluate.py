"""The eval job from top to bottom: prepare, play the cases, write the result."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import closing

from accelerate import PartialState
from accelerate.utils import gather_object

from aitrain.engines.scopes import frozen_heap
from aitrain.errors import Interrupted
from aitrain.events import Ended, Evaluating
from aitrain.options.evaluate import EvalConfig
from aitrain.runs.checkpoint import clean_partial
from aitrain.runs.environment_source import files_of
from aitrain.runs.held_out import Scoring
from aitrain.runs.model_reference import read_model, weights_stamp
from aitrain.runs.records import read_rollouts
from aitrain.runs.result import PHASE, EvalResult, model_of, with_scores
from aitrain.runs.run_folder import write_json
from aitrain.runs.statistics import mean_score
from aitrain.training.distributed import explain_timeout
from aitrain.training.eval_preparation import PreparedEval, prepare_eval
from aitrain.training.evaluation import EvalPhase, evaluate
from aitrain.training.run_context import RunContext
from aitrain.training.run_recorder import RunRecorder, describe_run, keep_sources
from aitrain.training.training_batch import PlayedEpisode


def run(context: RunContext) -> EvalResult | None:
    """Score the cases, and write the result. Every rank must call this; the first one gets the result.

    Raises:
        AitrainError: the eval failed or was stopped; the records of what was scored are kept.
    """
    config, is_first = context.config, os.environ.get("RANK", "0") == "0"
    assert isinstance(config, EvalConfig)
    with closing(context.runner), explain_timeout(config):
        if is_first:
            clean_partial(context.folder)
            shutil.rmtree(context.folder.rollouts, ignore_errors=True)  # of an earlier start
        prepared = prepare_eval(context, config, read_model(config.model))
        with frozen_heap(), closing(prepared.rollouts):
            return _play_and_score(context, config, prepared)


def _play_and_score(context: RunContext, config: EvalConfig, prepared: PreparedEval) -> EvalResult | None:
    progress, folder, reference = context.progress, context.folder, prepared.reference
    is_main = PartialState().is_main_process
    if is_main:
        _describe(context, prepared)
    progress.pids = gather_object([os.getpid()])
    plan = prepared.plan
    steps = len(plan.cases) * sum(len(plan.numbers(name)) for name in plan.decodings)
    progress.steps, progress.step, progress.seconds = steps, 0, 0.0
    began, failed = time.monotonic(), 0

    def after_batch(decoding: str, played: list[PlayedEpisode], scores: Scoring) -> None:
        """Show the progress, and end the eval between two batches if it fails or is to stop."""
        nonlocal failed
        failures = sum(sample.failure is not None for sample in played)
        failed += failures
        done = progress.step = (progress.step or 0) + len(played)
        seconds = time.monotonic() - began
        left = seconds / max(1, done) * (steps - done)
        progress.seconds, progress.ends_at = round(seconds, 3), round(time.time() + left, 1)
        mean = mean_score(scores, plan.mixture)
        context.announce(Evaluating(done, steps, decoding, mean, left, failed / max(1, done)))
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
    begun = EvalResult(
        folder.path,
        model_of(reference),
        context.runner.label,
        config.seed,
        len(plan.cases),
        plan.samples,
        overlap=prepared.overlap,
        seconds=progress.seconds or 0.0,
    )
    records = (record for file in folder.rollout_files for record in read_rollouts(file))
    result = with_scores(begun, plan.mixture, records)
    result.write()
    context.announce(Ended("finished", progress.step))
    return result


def _describe(context: RunContext, prepared: PreparedEval) -> None:
    """Write environment.json, with the model."""
    reference, runner = prepared.reference, context.runner
    played = {
        "model": {**model_of(reference), "weights": weights_stamp(reference.base, reference.adapter)},
        "files": [str(file) for part in runner.parts.values() for file in files_of(part.environment)],
    }
    write_json(context.folder.environment, {**describe_run(runner), **played})
    keep_sources(runner, context.folder)
