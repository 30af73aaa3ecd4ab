"""The GRPOTrainer subclass, and every place where we lean on the inside of TRL 1.16.

tests/test_upstream.py checks each of them by name:

    GRPOTrainer._generate_and_score_completions(inputs)     overridden: rows come in, advantages go out
    GRPOTrainer._tokenize_prompts(prompts)                  called, for evaluation
    GRPOTrainer._generate_single_turn(ids, images, fields, n)   called, for evaluation
    GRPOTrainer.generation_config, .generation_kwargs       replaced while decoding greedily
    GRPOTrainer.eos_token_ids                               read: what ends a completion
    GRPOTrainer.vllm_generation.temperature, .top_k, .top_p replaced while decoding greedily
    GRPOTrainer.create_model_card                           overridden: TRL's card is not ours
    output["advantages"]                                    this process's advantages, in the order of `inputs`
    reward function keywords                                prompts, completions, completion_ids, columns, log_metric
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import GenerationConfig, PreTrainedModel, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from aitrain.environment.contract import Case, Completion, Prompt
from aitrain.environment.scoring import FAILURE_KINDS, FailureCount, Scored, Scorer
from aitrain.training.dataset import Cases


@dataclass(frozen=True)
class Episode:
    """One case answered and scored. `tokens` counts the completion's; `stop` says what ended it."""

    completion: Completion
    tokens: int
    stop: str
    scored: Scored

    def record(self) -> dict[str, Any]:
        """The episode as a rollout record, less what only the batch knows (step, group, advantage)."""
        failure = self.scored.failure
        return {
            "case_idx": self.completion.case.case_idx,
            "prompt": self.completion.case.prompt,
            "messages": self.completion.messages,
            "completion": self.completion.text,
            "score": self.scored.score,
            "metrics": self.scored.metrics,
            "stop": "env_error" if failure else self.stop,
            "error": None if failure is None else {"kind": failure.kind, "message": failure.trace or failure.message},
            "tokens": self.tokens,
            "seconds": round(self.scored.seconds, 6),
        }


