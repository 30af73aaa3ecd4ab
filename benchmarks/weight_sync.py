"""What it takes to hand new weights to a vLLM server: a LoRA adapter alone, against all weights, both as files.

`python -m benchmarks.weight_sync [--pairs N]`, where vLLM is installed; exits 1 when a bound is not met. One policy
with an adapter of the default rank, two real servers: one gets the adapter (`--vllm-sync adapter`), the other one base
and adapter added up (`--vllm-sync disk`). After each hand-over both must say the probabilities of the new policy.

The bound is on the bytes, for a model in the shape of Qwen2.5-0.5B; an adapter of the tiny model is a fifth of it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aitrain.options.train import TrainConfig
from aitrain.rollout.event_loop import EventLoop
from aitrain.vllm.server_process import MODEL_NAME, ServerConfig, VLLMServer
from benchmarks.measuring import Bounds, Row, options, show
from benchmarks.overhead import SURROUNDINGS, in_new_process
from benchmarks.shapes import QWEN_HALF_B, make_model

BYTES = Bounds(ratio=1 / 20)
CONTEXT = 256
LOOP = EventLoop()
NUDGE = 0.02
"""Standard deviation of what a step adds to each weight of the adapter: far more than a real one."""

PROMPTS = [[(7 * place + 31 * number) % 256 for place in range(8)] for number in range(8)]


@dataclass(frozen=True)
class Case:
    """A model to hand over."""

    name: str
    folder: str
    dtype: str
    bounds: Bounds | None = None


def main() -> int:
    """Measure, show, judge."""
    wanted = options("Bytes and seconds of handing weights to a vLLM server: adapter against all.").parse_args()
    os.environ.update(SURROUNDINGS)
    with tempfile.TemporaryDirectory(prefix="aitrain-weight-sync-") as folder:
        in_new_process(make_half_b, Path(folder) / "model")
        rows = compare(Case("tiny model", "tiny", "float32"), Path(folder) / "tiny", wanted.pairs)
        large = Case("0.5B, bfloat16", str(Path(folder) / "model"), "bfloat16", BYTES)
        rows += compare(large, Path(folder) / "large", wanted.pairs)
    print(f"{wanted.pairs} pairs; an adapter of rank {TrainConfig().lora_r} on all linear layers\n")
    return 0 if show(rows, "all weights", "adapter") else 1


def make_half_b(folder: Path) -> None:
    """In a process of its own."""
    make_model(QWEN_HALF_B, folder)


def compare(case: Case, folder: Path, pairs: int) -> list[Row]:
    """Both ways in turn, so many times; each goes once before, uncounted, because what runs first allocates."""
    folder.mkdir()
    policy = load_policy(case)
    with served(case, policy, folder / "adapter") as adapter, served(case, policy, folder / "disk") as disk:
        done = [hand_over(policy, adapter, disk) for _ in range(pairs + 1)][1:]
    names = (f"{case.name}: MiB", case.bounds), (f"{case.name}: seconds", None)
    return [
        Row(name, [ours[measure] for ours, _ in done], [theirs[measure] for _, theirs in done], bounds)
        for measure, (name, bounds) in enumerate(names)
    ]


def load_policy(case: Case) -> Any:
    """The model with an adapter, as a run with `--peft` has it."""
    import torch
    from peft import get_peft_model
    from transformers.utils.logging import disable_progress_bar

    from aitrain.training.model import load_model, lora_config

    disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = TrainConfig(model=case.folder, peft=True)
    return get_peft_model(load_model(config, getattr(torch, case.dtype)), lora_config(config)).eval()


@contextmanager
def served(case: Case, policy: Any, folder: Path) -> Iterator[Any]:
    """A server for this way of getting weights, started as a run starts it."""
    from accelerate import PartialState

    from aitrain.engines.server import VLLMServerEngine
    from aitrain.engines.server_fleet import ServerFleet
    from aitrain.engines.weight_sync import AdapterSync, DiskSync, roomy_folder
    from aitrain.rollout.limits import EndOfTurn
    from aitrain.training.model import model_path
    from aitrain.vllm.client import VLLMClient

    by_adapter = folder.name == "adapter"
    size = sum(weight.numel() * weight.element_size() for weight in policy.parameters())
    where = roomy_folder(folder, size)
    sync: Any = AdapterSync(policy, where) if by_adapter else DiskSync(policy, where, renews=True)
    plan = ServerConfig(
        model_path(case.folder),
        folder.with_suffix(".log"),
        context=CONTEXT,
        lora_rank=TrainConfig().lora_r if by_adapter else None,
        dtype=case.dtype,
    )
    with VLLMServer.start(plan, lambda _: None) as server:
        PartialState(cpu=True)
        engine = VLLMServerEngine(ServerFleet.of([VLLMClient(server.url)], sync), MODEL_NAME, EndOfTurn([]))
        try:
            yield engine
        finally:
            LOOP.run(engine.close())


def hand_over(policy: Any, *ways: Any) -> list[tuple[float, float]]:
    """After a step of training: MiB and seconds for each of the ways."""
    before = said_next(policy)
    nudge(policy)
    now = said_next(policy)
    took = []
    for way in ways:
        LOOP.run(way.load_weights(way.fleet.loads))
        took.append((way.last_bytes / 2**20, way.last_seconds))
    for way in ways:
        check(way, before, now)
    return took


def said_next(policy: Any) -> Any:
    """The log-probability of each token after each prompt: (prompts, vocabulary)."""
    import torch

    with torch.no_grad():
        return policy(torch.tensor(PROMPTS)).logits[:, -1].float().log_softmax(-1)


def nudge(policy: Any) -> None:
    """What stands for a step."""
    import torch

    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=NUDGE)


def check(way: Any, before: Any, now: Any) -> None:
    """The server has the weights of now, or bytes and seconds mean nothing. In bfloat16 it rounds otherwise than the
    trainer, so that what it says is compared with what it would say without the step.

    Raises:
        RuntimeError: it may as well have other weights.
    """
    import torch

    from aitrain.engines.sampling import CompletionBatch, Sampling

    answers = LOOP.run(way.generate_batch(CompletionBatch(PROMPTS, Sampling(), max_tokens=1)))
    tokens = torch.tensor([answer.ids for answer in answers])
    said = torch.tensor([answer.logprobs for answer in answers])
    off, stale = ((said - one.gather(1, tokens)).abs().mean() for one in (now, before))
    if off > stale / 4:
        raise RuntimeError(f"the server is off by {off:.4f}, and {stale:.4f} off from the step before: old weights?")


if __name__ == "__main__":
    sys.exit(main())
