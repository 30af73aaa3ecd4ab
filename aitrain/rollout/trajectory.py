"""An episode as token ids: what the policy sampled, and what the environment said in between."""

from __future__ import annotations

from dataclasses import dataclass, field

from aitrain.rollout.engine import Completion


@dataclass(frozen=True)
class TurnTokens:
    """Start of one turn of the policy in a trajectory, and the version of the weights that its sampling began with."""

    start: int
    weight_version: int


@dataclass(eq=False)
class Trajectory:
    """Token ids of one episode. `ids`, `mask` and `logprobs` have one entry for each token after the prompt; the mask
    is 1 for tokens that the policy sampled and 0 for the environment's."""

    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[TurnTokens] = field(default_factory=list)
    completion_starts: list[int] = field(default_factory=list)
    """Index in `ids` of the first token of each completion: a turn has two where its thought had a budget."""
    ended_by_policy: bool = False
    """Whether the policy ended its last completion, which was then not cut off."""
    stop: str | None = None
    """Why the episode ended, one of STOPS; None while it continues."""

    def append_completion(self, completion: Completion, continues_turn: bool = False) -> None:
        """Append a completion, whose tokens are trained."""
        if not continues_turn:
            self.turns.append(TurnTokens(len(self.ids), completion.weight_version))
        self.completion_starts.append(len(self.ids))
        self.ids += completion.ids
        self.mask += [1] * len(completion.ids)
        self.logprobs += completion.logprobs or [0.0] * len(completion.ids)
        self.ended_by_policy = completion.finish_reason == "stop"

    def append_env_tokens(self, ids: list[int]) -> None:
        """Append tokens that the policy did not sample, which are not trained."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    @property
    def context(self) -> list[int]:
        """All token ids so far."""
        return self.prompt_ids + self.ids

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.mask)

    @property
    def turn_starts(self) -> list[int]:
        """Index in `ids` of the first token of each turn."""
        return [turn.start for turn in self.turns]

    @property
    def turn_lengths(self) -> list[int]:
        """Number of sampled tokens of each turn."""
        starts = self.turn_starts
        return [sum(self.mask[first:end]) for first, end in zip(starts, [*starts[1:], len(self.ids)], strict=False)]
