"""The second half of slow_environment.py: a tool that waits, in aitrain's trainer and in TRL's.

What the model says is written down, so that both sides make the same calls and generating costs nothing on either.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from aitrain.batch import plan_batch
from aitrain.engines.batching import BatchRow
from aitrain.engines.hf import HFEngine
from aitrain.options.train import TrainConfig
from aitrain.rollout.engine import Completion
from aitrain.training.model import TINY_MODEL, choose_precision
from aitrain.training.trainer import EpisodeTrainer
from aitrain.training.trl_arguments import grpo_arguments
from benchmarks.measuring import Bounds, Row
from benchmarks.quiet_training import SETTINGS, quietly, train

SECONDS = 0.25
TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
"""One whose tool calls TRL can read."""

MOST_TOKENS = 512
SEEN = ("completion_ids", "tool_mask")
"""What must be the same on both sides."""


# -- the environment


class Shop:
    """Asks for stock, which a tool knows after a while. In TRL's form: all public methods but two are tools."""

    asked = 0

    def reset(self, **_: Any) -> None:
        """A new episode."""
        self.asked = 0

    def stock(self, item: int) -> str:
        """Look up how many there are.

        Args:
            item: The number of the item.
        """
        time.sleep(SECONDS)
        return self._found(item)

    def get_reward(self) -> float:
        """Something that differs inside of a group."""
        return self.asked / 2

    def _found(self, item: int) -> str:
        self.asked += 1
        return f"{item * 3} left"


class AsyncShop(Shop):
    """The same with an async tool."""

    async def stock(self, item: int) -> str:  # type: ignore[override]
        """Look up how many there are.

        Args:
            item: The number of the item.
        """
        await asyncio.sleep(SECONDS)
        return self._found(item)


class Shops:
    """The same as an environment of aitrain's: a shop for each episode."""

    def __init__(self, shop: type[Shop]) -> None:
        self.shop = shop

    def build_dataset(self) -> list[dict[str, Any]]:
        """Items to ask for."""
        return [{"prompt": [{"role": "user", "content": f"Is item {number} there?"}]} for number in range(64)]

    def start(self) -> OpenShop:
        """A new episode."""
        return OpenShop(self.shop())


class OpenShop:
    """One episode."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop

    def get_tools(self) -> list[Any]:
        """The one that waits."""
        return [self.shop.stock]

    def step(self, reply: str) -> None:
        """The first answer without a call is the last one."""

    def score(self) -> float:
        """As TRL's side has it."""
        return self.shop.get_reward()


# -- the model


class Scripted:
    """What the model says, and a clock for the rollout; in front of a trainer."""

    answers = 0
    seconds = 0.0
    seen: list[Any]

    @classmethod
    def answer_to(cls, tokenizer: Any, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Token ids of what is said after each prompt."""
        cls.answers += len(prompt_ids)
        ids: list[list[int]] = tokenizer([says(tokenizer.decode(ids)) for ids in prompt_ids])["input_ids"]
        return ids

    def _generate_and_score_completions(self: Any, inputs: list[Any]) -> dict[str, Any]:
        type(self).answers, start = 0, time.perf_counter()
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        type(self).seconds = time.perf_counter() - start
        type(self).seen = [(output[name] * output["completion_mask"]).tolist() for name in SEEN]
        return output

    def _compute_loss(self: Any, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        return 0.0 * torch.stack([weights.sum() for weights in model.parameters()]).sum()  # only rollouts are measured


def says(given: str) -> str:
    """An item with an even number is asked for twice, any other one once; then there is an answer."""
    item = int(re.findall(r"Is item (\d+)", given)[-1])
    if given.count("<tool_response>") < 1 + (item % 2 == 0):
        return f'<tool_call>\n{{"name": "stock", "arguments": {{"item": {item}}}}}\n</tool_call><|im_end|>'
    return "Yes.<|im_end|>"


class Ours(Scripted, EpisodeTrainer):  # type: ignore[misc]
    """aitrain's trainer."""


class Theirs(Scripted, GRPOTrainer):  # type: ignore[misc]
    """TRL's."""

    def _generate_single_turn(
        self: Any, prompt_ids: list[list[int]], *_: Any, **__: Any
    ) -> tuple[list[list[int]], None]:
        return self.answer_to(self.processing_class, prompt_ids), None


def scripted_sample(engine: HFEngine, rows: list[BatchRow], *_: Any) -> list[Completion]:
    """In the place of `HFEngine.sample`."""
    prompts = [row.prompt_ids for row in rows]
    return [Completion(ids) for ids in Ours.answer_to(engine.policy.tokenizer, prompts)]


# -- measuring


def per_turn(episodes: int, pairs: int, bounds: Bounds) -> list[Row]:
    """Milliseconds of a rollout for each answer of the model, with the tool in both forms."""
    with tempfile.TemporaryDirectory(prefix="aitrain-tools-") as folder:
        settings = {"model": model_with_tools(Path(folder)), **step_of(episodes)}
        rows = []
        for name, shop in ((f"tool of {SECONDS:g} s: ms per turn", Shop), ("the same, async", AsyncShop)):
            done = [(aitrain_turn(shop, settings, folder), trl_turn(shop, settings, folder)) for _ in range(pairs)]
            rows.append(Row(name, *zip(*done, strict=True), bounds))
    return rows


def model_with_tools(folder: Path) -> str:
    """The tiny model with another chat template."""
    model = folder / "model"
    shutil.copytree(TINY_MODEL, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.save_pretrained(model)
    return str(model)


def step_of(episodes: int) -> dict[str, Any]:
    """One step with so many."""
    batch = {"batch_size": episodes, "rl_prompts_per_step": episodes // 4, "rl_num_generations": 4}
    return {**batch, "max_steps": 1, "eval_cases": 0, "rl_max_new_tokens": MOST_TOKENS}


def aitrain_turn(shop: type[Shop], settings: dict[str, Any], folder: str) -> float:
    """A step with aitrain; milliseconds per turn."""
    with patch("aitrain.training.preparation.EpisodeTrainer", Ours), patch.object(HFEngine, "sample", scripted_sample):
        train(Shops(shop), folder, **settings)
    return 1000 * Ours.seconds / Ours.answers


def trl_turn(shop: type[Shop], settings: dict[str, Any], folder: str) -> float:
    """The same step with TRL alone, by the arguments that aitrain makes of the settings."""
    config = TrainConfig(**(SETTINGS | settings))
    arguments = grpo_arguments(config, plan_batch(config, 1), choose_precision(config))
    with quietly():
        trainer = Theirs(
            model=config.model,
            args=GRPOConfig(output_dir=tempfile.mkdtemp(dir=folder), **arguments),
            train_dataset=Dataset.from_list(Shops(shop).build_dataset()),
            processing_class=AutoTokenizer.from_pretrained(config.model),
            environment_factory=shop,
        )
        trainer.train()
    if (Ours.answers, Ours.seen) != (Theirs.answers, Theirs.seen):
        raise RuntimeError("the two sides did not play the same episodes: their times cannot be compared")
    return 1000 * Theirs.seconds / Theirs.answers
