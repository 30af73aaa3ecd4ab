"""Train with completions that are written down, not sampled: `-m tests.training.scripted_run MODEL OUT`, or torchrun.

Eight completions a step whatever the number of processes, so that the only difference is who computes what.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aitrain.engines import scopes
from aitrain.engines.batching import BatchRow
from aitrain.engines.hf import HFEngine
from aitrain.environment.runner import start_runner
from aitrain.events import Event
from aitrain.jobs.grpo import run
from aitrain.jobs.worker import exit_now
from aitrain.options.train import TrainConfig
from aitrain.rollout.engine import Completion
from aitrain.runs.run_folder import RunFolder
from aitrain.training.distributed import shutdown_group
from aitrain.training.run_context import RunContext

ANSWERS = ["abz", "zzzzz", "bcd", "mno", "y", "aaaaaa", "nnm", "xyab"]


class Scripted:
    """Rewards letters below n, as the answers have them in different shares. A step holds the last case of an epoch and
    the first of the next."""

    concurrent = True  # the scripted policy counts the rows of each batch

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}:"} for number in range(7)]

    def score_episode(self, completion: str) -> float:
        return sum(letter < "n" for letter in completion) / max(1, len(completion))


class ScriptedTalk(Scripted):
    """The same over several turns, more of them for some cases and answers than for others."""

    score_episode = None  # type: ignore[assignment]

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        said = reply = yield None
        for turn in range(case_idx % 3 + len(reply) % 2):
            reply = yield f" more {turn}:"
            said += reply
        return sum(letter < "n" for letter in said) / max(1, len(said))


class Unscored(Scripted):
    """Every second case has no score, so that a process may have none at all."""

    def score_episode(self, completion: str, case_idx: int) -> float | None:  # type: ignore[override]
        return None if case_idx % 2 else super().score_episode(completion)


class Endless(Scripted):
    """In every second case the environment never stops asking."""

    score_episode = None  # type: ignore[assignment]

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        reply = yield None
        while case_idx % 2:
            yield " more:"
        return sum(letter < "n" for letter in reply) / max(1, len(reply))


def scripted_sample(self: HFEngine, rows: list[BatchRow], *_: Any) -> list[Completion]:
    """In the place of sampling: the answer depends on what was said before, and on how many others of the group have
    said the same, so that it is the same for any number of processes."""
    seen: Counter[int] = Counter()
    answers = []
    for ids in (row.prompt_ids for row in rows):
        answers.append(ANSWERS[(seen[sum(ids)] + sum(ids)) % len(ANSWERS)] + "<|im_end|>")
        seen[sum(ids)] += 1
    return [Completion(ids) for ids in self.policy.tokenizer(answers)["input_ids"]]


REWARDS = {
    "rl_kl_coef": 0.1, "rl_kl_in": "reward", "rl_kl_estimator": "k2", "rl_baseline": "leave_one_out",
    "rl_overlong_buffer": 6,
}  # fmt: skip
LOSS = {
    "rl_kl_coef": 0.1, "rl_kl_estimator": "k2", "custom_loss": "tests/environments/extensions.py:likelihood",
}  # fmt: skip
KINDS: list[tuple[str, type[Scripted], dict[str, Any]]] = [
    ("grpo", Scripted, {}), ("dr_grpo", Scripted, {}), ("dapo", Scripted, {}), ("grpo", ScriptedTalk, {}),
    ("grpo", Unscored, {}), ("dapo", Unscored, {}), ("dr_grpo", ScriptedTalk, REWARDS), ("dr_grpo", Unscored, LOSS),
]  # fmt: skip
TRIMMED = [("grpo", ScriptedTalk, {}), ("dapo", Unscored, {}), ("dr_grpo", ScriptedTalk, REWARDS)]
"""Of these, those that are trained with trimmed padding as well."""


class Evaluated:
    """One turn, and two completions that the environment samples itself; every other prompt is the same. Notes each
    call, as held-out cases are to be scored once."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}:"} for number in range(8)]

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [
            {"prompt": "say:" if number % 2 else f"tell {number}:", "case_idx": 100 + number} for number in range(9)
        ]

    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> dict[str, float]:
        with self.notes.open("a") as file:
            file.write(f"{case_idx}\n")
        ids = tokenizer([f"{completion} more:"] * 2, return_tensors="pt")
        said = model.generate(**ids, do_sample=True, top_k=0, max_new_tokens=5, num_return_sequences=2)
        own = float(said[:, ids["input_ids"].shape[1] :].sum())
        return {"score": sum(letter < "n" for letter in completion) / max(1, len(completion)), "own": own}


class EvaluatedTalk(Evaluated):
    """Three turns of the policy."""

    score_episode = None  # type: ignore[assignment]

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        with self.notes.open("a") as file:
            file.write(f"{case_idx}\n")
        said = yield None
        for turn in range(1 + case_idx % 2):
            said += yield f" more {turn}:"
        return sum(letter < "n" for letter in said) / max(1, len(said))


def ignore(event: Event) -> None:
    """Nobody watches."""


def main(model: str, out: Path) -> None:
    scopes.gc = SimpleNamespace(collect=int, freeze=int, unfreeze=int)  # type: ignore[assignment]  # as in conftest.py
    sample, HFEngine.sample = HFEngine.sample, scripted_sample  # type: ignore[method-assign]
    for (loss, environment, more), trims in [*((kind, False) for kind in KINDS), *((kind, True) for kind in TRIMMED)]:
        plain: dict[str, Any] = {"rl_kl_coef": 0.0, **more}
        config = TrainConfig(
            model=model, rl_prompts_per_step=2, batch_size=4, rl_num_generations=4, rl_loss_type=loss, max_steps=4,
            lr=1e-3, eval_cases=0, rl_max_new_tokens=8, save_strategy="no", output_dir=str(out), rl_trim_padding=trims,
            **plain,
        )  # fmt: skip
        folder = RunFolder(out / f"{loss}-{environment.__name__}{'-trimmed' if trims else ''}")
        if os.environ.get("RANK", "0") == "0":
            folder.path.mkdir(parents=True)
        run(RunContext(config, folder, start_runner(environment(), config), ignore))
    HFEngine.sample = sample  # type: ignore[method-assign]
    for kind in (Evaluated, EvaluatedTalk):
        config = TrainConfig(
            model=model, rl_prompts_per_step=4, batch_size=4, rl_num_generations=4, max_steps=1, rl_kl_coef=0.0,
            rl_max_new_tokens=8, save_strategy="no", output_dir=str(out),
        )  # fmt: skip
        folder = RunFolder(out / kind.__name__)
        if os.environ.get("RANK", "0") == "0":
            folder.path.mkdir(parents=True)
        run(RunContext(config, folder, start_runner(kind(out / f"{kind.__name__}.calls"), config), ignore))
    shutdown_group()


if __name__ == "__main__":
    from tests.training import scripted_run  # whose classes are in a module that can be read

    scripted_run.main(sys.argv[1], Path(sys.argv[2]))
    exit_now(0)
