"""`EpisodeTrainer`, a GRPOTrainer whose completions and rewards are the episodes and scores of an environment.

Its base classes differ from TRL in steps and checkpoints (logprobs.py, optimizing.py, resumable_trainer.py). Where this
depends on the inside of TRL 1.16 (tests/training/test_upstream.py):

    GRPOTrainer._generate_and_score_completions(inputs)     overridden: rows come in, advantages go out
    GRPOTrainer(rollout_func=)                              one episode for each prompt, repeats included; env_mask
                                                            becomes tool_mask, the tokens that are in the loss
    trl.trainer.grpo_trainer.VLLMGeneration                 replaced while TRL starts vLLM
    trl.trainer.grpo_trainer.prepare_fsdp(model, accelerator)   replaced while TRL makes the reference model
    GRPOTrainer.use_vllm                                    read: whether completions have log-probabilities
    GRPOTrainer._generate(prompts)                          overridden: which episodes its metrics count as cut off;
                                                            it appends to ._metrics["train"], lengths included
    GRPOTrainer.create_model_card                           overridden: TRL's card is not ours
    GRPOTrainer.mask_truncated_completions                  set to False: it knows the last token, not what ended an
                                                            episode
    GRPOTrainer._metrics["train"]["frac_reward_zero_std"]   replaced: it does not count groups without two scores
    GRPOTrainer.log(logs, start_time)                       overridden: called once a logging step, before the callbacks
    GRPOTrainer._save_checkpoint(model, trial)              wrapped: it fills args.output_dir/checkpoint-<step>, and
                                                            deletes nothing if that is the only one
    GRPOTrainer._get_train_sampler(dataset)                 overridden: TRL's leaves out what does not fill a batch
    on_train_begin                                          comes after weights, optimizer and state were loaded
    output["advantages"]                                    this process's advantages, in the order of `inputs`
    reward function keywords                                prompts, completions, completion_ids, columns, log_metric
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig
from trl.trainer import grpo_trainer

from aitrain.batch import CaseSchedule, PassLimit
from aitrain.engines.colocated import ColocatedGeneration
from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import replaced, savable_generation_config
from aitrain.engines.server import VLLMServerEngine
from aitrain.environment.mixed_runner import Runner
from aitrain.errors import ConfigError
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.limits import EndOfTurn, Limits
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.training.algorithm import PLAIN, Algorithm
from aitrain.training.batch_diagnostics import batch_diagnostics
from aitrain.training.batch_source import BatchPlace, BatchPlaces, BatchSource, batch_source
from aitrain.training.case_choice import case_choice
from aitrain.training.dataset import case_numbers
from aitrain.training.episode_metrics import episode_metrics
from aitrain.training.epochs import CaseSampler, EpochCallback
from aitrain.training.holdout import CaseList
from aitrain.training.kept_rows import KEPT, KeptRows
from aitrain.training.model import keep_adapter_float32
from aitrain.training.non_finite import NonFiniteGuard
from aitrain.training.resumable_trainer import ResumableTrainer
from aitrain.training.rollout_setup import make_rollouts
from aitrain.training.sharding import check_sharded, prepare_reference, shard_now
from aitrain.training.stopwatch import Stopwatch
from aitrain.training.zero_variance import ZERO_VARIANCE, ZeroVarianceSteps, zero_variance_share

UNKNOWN = [{"role": "user", "content": ""}]
"""For TRL, the prompt of a case that the environment's opening makes; TRL only asks whether it is messages."""


@dataclass(frozen=True)
class TrainerInputs:
    """The parts that a trainer is made from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    arguments: GRPOConfig
    cases: CaseList
    runner: Runner
    chat: ChatFormat
    limits: Limits
    schedule: CaseSchedule
    peft_config: Any = None
    pass_limit: PassLimit | None = None
    """Of forward passes whose padding is trimmed; None: they are as TRL makes them."""
    serve: Callable[[Any, EndOfTurn], VLLMServerEngine] | None = None
    """Makes the engine for a trainer, if that is a vLLM server that gets files; None: transformers, or TRL's vLLM."""
    algorithm: Algorithm = PLAIN
    callbacks: Sequence[TrainerCallback] = ()
    """Those of the user."""


@dataclass(frozen=True)
class TrainerHooks:
    """Functions that the trainer calls: with rollout records, with notes for the user, and to write checkpoints."""

    write: Callable[[list[RolloutRecord]], None]
    notify: Callable[[str], None]
    callbacks: list[TrainerCallback]
    save: Callable[[Any, Callable[[], None]], None]
    """Writes a checkpoint of the trainer, given TRL's method that writes one."""


