"""Scores the held-out cases of a training, before, during and after it, shown and recorded; and ends the training, by
these scores (`--patience`) or as it was asked to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aitrain import activity
from aitrain.errors import EpisodesFailed
from aitrain.events import Evaluated
from aitrain.runs.held_out import DECODINGS, Scoring
from aitrain.runs.records import RECORD, MetricsLine
from aitrain.runs.run_folder import keep_lines
from aitrain.runs.statistics import interval_of_mean, mean_score, named
from aitrain.training.distributed import agree_on
from aitrain.training.evaluation import EvalPhase, EvalPlan, evaluate
from aitrain.training.run_context import RunContext
from aitrain.training.tracking import Tracking

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer


@dataclass
class EvalState:
    """Results of the evaluations so far; a resumed run continues with them."""

    is_same: bool = True
    """Whether the options, environment and cases are those of the checkpoint."""
    before: dict[str, Scoring] = field(default_factory=dict)
    """Scores of the initial policy by decoding; empty before it has played the present cases."""
    last_scored: int = 0
    """The last step that was scored during the training."""
    last_other: int = 0
    """The last scored step with other held-out cases, or another number of samples, than now."""
    scorings: list[MetricsLine] = field(default_factory=list)
    """The evaluations during the training so far that have played the present cases."""

    @property
    def best(self) -> MetricsLine | None:
        """The first evaluation with the highest score."""
        return max(self.scorings, key=lambda line: line.eval_score or 0.0, default=None)

    def add(self, line: MetricsLine) -> bool:
        """Add an evaluation; returns whether its score is the best so far."""
        if line.is_scoring:
            self.scorings.append(line)
        return line is self.best

    def has_scored(self, step: int) -> bool:
        """Whether the last evaluation was that of a step."""
        return bool(self.scorings) and self.scorings[-1].step == step


class TrainingOver(Exception):
    """Raised before the first step of a resumed training whose last evaluation ends it; transformers has no other way
    to leave."""


@dataclass(eq=False)
class HeldOutScoring(TrainerCallback):  # type: ignore[misc]
    """Scores the held-out cases with the trainer's weights. Every rank must call its methods.

    During the training, an evaluation comes before the checkpoint of the same step is written. The last step is scored
    after the training; a run that continues from there makes up for the evaluation that is due after this step.
    """

    context: RunContext
    trainer: EpisodeTrainer
    plan: EvalPlan
    """The cases whose scores before and after are reported."""
    choosing: EvalPlan
    """The cases that evaluations during the training play: others with --save-best, else the same."""
    tracking: Tracking
    state: EvalState
    mean_before: float | None = field(default=None, init=False)
    """Score of the initial policy on the cases of `choosing`."""
    stopped: bool = field(default=False, init=False)
    """Whether the training ended before its last step, with a checkpoint."""

    def before(self) -> dict[str, Scoring]:
        """Scores of the initial policy on all cases, by decoding. A resumed run has them in its checkpoint, unless its
        cases or samples are others, or are played or scored in another way."""
        plan, folder = self.choosing, self.context.folder
        if plan is not self.plan:
            plan = replace(plan, cases=[*self.plan.cases, *plan.cases])
        if not self.state.before:
            if self.context.checkpoint is not None and self.trainer.accelerator.is_main_process:
                for file in folder.rollout_files:
                    keep_lines(file, lambda record: record.eval_phase[:6] != "before", RECORD.validate_json)
            self.trainer.accelerator.wait_for_everyone()
            self.state.before = self._score(EvalPhase("before", 0, 0), plan)
        self.mean_before = self.diagnosed(0, self.state.before).eval_score
        return self.state.before

    def after_step(self, step: int) -> bool:
        """Score a step, also as a line of metrics; returns whether its score is the best so far."""
        line = self.diagnosed(step, self._score(EvalPhase(f"step{step}", step, step), self.choosing))
        if line.is_scoring and self.trainer.accelerator.is_main_process:
            self.trainer.recorder.add_metrics(line)
        activity.own.enter("training")
        return self.state.add(line)

    def diagnosed(self, step: int, scores: Mapping[str, Scoring]) -> MetricsLine:
        """Scores after a step as a line of metrics, of the cases that are played during the training; it is looked
        at."""
        mixture = self.choosing.mixture
        interval = interval_of_mean(scores["sampled"], mixture)
        values = {
            f"env/{one.name}/eval_{name}": mean_score(scores[decoding], (one,))
            for one in named(mixture)
            for name, decoding in (("score", "sampled"), ("greedy", "greedy"))
        }
        line = MetricsLine(
            step,
            {
                "eval_score": mean_score(scores["sampled"], mixture),
                "eval_low": None if interval is None else interval["low"],
                "eval_greedy": mean_score(scores["greedy"], mixture),
                "eval_cases": len(self.choosing.cases),
                "eval_samples": self.choosing.samples,
                **values,
            },
        )
        if line.is_scoring and self.trainer.accelerator.is_main_process:
            self.context.diagnose(line)
        return line

    def after(self, model_step: int, is_chosen: bool) -> dict[str, Scoring]:
        """Scores of model/, the weights of a step; with new samples if the step was chosen by scores of the same
        cases."""
        phase, plan = EvalPhase("after", self.trainer.state.global_step, model_step), self.plan
        if self.choosing is not plan:
            return self._score(phase, plan)
        scores = self._score(phase, replace(plan, first_sample=plan.samples) if is_chosen else plan)
        self.diagnosed(phase.step, scores)
        return scores

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Make up for the evaluation that the end of the training skipped."""
        if self.is_due(state.global_step) and self.state.last_scored < state.global_step:
            self.after_step(state.global_step)
        if self.ends_at(state.global_step):
            raise TrainingOver

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Stop if any process was asked to. Else score if it is due, or a callback of the user's asks for it; with
        --save-best, save the best step so far. A collective operation, so that every process calls it in every step."""
        is_due = agree_on(control) or self.is_due(state.global_step)
        if self.context.stop.on_any_rank() and state.global_step < state.max_steps:
            self.stopped = control.should_training_stop = control.should_save = True
        is_last = state.global_step >= state.max_steps
        if is_due and not is_last and not control.should_training_stop:
            is_best = self.after_step(state.global_step)
            control.should_save |= is_best and self.context.config.save_best
        if self.ends_at(state.global_step):
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Agree on what callbacks ask for at the end of the training, which transformers takes for one epoch."""
        agree_on(control)

    def is_due(self, step: int) -> bool:
        """Whether an evaluation is due after a step."""
        config = self.context.config
        if config.eval_strategy == "steps":
            return step % config.eval_steps == 0
        return config.eval_strategy == "epoch" and self.trainer.schedule.ends_epoch(step)

    def ends_at(self, step: int) -> bool:
        """Whether the evaluation of a step, the last one, ends the training; on every process, as all have the same
        scores."""
        patience, seen = self.context.config.patience, self.state
        if patience is None or not seen.has_scored(step):
            return False
        reason = reason_to_stop(patience, self.mean_before, seen.scorings)
        if reason is not None:
            self.stopped = True
            self.context.stop.end_run(reason)
        return reason is not None

    def _score(self, phase: EvalPhase, plan: EvalPlan) -> dict[str, Scoring]:
        """The scores of a phase by decoding, none if no case could be scored: what was trained is worth more than one
        evaluation.

        Raises:
            EpisodesFailed: nothing was trained yet.
        """
        samples = f", {plan.samples} samples each" if plan.samples > 1 else ""
        self.context.enter(f"scoring {len(plan.cases)} held-out cases{samples}", moves_files=False)
        try:
            scores = evaluate(self.trainer.rollouts, plan, phase, self.trainer.recorder.add_rollouts)
        except EpisodesFailed as error:
            if phase.name == "before":
                raise
            self.context.note(
                f"The evaluation after step {phase.step} is skipped: {str(error).partition(chr(10))[0]}\n"
                "aitrain eval scores a model later."
            )
            return {name: {} for name in plan.decodings}
        sampled, greedy = (mean_score(scores[name], plan.mixture) for name in DECODINGS)
        if phase.name == "before":
            self.context.progress.score_before = sampled
        each = {one.name: mean_score(scores["sampled"], (one,)) for one in named(plan.mixture)}
        evaluated = Evaluated(phase.name.replace("step", "step "), sampled, greedy, each)
        self.context.announce(evaluated)
        self.tracking.take(evaluated)
        return scores


def reason_to_stop(patience: int, before: float | None, scorings: Sequence[MetricsLine]) -> str | None:
    """The reason to stop the training after the last evaluation; None to continue."""
    scores = [score for score in (before, *(line.eval_score for line in scorings)) if score is not None]
    since = len(scores) - 1 - scores.index(max(scores)) if scores else 0
    if since < patience:
        return None
    return f"{since} evaluations in a row have not beaten the held-out score {max(scores):.3f} (--patience {patience})"
