"""How close vLLM's log-probabilities are to the trainer's, with sampling from all tokens and from some of them.

`python -m benchmarks.importance`, where vLLM is installed. A random model with a vocabulary of 32,000 and a peaked
distribution, in float32; vLLM inside the training process and as a server; answers of 32 and of 256 tokens. Weights are
equal on both sides, so the importance ratio of an episode, the product of its tokens' ratios, should be 1. Next to it
is what it would be if the two were compared as they come.

Fails where a mean ratio is not 1 within 0.02.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.overhead import SURROUNDINGS
from benchmarks.shapes import Shape, make_model

SHAPE = Shape("vocabulary of 32,000", layers=2, hidden=64, heads=2, key_heads=2, intermediate=128, vocabulary=32_000)
SPREAD = 150.0
"""What the random head is multiplied by: the 50 most likely tokens then have about 0.9 of the probability."""
LENGTHS = (32, 256)
PROMPTS, GENERATIONS = 2, 4
BOUND = 0.02

WAYS: dict[str, dict[str, Any]] = {"inside": {}, "server": {"vllm_mode": "server"}}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.02": {"min_p": 0.02},
    "top-k 50, top-p 0.9, min-p 0.02": {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "penalties and min tokens": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "min_new_tokens": 32,
    },
}


class Asks:
    """Asks something short, and takes any answer."""

    def build_dataset(self) -> list[dict[str, Any]]:
        """Enough cases for one batch."""
        return [{"prompt": f"say {number}:"} for number in range(8 * PROMPTS)]

    def score_episode(self, completion: str) -> float:
        """Half a point."""
        return 0.5


def main() -> int:
    """Measure, show, and check the bound."""
    parser = argparse.ArgumentParser(description="Importance ratios between vLLM and the trainer with equal weights.")
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    wanted = parser.parse_args()
    os.environ.update(SURROUNDINGS | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"})
    with tempfile.TemporaryDirectory(prefix="aitrain-importance-") as folder:
        in_new_process(make_peaked, SHAPE, Path(folder))
        rows = [row for way in wanted.ways for row in in_new_process(measure, way, Path(folder))]
    print(f"{'vLLM':8}{'sampling':36}{'tokens':>8}{'ratio':>10}{'lowest':>10}{'highest':>10}{'as they come':>16}")
    for way, name, tokens, ratios, raw in rows:
        mean, others = sum(ratios) / len(ratios), sum(raw) / len(raw)
        print(f"{way:8}{name:36}{tokens:8}{mean:10.4f}{min(ratios):10.4f}{max(ratios):10.4f}{others:16.3g}")
    return int(any(abs(sum(ratios) / len(ratios) - 1) > BOUND for *_, ratios, _ in rows))


def in_new_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What needs torch and vLLM happens elsewhere: one engine is gone before the next one starts."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def make_peaked(shape: Shape, folder: Path) -> None:
    """A model of random weights in float32 whose head is its own, and large."""
    import torch
    from transformers import AutoModelForCausalLM

    make_model(shape, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = torch.nn.Parameter(model.get_input_embeddings().weight.detach() * SPREAD / shape.hidden**0.5)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = head
    model.save_pretrained(folder)


def measure(way: str, model: Path) -> list[tuple[str, str, int, list[float], list[float]]]:
    """A batch of each kind, played by one trainer: mean tokens, and ratios of episodes, corrected and not."""
    with prepared(way, model) as trainer:
        return [
            (way, name, *batch(trainer, sampling, length)) for length in LENGTHS for name, sampling in SAMPLINGS.items()
        ]


@contextmanager
def prepared(way: str, model: Path) -> Iterator[Any]:
    """The trainer of a run, with a vLLM server of its own if that is its way."""
    from aitrain.environment.runner import EnvRunner
    from aitrain.launch.managed_server import managed_server
    from aitrain.launch.preflight import check
    from aitrain.options.train import TrainConfig
    from aitrain.training.preparation import prepare
    from aitrain.training.run_context import RunContext
    from benchmarks.quiet_training import SETTINGS

    where = {"model": str(model), "output_dir": str(model / "runs"), "project_name": way, "eval_cases": 0}
    sizes = {"batch_size": 4, "rl_prompts_per_step": PROMPTS, "rl_num_generations": GENERATIONS}
    config = TrainConfig(**(SETTINGS | where | sizes | WAYS[way]), use_vllm=True, rl_max_new_tokens=max(LENGTHS))
    plan = check(config, has_environment=True)
    folder = plan.open_folder()
    with managed_server(plan, folder, lambda _: None) as url, closing(EnvRunner(Asks(), plan.config)) as runner:
        config = plan.config.model_copy(update={"vllm_server_url": url} if url else {})
        trainer = prepare(RunContext(config, folder, runner, lambda _: None)).trainer
        with closing(trainer.rollouts):
            yield trainer


def batch(trainer: Any, sampling: dict[str, Any], length: int) -> tuple[int, list[float], list[float]]:
    """Mean tokens of an episode; the ratio of each, corrected and not; for a batch of this sampling and length."""
    import torch

    from aitrain.engines.sampling import Sampling
    from aitrain.engines.scopes import replaced
    from aitrain.rollout.limits import Limits

    shaped = Sampling(**sampling)
    limits = Limits(1, length, None, trainer.rollouts.rollout.limits.context)
    rollout = replace(trainer.rollouts.rollout, limits=limits)
    rows = [{"case": place // GENERATIONS} for place in range(PROMPTS * GENERATIONS)]
    with (
        replaced(trainer, {"sampling": shaped}),
        replaced(trainer.rollouts, {"rollout": rollout}),
        replaced(rollout.engine, {"sampling": shaped}),
    ):
        trainer.model.train()
        output = trainer._generate_and_score_completions(rows)
    mask = (output["completion_mask"] * output["tool_mask"]).float()
    difference = (output["old_per_token_logps"] - output["sampling_per_token_logps"]) * mask
    said = torch.zeros_like(mask)
    for row, episode in enumerate(trainer._batch.episodes):
        said[row, : len(episode.trajectory.ids)] = torch.tensor(episode.trajectory.logprobs)
    raw = (output["old_per_token_logps"] - said) * mask
    tokens = int(mask.sum(-1).mean())
    return tokens, difference.sum(-1).exp().tolist(), raw.sum(-1).exp().tolist()


if __name__ == "__main__":
    sys.exit(main())
