"""The GRPOTrainer subclass, and where we lean on the inside of TRL 1.16; see also logprobs.py and optimizing.py.

tests/training/test_upstream.py checks each of them by name:

    GRPOTrainer._generate_and_score_completions(inputs)     overridden: rows come in, advantages go out
    GRPOTrainer(rollout_func=)                              one episode for each prompt, repeats included; env_mask
                                                            becomes tool_mask, the tokens that are in the loss
    GRPOTrainer._generate_single_turn(ids, images, fields, n)   called, for each round of a rollout
    GRPOTrainer.generation_config.max_new_tokens            replaced for each round
    GRPOTrainer.generation_config, .generation_kwargs       replaced while decoding greedily
    GRPOTrainer.eos_token_ids                               read: what ends an answer
    GRPOTrainer.use_vllm, .vllm_mode, ._last_loaded_step, .vllm_generation   set, for a server that TRL does not know:
                                                            weights are synced when global_step is not the last one
    GRPOTrainer.temperature, .top_p, .top_k, .min_p, .repetition_penalty   read: how it samples
    GRPOTrainer.vllm_generation.max_completion_length, .temperature, .top_k, .top_p   replaced likewise
    GRPOTrainer.vllm_generation.generation_kwargs           replaced likewise: further fields of vLLM's SamplingParams
    GRPOTrainer._generate(prompts)                          overridden: which episodes its metrics take for cut off;
                                                            it appends to ._metrics["train"], lengths included
    GRPOTrainer.create_model_card                           overridden: TRL's card is not ours
    GRPOTrainer.mask_truncated_completions                  set to False: it knows the last token, not what ended an
                                                            episode
    GRPOTrainer._metrics["train"]["frac_reward_zero_std"]   replaced: it does not count groups without two scores
    GRPOTrainer.log(logs, start_time)                       overridden: called once a logging step, before the callbacks
    GRPOTrainer._save_checkpoint(model, trial)              wrapped: it fills args.output_dir/checkpoint-<step>, and
                                                            deletes nothing where that is the only one
    GRPOTrainer._step, ._buffered_inputs                    saved and put back: forward passes so far, and the pieces of
                                                            a batch that is used for longer than one step
    GRPOTrainer._metrics["train"]                           saved and put back: what has not been logged yet; likewise
                                                            ._tr_loss, ._total_loss_scalar, ._globalstep_last_logged
    Trainer._load_from_checkpoint(checkpoint)               called, for the weights alone
    Trainer.train(resume_from_checkpoint)                   not called for a checkpoint of the last step: it trains one
                                                            step more
    GRPOTrainer._get_train_sampler(dataset)                 overridden: TRL's leaves out what does not fill a batch
    on_train_begin                                          comes after weights, optimizer and state were loaded
    output["advantages"]                                    this process's advantages, in the order of `inputs`
    reward function keywords                                prompts, completions, completion_ids, columns, log_metric
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import GenerationConfig, PreTrainedModel, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback, TrainerState
from trl import GRPOConfig
from trl.trainer import grpo_trainer

from aitrain.batch import CaseSchedule
from aitrain.environment.contract import Case
from aitrain.environment.scoring import FailureCount, Host
from aitrain.environment.seeds import Draw, derived_seed
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.training.chat import Chat
from aitrain.training.dataset import Cases
from aitrain.training.episode_metrics import episode_metrics, length_metrics
from aitrain.training.episode_record import episode_record
from aitrain.training.epochs import CaseStream, Epochs
from aitrain.training.finite import Finite
from aitrain.training.flat import FLAT, FlatSteps, flat_share
from aitrain.training.generation.batching import Batcher
from aitrain.training.generation.colocated import Generation
from aitrain.training.generation.local import LocalSampling
from aitrain.training.generation.row_sampling import seeded_rows
from aitrain.training.generation.sampling import Sampling
from aitrain.training.generation.served import Asking, Served
from aitrain.training.kept_rows import KEPT, KeptRows
from aitrain.training.model import keep_adapter_precise, tick_in_forward_passes
from aitrain.training.optimizing import OptimizingTrainer
from aitrain.training.rollout import Episode, Limits, Rollout, Sampled
from aitrain.training.scopes import evaluation_mode, replaced
from aitrain.training.stopwatch import Stopwatch


@dataclass(frozen=True)
class Parts:
    """What a trainer is made of."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    arguments: GRPOConfig
    cases: Cases
    host: Host
    chat: Chat
    limits: Limits
    schedule: CaseSchedule
    peft_config: Any = None
    serve: Callable[[Any], Served] | None = None
    """Generation by a vLLM server, for a trainer that is made; None: TRL's own, whichever it is."""


