"""Scores the held-out cases of a run: before, during and after the training, shown and recorded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aitrain import activity
from aitrain.environment.failure_count import PATIENCE
from aitrain.errors import EpisodesFailed
from aitrain.events import Evaluated
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.mixture import interval_of_mean, named
from aitrain.training.diagnostics import DiagnosticsCallback
from aitrain.training.evaluation import EvalPhase, EvalPlan, EvalScores, evaluate, recorded_before
from aitrain.training.run_context import RunContext
from aitrain.training.run_recorder import RunRecorder
from aitrain.training.tracking import Tracking
from aitrain.training.trainer import EpisodeTrainer


@dataclass(frozen=True)
class HeldOutScoring:
    """Scores the held-out cases with the trainer's weights. Every rank must call its methods."""

    context: RunContext
    trainer: EpisodeTrainer
    plan: EvalPlan
    """The cases whose scores before and after are reported."""
    choosing: EvalPlan
    """The cases that evaluations during the training play: others with --save-best, else the same."""
    recorder: RunRecorder
    tracking: Tracking
    diagnostics: DiagnosticsCallback

    def before(self) -> EvalScores:
        """Scores of the initial policy on all cases; the means are those of the cases that are played during the
        training. A resumed run plays only the cases and samples that are not recorded."""
        phase, plan = EvalPhase("before", 0, 0), self.choosing
        if plan is not self.plan:
            plan = replace(plan, cases=[*self.plan.cases, *plan.cases])
        if self.context.checkpoint is None:
            scores = self._score(phase, plan)
        else:
            plan = replace(plan, recorded=recorded_before(self.context.folder, plan.cases))
            scores = evaluate(self.trainer.rollouts, plan, phase, self.trainer.hooks.write)
        self._diagnose(self.line_of(0, scores))
        return scores

    def after_step(self, step: int) -> MetricsLine:
        """Scores after a step, also written as a line of metrics.

        Raises:
            EpisodesFailed: PATIENCE evaluations in a row have no scores.
        """
        line = self.line_of(step, self._score(EvalPhase(f"step{step}", step, step), self.choosing))
        if line.is_scoring and self.trainer.accelerator.is_main_process:
            self.recorder.add_metrics(line)
        self._diagnose(line)
        activity.own.enter("training")
        return line

    def line_of(self, step: int, scores: EvalScores) -> MetricsLine:
        """Scores after a step as a line of metrics."""
        interval = interval_of_mean(scores.sampled, scores.mixture)
        sampled, greedy = scores.means
        values = {
            f"env/{one.name}/eval_{name}": mean
            for one in named(scores.mixture)
            for name, mean in scores.means_of(one).items()
        }
        return MetricsLine(
            step=step,
            eval_score=sampled,
            eval_low=None if interval is None else interval.low,
            eval_greedy=greedy,
            eval_cases=len(self.choosing.cases),
            eval_samples=self.choosing.samples,
            trained_seconds=round(self.trainer.watch.trained_seconds, 3),
            trained_tokens=self.trainer.rollouts.trained_tokens,
            values=values,
        )

    def after(self, model_step: int, is_chosen: bool) -> EvalScores:
        """Scores of model/, the weights of a step; with new samples if the step was chosen by scores of the same
        cases."""
        phase, plan = EvalPhase("after", self.trainer.state.global_step, model_step), self.plan
        if self.choosing is not plan:
            return self._score(phase, plan)
        scores = self._score(phase, replace(plan, first_sample=plan.samples) if is_chosen else plan)
        self._diagnose(self.line_of(phase.step, scores))
        return scores

    def _diagnose(self, line: MetricsLine) -> None:
        if line.is_scoring and self.trainer.accelerator.is_main_process:
            self.diagnostics.see(line)

    def _score(self, phase: EvalPhase, plan: EvalPlan) -> EvalScores:
        samples = f", {plan.samples} samples each" if plan.samples > 1 else ""
        self.context.enter(f"scoring {len(plan.cases)} held-out cases{samples}", moves_files=False)
        failures = self.trainer.rollouts.failures
        try:
            scores = evaluate(self.trainer.rollouts, plan, phase, self.trainer.hooks.write)
        except EpisodesFailed as error:
            failures.empty_evaluations += 1
            self._skip(phase, error)
            return EvalScores(mixture=plan.mixture)
        failures.empty_evaluations = 0
        if phase.name == "before":
            self.context.progress.score_before = scores.means[0]
        each = {one.name: scores.means_of(one)["score"] for one in named(plan.mixture)}
        evaluated = Evaluated(phase.name.replace("step", "step "), *scores.means, each)
        self.context.announce(evaluated)
        self.tracking.take(evaluated)
        return scores

    def _skip(self, phase: EvalPhase, error: EpisodesFailed) -> None:
        """Note that an evaluation has no scores: what was trained is worth more than one evaluation of it.

        Raises:
            EpisodesFailed: nothing was trained yet; during the training, PATIENCE evaluations in a row have none; or
                after it, its last batch had none either.
        """
        failures, during = self.trainer.rollouts.failures, phase.name not in ("before", "after")
        if phase.name == "before" or (not during and failures.empty_batches):
            raise error
        if during and failures.empty_evaluations >= PATIENCE:
            raise EpisodesFailed(f"{PATIENCE} evaluations in a row have no scores.\n{error}") from error
        later = "" if during else f" aitrain eval {self.context.folder.path} scores the model later."
        self.context.note(
            f"The evaluation after {f'step {phase.step}' if during else 'the training'} is skipped:"
            f" {str(error).partition(chr(10))[0]}\n--rl-env-retries tries failed scores again.{later}"
        )
