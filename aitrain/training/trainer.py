"""`EpisodeTrainer`, a GRPOTrainer whose completions and rewards are the episodes and scores of an environment.

One step, in the order in which things happen: TRL's `_generate_and_score_completions` calls `roll_out`, which plays the
episodes of a generation batch (batch_source.py), and `score`, which returns their scores; the advantages are TRL's or
those of the algorithm (algorithm.py). `_compute_loss` divides an optimizer step into forward passes (passes.py) and
makes them, each with TRL's loss and what the algorithm adds to it; `_get_grad_norm` skips a step that is not finite.
Where this depends on the inside of TRL 1.16 and transformers 5.17 (tests/training/test_upstream.py):

    GRPOTrainer(rollout_func=)                              one episode for each prompt, repeats included; env_mask
                                                            becomes tool_mask, the tokens that are in the loss
    GRPOTrainer._generate_and_score_completions(inputs)     extended: rows come in, advantages go out, this process's
                                                            in output["advantages"], in the order of `inputs`
    GRPOTrainer._compute_loss(model, inputs)                overridden: called for each forward pass; reads .beta,
                                                            .loss_type, .args.steps_per_generation,
                                                            .current_gradient_accumulation_steps,
                                                            inputs["num_items_in_batch"], ["tool_mask"], ["advantages"]
    GRPOTrainer._get_per_token_logps_and_entropies(...)     overridden: all log-probabilities of policy and reference
                                                            model come from it; it passes no position ids to the model
    GRPOTrainer._metrics["train"]                           appended to, corrected, saved and restored
    GRPOTrainer._step, ._buffered_inputs                    saved and restored (trainer_checkpoint.py): optimizer steps
                                                            so far, and the pieces of a batch that is used for longer
                                                            than one step
    GRPOTrainer.log(logs, start_time)                       overridden: called once a logging step, before the callbacks
    GRPOTrainer.shuffle_dataset                             set to False: the order of the cases is ours
    GRPOTrainer.mask_truncated_completions                  set to False: it knows the last token, not what ended an
                                                            episode
    GRPOTrainer.use_vllm, .vllm_importance_sampling_correction, .importance_sampling_level,
    .aux_loss_enabled                                       read
    trl.trainer.grpo_trainer.VLLMGeneration                 replaced while TRL starts vLLM
    trl.trainer.grpo_trainer.prepare_fsdp(model, accelerator)   replaced while TRL makes the reference model
    trl.trainer.utils._ChunkedLogProbFunction               replaced for one pass, see engines/logprob_check.py
    trl.trainer.utils._use_triton(device)                   replaced in trimmed passes: whether the head is computed
                                                            only for tokens with a label
    Trainer.training_step(...), ._get_grad_norm(model, grad_norm)   overridden: the latter is called once per step,
                                                            after clipping and before optimizer.step, which skips
                                                            parameters without a gradient; the public
                                                            on_pre_optimizer_step is not given the norm
    Trainer._save_checkpoint(model, trial)                  wrapped: it fills args.output_dir/checkpoint-<step>, and
                                                            deletes nothing if that is the only one
    Trainer._load_from_checkpoint(checkpoint)               overridden, for the weights alone; under FSDP2, so
                                                            are .save_model and ._prepare_for_training
    Trainer._tr_loss, ._globalstep_last_logged     saved and restored: what is not logged yet
    Trainer.train(resume_from_checkpoint)                   not called for a checkpoint of the last step: it trains one
                                                            step more
    accelerator.no_sync(model), .backward(loss)             used as Trainer does, where a step has several passes
    accelerator.gather(values), .reduce(values, reduction)  replaced meanwhile: the loss gathers values of rows, takes
                                                            their minimum and maximum, and adds up sums, for metrics
    model._is_accelerate_prepared                           reset after accelerator.prepare_model(), which is called a
                                                            second time by Trainer.train(), for DDP
    accelerator.gradient_state._set_sync_gradients(value)   set: whether a backward pass is the last one of a step
"""

import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback, TrainerState
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer import utils as trl_utils

