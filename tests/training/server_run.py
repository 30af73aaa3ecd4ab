"""Train with a vLLM server that is written down: `-m tests.training.server_run MODEL OUT` under torchrun.

All is TRL's own but the client of that server, which gives each prompt an answer that belongs to no other.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
import trl.generation.vllm_generation as vllm_generation
from transformers import AutoTokenizer

from aitrain.engines import colocated
from aitrain.environment.runner import start_runner
from aitrain.events import Event
from aitrain.jobs.grpo import run
from aitrain.jobs.worker import exit_now
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder, append_lines
from aitrain.training.distributed import shutdown_group
from aitrain.training.run_context import RunContext


class Echo:
    """Asks as many more times as the case says, so that processes have different numbers of episodes under way. Scores
    differ within a group, where the answers do not."""

    concurrent = True

    def __init__(self) -> None:
        self.played, self.lock = itertools.count(), threading.Lock()

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"case {number}."} for number in range(24)]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"case {24 + number}."} for number in range(5)]

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        yield None
        for turn in range(turns_of(case_idx) - 1):
            yield f" turn {turn + 1}."
        with self.lock:
            return next(self.played) % 7 / 7


def turns_of(case_idx: int) -> int:
    """How many answers an episode gets."""
    return 1 + case_idx % 6


class Client:
    """Answers `case 5. ... turn 2. ...` with `5/2`, and notes its calls."""

    tokenizer: Any
    out: Path

    def __init__(self, **_: Any) -> None:
        pass

    def note(self, what: str, **values: Any) -> None:
        append_lines(self.out / "calls", [{"call": what, **values}])

    def init_communicator(self, device: Any) -> None:
        self.note("init_communicator", device=str(device))

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: Any, parameters: Any) -> None:
        sent = [(name, tensor.clone()) for name, tensor in parameters]
        shapes = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in sent]
        self.note("update_named_params", announced=[list(entry) for entry in metadata], sent=shapes)
        torch.save(dict(sent), self.out / "weights.pt")

    def reset_prefix_cache(self) -> None:
        self.note("reset_prefix_cache")

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **_: Any) -> dict[str, Any]:
        assert n == 1
        self.note("generate")
        answers = [self.tokenizer(answer_to(self.tokenizer.decode(ids)))["input_ids"][:max_tokens] for ids in prompts]
        logprobs = [[[-1.0]] * len(ids) for ids in answers]
        return {"prompt_ids": prompts, "completion_ids": answers, "logprobs": logprobs}


def answer_to(given: str) -> str:
    """What belongs to a prompt, and to no other."""
    case, turns = re.findall(r"case (\d+)\.", given), re.findall(r"turn (\d+)\.", given)
    return f"{case[0] if case else '?'}/{turns[-1] if turns else 0}<|im_end|>"


class Health(BaseHTTPRequestHandler):
    """Somebody answers at the server's address."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def ignore(event: Event) -> None:
    """Nobody watches."""


def main(model: str, out: Path) -> None:
    Client.tokenizer, Client.out = AutoTokenizer.from_pretrained(model), out
    vllm_generation.is_vllm_available = lambda: True
    colocated.KeyedClient = Client  # type: ignore[assignment,misc]
    health = HTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=health.serve_forever, daemon=True).start()
    config = TrainConfig(
        model=model, rl_prompts_per_step=6, batch_size=4, rl_num_generations=4, max_steps=4, rl_max_new_tokens=8,
        rl_kl_coef=0.0, save_strategy="no", output_dir=str(out),
        use_vllm=True, vllm_mode="server", vllm_server_url=f"http://127.0.0.1:{health.server_port}", vllm_sync="nccl",
    )  # fmt: skip
    folder = RunFolder(out / "run")
    if os.environ.get("RANK", "0") == "0":
        folder.path.mkdir(parents=True)
    run(RunContext(config, folder, start_runner(Echo(), config), ignore))
    shutdown_group()


if __name__ == "__main__":
    from tests.training import server_run  # whose classes are in a module that can be read

    server_run.main(sys.argv[1], Path(sys.argv[2]))
    exit_now(0)
