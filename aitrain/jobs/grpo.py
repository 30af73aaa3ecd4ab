"""The grpo job, in the order in which things happen: prepare, score, train, save, score again, write the result."""

import os
import pickle
from collections import Counter
from collections.abc import Mapping
from contextlib import closing

from accelerate import PartialState

from aitrain.engines.scopes import frozen_heap
from aitrain.errors import (
    AitrainError,
    CannotWriteError,
    DivergedError,
    EnvironmentFailed,
    EpisodesFailed,
    RunFailed,
    ServerFailed,
)
from aitrain.events import Ended
from aitrain.runs.checkpoint import PREFIX, clean_partial, damage_of, forget, step_of
from aitrain.runs.held_out import Scoring, verdict_of_scores
from aitrain.runs.records import MetricsLine, read_rollouts
from aitrain.runs.result import Result
from aitrain.runs.statistics import mean_score, score_table
from aitrain.training.distributed import explain_timeout, of_first
from aitrain.training.held_out_scoring import TrainingOver
from aitrain.training.preparation import Prepared, prepare
from aitrain.training.run_context import RunContext
from aitrain.training.saving import merge_adapter, save_model, upload
from aitrain.training.trainer_checkpoint import explain_write_errors
from aitrain.training.warm_up import can_warm_up, explain_out_of_memory, fit_passes, longest_shapes
from aitrain.ui.card import try_to_write_card