from aitrain import activity
from aitrain.batch import BatchPlan, CaseSchedule
from aitrain.engines.colocated import ColocatedGeneration
from aitrain.engines.logprob_check import POSITIONS, LogprobShift, kl_by_position
from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import (
    evaluation_mode,
    gradient_checkpointing,
    innermost,
    replaced,
    savable_generation_config,
    use_autocast,
)
from aitrain.engines.server_check import ServerModel
from aitrain.engines.sharded_tensors import gathered, is_sharded, whole
from aitrain.engines.shared_cache import padded
from aitrain.environment.runner import Runner
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.engine import Trajectory
from aitrain.training.algorithm import (
    AlgorithmParts,
    has_advantages,
)
from aitrain.training.batch_source import batch_source
from aitrain.training.distributed import agree_on, of_first
from aitrain.training.engine_setup import make_rollouts
from aitrain.training.holdout import DatasetSplit, PromptLimit
from aitrain.training.model import keep_adapter_float32
from aitrain.training.passes import (
    KEPT,
    MicroBatch,
    log_probs_of_rows,
    metric_of_step,
    passes_of,
    trimmed_blocks,
)
from aitrain.training.run_context import RunContext, RunRecorder
from aitrain.training.sharding import (
    load_weights,
    own_weights,
    prepare_reference,
    refuse_unsharded,
    shard_now,
)
from aitrain.training.shared_prompts import SharedPrompts, why_apart
from aitrain.training.step_events import StepEvents
from aitrain.training.training_batch import TrainingBatch, episode_metrics

