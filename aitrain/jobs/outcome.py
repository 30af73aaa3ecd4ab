"""How a training run ended, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from aitrain.runs.checkpoint import Best
from aitrain.runs.held_out import before_and_after, bounds_of
from aitrain.runs.metrics_line import read_metrics
from aitrain.runs.result import Result
from aitrain.runs.run_folder import RunFolder
from aitrain.training.evaluation import EvalPlan, EvalScores
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
    before, after, best = outcome.before, outcome.after, outcome.best
    (score_before, greedy_before), (score_after, greedy_after) = before.means, after.means
    scorings = {"before_sampled": before.sampled, "before_greedy": before.greedy}
    scorings |= {"after_sampled": after.sampled, "after_greedy": after.greedy}
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
        selection_scorings=None if best is None else _comparable_scorings(context.folder, plan),
        scores=before_and_after(scorings, bounds_of(config.rl_score_range), config.eval_samples),
        eval_cases=len(plan.cases),
        eval_samples=plan.samples,
        eval_overlap=prepared.split.overlap,
        train_cases=len(trainer.cases),
        base_model=config.model,
        environment=type(context.runner.environment).__qualname__,
        seed=config.seed,
        vllm_restarts=0 if server is None else server.restarts,
    )


def _comparable_scorings(folder: RunFolder, plan: EvalPlan) -> int:
    """Number of scorings during the training with the present numbers of held-out cases and samples, which may have
    changed when the run was resumed."""
    cases, samples = (None, len(plan.cases)), (None, plan.samples)
    lines = (line for line in read_metrics(folder.metrics) if line.is_scoring)
    return sum(line.eval_cases in cases and line.eval_samples in samples for line in lines)