class EpisodeTrainer(ResumableTrainer):
    """GRPOTrainer whose completions are an environment's episodes and whose rewards are its scores."""

    _sampled_in_step = -1, 0
    """Step of the last generation batch, and number of generation batches in it."""

    def __init__(self, inputs: TrainerInputs, hooks: TrainerHooks) -> None:
        self.cases, self.schedule, self.hooks = inputs.cases, inputs.schedule, hooks
        self.sampling = Sampling.of(inputs.runner.config)
        ours = {
            "VLLMGeneration": partial(ColocatedGeneration, run_seed=inputs.arguments.seed),
            "prepare_fsdp": prepare_reference,
        }
        with warnings.catch_warnings(), replaced(grpo_trainer, ours):
            warnings.filterwarnings("ignore", message=".*rollout_func.*experimental")
            super().__init__(
                model=inputs.model,
                reward_funcs=[self.score],
                args=inputs.arguments,
                train_dataset=case_numbers(inputs.cases),
                processing_class=inputs.tokenizer,
                peft_config=inputs.peft_config,
                callbacks=[*hooks.callbacks, *inputs.callbacks],
                rollout_func=self.roll_out,
            )
        if inputs.peft_config is not None:
            keep_adapter_float32(self.model)
        if self.is_fsdp_enabled:
            shard_now(self)
        check_sharded(inputs.runner.config, self.model)
        if self.is_deepspeed_enabled:
            self.model.to(self.accelerator.device)  # DeepSpeed does so in `train`, after held-out cases were scored
        self.remove_callback(PrinterCallback)
        self.masks_truncated: bool = inputs.arguments.mask_truncated_completions
        self.mask_truncated_completions = False
        if inputs.pass_limit is not None and self.aux_loss_enabled:
            raise ConfigError(
                "rl_trim_padding: the router's loss of this model depends on which completions share a forward pass\n"
                "Leave it out, or add --trl router_aux_loss_coef=0."
            )
        self.pass_limit = inputs.pass_limit
        self.rows = KeptRows(self.accelerator.num_processes, partial(self.accelerator.reduce, reduction="sum"))
        self.zero_variance, self.non_finite = ZeroVarianceSteps(), NonFiniteGuard(self.accelerator, hooks.notify)
        self.updates = 0  # steps that had a gradient and a learning rate
        self.rollouts = make_rollouts(self, inputs)
        self.places, config = self._places(), inputs.runner.config
        source = BatchSource(self.rollouts, self.cases, case_choice(self, inputs.runner), self.num_generations)
        self.batches = batch_source(config, source, self.places)
        self.watch = Stopwatch(self.batches.clock)
        for callback in (EpochCallback(inputs.schedule), self.non_finite, self.watch):
            self.add_callback(callback)
        self.algorithm = inputs.algorithm
        self.context = inputs.limits.context
        self.aligns_rows = self.depends_on_left_padding()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """`inputs`: as many rows of `case_numbers` as this process has completions; they are only counted."""
        self._batch = self.batches.take(self._next_place())
        output: dict[str, Any] = super()._generate_and_score_completions(
            [{"prompt": case.prompt or UNKNOWN} for case in self._batch.cases]
        )
        self.hooks.write(self._batch.records(output["advantages"].tolist()))
        for name, value in (self._batch.metrics | batch_diagnostics(self._batch.episodes)).items():
            self._metrics["train"][name].append(value)
        return output | self._loss_rows()

    def _places(self) -> BatchPlaces:
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        count = self.schedule.prompts * self.num_generations // processes
        return BatchPlaces(self.schedule, count, processes, rank)

    def _next_place(self) -> BatchPlace:
        """Place of the next generation batch."""
        step, batches = self._sampled_in_step
        before = batches if step == self.state.global_step else 0
        self._sampled_in_step = self.state.global_step, before + 1
        return self.places.at(self.state.global_step, before)

    def _loss_rows(self) -> dict[str, torch.Tensor]:
        """Mask of this process's episodes in the loss, and whether all advantages of all processes are zero."""
        device, kept = self.accelerator.device, self._batch.kept(self.masks_truncated)
        dropped = [episode.is_dropped for episode in self._batch.episodes]
        everywhere = self.accelerator.gather(torch.tensor([self._batch.scores(), kept, dropped], device=device).T)
        mean = everywhere[:, 0].nanmean().item()
        if self.rewards is not None:
            everywhere[:, 0] = self.rewards
        played = everywhere[everywhere[:, 2] == 0]  # whole groups are dropped
        share = zero_variance_share(played[:, 0], played[:, 1], self.num_generations)
        self._metrics["train"]["frac_reward_zero_std"][-1] = share
        self.zero_variance.reward = None if math.isnan(mean) else mean
        return {KEPT: torch.tensor(kept, device=device), ZERO_VARIANCE: torch.tensor(share == 1.0, device=device)}

    def roll_out(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's rollout function: the episodes of this batch, as tokens."""
        trajectories = [episode.trajectory for episode in self._batch.episodes]
        return {
            "prompt_ids": [trajectory.prompt_ids for trajectory in trajectories],
            "completion_ids": [trajectory.ids for trajectory in trajectories],
            "env_mask": [trajectory.mask for trajectory in trajectories],
            "logprobs": self.comparable_logprobs(trajectories) if self.use_vllm else None,
        }

    def _generate(self, prompts: list[Any]) -> Any:
        output = super()._generate(prompts)
        if self.rollouts.rollout.end.stop_strings is not None or self._batch.dropped:
            for name, value in self._batch.length_metrics().items():
                self._metrics["train"][name][-1] = value
        return output

    def score(self, completions: list[Any], **rest: Any) -> list[float | None]:
        """TRL's reward function: the environment's score for each completion, None if unscored."""
        self.rollouts.count_failures(self._batch.played)
        for episode in self._batch.episodes:
            for name, value in episode_metrics(episode).items():
                rest["log_metric"](name, value)  # each episode's own: TRL takes the mean of all, over processes
        return [episode.result.score for episode in self._batch.episodes]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with times, the number of skipped steps, and the metrics of vLLM servers."""
        server = self.rollouts.server
        logs = logs | {"skipped_steps": self.non_finite.skipped}
        if self.watch.steps:
            logs |= self.watch.take(self.rollouts.take_sampled_tokens())
        if server is not None and "train_runtime" not in logs:
            logs |= server.metrics
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with savable_generation_config(self.model):
            self.hooks.save(self, partial(super()._save_checkpoint, model, trial))

    def _get_train_sampler(self, dataset: Any = None) -> CaseSampler:
        return CaseSampler(self.schedule, self.num_generations)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """No-op: ui/card.py writes the card of a run."""
