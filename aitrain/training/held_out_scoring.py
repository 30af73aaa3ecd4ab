"""Scores the held-out cases of a run: before, during and after the training, shown and recorded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aitrain import activity
from aitrain.events import Evaluated
from aitrain.runs.metrics_line import MetricsLine
from aitrain.training.callbacks import MeanScores
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
    recorder: RunRecorder
    tracking: Tracking

    def before(self) -> EvalScores:
        """Scores of the initial policy. A resumed run plays only the cases and samples that are not recorded."""
        phase = EvalPhase("before", 0, 0)
        if self.context.checkpoint is None:
            return self._score(phase, self.plan)
        plan = replace(self.plan, recorded=recorded_before(self.context.folder, self.plan.cases))
        return evaluate(self.trainer.rollouts, plan, phase, self.trainer.hooks.write)

    def after_step(self, step: int) -> MeanScores:
        """Mean scores after a step, also written as a line of metrics."""
        sampled, greedy = self._score(EvalPhase(f"step{step}", step, step), self.plan).means
        if sampled is not None and self.trainer.accelerator.is_main_process:
            line = MetricsLine(step=step, eval_score=sampled, eval_greedy=greedy)
            self.recorder.add_metrics(replace(line, eval_cases=len(self.plan.cases), eval_samples=self.plan.samples))
        activity.own.enter("training")
        return sampled, greedy

    def after(self, chosen_step: int | None) -> EvalScores:
        """Scores of model/; with new samples if its step was chosen by its score, as the best of several scores is
        biased upwards."""
        step, plan = self.trainer.state.global_step, self.plan
        if chosen_step is None:
            return self._score(EvalPhase("after", step, step), plan)
        return self._score(EvalPhase("after", step, chosen_step), replace(plan, first_sample=plan.samples))

    def _score(self, phase: EvalPhase, plan: EvalPlan) -> EvalScores:
        samples = f", {plan.samples} samples each" if plan.samples > 1 else ""
        self.context.enter(f"scoring {len(plan.cases)} held-out cases{samples}", moves_files=False)
        scores = evaluate(self.trainer.rollouts, plan, phase, self.trainer.hooks.write)
        if phase.name == "before":
            self.context.progress.score_before = scores.means[0]
        evaluated = Evaluated(phase.name.replace("step", "step "), *scores.means)
        self.context.announce(evaluated)
        self.tracking.take(evaluated)
        return scores
