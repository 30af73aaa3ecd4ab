"""The part of the trainer that applies what a run adds to TRL's algorithm, see algorithm.py.

TRL computes rewards, advantages and losses itself wherever it can. An addition to the loss is one more average over
tokens, with the divisors of the loss type; it reads `beta` and `current_gradient_accumulation_steps` where
optimizing.py has replaced them, so it is right for rows that are left out as well.

Inside API of TRL 1.16 that it uses (tests/training/test_upstream.py):

    GRPOTrainer._compute_loss(model, inputs)                overridden to add to the loss; it makes one call of
                                                            ._get_per_token_logps_and_entropies, and appends to
                                                            ._metrics["train"]; reads .beta, .loss_type, .args,
                                                            .importance_sampling_level, .use_vllm,
                                                            .vllm_importance_sampling_correction,
                                                            .max_completion_length,
                                                            .current_gradient_accumulation_steps
    GRPOTrainer._calculate_rewards(...)                     overridden to subtract penalties: called after the forward
                                                            passes of policy and reference model, it returns the
                                                            rewards of all processes, (episodes, 1)
    GRPOTrainer._get_per_token_logps_and_entropies(...)     replaced meanwhile by a function that keeps its results
    GRPOTrainer._generate_and_score_completions(inputs)     overridden for the baseline; it appends the mean and the
                                                            deviation of rewards to ._metrics["train"]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from trl.trainer.utils import nanstd

from aitrain.engines.scopes import evaluation_mode, replaced
from aitrain.training.algorithm import PLAIN, Algorithm, Average, estimate_kl, leave_one_out_factor
from aitrain.training.kept_rows import MicroBatch
from aitrain.training.logprobs import LogProbTrainer
from aitrain.training.training_batch import TrainingBatch


@dataclass(frozen=True)
class ForwardPass:
    """A call that computed log-probabilities: its arguments after the model, and its result."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    logps: torch.Tensor
    entropies: torch.Tensor | None