@dataclass(frozen=True)
class Hooks:
    """Whom the trainer tells: of each batch of rollout records, and of what a person should see."""

    write: Callable[[list[RolloutRecord]], None]
    tell: Callable[[str], None]
    callbacks: list[TrainerCallback]
    save: Callable[[Any, Callable[[], None]], None]
    """Writes a checkpoint of the trainer, given TRL's own way to do it."""


class EpisodeTrainer(OptimizingTrainer):
    """GRPOTrainer whose completions are an environment's episodes and whose rewards are its scores."""

    _is_seeded = False
    """Whether transformers samples each completion with its episode's seed."""
    _sampled_in_step = -1, 0
    """The step that the last generation batch was sampled in, and how many completions were, by all processes."""

    def __init__(self, parts: Parts, hooks: Hooks) -> None:
        self.cases, self.schedule = parts.cases, parts.schedule
        self.hooks = hooks
        self.failures = FailureCount(parts.host.config.rl_max_failed)
        self.sampling = Sampling.of(parts.host.config)
        self.stops = self.sampling.stop_strings(parts.tokenizer)
        generation = {"VLLMGeneration": partial(Generation, run_seed=parts.arguments.seed)}
        with warnings.catch_warnings(), replaced(grpo_trainer, generation):
            warnings.filterwarnings("ignore", message=".*rollout_func.*experimental")
            super().__init__(
                model=parts.model,
                reward_funcs=[self.score],
                args=parts.arguments,
                train_dataset=parts.cases.as_dataset(),
                processing_class=parts.tokenizer,
                peft_config=parts.peft_config,
                callbacks=hooks.callbacks,
                rollout_func=self.roll_out,
            )
        if parts.peft_config is not None and not (self.is_fsdp_enabled or is_deepspeed_zero3_enabled()):
            keep_adapter_precise(self.model)  # sharded, all weights have to be of one type
        self.remove_callback(PrinterCallback)
        self.masks_truncated: bool = parts.arguments.mask_truncated_completions
        self.mask_truncated_completions = False
        self.rows = KeptRows(self.accelerator.num_processes, partial(self.accelerator.reduce, reduction="sum"))
        self.flat = FlatSteps()
        self._add_callbacks(parts)
        self._set_up_generation(parts)
        self.rollout = self._make_rollout(parts)
        self.context = parts.limits.context
        self.aligns_rows = self._is_sharded or self.depends_on_left_padding()

    def _add_callbacks(self, parts: Parts) -> None:
        self.finite = Finite(self.accelerator, self.hooks.tell)
        self.watch = Stopwatch()
        self.updates = 0  # steps that had a gradient and a learning rate
        self.add_callback(Epochs(parts.schedule))
        self.add_callback(self.finite)
        self.add_callback(self.watch)

    def _set_up_generation(self, parts: Parts) -> None:
        if parts.serve is not None:
            self.use_vllm, self.vllm_mode, self._last_loaded_step = True, "server", -1
            self.vllm_generation = parts.serve(self)
        if not self.use_vllm and self.sampling.needs_processor:  # which LocalSampling brings
            self.generation_config.update(min_p=None, repetition_penalty=1.0)
            self.generation_kwargs |= {"min_p": None, "repetition_penalty": 1.0}

    def _make_rollout(self, parts: Parts) -> Rollout:
        policy = self.accelerator.unwrap_model(self.model)
        tick_in_forward_passes(policy)
        shared = not self.use_vllm or self._generates_in_common
        batcher = Batcher(policy, parts.tokenizer.pad_token_id, None if shared else self._engine)
        batcher.wake = parts.host.workers.wake
        parts.host.meanwhile = batcher.meanwhile
        parts.host.around = torch.no_grad
        parts.host.offer(batcher.policy, parts.tokenizer)

        @contextmanager
        def scoring() -> Iterator[None]:
            with evaluation_mode(self.model), batcher.serving():
                yield

        served = self._served
        asking = None if served is None else partial(Asking, served, parts.host.workers.wake)
        return Rollout(
            parts.host,
            parts.chat,
            parts.limits,
            self.generate,
            self.eos_token_ids,
            scoring,
            asking,
            self.watch,
            self.stops,
            is_padded=not self.use_vllm or (served is None and self.vllm_mode == "server"),
        )

    # -- a batch of training

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """`inputs`: one row of `Cases.as_dataset()` for each completion of this process, groups side by side."""
        self._places = self._next_places(len(inputs))
        numbers = [row["case"] for row in inputs]
        cases = [self.cases[number] for number in numbers]
        seeds = [self.seed_of(self.state.global_step, number) for number in numbers]
        self._asked = cases, seeds, self._sampling_seeds(numbers)
        output: dict[str, Any] = super()._generate_and_score_completions([{"prompt": case.prompt} for case in cases])
        self._write_rollouts(output["advantages"].tolist())
        return output | self._what_is_learned_from()

    def _what_is_learned_from(self) -> dict[str, torch.Tensor]:
        """Which episodes of this process are in the loss, and whether none of any process has an advantage."""
        scores = [math.nan if e.scored.score is None else e.scored.score for e in self._batch]
        kept = [e.scored.score is not None and not (self.masks_truncated and e.is_truncated) for e in self._batch]
        everywhere = self.accelerator.gather(torch.tensor([scores, kept], device=self.accelerator.device).T)
        share = flat_share(everywhere[:, 0], everywhere[:, 1], self.num_generations)
        self._metrics["train"]["frac_reward_zero_std"][-1] = share
        mean = everywhere[:, 0].nanmean().item()
        self.flat.reward = None if math.isnan(mean) else mean
        device = self.accelerator.device
        return {KEPT: torch.tensor(kept, device=device), FLAT: torch.tensor(share == 1.0, device=device)}

    def _next_places(self, count: int) -> range:
        """Where this process's completions are among all completions that are sampled in a step: after those of the
        processes before it, and after those of the step's earlier generation batches."""
        step, sampled = self._sampled_in_step
        before = sampled if step == self.state.global_step else 0
        self._sampled_in_step = self.state.global_step, before + count * self.accelerator.num_processes
        first = before + count * self.accelerator.process_index
        return range(first, first + count)

    def _sampling_seeds(self, numbers: Sequence[int]) -> list[int]:
        """Those of this batch: consecutive within a group, so that a server can be asked for all of it at once."""
        groups = [divmod(place, self.num_generations) for place in self._places]
        return [
            self.sampling_seed(self.state.global_step, number, group) + member
            for number, (group, member) in zip(numbers, groups, strict=True)
        ]

    def sampling_seed(self, *names: object) -> int:
        """What an episode is sampled with: it follows from the run's seed and what the episode is named, on whichever
        process it is played."""
        return derived_seed(self.args.seed, "sampling", *names)

    def seed_of(self, *names: object) -> int:
        """The environment's seed for a case at some time: the same one for a whole group, on whichever process."""
        return random.Random("/".join(map(str, (self.args.seed, *names)))).getrandbits(31)

    def roll_out(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's rollout function: the episodes of this batch, as tokens."""
        self._batch = self.play(*self._asked)
        tracks = [episode.track for episode in self._batch]
        return {
            "prompt_ids": [track.prompt_ids for track in tracks],
            "completion_ids": [track.ids for track in tracks],
            "env_mask": [track.mask for track in tracks],
            "logprobs": self.comparable_logprobs(tracks) if self.use_vllm else None,
        }

    def _generate(self, prompts: list[Any]) -> Any:
        """With the metrics of which episodes end by themselves, where TRL knows of the tokens only that end one."""
        output = super()._generate(prompts)
        if self.stops is not None:
            lengths = [sum(episode.track.mask) for episode in self._batch]
            is_cut_off = [not self.rollout.is_ended(episode.track) for episode in self._batch]
            episodes = gather_object(list(zip(lengths, is_cut_off, strict=True)))
            for name, value in length_metrics(episodes).items():
                self._metrics["train"][name][-1] = value
        return output

    def play(self, cases: Sequence[Case], seeds: Sequence[int], sampling_seeds: Sequence[int]) -> list[Episode]:
        """This process's episodes, which may be none, with the weights as they are now. Every process must call this.

        Raises:
            ServerFailed: on all processes, where a vLLM server failed one of them.
        """
        work = partial(self.rollout.play, cases, seeds, sampling_seeds)
        served = self._served
        if served is None:
            return work()
        if self._last_loaded_step != self.state.global_step:
            served.sync_weights()
            self._last_loaded_step = self.state.global_step
        return served.in_common(work)

    def score(self, completions: list[Any], **rest: Any) -> list[float | None]:
        """TRL's reward function: the environment's score for each completion, None where there is none."""
        self._note_failures(self._batch)
        for episode in self._batch:
            for name, value in episode_metrics(episode).items():
                rest["log_metric"](name, value)  # each episode's own: TRL takes the mean of all, over processes
        return [episode.scored.score for episode in self._batch]

    def _note_failures(self, episodes: list[Episode]) -> None:
        """Counted over all processes, so that all of them give up at the same moment."""
        scores = sum(episode.scored.score is not None for episode in episodes)
        failures = sum(episode.scored.failure is not None for episode in episodes)
        tokens = sum(sum(episode.track.mask) for episode in episodes)
        counts = torch.tensor([scores, failures, len(episodes), tokens], device=self.accelerator.device)
        scores, failures, total, tokens = self.accelerator.reduce(counts, reduction="sum").tolist()
        self.watch.tokens += tokens
        if failures:
            self.tell_failures(episodes)
        self.failures.after_batch(scores, failures, total)

    def tell_failures(self, episodes: list[Episode]) -> None:
        """Show the first failure of each kind; every process must call this, for the other ones' failures."""
        named = [(e.scored.failure.kind, e.told) for e in episodes if e.scored.failure is not None]
        for message in self.failures.first_of_each(gather_object(named)):
            self.hooks.tell(message)

    def _write_rollouts(self, advantages: list[float]) -> None:
        done = self.state.global_step
        records = [episode_record(episode, done + 1, done) for episode in self._batch]
        self.hooks.write(
            [
                replace(record, group=place // self.num_generations, advantage=advantage)
                for place, record, advantage in zip(self._places, records, advantages, strict=True)
            ]
        )

    def _engine(self, prompts: list[list[int]], sampling: dict[str, Any]) -> list[list[int]]:
        """vLLM for an environment that asks the model itself: token ids in, token ids out."""
        most, seeds = sampling.pop("max_new_tokens"), sampling.pop("seeds", None)
        ends = {"stop_token_ids": list(self.eos_token_ids)}  # the environment's own call: none of the run's options
        asked = {**sampling, "max_completion_length": most, "generation_kwargs": ends, "seeds": seeds}
        with replaced(self.vllm_generation, asked):
            ids, _ = self._generate_single_turn(prompts, None, {}, 1)
        return list(ids)

    # -- the policy's side of a rollout

    def generate(
        self, prompts: list[list[int]], most: int, begun: Sequence[int], draws: Sequence[Draw | None]
    ) -> list[Sampled] | None:
        """One answer to each prompt (token ids), sampled as in training; None when no process has a prompt. `begun`
        tokens at the end of a prompt belong to the answer.

        Where generation is one common act of several processes, all of them bring equally many prompts, the missing
        ones made up: TRL hands the answers out by position, and would wait for a process that does not ask.
        """
        count, most = self._agreed(len(prompts), most)
        if not count:
            return None
        filler = [[self.eos_token_ids[0]]] * (count - len(prompts))
        with self._sampled_with(draws, count):
            ids, logprobs = self._sample(prompts + filler, most, [*begun, *(0 for _ in filler)])
        return [Sampled(ids[n], logprobs[n] if logprobs else None) for n in range(len(prompts))]

    def _sample(self, prompts: list[list[int]], most: int, begun: list[int]) -> tuple[list[list[int]], Any]:
        if self.use_vllm:
            extras = self.sampling.vllm_extras(self.eos_token_ids, most)
            with replaced(self.vllm_generation, {"max_completion_length": most, "generation_kwargs": extras}):
                return self._generate_single_turn(prompts, None, {}, 1)  # type: ignore[no-any-return]
        local = LocalSampling(self.sampling, self.eos_token_ids, self.stops, prompts, begun)
        policy = self.accelerator.unwrap_model(self.model_wrapped)
        with replaced(self.generation_config, {"max_new_tokens": most}), local.applied(policy):
            ids, _ = self._generate_single_turn(prompts, None, {}, 1)
        return local.cut(ids), None

    def _agreed(self, count: int, most: int) -> tuple[int, int]:
        if not self._generates_in_common:
            return count, most
        wanted = torch.tensor([[count, most]], device=self.accelerator.device)
        count, most = self.accelerator.gather(wanted).max(dim=0).values.tolist()
        return count, most

    @property
    def _generates_in_common(self) -> bool:
        if self.accelerator.num_processes == 1:
            return False
        if self._served is not None:
            return False  # each process asks the server by itself
        shares_engine = self.use_vllm and (self.vllm_mode == "server" or self.args.vllm_tensor_parallel_size > 1)
        return bool(shares_engine or self._is_sharded)

    def _sampled_with(self, draws: Sequence[Draw | None], count: int) -> AbstractContextManager[None]:
        """While this lasts, each of so many prompts is sampled with its draw, those made up with any. transformers
        samples as TRL does unless `seeded` says otherwise.

        A process whose prompts are all made up has seeds as well: processes that share an engine exchange theirs.
        """
        given = [draw for draw in draws if draw is not None]
        filled = [*given, *[Draw(0)] * (count - len(given))] if len(given) == len(draws) else []
        if self.use_vllm:
            return replaced(self.vllm_generation, {"seeds": [draw.request_seed for draw in filled] or None})
        if not filled or not self._is_seeded or self.use_transformers_continuous_batching:
            return nullcontext()
        return seeded_rows(self.accelerator.unwrap_model(self.model), lambda rows: filled)

    def seeded(self) -> AbstractContextManager[None]:
        """While this lasts, transformers samples each completion with its episode's seed, as vLLM always does. Training
        does without: there it draws what TRL draws."""
        return replaced(self, {"_is_seeded": True})

    def greedy(self) -> AbstractContextManager[None]:
        """While this lasts, `generate` takes the likeliest token every time."""
        return replaced(*self._greedy_settings())

    def _greedy_settings(self) -> tuple[Any, dict[str, Any]]:
        if self.use_vllm:
            return self.vllm_generation, {"temperature": 0.0, "top_k": -1, "top_p": 1.0}
        likeliest = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
        settings = self.generation_kwargs | likeliest
        return self, {
            "generation_config": GenerationConfig(**settings, disable_compile=True),
            "generation_kwargs": settings,
        }

    # -- around the steps

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """With the times, the steps that were left out so far, how the weights got to a vLLM server, and how often it
        had to be given them again."""
        served = self._served
        logs = logs | {"skipped_steps": self.finite.skipped} | self.watch.take()
        if served is not None and "train_runtime" not in logs:
            logs |= {
                "sync/bytes": served.last_bytes,
                "sync/seconds": served.last_seconds,
                "vllm/restarts": served.restarts,
            }
        super().log(logs, start_time)

    def save_checkpoint(self) -> None:
        """A checkpoint of the last whole step, to go on from. Every process must call this."""
        self._save_checkpoint(self.model, None)

    def close(self) -> None:
        """Leave no weights behind that were on their way to a vLLM server."""
        if self._served is not None:
            self._served.close()

    @property
    def vllm_restarts(self) -> int:
        """How often a vLLM server came back and was given the weights again."""
        return 0 if self._served is None else self._served.restarts

    @property
    def _served(self) -> Served | None:
        generation = self.vllm_generation if self.use_vllm else None
        return generation if isinstance(generation, Served) else None

    # -- a checkpoint

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.hooks.save(self, partial(super()._save_checkpoint, model, trial))

    def _get_train_sampler(self, dataset: Any = None) -> CaseStream:
        return CaseStream(self.schedule, self.num_generations, self.args.seed if self.shuffle_dataset else None)

    def is_over(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is that of the last step, which transformers would follow with one more; then this
        trainer is where it would be after it. Every process must call this."""
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if state.global_step < self.args.max_steps or self._is_sharded:
            return False
        self.take_weights(checkpoint)
        self.state = state
        return True

    def take_weights(self, checkpoint: Path) -> None:
        """The weights of a checkpoint, for the model as it is; every process must call this."""
        self._load_from_checkpoint(str(checkpoint))
        self._last_loaded_step = -1  # an engine of its own gets them before it generates again

    @property
    def has_moved_reference(self) -> bool:
        """Whether the reference model has been given weights of the policy, so far."""
        args = self.args
        return bool(args.sync_ref_model and self.state.global_step >= args.ref_model_sync_steps)

    def rest_of_window(self) -> list[dict[str, Any]]:
        """The pieces of the last generation batch, when some of them are still to be trained on."""
        is_inside = self._step % (self.args.steps_per_generation * self.num_iterations)
        return (self._buffered_inputs or []) if is_inside else []

    def unlogged(self) -> dict[str, Any]:
        """How far this process is, and what it has gathered for the next line of metrics."""
        return {
            "step": self._step,
            "metrics": dict(self._metrics["train"]),
            "loss": self._tr_loss.item(),
            "total_loss": self._total_loss_scalar,
            "logged": self._globalstep_last_logged,
            "skipped": [self.finite.skipped, self.finite.in_a_row],
            "flat_steps": self.flat.in_a_row,
        }

    def go_on(self, pieces: list[dict[str, Any]], values: dict[str, Any]) -> None:
        """As if this process had come here itself: `rest_of_window` and `unlogged` of the one that did."""
        self._step, self._buffered_inputs = values["step"], pieces or None
        self._metrics["train"].update(values["metrics"])
        self._tr_loss = torch.tensor(values["loss"], device=self.args.device)
        self._total_loss_scalar, self._globalstep_last_logged = values["total_loss"], values["logged"]
        self.finite.skipped, self.finite.in_a_row = values["skipped"]
        self.flat.in_a_row = values["flat_steps"]

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Nothing: the card of a run is written by saving.py."""
