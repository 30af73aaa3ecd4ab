"""Rollouts of the policy on one rank: episodes with its present weights, their seeds, and failures over all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from aitrain.engines.server import VLLMServerEngine
from aitrain.environment.contract import Case
from aitrain.environment.seeds import derived_seed
from aitrain.errors import errors_of
from aitrain.execution.failure import FailureCount
from aitrain.rollout.engine import Decoding
from aitrain.rollout.episode import Episode, Rollout
from aitrain.rollout.event_loop import EventLoop, ThreadLoop, event_loop

if TYPE_CHECKING:
    from aitrain.training.training_batch import PlayedEpisode


@dataclass
class PolicyRollouts:
    """Plays episodes with the policy. Every rank must call `play` and `count_failures`, also without episodes."""

    rollout: Rollout
    accelerator: Accelerator
    run_seed: int
    notify: Callable[[str], None]
    failures: FailureCount
    evaluating: Callable[[], AbstractContextManager[None]]
    """The policy in evaluation mode."""
    weight_version: Callable[[], int]
    """Returns the number of the policy's optimizer steps."""
    loop: EventLoop = field(default_factory=event_loop)
    gather: Callable[[list[Any]], list[Any]] = gather_object
    """Joins lists of all ranks in their order; every rank must call it. Code that plays and groups episodes uses this
    one, as it may run in a thread beside the training."""
    settle: Callable[[], None] = lambda: None
    """Called before weights are loaded to play episodes: waits for those that a thread plays beside the training."""
    loads_weights: bool = True
    """Whether `play` loads the present weights. A thread beside the training must not, as loading takes all ranks."""

    @property
    def server(self) -> VLLMServerEngine | None:
        """The engine, if it is a vLLM server that gets files."""
        return self.rollout.engine if isinstance(self.rollout.engine, VLLMServerEngine) else None

    def play(
        self,
        cases: Sequence[Case],
        phase: object,
        samples: Sequence[tuple[int, ...]],
        decoding: Decoding = Decoding.TRAINING,
    ) -> list[Episode]:
        """Play this rank's episodes with the policy's present weights. In a phase, a case has one environment seed, and
        each of its `samples` its own sampling seed, the same on any rank.

        Raises:
            ServerFailed: on all ranks, if a vLLM server failed one of them.
        """
        run, numbered = self.run_seed, zip(cases, samples, strict=True)
        seeds = [random.Random(f"{run}/{phase}/{case.number}").getrandbits(31) for case in cases]
        sampling_seeds = [derived_seed(run, "sampling", phase, case.number, *sample) for case, sample in numbered]
        if self.loads_weights:
            self.settle()
            self.load_weights()
        most = max(1, *self.gather([len(cases)]))
        with nullcontext() if self.server is None else self.server.failing_together(self.gather):
            return self.loop.run(self.rollout.play(cases, seeds, sampling_seeds, decoding, most))

    def load_weights(self) -> None:
        """Load the policy's present weights into the engine, unless it has them. Every rank must call this.

        Raises:
            ServerFailed: on all ranks, if a vLLM server did not get them.
        """
        self.loop.run(self.rollout.engine.load_weights(self.weight_version()))

    def count_failures(self, played: Sequence[PlayedEpisode]) -> None:
        """Count the failures of a training batch. Every rank must call this, with the episodes of all ranks, so that
        all of them raise together.

        Raises:
            EpisodesFailed: too many episodes failed in consecutive batches.
        """
        self.report(played)
        for name in ("", *filter(None, self.rollout.runner.parts)):
            those = [one for one in played if not one.dropped and name in ("", one.env)]
            scored, failed = (sum(getattr(one, field) is not None for one in those) for field in ("score", "failure"))
            if name == "" or those:
                with errors_of(name):
                    self.failures.of(name).after_batch(scored, failed, len(those))

    def report(self, played: Sequence[PlayedEpisode]) -> None:
        """Show the first failure of each kind, of each environment, the first episode that is dropped, and the first
        abandoned thread, in which a call of the environment hangs. Every rank must call this.

        Raises:
            EnvironmentFailed: there are too many such threads on all ranks.
        """
        dropped = next((one.dropped for one in played if one.dropped), "")
        if dropped and not self.failures.has_noted_dropped:
            self.failures.has_noted_dropped = True
            self.notify(
                f"{dropped}, which leaves no room for an answer in a context of {self.rollout.context}. Dropped"
                " cases take no part (metric stopped/no_room)."
            )
        for env in dict.fromkeys(one.env for one in played):
            failures = [one.failure for one in played if one.failure is not None and one.env == env]
            for message in self.failures.of(env).first_of_each(failures):
                self.notify(f"{env}: {message}" if env else message)
        pools = [part.pool for part in self.rollout.runner.parts.values()]
        hangs = gather_object([(pool.abandoned, pool.last_hang) for pool in pools])
        line = next((line for _, line in hangs if line), "at an unknown line")
        note = self.failures.after_abandoned(sum(threads for threads, _ in hangs), line)
        if note is not None:
            self.notify(note)

    def invalidate_weights(self) -> None:
        """Mark the engine's weights as outdated, after a change of the policy's weights without an optimizer step."""
        self.rollout.engine.weight_version = None

    def close(self) -> None:
        """Close the engine, and remove files of weights for a vLLM server."""
        if isinstance(self.loop, ThreadLoop):
            self.loop.cancel()
        if self.server is not None:  # else there is nothing to wait for, as on a loop that still generates
            self.loop.run(self.server.close())
        self.loop.close()