def run(context: RunContext) -> Result | None:
    """Train, score the held-out cases before and after, and save. Every rank must call this. None after a dry run.

    Raises:
        AitrainError: the run failed. The trained weights are saved, unless only one of several ranks failed.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    with closing(context.runner), explain_timeout(context.config):
        if is_first:
            clean_partial(context.folder)
            if context.checkpoint is None:
                forget(context.folder)
        try:
            prepared = prepare(context)
            if prepared is None:
                context.announce(Ended("checked", 0))
                return None
            with frozen_heap(), closing(prepared.trainer.rollouts), closing(prepared.tracking):
                return _train_and_score(context, prepared)
        except ServerFailed:
            context.stop.check()  # a stop request also ends the wait for a server
            raise


def _train_and_score(context: RunContext, prepared: Prepared) -> Result:
    _warm_up(context, prepared)
    context.stop.check()
    before = prepared.held_out.before()
    context.stop.check()
    after, best = dict[str, Scoring](), None
    try:
        _train(context, prepared)
        _save(context, prepared)
        # a run that is asked to stop in its last step scores when it is resumed; one that ended itself scores now
        is_asked = context.stop.on_any_rank() and context.stop.reason is None
        status = "stopped" if prepared.held_out.stopped or is_asked else "finished"
        if is_asked:
            last = context.folder.checkpoints / f"{PREFIX}{prepared.trainer.state.global_step}"
            if not of_first(last.is_dir()):
                prepared.trainer.save_checkpoint()
        if status == "finished" or context.stop.reason is not None:
            best = _take_best(context, prepared) if context.config.save_best else None
            is_chosen = best is not None or context.stop.reason is not None
            step = best.step if best else prepared.trainer.state.global_step
            after = prepared.held_out.after(step, is_chosen)
    except AitrainError as error:
        # these are raised on all ranks at once; after any other error, saving would wait for ranks that did not fail
        is_on_all_ranks = isinstance(error, (EnvironmentFailed, ServerFailed, DivergedError))
        is_writable = not isinstance(error, CannotWriteError) and getattr(error, "has_finite_weights", True)
        if (is_on_all_ranks or PartialState().num_processes == 1) and is_writable:
            _save(context, prepared)
            _finish(context, prepared, "failed", before)
        raise
    return _finish(context, prepared, status, before, after, best)


# -- before


def _warm_up(context: RunContext, prepared: Prepared) -> None:
    """Check that the longest episodes fit into the memory, as the first of them may come after hours. As many
    completions share a forward pass as fit.

    Raises:
        RunFailed: they do not.
    """
    if context.config.warm_up and can_warm_up(prepared.trainer):
        lengths = longest_shapes(prepared.trainer.inputs)
        context.enter("warming up")
        what = f"the warm-up, with the longest episodes ({lengths.prompt} + {lengths.completion} tokens)"
        trainer, before = prepared.trainer, prepared.trainer.pass_limit
        with explain_out_of_memory(lambda: what, trainer):
            fitting = fit_passes(trainer, lengths)
        if fitting != before:
            context.note(f"A forward pass has at most {fitting}, as {before} did not fit into the memory.", "info")
            trainer.lowered = {
                "batch_size": fitting.completions,
                "rl_prompts_per_step": trainer.inputs.batch.prompts_per_step,
            }
            if trainer.accelerator.is_main_process:
                context.folder.write_config(context.config.model_copy(update=trainer.lowered))


# -- during


def _train(context: RunContext, prepared: Prepared) -> None:
    """Train, and note if no optimizer step changed the weights.

    Raises:
        RunFailed: there was no optimizer step at all, or the checkpoint holds code.
    """
    trainer, checkpoint = prepared.trainer, context.checkpoint
    if checkpoint is not None:
        done = step_of(checkpoint)
        if done >= trainer.args.max_steps:
            context.note(f"All {done} steps are done; --resume with a larger --max-steps continues.", "info")
            trainer.end_at(checkpoint)
            return
    context.enter("training", moves_files=False)
    try:
        with explain_out_of_memory(lambda: f"step {trainer.state.global_step + 1}", trainer):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.rollouts.failures.after_run()
    except TrainingOver:
        return
    except (EpisodesFailed, ServerFailed) as error:
        if trainer.state.global_step == 0:
            raise
        trainer.save_checkpoint()
        if isinstance(error, EpisodesFailed) or not context.stop.on_any_rank():
            raise
        prepared.held_out.stopped = True
        return
    except pickle.UnpicklingError as error:
        raise RunFailed(
            f"{checkpoint} contains pickled code: it was not executed, and the run cannot be resumed from it.\n"
            "Choose another one with --resume-from-checkpoint, and do not trust the source of this one."
        ) from error
    finally:
        trainer.watch.on_train_end()  # transformers does not call it after an error
    if trainer.state.global_step == 0:
        raise RunFailed("There was no optimizer step: nothing was trained.\nSee train.log in the run folder.")
    if not trainer.updates:
        context.note(
            "No step changed the weights: in every group all completions had the same score, or none; were left out"
            " (--rl-mask-truncated-completions); or the steps were skipped."
        )


# -- after


def _save(context: RunContext, prepared: Prepared) -> None:
    """Save the present weights as model/; no-op before the first step."""
    config, trainer = context.config, prepared.trainer
    if trainer.state.global_step == 0:
        return
    context.enter("saving")
    context.folder.check_owner()
    with explain_write_errors(context.folder):
        save_model(trainer, context.folder)
        if config.peft and config.merge_adapter and trainer.accelerator.is_main_process:
            merge_adapter(trainer, context.folder, config)
    trainer.accelerator.wait_for_everyone()


def _take_best(context: RunContext, prepared: Prepared) -> MetricsLine | None:
    """Make model/ the first step with the highest score; None if there is none, or its checkpoint is damaged."""
    trainer, last = prepared.trainer, prepared.trainer.state.global_step
    if not prepared.held_out.state.has_scored(last):
        prepared.held_out.after_step(last)
    best = prepared.held_out.state.best
    if best is None:
        return None
    if best.step != last:
        checkpoint = context.folder.checkpoints / f"{PREFIX}{best.step}"
        if damage := of_first(damage_of(checkpoint) if trainer.accelerator.is_main_process else ""):
            context.note(
                f"The best step, {best.step}, is lost: {checkpoint} is damaged ({damage}).\n"
                f"model/ has the weights of the last step, {last}."
            )
            return None
        trainer.take_weights(checkpoint)
        _save(context, prepared)
    context.note(
        f"The best held-out score was {best.eval_score:.3f} after step {best.step}: model/ is of that step.", "info"
    )
    return best


def _finish(
    context: RunContext,
    prepared: Prepared,
    status: str,
    before: Mapping[str, Scoring],
    after: Mapping[str, Scoring] = {},
    best: MetricsLine | None = None,
) -> Result:
    """Write result.json and the model card on the first process, and upload the model if the options say so. `before`
    and `after` are the scores of the initial policy and of model/; `best` is what --save-best chose model/ by."""
    config, trainer, held_out = context.config, prepared.trainer, prepared.held_out
    plan, step = held_out.plan, trainer.state.global_step
    is_main = trainer.accelerator.is_main_process
    scorings = {f"before_{name}": scoring for name, scoring in before.items()}
    scorings |= {f"after_{name}": scoring for name, scoring in after.items()}
    scores = score_table(scorings, plan.mixture, config.eval_samples)
    because = context.stop.reason if status == "stopped" else None
    records = read_rollouts(context.folder.path) if is_main else ()  # of all processes
    outcomes = [record.error.kind if record.error else "" for record in records]
    result = Result(
        context.folder.path,
        status=status,
        stopped_because=because or "Ctrl-C, SIGTERM, or the end of the parent process" if status == "stopped" else None,
        steps=step,
        model_step=step if best is None else best.step,
        seconds=round(trainer.watch.trained_seconds, 3),
        score_before=mean_score(before["sampled"], plan.mixture),
        score_after=mean_score(after.get("sampled", {}), plan.mixture),
        selection_score=None if best is None else best.eval_score,
        selection_scorings=None if best is None else len(held_out.state.scorings),
        selection_cases=None if best is None else len(trainer.inputs.split.choosing) or None,
        scores=scores,
        verdict=verdict_of_scores(scores),
        eval_cases=len(plan.cases),
        eval_samples=plan.samples,
        eval_overlap=trainer.inputs.split.overlap,
        train_cases=len(trainer.inputs.split.train),
        base_model=config.model,
        environment=context.runner.label,
        seed=config.seed,
        episodes=len(outcomes),
        failures=dict(Counter(filter(None, outcomes))),
    )
    if is_main and step > 0:
        result.write()
        context.note(try_to_write_card(context.folder))
        if config.push_to_hub and (status == "finished" or because is not None):
            context.enter("uploading")
            context.note(f"Uploaded to {upload(config, context.folder.model)}", "info")
    context.progress.status, context.progress.step = status, step  # after the upload: what has finished is not resumed
    if status != "failed":
        context.announce(Ended(status, step, because))
    return result
