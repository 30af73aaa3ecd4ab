"""What an eval costs beside the model: `python -m benchmarks.evaluation [--pairs N]`.

Plays 256 cases on a model of the tiny shape as `aitrain eval` does, with sessions, scores and records, and as a plain
loop over `generate` does: render, pad, generate, decode, score. Same process, same weights, same batches, answers of
128 tokens. With `--vllm`, where vLLM is installed: through a server that is started for it, against `vllm bench serve`,
with the same prompts and answers.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measuring import Bounds, Row, options, show
from benchmarks.overhead import SURROUNDINGS, in_new_process
from benchmarks.shapes import TINY, make_model

CASES, BATCH, ANSWER = 256, 32, 128
PLAIN_BOUND, SERVED_BOUND = Bounds(1.05), Bounds(1.10)
TOP_K = 50
"""The model of shapes.py ends no answer early where only these are sampled."""


CLIENT = (
    "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser();"
    "serve.add_cli_args(parser); serve.main(parser.parse_args())"
)
"""`vllm bench serve`, whose own console script does not run with the CPU build."""


class Digits:
    """Scores the share of digits in an answer."""

    def build_dataset(self) -> list[dict[str, Any]]:
        """Nothing to train on."""
        return prompts()[:1]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        """All cases."""
        return prompts()

    def score_episode(self, text: str) -> float:
        """The score of an answer."""
        return score(text)


def prompts() -> list[dict[str, Any]]:
    """Questions of several lengths, which are padded."""
    rng = random.Random(0)
    texts = [f"{number}: {'please ' * rng.randint(0, 6)}count" for number in range(CASES)]
    return [{"prompt": [{"role": "user", "content": text}]} for text in texts]


def score(text: str) -> float:
    """The share of digits."""
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


def main() -> int:
    """Measure and show."""
    parser = options("An eval against a plain loop over generate, or vLLM's benchmark client.")
    parser.add_argument("--vllm", action="store_true", help="through a vLLM server, against vllm bench serve")
    wanted = parser.parse_args()
    os.environ.update(SURROUNDINGS | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"})
    with tempfile.TemporaryDirectory(prefix="aitrain-evaluation-") as folder:
        in_new_process(partial(make_model, TINY), Path(folder) / "model")
        rows = served(Path(folder), wanted.pairs) if wanted.vllm else plain(Path(folder), wanted.pairs)
    print(f"{CASES} cases, {ANSWER} tokens an answer, {wanted.pairs} pairs; seconds\n")
    return 0 if show(rows, "vllm bench serve" if wanted.vllm else "plain loop") else 1


# -- in one process, against a plain loop


def plain(folder: Path, pairs: int) -> list[Row]:
    """Both decodings, by the clock on the wall and of the CPU.

    No bound for sampled completions: the plain loop draws all rows at once, aitrain each row with a seed of its own.
    """
    rows = []
    with prepared(folder, concurrency=BATCH) as ours:
        for decoding, bound in (("greedy", PLAIN_BOUND), ("sampled", None)):
            theirs = partial(plain_loop, ours.rollouts.rollout.engine.policy, decoding)
            sides = [partial(play, ours, folder, decoding), theirs]
            taken = [[seconds(side) for side in sides] for _ in range(pairs + 1)][1:]
            for name, clock, bounds in (("wall", 0, bound), ("CPU", 1, None)):
                times = [[side[clock] for side in pair] for pair in taken]
                rows.append(Row(f"{decoding}, {name}", *map(list, zip(*times, strict=True)), bounds))
    return rows


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """On the wall, and of the CPU."""
    start, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - used


@contextmanager
def prepared(folder: Path, **settings: Any) -> Iterator[Any]:
    """An eval that is ready to play, in this process."""
    from aitrain.engines.scopes import frozen_heap
    from aitrain.environment.runner import start_runner
    from aitrain.options.evaluate import EvalConfig
    from aitrain.runs.model_reference import read_model
    from aitrain.runs.run_folder import RunFolder
    from aitrain.training.eval_preparation import prepare_eval
    from aitrain.training.run_context import RunContext

    config = EvalConfig(
        model=str(folder / "model"), rl_max_new_tokens=ANSWER, rl_top_k=TOP_K, eval_cases=CASES, **settings
    )
    context = RunContext(config, RunFolder(folder), start_runner(Digits(), config), lambda event: None)
    with closing(context.runner):
        ready = prepare_eval(context, config, read_model(config.model))
        with closing(ready.rollouts), frozen_heap():
            yield ready


def play(ready: Any, folder: Path, *decodings: str) -> None:
    """Play and record all cases."""
    from aitrain.runs.run_folder import append_lines
    from aitrain.training.evaluation import EvalPhase, evaluate

    def write(records: Sequence[Any]) -> None:
        append_lines(folder / "records.jsonl", (record.to_json() for record in records))
        assert all(record.tokens == ANSWER for record in records)

    evaluate(ready.rollouts, replace(ready.plan, decodings=decodings), EvalPhase("eval", 0, 0), write)


def plain_loop(policy: Any, decoding: str) -> float:
    """The mean score, as a script would compute it."""
    import torch

    rows, model, tokenizer = prompts(), policy.model, policy.tokenizer
    sampling = {"do_sample": True, "top_k": TOP_K} if decoding == "sampled" else {"do_sample": False, "top_k": None}
    scores: list[float] = []
    for start in range(0, CASES, BATCH):
        chats = [row["prompt"] for row in rows[start : start + BATCH]]
        asked = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            ids = model.generate(**asked, max_new_tokens=ANSWER, **sampling)
        texts = tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        scores += map(score, texts)
    return sum(scores) / len(scores)


# -- through a server, against vLLM's own client


def served(folder: Path, pairs: int) -> list[Row]:
    """The same requests, with greedy decoding, from both clients to one server."""
    from aitrain.vllm.server_process import ServerConfig, VLLMServer

    config = ServerConfig(str(folder / "model"), folder / "vllm.log", context=512, dtype="float32")
    with VLLMServer.start(config, lambda _: None) as server:
        given = {"use_vllm": True, "vllm_mode": "server", "vllm_server_url": server.url}
        with prepared(folder, **given) as ours:
            write_requests(folder, ours)
            sides = [
                lambda: seconds(partial(play, ours, folder, "greedy"))[0],
                partial(bench_serve, folder, ours.rollouts.rollout.engine),
            ]
            taken = [[side() for side in sides] for _ in range(pairs + 1)][1:]
    return [Row("greedy, through a server", *map(list, zip(*taken, strict=True)), SERVED_BOUND)]


def write_requests(folder: Path, ready: Any) -> None:
    """The rendered prompts, in the form of vLLM's custom data set."""
    chat = ready.rollouts.rollout.chat
    texts = [chat.prompt_text(case.prompt) for case in ready.plan.cases]
    lines = [json.dumps({"prompt": text, "output_tokens": ANSWER}) for text in texts]
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n")


def bench_serve(folder: Path, engine: Any) -> float:
    """Seconds of vLLM's own benchmark client for the same requests, all sent at once."""
    result = folder / "bench.json"
    command = [
        sys.executable, "-c", CLIENT, "--backend", "vllm", "--base-url", engine.url, "--endpoint", "/v1/completions",
        "--served-model-name", engine.base_model, "--model", str(folder / "model"),
        "--tokenizer", str(folder / "model"),
        "--dataset-name", "custom", "--dataset-path", str(folder / "requests.jsonl"), "--skip-chat-template",
        "--custom-output-len", str(ANSWER), "--num-prompts", str(CASES), "--ignore-eos", "--temperature", "0",
        "--disable-tqdm", "--disable-shuffle", "--save-result", "--save-detailed", "--result-dir", str(folder),
        "--result-filename", result.name,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not result.exists():
        raise RuntimeError(
            f"vllm bench serve ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    found = json.loads(result.read_text())
    assert found["completed"] == CASES, found["errors"][0]
    return float(found["duration"])


if __name__ == "__main__":
    sys.exit(main())