@dataclass(frozen=True)
class Parts:
    """What a trainer is made of."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    arguments: GRPOConfig
    cases: Cases
    environment: Any
    peft_config: Any = None


@dataclass(frozen=True)
class Hooks:
    """Whom the trainer tells: of each batch of rollout records, and of what a person should see."""

    write: Callable[[list[dict[str, Any]]], None]
    tell: Callable[[str], None]
    callbacks: list[TrainerCallback]


class EpisodeTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """GRPOTrainer whose prompts are an environment's cases and whose rewards are its scores."""

    def __init__(self, parts: Parts, hooks: Hooks) -> None:
        self.cases = parts.cases
        self.hooks = hooks
        self.failures = FailureCount()
        self._batch: list[Episode] = []
        super().__init__(
            model=parts.model,
            reward_funcs=[self.score],
            args=parts.arguments,
            train_dataset=parts.cases.as_dataset(),
            processing_class=parts.tokenizer,
            peft_config=parts.peft_config,
            callbacks=hooks.callbacks,
        )
        self.remove_callback(PrinterCallback)
        self.scorer = Scorer(parts.environment, self.accelerator.unwrap_model(self.model), parts.tokenizer)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """`inputs`: one row of `Cases.as_dataset()` for each completion of this process, groups side by side."""
        cases = [self.cases[row["case"]] for row in inputs]
        output: dict[str, Any] = super()._generate_and_score_completions(
            [{"prompt": case.prompt, "case": case} for case in cases]
        )
        self._write_rollouts(output["advantages"].tolist())
        return output

    def score(
        self, completions: list[Any], completion_ids: list[list[int]], case: list[Case], **rest: Any
    ) -> list[float | None]:
        """TRL's reward function: the environment's score for each completion, None where there is none."""
        self._batch = self.episodes(case, completions, completion_ids)
        self._note_failures(self._batch)
        for name, value in _batch_metrics(self._batch).items():
            rest["log_metric"](name, value)
        return [episode.scored.score for episode in self._batch]

    def episodes(
        self, cases: Sequence[Case], completions: Sequence[Any], completion_ids: Sequence[list[int]]
    ) -> list[Episode]:
        """The answered cases, scored by the environment; all three in the same order."""
        answers = [Completion(case, content) for case, content in zip(cases, completions, strict=True)]
        with evaluation_mode(self.model):  # an environment that generates itself wants no dropout and its cache
            scored = self.scorer.score(answers)
        return [
            Episode(answer, len(ids), "done" if ids and ids[-1] in self.eos_token_ids else "max_tokens", result)
            for answer, ids, result in zip(answers, completion_ids, scored, strict=True)
        ]

    def _note_failures(self, episodes: list[Episode]) -> None:
        """Counted over all processes, so that all of them give up at the same moment."""
        scores = sum(episode.scored.score is not None for episode in episodes)
        failures = sum(episode.scored.failure is not None for episode in episodes)
        counts = torch.tensor([scores, failures], device=self.accelerator.device)
        scores, failures = self.accelerator.reduce(counts, reduction="sum").tolist()
        if failures:
            self.tell_failures(episodes)
        self.failures.after_batch(scores, failures)

    def tell_failures(self, episodes: list[Episode]) -> None:
        """Show the first failure of each kind; every process must call this, for the other ones' failures."""
        named = [
            (e.scored.failure.kind, f"score_episode of case {e.completion.case.case_idx} {e.scored.failure.message}")
            for e in episodes
            if e.scored.failure is not None
        ]
        for message in self.failures.first_of_each(gather_object(named)):
            self.hooks.tell(message)

    def _write_rollouts(self, advantages: list[float]) -> None:
        first = self.accelerator.process_index * len(self._batch)
        self.hooks.write(
            [
                {"step": self.state.global_step + 1, "group": (first + index) // self.num_generations}
                | episode.record()
                | {"advantage": advantage}
                for index, (episode, advantage) in enumerate(zip(self._batch, advantages, strict=True))
            ]
        )

    def answer(self, prompts: list[Prompt]) -> tuple[list[Any], list[list[int]]]:
        """Completions for prompts, sampled as in training: (as the environment is shown them, their token ids).

        With a vLLM server every process must bring equally many prompts.
        """
        prompt_ids, images, fields = self._tokenize_prompts(prompts)
        completion_ids, _ = self._generate_single_turn(prompt_ids, images, fields, 1)
        texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        if isinstance(prompts[0], str):
            return texts, completion_ids
        return [[{"role": "assistant", "content": text}] for text in texts], completion_ids

    @contextmanager
    def greedy(self) -> Iterator[None]:
        """While this lasts, `answer` takes the likeliest token every time."""
        owner, changed = self._greedy_settings()
        before = {name: getattr(owner, name) for name in changed}
        vars(owner).update(changed)
        try:
            yield
        finally:
            vars(owner).update(before)

    def _greedy_settings(self) -> tuple[Any, dict[str, Any]]:
        if self.use_vllm:
            return self.vllm_generation, {"temperature": 0.0, "top_k": -1, "top_p": 1.0}
        likeliest = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
        settings = self.generation_kwargs | likeliest
        return self, {
            "generation_config": GenerationConfig(**settings, disable_compile=True),
            "generation_kwargs": settings,
        }

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Nothing: the card of a run is written by saving.py."""


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """No dropout, no gradients; afterwards as before."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _batch_metrics(episodes: list[Episode]) -> dict[str, float]:
    """Means over a batch: the environment's own metrics, and the share of episodes without a score."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.scored.metrics.items():
            values.setdefault(f"env/{name}", []).append(value)
    kinds = [episode.scored.failure.kind for episode in episodes if episode.scored.failure]
    shares = {f"failed/{kind}": kinds.count(kind) / len(episodes) for kind in FAILURE_KINDS}
    unscored = sum(episode.scored.score is None for episode in episodes) / len(episodes)
    means = {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
    return {"unscored": unscored, **means, **shares}
