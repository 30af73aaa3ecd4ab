"""Train with completions that are written down, not sampled: `scripted_run.py MODEL OUT`, alone or under torchrun.

Eight completions a step whatever the number of processes, so that the only difference is who computes what.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from aitrain.config import TrainConfig
from aitrain.events import Event
from aitrain.run_folder import RunFolder
from aitrain.training.run import Job, part_in_peace, run
from aitrain.training.trainer import EpisodeTrainer
from aitrain.training.worker import leave

ANSWERS = ["abz", "zzzzz", "bcd", "mno", "y", "aaaaaa", "nnm", "xyab"]


class Scripted:
    """Rewards letters below n, as the answers have them in different shares."""

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}:"} for number in range(16)]

    def score_episode(self, completion: str) -> float:
        return sum(letter < "n" for letter in completion) / max(1, len(completion))


class ScriptedTrainer(EpisodeTrainer):
    """The real trainer, but for what it would have sampled."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
        first = self.accelerator.process_index * len(prompt_ids)
        answers = [
            ANSWERS[(first + index + sum(ids)) % len(ANSWERS)] + "<|im_end|>" for index, ids in enumerate(prompt_ids)
        ]
        return self.processing_class(answers)["input_ids"], None


def ignore(event: Event) -> None:
    """Nobody watches."""


def main(model: str, out: Path) -> None:
    import aitrain.training.run as module

    module.EpisodeTrainer = ScriptedTrainer  # type: ignore[misc]
    for loss in ("grpo", "dr_grpo", "dapo"):
        config = TrainConfig(
            model=model, rl_prompts_per_step=2, batch_size=4, rl_num_generations=4, rl_loss_type=loss, max_steps=4,
            lr=1e-3, rl_kl_coef=0.0, eval_cases=0, rl_max_new_tokens=8, save_strategy="no", output_dir=str(out),
        )  # fmt: skip
        folder = RunFolder(out / loss)
        if os.environ.get("RANK", "0") == "0":
            folder.path.mkdir(parents=True)
        run(Job(config, folder, Scripted(), ignore))
    part_in_peace()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    leave(0)
