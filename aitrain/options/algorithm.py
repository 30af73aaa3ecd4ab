"""Options of the algorithm: the group, the loss, and how the cases of a batch are chosen."""

from collections.abc import Iterator
from typing import Literal

from pydantic import model_validator

from aitrain.options.algorithms import LossName, PresetName, with_preset
from aitrain.options.section import Options, ResumeSafe
from aitrain.options.value_types import (
    AboveOne,
    FunctionNames,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    TwoOrMore,
    ZeroOrOne,
)


class GRPOOptions(Options):
    """The group and the loss."""

    section = "GRPO"

    rl_num_generations: TwoOrMore = 4
    """Completions per prompt: the group that a completion is compared with."""
    rl_kl_coef: NonNegativeFloat = 0.1
    """Weight of the KL term to the initial model; 0 saves the reference model's memory."""
    rl_loss_type: LossName = "grpo"
    """How token losses are formed and averaged; brings the settings of its paper along (docs/algorithms.md)."""
    rl_clip_range: PositiveFloat | None = None
    """How far the probability ratio may move from 1 before it is clipped; unset: by loss type, 0.2 for grpo. Without
    effect where each batch is used for one update: the ratio is then 1."""
    rl_clip_range_high: PositiveFloat | None = None
    """How far the ratio may rise above 1 (clip-higher); for cispo the largest ratio; unset: by loss type, 0.28 for
    dapo, 5 for cispo."""
    rl_importance_level: Literal["token", "sequence"] | None = None
    """A probability ratio for each token, or one for the whole completion (GSPO); unset: by loss type."""
    rl_scale_rewards: Literal["group", "batch", "none"] | None = None
    """Standard deviation that advantages are divided by: the group's, the batch's, or none; unset: by loss type."""
    rl_mask_truncated_completions: bool = False
    """Leave out of the loss the episodes that a limit ended: a truncated completion, a full context, rl_max_turns."""
    rl_preset: PresetName | None = None
    """The settings of one paper together, as defaults of other options: an option that is given itself wins; aitrain
    plan prints them (docs/algorithms.md)."""
    rl_kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of the KL term for each token, with d = log(policy / reference): k1 is d, k2 is d squared / 2, k3 is
    exp(-d) - 1 + d, abs is |d| (J. Schulman, Approximating KL Divergence, 2020)."""
    rl_kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term is: in the loss of each token (GRPO, arXiv 2402.03300), or, summed over the tokens of the
    episode, subtracted from its reward (as in RLHF with PPO, arXiv 2203.02155)."""
    rl_baseline: Literal["group", "leave_one_out"] = "group"
    """What is subtracted from a score: the mean of its group, or that of the others in it (RLOO, arXiv 2402.14740)."""
    rl_dual_clip: AboveOne | None = None
    """Largest probability ratio for completions with a negative advantage, above the clip range; 3 in its paper
    (dual-clip PPO, arXiv 1912.09729)."""
    rl_overlong_buffer: PositiveInt | None = None
    """Tokens before the limit of a completion (--rl-max-new-tokens) over which the reward falls linearly, by
    --rl-overlong-penalty at the limit (soft overlong punishment of DAPO, arXiv 2503.14476, section 3.4); unset: off, or
    that of --rl-preset."""
    rl_overlong_penalty: PositiveFloat = 1.0
    """Reward subtracted from a completion that reaches the limit, with --rl-overlong-buffer."""
    rl_entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the mean entropy of the policy over the tokens, which training then increases (A3C,
    arXiv 1602.01783)."""
    rl_updates_per_rollout: PositiveInt = 1
    """Optimizer steps per rollout: a rollout samples for this number of steps, all but the first of which are
    off-policy; 16 in DAPO (arXiv 2503.14476), 4 in GSPO (arXiv 2507.18071)."""
    custom_loss: FunctionNames | None = None
    """Your loss of each token, as module:function or file.py:function; --rl-loss-type says how it is averaged
    (docs/extending.md)."""
    custom_sampler: FunctionNames | None = None
    """Your choice of cases, as module:function or file.py:function; see docs/extending.md."""
    custom_callbacks: ResumeSafe[FunctionNames | None] = None
    """Your callbacks of the trainer, as module:function or file.py:Class, several with commas
    (docs/extending.md)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, values: object) -> object:
        return with_preset(values, cls.model_fields) if isinstance(values, dict) else values


class SamplingOptions(Options):
    """Which cases are sampled, and when."""

    section = "Cases"

    rl_sampling: Literal["uniform", "refill", "difficulty"] = "uniform"
    """How the cases of a batch are chosen: uniform, each once per epoch; refill, which replaces groups whose scores are
    all equal by groups of other cases (dynamic sampling of DAPO, arXiv 2503.14476); difficulty, by their moving success
    rate, so that cases that are always or never solved become rare."""
    rl_refill_limit: PositiveInt = 10
    """How often the groups of a batch are replaced at most, with --rl-sampling refill."""
    rl_ahead: ZeroOrOne = 0
    """1: sample the next rollout while this one trains, with weights that are one rollout old; importance weights
    correct for that. Needs --vllm-mode server."""
    rl_ahead_turns: bool = False
    """With --rl-ahead, load new weights also between the turns of episodes, where training would wait for them; such
    runs depend on timing."""

    def rules(self) -> Iterator[str]:
        """A limit needs what it limits."""
        is_given = self.rl_refill_limit != type(self).model_fields["rl_refill_limit"].default
        if is_given and self.rl_sampling != "refill":
            yield "rl_refill_limit: no groups are replaced: add rl_sampling refill"