LOGPROBS = {"old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"}
"""Earlier log-probabilities in the inputs of a loss; as those of the pass, 0 for tokens that are not in the loss."""
CLIP_MEANS = {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
"""Metrics of the loss that are means over rows if there is one ratio for a completion."""

OF_POLICY_TERM = ("policy_loss", "clip_ratio/", "cispo_clip_ratio", "vespo/")
"""How metrics of TRL's policy term begin; they say nothing of a loss in its place."""


@dataclass(frozen=True)
class TrainerInputs:
    """The parts that a trainer is made from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    arguments: GRPOConfig
    split: DatasetSplit
    runner: Runner
    chat: ChatFormat
    context_tokens: int | None
    """Maximum tokens of prompt and completions together."""
    prompts: Mapping[str, PromptLimit]
    """Which prompts of each environment are used."""
    schedule: CaseSchedule
    batch: BatchPlan
    peft_config: LoraConfig | None
    algorithm: AlgorithmParts
    callbacks: list[TrainerCallback]
    """Those of the user."""
    server: ServerModel | None
    """The model of the vLLM servers that get files; None: transformers, or TRL's vLLM."""


class EpisodeTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """GRPOTrainer whose completions are an environment's episodes and whose rewards are its scores."""

    _buffered_inputs: list[MicroBatch] | None
    _batch: TrainingBatch
    _prompts: SharedPrompts | None = None
    """Those of the forward passes that are being made, if they are computed once."""
    saved_step: int | None = None
    """The last step that was saved."""
    _in_loss: torch.Tensor | None = None
    """The tokens of a pass whose log-probabilities are computed, of shape (rows, tokens of completions); None: all."""

    def __init__(
        self,
        run: RunContext,
        inputs: TrainerInputs,
        save: Callable[[Any, Callable[[], None]], None],
    ) -> None:
        """`save` writes a checkpoint of a trainer, given TRL's method that writes one."""
        self.run, self.inputs, self.save_with = run, inputs, save
        self.recorder = RunRecorder(run.folder, run.checkpoint)
        self.schedule, self.algorithm, config = inputs.schedule, inputs.algorithm, inputs.runner.config
        self.sampling = Sampling.of(config)
        ours = {
            "VLLMGeneration": ColocatedGeneration,
            "prepare_fsdp": prepare_reference,
        }
        with warnings.catch_warnings(), replaced(grpo_trainer, ours):
            warnings.filterwarnings("ignore", message=".*rollout_func.*experimental")
            super().__init__(
                model=inputs.model,
                reward_funcs=[self.score],
                args=inputs.arguments,
                # TRL only counts the rows
                train_dataset=Dataset.from_dict({"prompt": range(self.schedule.batches * self.schedule.prompts)}),
                processing_class=inputs.tokenizer,
                peft_config=inputs.peft_config,
                callbacks=inputs.callbacks,
                rollout_func=self.roll_out,
            )
        self.shuffle_dataset = False
        if inputs.peft_config is not None:
            keep_adapter_float32(self.model)
        # transformers does this in `train`, before which held-out cases are scored, and the warm-up makes a pass
        if self.is_fsdp_enabled:
            shard_now(self)
        elif self.is_deepspeed_enabled:
            self.model.to(self.accelerator.device)
        else:
            model = innermost(self.model)  # whose `forward` an adapter's `generate` calls
            use_autocast(self.accelerator, model)
            model._is_accelerate_prepared = False  # so that `train` adds DDP
        refuse_unsharded(config, self.accelerator.device.type, not is_sharded(self.model))
        self.remove_callback(PrinterCallback)
        self.mask_truncated_completions = False
        self.pass_limit = inputs.batch.limit
        self.lowered = dict[str, int]()
        """Options of a forward pass that the warm-up has lowered."""
        # the router's loss depends on which rows share a pass
        self.trims = config.trims_padding and not self.aux_loss_enabled
        self.updates = 0  # steps that had a gradient and a learning rate
        self.rollouts = make_rollouts(self, inputs)
        self.batches = batch_source(inputs.runner, self.rollouts, inputs.split.train, self.schedule, self.args)
        self.watch = StepEvents(self)
        self.add_callback(self.watch)
        policy = self.accelerator.unwrap_model(self.model)
        is_precise = policy.dtype == torch.float32 and not (self.args.bf16 or self.args.fp16)
        has_rotary_positions = bool(getattr(policy.config.get_text_config(), "rope_parameters", None))
        self.depends_on_padding = not has_rotary_positions or policy._is_stateful
        self.rows_apart = "positions depend on padding" if self.depends_on_padding else "this is off"
        """Why each row is computed with its own prompt; empty if prompts are shared."""
        if config.shares_prompts and self.trims and not self.depends_on_padding:
            with gradient_checkpointing(policy, self.args):
                self.rows_apart = of_first(why_apart(policy, is_precise))  # all processes make the same passes
        self.shares_prompts = not self.rows_apart

    # -- a generation batch: episodes, scores, advantages

    def roll_out(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's rollout function: plays the episodes of the next batch, this process's share of which has as many as
        there are `prompts`. Every process must call this."""
        start = time.monotonic()
        self._batch = self.batches.take(self.state.global_step)
        self.watch.rollout_seconds += time.monotonic() - start
        trajectories = [episode.trajectory for episode in self._batch.episodes]
        return {
            "prompt_ids": [trajectory.prompt_ids for trajectory in trajectories],
            "completion_ids": [trajectory.ids for trajectory in trajectories],
            "env_mask": [trajectory.mask for trajectory in trajectories],
            "logprobs": self.comparable_logprobs(trajectories) if self.use_vllm else None,
        }

    def score(self, completions: list[Any], log_metric: Callable[[str, float], None], **_: Any) -> list[float | None]:
        """TRL's reward function: the environment's score for each completion, less the penalty for the longest one of
        its episode; None if unscored."""
        self.rollouts.count_failures(self._batch.played)
        self._metrics["train"]["tokens"].append(sum(one.tokens for one in self._batch.played))
        for episode in self._batch.episodes:
            for name, value in episode_metrics(episode).items():
                log_metric(name, value)  # each episode's own: TRL takes the mean of all, over processes
        own = [one for one in self._batch.everywhere if one.key in self._batch.own]
        return [None if one.score is None else one.score - self.algorithm.penalty(one.longest) for one in own]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's tensors of this process's episodes, with the advantages of the algorithm, and what is in the loss.
        `inputs`: as many rows as this process has episodes; they are only counted."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        batch, metrics, device = self._batch, self._metrics["train"], self.accelerator.device
        everywhere, size, first = batch.everywhere, self.num_generations, len(inputs) * self.accelerator.process_index
        own = slice(first, first + len(inputs))
        scores = torch.tensor([math.nan if one.score is None else one.score for one in everywhere], device=device)
        rewards = scores - torch.tensor([self.algorithm.penalty(one.longest) for one in everywhere], device=device)
        in_loss = torch.tensor([one.is_kept for one in everywhere], device=device)
        if self.run.config.overlong_buffer:
            metrics["penalty/overlong"].append((scores - rewards).nanmean().item())
            # TRL's are of the rewards
            metrics["reward"][-1], metrics["reward_std"][-1] = scores.nanmean().item(), trl_utils.nanstd(scores).item()
        output["advantages"] = self.algorithm.advantages(rewards, size, output["advantages"], own)
        self.recorder.add_rollouts(batch.records(output["advantages"].tolist()))

        for name, value in batch.metrics.items():
            metrics[name].append(value)
        for name, value in batch.length_metrics().items():
            metrics[name][-1] = value
        is_played = torch.tensor([not one.dropped for one in everywhere], device=device)
        # without the groups of a prompt that is too long; TRL's does not count groups without two scores
        teaches = has_advantages(rewards, in_loss, size)[is_played.view(-1, size).any(1)]
        metrics["frac_reward_zero_std"][-1] = 1.0 - teaches.float().mean().item()
        if "sampling_per_token_logps" in output and "old_per_token_logps" in output:
            self._add_kl_by_position(output)
        tokens = [float(one.tokens) for one in everywhere if one.is_kept] or [0.0]
        items = torch.tensor(tokens, dtype=torch.float64, device=device).mean() * self.args.steps_per_generation
        return output | {KEPT: in_loss[own], "num_items_in_batch": items}

    def _add_kl_by_position(self, output: Mapping[str, torch.Tensor]) -> None:
        """Log the KL between vLLM and the trainer for tokens at like positions. Every process must call this."""
        logps = output["old_per_token_logps"], output["sampling_per_token_logps"]
        sampled = output["completion_mask"] * output["tool_mask"]
        own = kl_by_position(*logps, sampled, output["prompt_mask"].sum(1))
        sums = self.accelerator.gather(own[None]).sum(0).tolist()
        for start, (kl, count) in zip((0, *POSITIONS), sums, strict=True):
            if count:
                self._metrics["train"][f"sampling/kl_from_{start}"].append(kl / count)

    # -- an optimizer step

    def training_step(self, *arguments: object, **keywords: object) -> torch.Tensor:
        """The forward and backward passes of one step."""
        with activity.own.doing("forward and backward pass"):
            loss: torch.Tensor = super().training_step(*arguments, **keywords)
            if self._prompts is not None and not self._prompts.is_joined:
                self._prompts.backward()
            self._prompts = None
        return loss

    def _compute_loss(self, model: torch.nn.Module, inputs: MicroBatch) -> torch.Tensor:
        """Loss of all forward passes of a step. The backward pass of the last one is left to the caller."""
        accelerator, metrics = self.accelerator, defaultdict[str, list[float]](list)
        passes = passes_of(inputs, self.pass_limit, self.trims, accelerator, self.shares_prompts, not self.beta)
        total, loss = torch.zeros((), device=accelerator.device), torch.zeros(())
        alone: Callable[[], AbstractContextManager[Any]] = partial(accelerator.no_sync, model)
        for number, (rows, divisor) in enumerate(zip(passes.rows, passes.divisors, strict=True), start=1):
            # before the last one, gradients are added up, not exchanged; with FSDP2 they are, as they would stay whole
            is_last = number == len(passes.rows)
            accelerator.gradient_state._set_sync_gradients(is_last)  # for DeepSpeed, and TRL's adaptive entropy
            if number - 1 in passes.begins:
                with alone():
                    self._prompts = SharedPrompts(model, rows["prompt_ids"], rows["prompt_mask"])
            if self._prompts is not None and is_last:
                self._prompts.is_joined = isinstance(model, DistributedDataParallel)
            exchange = nullcontext() if is_last or self.is_fsdp_enabled else alone()
            with exchange, replaced(self, {"_metrics": {"train": metrics}}):
                loss = self.loss_of_pass(model, rows, divisor)
                if not is_last:
                    total += loss.detach()
                    accelerator.backward(loss)
                    if number in passes.begins and self._prompts is not None:
                        self._prompts.backward()
        over_rows = {"vespo/phi_seq_mean", "policy_loss", "aux_loss"}
        over_rows |= CLIP_MEANS if self.importance_sampling_level == "sequence" else set()
        everywhere = gather_object([(passes.weights, dict(metrics))])
        for name, values in metrics.items():
            if len(values) == len(passes.rows):  # else it is measured once a step
                each = [zip(weights[name in over_rows], of[name], strict=True) for weights, of in everywhere]
                values = [metric_of_step(name, chain(*each))]
            self._metrics["train"][name].append(values[-1])
        self._metrics["train"]["passes"].append(len(passes.rows))
        self.has_kept_rows = passes.has_kept_rows
        return loss + total

    def loss_of_pass(self, model: torch.nn.Module, rows: MicroBatch, divisor: float) -> torch.Tensor:
        """TRL's loss of one forward pass, with what the algorithm adds. `divisor`: passes to divide a mean by."""
        updates, is_in_loss = self.args.steps_per_generation, None

        def unchanged(values: torch.Tensor, reduction: str = "") -> torch.Tensor:
            """For TRL's metrics, which are those of this pass alone until the end of the step."""
            return values

        # the adaptive coefficient follows the entropy of all processes
        local = dict.fromkeys(["gather"] if self.use_adaptive_entropy else ["gather", "reduce"], unchanged)
        if self.trims:
            is_in_loss = (rows["completion_mask"] * rows["tool_mask"]).bool()
            rows = rows | {name: rows[name].masked_fill(~is_in_loss, 0.0) for name in LOGPROBS & rows.keys()}
        # the passes of a generation batch, if all were like this one
        pieces = divisor * updates if math.isfinite(divisor) else 1.0
        with (
            replaced(self, {"current_gradient_accumulation_steps": divisor, "_in_loss": is_in_loss}),
            replaced(self.args, {"steps_per_generation": pieces}),
            replaced(self.accelerator, local),
            replaced(trl_utils, {"_use_triton": lambda _: True} if self.trims else {}),
        ):
            return self._loss_of_algorithm(model, rows)

    def _loss_of_algorithm(self, model: torch.nn.Module, inputs: MicroBatch) -> torch.Tensor:
        """TRL's loss, or a loss of the user's in place of TRL's policy term: the mean over all tokens of the step."""
        custom = self.algorithm.custom_loss
        if custom is None:
            return cast(torch.Tensor, super()._compute_loss(model, inputs))
        compute, computed = self._get_per_token_logps_and_entropies, list[Any]()

        def kept(*arguments: Any, **keywords: Any) -> Any:
            computed.append(compute(*arguments, **keywords))
            return computed[-1]

        with replaced(self, {"_get_per_token_logps_and_entropies": kept}):
            without_policy_term = inputs | {"advantages": torch.zeros_like(inputs["advantages"])}
            loss: torch.Tensor = super()._compute_loss(model, without_policy_term)
        ((logps, entropies, _),) = computed
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        losses = custom(
            mask,
            logprobs=logps,
            old_logprobs=inputs.get("old_per_token_logps", logps.detach()),
            advantages=inputs["advantages"].unsqueeze(1),
            ref_logprobs=inputs.get("ref_per_token_logps"),
            entropies=entropies,
        )
        if self.use_vllm and self.vllm_importance_sampling_correction:
            losses = losses * inputs["importance_sampling_ratio"]
        steps = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes / steps
        mean: torch.Tensor = losses.sum() / tokens
        for name in [name for name in self._metrics["train"] if name.startswith(OF_POLICY_TERM)]:
            del self._metrics["train"][name]
        return loss + mean

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: object = None) -> object:
        """Hook between gradient clipping and the optimizer step."""
        norm = super()._get_grad_norm(model, grad_norm)
        norm = whole(norm) if isinstance(norm, torch.Tensor) else norm
        size = 1.0 if norm is None else float(norm)
        self.watch.before_step(model, size)
        if not self.has_kept_rows:
            model.zero_grad()  # no momentum and no weight decay without a kept row
        self.updates += math.isfinite(size) and size > 0 and self._get_learning_rate() > 0
        return norm

    # -- log-probabilities

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **more: object,
    ) -> Any:
        """Values of the last `logits_to_keep` tokens, each token at its position without padding.

        Without gradients TRL passes a whole generation batch with a `batch_size`, in place of which passes have ours.
        """
        if batch_size is not None and (self.trims or self.depends_on_padding):
            return self._in_own_passes(model, input_ids, attention_mask, logits_to_keep), None, None
        if batch_size is not None:
            width = max(gather_object([input_ids.shape[1]]))  # as many passes on each process
            more["batch_size"] = self.pass_limit.most(width)
        in_loss = attention_mask[:, -logits_to_keep:].bool() if self._in_loss is None else self._in_loss
        if self._prompts is not None:
            return *self._prompts.log_probs(model, input_ids, attention_mask, in_loss), None
        if self.trims or self.depends_on_padding:
            return log_probs_of_rows(model, input_ids, attention_mask, in_loss, bool(more.get("compute_aux_loss")))
        return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, **more)

    def _in_own_passes(self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
        """Log-probabilities of a padded generation batch, in passes of rows of similar lengths or with shared
        prompts."""
        end = ids.shape[1] - keep
        parts = ids[:, :end], mask[:, :end], mask[:, end:]
        (blocks,), are_shared = trimmed_blocks(*parts, [True] * len(ids), self.pass_limit, 1, self.shares_prompts)
        forwards = sum(are_shared + len(block) for block in blocks)
        # sharded weights are gathered equally often on each process
        more = max(gather_object([forwards])) - forwards if self.is_fsdp_enabled else 0
        values = torch.zeros(len(ids), keep, device=ids.device)
        for block in blocks:
            if are_shared:
                self._prompts = SharedPrompts(model, ids[block[0], :end], mask[block[0], :end])
            for rows in block:
                values[rows], *_ = self._get_per_token_logps_and_entropies(model, ids[rows], mask[rows], keep)
            self._prompts = None
        for _ in range(more):
            self._get_per_token_logps_and_entropies(model, ids[rows], mask[rows], keep)
        return values

    def comparable_logprobs(self, trajectories: list[Trajectory]) -> list[list[float | None]]:
        """vLLM's log-probabilities, corrected for truncated sampling in forward passes without dropout. Every process
        must call this."""
        if self.sampling.is_plain:
            return [list(each.logprobs) for each in trajectories]
        pad, device = self.processing_class.pad_token_id, self.accelerator.device
        prompts = padded([each.prompt_ids for each in trajectories], pad, device)
        answers = padded([each.ids for each in trajectories], pad, device, "right")
        ids, mask = torch.cat([prompts.ids, answers.ids], 1), torch.cat([prompts.mask, answers.mask], 1)
        with evaluation_mode(self.model), replaced(trl_utils, {"_ChunkedLogProbFunction": LogprobShift(self.sampling)}):
            shifts = self._in_own_passes(self.model, ids, mask, answers.ids.shape[1]).tolist()
        comparable = list[list[float | None]]()
        for each, row in zip(trajectories, shifts, strict=True):
            values = zip(each.logprobs, row, each.mask, strict=False)  # a row has padding at its end
            # TRL has None in place of NaN
            comparable.append([one + shift if own and one is not None else one for one, shift, own in values])
        return comparable

    # -- logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the tokens a second, the number of skipped steps, the most memory that was in use on the first
        process's GPU so far, and the metrics of vLLM servers."""
        server = self.rollouts.server
        logs = logs | {"skipped_steps": self.watch.skipped}
        metrics = self._metrics["train"]
        if (tokens := metrics.pop("tokens", [])) and (seconds := sum(metrics.get("time/step", []))):
            logs["tokens_per_second"] = round(sum(tokens) / seconds, 3)
        if torch.cuda.is_available():
            logs["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if server is not None:
            logs |= {"sync/seconds": server.last_seconds, "vllm/restarts": server.restarts}
        super().log(logs, start_time)
        agree_on(self.control)

    # -- weights and checkpoints

    def _prepare_for_training(self, *arguments: Any, **keywords: Any) -> Any:
        """Does not shard the model a second time."""
        if not self.is_fsdp_enabled:
            return super()._prepare_for_training(*arguments, **keywords)
        with replaced(self.accelerator, {"prepare": lambda model, optimizer: (model, optimizer)}):
            return super()._prepare_for_training(*arguments, **keywords)

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the last whole step. Every process must call this."""
        self._save_checkpoint(self.model, None)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save_with(self, partial(super()._save_checkpoint, model, trial))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights, gathered. Every process must call this."""
        folder, writes = Path(output_dir or self.args.output_dir), self.args.should_save
        with savable_generation_config(self.model):
            if not self.is_fsdp_enabled:
                super().save_model(str(folder), _internal_call)
            else:
                tensors = gathered(own_weights(self.model).items(), writes)
                if writes:
                    self._save(str(folder), state_dict=tensors)
        if writes:
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle that nothing reads

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(self.model, Path(resume_from_checkpoint))  # transformers only warns of weights that it misses

    def end_at(self, checkpoint: Path) -> None:
        """Load a checkpoint after which there is no step: transformers would train one more. Every process must call
        this."""
        self.take_weights(checkpoint)
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))

    def take_weights(self, checkpoint: Path) -> None:
        """Load the weights of a checkpoint. Every process must call this."""
        self._load_from_checkpoint(str(checkpoint))
        self.rollouts.invalidate_weights()
