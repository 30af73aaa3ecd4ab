"""The peer of overhead.py: GRPO as one writes it with TRL alone; nothing here imports aitrain.

`python -m benchmarks.plain_trl ARGUMENTS.json TASK OUTPUT_DIR`; the file holds `model`, `grpo`, the keyword arguments
of GRPOConfig, and `lora`, those of LoraConfig or null; TASK has the arguments of Letters as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from benchmarks.letters import Letters


def main(arguments_file: str, task_arguments: str, output_dir: str) -> None:
    """Train and save."""
    arguments = json.loads(Path(arguments_file).read_text(encoding="utf-8"))
    task = Letters(**json.loads(task_arguments))

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokenizer = trainer.processing_class  # TRL's `completions` lack the special tokens that the model wrote
        ends = set(trainer.eos_token_ids)
        texts = [tokenizer.decode(ids[:-1] if ids[-1] in ends else ids) for ids in completion_ids]
        return [task.score_episode([{"role": "assistant", "content": text}]) for text in texts]

    trainer = GRPOTrainer(
        model=arguments["model"],
        reward_funcs=reward,
        args=GRPOConfig(output_dir=output_dir, **arguments["grpo"]),
        train_dataset=Dataset.from_list(task.build_dataset()),
        peft_config=LoraConfig(**arguments["lora"]) if arguments["lora"] else None,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