class AlgorithmTrainer(LogProbTrainer):
    """GRPOTrainer with the additions of an `Algorithm`."""

    algorithm: Algorithm = PLAIN
    rewards: torch.Tensor | None = None
    """The rewards of the current generation batch, of all processes: scores less penalties."""
    row_factor = 1.0
    """What optimizing.py has multiplied the advantages of a micro-batch by."""
    _batch: TrainingBatch
    _passes: list[ForwardPass]
    """The forward passes of the current generation batch; only with the KL term in rewards."""

    # -- rewards and advantages

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.algorithm.kl_in_reward and self.beta:
            with self._keeping_passes() as self._passes:
                output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            self._passes = []
        else:
            output = super()._generate_and_score_completions(inputs)
        if self.algorithm.leave_one_out and self.rewards is not None:
            factor = leave_one_out_factor(self.rewards, self.num_generations)
            own = slice(
                len(inputs) * self.accelerator.process_index, len(inputs) * (self.accelerator.process_index + 1)
            )
            output["advantages"] = output["advantages"] * factor[own]
        if self.algorithm.overlong is not None or self.algorithm.kl_in_reward:
            self._log_scores()
        return output

    def _calculate_rewards(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """The scores of all processes' episodes, less their penalties. Every process must call this."""
        rewards: torch.Tensor = super()._calculate_rewards(*arguments, **keywords)
        self.scores = rewards[:, 0]
        penalties: dict[str, torch.Tensor] = {}
        if (overlong := self.algorithm.overlong) is not None:
            own = [overlong.of(episode.trajectory) for episode in self._batch.episodes]
            penalties["overlong"] = torch.tensor(own, device=rewards.device)
        if self.algorithm.kl_in_reward and self.beta:
            penalties["kl"] = self.beta * self._kl_of_episodes().float()
        for name, values in penalties.items():
            everywhere = self.accelerator.gather(values)
            self._metrics["train"][f"penalty/{name}"].append(everywhere.mean().item())
            rewards = rewards - everywhere.unsqueeze(1)
        self.rewards = rewards[:, 0]
        return rewards

    def _kl_of_episodes(self) -> torch.Tensor:
        """The estimated KL of each of this process's episodes, summed over the tokens that the policy sampled."""
        reference = self._passes[-1]
        before = [one for one in self._passes[:-1] if one.arguments[0] is reference.arguments[0]]
        if before:  # TRL has computed it for importance ratios
            logps = before[-1].logps
        else:
            with evaluation_mode(self.model):  # without dropout, whose noise would count as KL
                output = self._get_per_token_logps_and_entropies(self.model, *reference.arguments, **reference.keywords)
                logps = output[0]
        kl = estimate_kl(self.algorithm.kl_estimator, logps, reference.logps)
        mask = torch.zeros_like(kl, dtype=torch.bool)
        for row, episode in enumerate(self._batch.episodes):
            own = episode.trajectory.mask
            mask[row, : len(own)] = torch.tensor(own, device=kl.device).bool()
        return kl.masked_fill(~mask, 0.0).sum(1)  # padding may have infinite values

    def _log_scores(self) -> None:
        """Log the mean and the deviation of the scores where TRL has logged those of the rewards."""
        self._metrics["train"]["reward"][-1] = self.scores.nanmean().item()
        self._metrics["train"]["reward_std"][-1] = nanstd(self.scores).item()

    # -- the loss

    def _compute_loss(self, model: torch.nn.Module, inputs: MicroBatch) -> torch.Tensor:
        """TRL's loss, or what is left of it and our parts."""
        custom, beta = self.algorithm.custom_loss, self.beta
        has_kl = beta != 0 and (
            self.algorithm.kl_estimator != "k3" or self.algorithm.kl_in_reward or custom is not None
        )
        if not has_kl and custom is None:
            return cast(torch.Tensor, super()._compute_loss(model, inputs))
        others: dict[str, object] = {"beta": 0.0}
        rest = inputs
        if custom is not None:  # sapo has no metrics of its own, and is 0 with advantages of 0
            others["loss_type"], rest = "sapo", inputs | {"advantages": torch.zeros_like(inputs["advantages"])}
        with self._keeping_passes() as passes, replaced(self, others):
            loss: torch.Tensor = super()._compute_loss(model, rest)
        (forward,) = passes
        logps, mask = forward.logps, inputs["completion_mask"] * inputs["tool_mask"]
        old = inputs.get("old_per_token_logps")
        old = logps.detach() if old is None else old
        parts = []
        if custom is not None:
            parts.append(self._custom_losses(forward, old, mask, inputs))
        if has_kl:
            kl = estimate_kl(self.algorithm.kl_estimator, logps, inputs["ref_per_token_logps"])
            if self.args.use_bias_correction_kl:
                kl = kl * self._ratio(logps - old, mask)
            self._log_token_mean("kl", kl, mask)
            if not self.algorithm.kl_in_reward:
                parts.append(beta * kl)
        if not parts:
            return loss
        average, divisor = self._average(inputs)(torch.stack(parts).sum(0), mask)
        if "policy_loss" in self._metrics["train"]:  # TRL logs it with an entropy bonus
            ours = self.accelerator.gather(average.detach()).nanmean().item()
            self._metrics["train"]["policy_loss"][-1] += ours
        return loss + average / divisor

    def _custom_losses(
        self, forward: ForwardPass, old: torch.Tensor, mask: torch.Tensor, inputs: MicroBatch
    ) -> torch.Tensor:
        """The user's loss of each token. A mean over all rows becomes one over the kept ones by `row_factor` on the
        advantages; here it is on the losses, which need not be linear in advantages."""
        assert self.algorithm.custom_loss is not None
        losses = self.algorithm.custom_loss(
            {
                "logprobs": forward.logps,
                "old_logprobs": old,
                "advantages": (inputs["advantages"] / self.row_factor).unsqueeze(1),
                "mask": mask,
                "ref_logprobs": inputs.get("ref_per_token_logps"),
                "entropies": forward.entropies,
            }
        )
        if self.use_vllm and self.vllm_importance_sampling_correction:
            losses = losses * inputs["importance_sampling_ratio"]
        return losses * self.row_factor

    def _ratio(self, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The probability ratio of each token, or of each row, which multiplies the KL term as TRL does it."""
        if self.importance_sampling_level == "sequence":
            log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        return torch.exp(log_ratio)

    def _average(self, inputs: MicroBatch) -> Average:
        passes = self.current_gradient_accumulation_steps
        items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        step = items * passes / self.args.steps_per_generation
        return Average(self.loss_type, passes, self.max_completion_length, step)

    def _log_token_mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Log the mean over the tokens of all processes' micro-batches, as TRL does. Every process must call this."""
        own = torch.stack([(values * mask).sum(), mask.sum().to(values.dtype)]).detach()
        total, count = self.accelerator.reduce(own, reduction="sum")
        self._metrics["train"][name].append((total / count.clamp(min=1.0)).item())

    @contextmanager
    def _keeping_passes(self) -> Iterator[list[ForwardPass]]:
        """Keep the results of the forward passes in this context."""
        compute, kept = self._get_per_token_logps_and_entropies, []

        def computed(model: torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
            result = compute(model, *arguments, **keywords)
            kept.append(ForwardPass(arguments, keywords, result[0], result[1]))
            return result

        with replaced(self, {"_get_per_token_logps_and_entropies": computed}):
            yield kept
