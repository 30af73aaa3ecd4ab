"""Generation batches of the trainer, each made and played when it is needed."""

from __future__ import annotations

from dataclasses import dataclass

from aitrain.environment.dataset import Cases
from aitrain.runs.json_values import JsonObject
from aitrain.training.case_order import CaseOrder
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.refill import BatchCompletion
from aitrain.training.training_batch import TrainingBatch


@dataclass(frozen=True)
class BatchPlace:
    """A generation batch's place in the run, and this rank's share of it."""

    index: int
    """Number of the batch, counted from the beginning of the run."""
    step: int
    """Optimizer steps before the one that trains on it first."""
    places: range
    """Indices of this rank's episodes among all episodes of the step."""
    own: slice
    """This rank's episodes among all episodes of the batch."""


@dataclass
class BatchSource:
    """Makes generation batches in order, and plays each with the present weights."""

    rollouts: PolicyRollouts
    cases: Cases
    completion: BatchCompletion
    group_size: int

    def take(self, place: BatchPlace) -> TrainingBatch:
        """The batch at this place, played. Every rank must call this."""
        batch = self.made(place)
        batch.play(self.rollouts)
        self.completion.complete(batch, self.rollouts)
        return batch

    @property
    def order(self) -> CaseOrder:
        """Chooses the cases of the batches."""
        return self.completion.order

    def order_state(self) -> JsonObject:
        """The state of the order after the last batch that was taken."""
        return self.order.state()

    def made(self, place: BatchPlace) -> TrainingBatch:
        """The batch at this place, without episodes."""
        everywhere = [number for number in self.order.batch(place.index) for _ in range(self.group_size)]
        numbers = everywhere[place.own]
        cases = [self.cases[number] for number in numbers]
        return TrainingBatch(place.step, place.places, self.group_size, numbers, cases)
