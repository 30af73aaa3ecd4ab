"""How a training run ended, and its result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TypedDict

from aitrain.options.train import TrainConfig
from aitrain.runs.checkpoint import Best
from aitrain.runs.early_stop import TimeToTarget, time_to_target
from aitrain.runs.mixture import env_results, score_table
from aitrain.runs.result import Result
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.verdict import verdict_of_scores
from aitrain.training.evaluation import EvalScores
from aitrain.training.preparation import Prepared
from aitrain.training.run_context import RunContext


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended, with the scores of the initial policy and of model/."""

    status: str
    seconds: float
    before: EvalScores
    after: EvalScores = field(default_factory=EvalScores)
    best: Best | None = None
    """With --save-best: the step of the weights in model/, and the scores that it was chosen by."""


def result_of(context: RunContext, prepared: Prepared, outcome: RunOutcome) -> Result:
    """The result of a run at its end."""
    config, trainer, plan = context.config, prepared.trainer, prepared.held_out.plan
    before, after, best = replace(outcome.before, mixture=plan.mixture), outcome.after, outcome.best
    (score_before, greedy_before), (score_after, greedy_after) = before.means, after.means
    scorings = {"before_sampled": before.sampled, "before_greedy": before.greedy}
    scorings |= {"after_sampled": after.sampled, "after_greedy": after.greedy}
    scores = score_table(scorings, plan.mixture, config.eval_samples)
    stopped_because = context.stop.reason or "Ctrl-C, SIGTERM, or the end of the parent process"
    server = trainer.rollouts.server
    return Result(
        context.folder.path,
        status=outcome.status,
        stopped_because=stopped_because if outcome.status == "stopped" else None,
        steps=trainer.state.global_step,
        model_step=trainer.state.global_step if best is None else best.step,
        seconds=round(outcome.seconds, 3),
        score_before=score_before,
        score_after=score_after,
        greedy_before=greedy_before,
        greedy_after=greedy_after,
        selection_score=None if best is None else best.score,
        selection_greedy=None if best is None else best.greedy,
        selection_scorings=None if best is None else len(prepared.held_out.state.scorings),
        selection_cases=None if best is None else len(prepared.split.choosing) or None,
        scores=scores,
        verdict=verdict_of_scores(scores),
        time_to_target=_time_to_target(config, prepared, after),
        eval_cases=len(plan.cases),
        eval_samples=plan.samples,
        eval_overlap=prepared.split.overlap,
        train_cases=len(trainer.cases),
        base_model=config.model,
        environment=context.runner.label,
        environments=env_results(scores, plan.mixture),
        seed=config.seed,
        vllm_restarts=0 if server is None else server.restarts,
        **_counts(context.folder, trainer.accelerator.is_main_process),
    )


def _time_to_target(config: TrainConfig, prepared: Prepared, after: EvalScores) -> TimeToTarget | None:
    """When --until was reached: in an evaluation during the training, or in the scoring after its last step."""
    if config.until is None:
        return None
    step, scorings = prepared.trainer.state.global_step, prepared.held_out.state.scorings
    is_scored = prepared.held_out.state.has_scored(step)
    return time_to_target(config.until, scorings if is_scored else [*scorings, prepared.held_out.line_of(step, after)])


class _Counts(TypedDict):
    episodes: int
    failures: dict[str, int]


def _counts(folder: RunFolder, is_main_process: bool) -> _Counts:
    """Numbers of episodes of all processes, read from their records by the one that writes the result."""
    rollouts = RolloutIndex(folder.rollouts)
    if is_main_process:
        rollouts.refresh()
    failures = Counter(entry.failure for entry in rollouts.entries if entry.failure)
    return {"episodes": len(rollouts.entries), "failures": dict(failures)}
