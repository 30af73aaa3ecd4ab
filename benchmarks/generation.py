"""How fast a rollout is with vLLM, inside the training process and as a server, against transformers' `generate`.

`python -m benchmarks.generation [--pairs N]`, where vLLM is installed. Three runs are prepared, each in processes of
its own, that differ in who generates; each plays the same cases in turn. A rollout is what a step does until the scores
are there, with the new weights handed to vLLM first. All answers have the same length, or the benchmark fails.

No bounds: vLLM is made for GPUs, and the one that this was written with is its CPU build.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from aitrain.options.train import TrainConfig
from benchmarks.measuring import PATIENCE, Row, options, show
from benchmarks.overhead import SURROUNDINGS, in_new_process
from benchmarks.quiet_training import SETTINGS
from benchmarks.shapes import SMALL, TINY, Shape, make_model

PROMPTS, GENERATIONS = 8, 4
EPISODES = PROMPTS * GENERATIONS
ANSWER = 32
TURNS = (1, 4)
ROUNDS = 100
"""No rollout plays a case that another one has played: vLLM remembers what it has read."""

GENERATE = "generate"
WAYS: dict[str, dict[str, Any]] = {
    GENERATE: {},
    "inside": {"use_vllm": True},
    "server": {"use_vllm": True, "vllm_mode": "server"},
}
VLLM = [way for way in WAYS if way != GENERATE]
VLLM_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}


class Talk:
    """Listens to one answer in the first half of its cases, to several in the second, and scores digits."""

    def build_dataset(self) -> list[dict[str, Any]]:
        """Enough cases of each kind for all rollouts."""
        return [
            {"prompt": [{"role": "user", "content": f"{number}?"}], "turns": turns}
            for turns in TURNS
            for number in range(PROMPTS * ROUNDS)
        ]

    def episode(self, turns: int) -> Generator[str | None, str, float]:
        """One episode."""
        said = yield None
        for _ in range(turns - 1):
            said += yield "more?"
        return sum(letter.isdigit() for letter in said) / max(1, len(said))


def main() -> int:
    """Measure and show."""
    wanted = options("Tokens per second of rollouts: vLLM against transformers' generate.").parse_args()
    os.environ.update(SURROUNDINGS | VLLM_ON_CPU)
    with tempfile.TemporaryDirectory(prefix="aitrain-generation-") as folder:
        rows = [row for shape in (TINY, SMALL) for row in compare(shape, Path(folder) / shape.name, wanted.pairs)]
    print(f"{wanted.pairs} pairs of rollouts of {EPISODES} episodes, {ANSWER} tokens an answer\n")
    show(rows, "generate", "vLLM")
    return 0


def compare(shape: Shape, folder: Path, pairs: int) -> list[Row]:
    """All three in turn, so many times; each goes once before, uncounted, because what runs first allocates."""
    in_new_process(partial(make_model, shape), folder)
    with ExitStack() as stack:
        players = {way: stack.enter_context(Player.started(folder, way)) for way in WAYS}
        done = [
            {(way, turns): player.play(number, turns) for turns in TURNS for way, player in players.items()}
            for number in range(pairs + 1)
        ][1:]
    return [row(shape.name, measure, way, turns, done) for turns in TURNS for way in VLLM for measure in MEASURES]


def row(shape: str, measure: str, way: str, turns: int, done: Sequence[dict[tuple[str, int], Played]]) -> Row:
    """One measure of vLLM and of `generate`, pair by pair."""
    of = MEASURES[measure]
    ours, theirs = ([of(one[side, turns]) for one in done] for side in (way, GENERATE))
    return Row(f"{shape}, {turns} turn{'s' * (turns > 1)}, vLLM {way}: {measure}", ours, theirs)


@dataclass(frozen=True)
class Played:
    """What a rollout took: by the clock on the wall, and of the CPU, vLLM's processes included."""

    tokens: int
    seconds: float
    cpu_seconds: float


MEASURES: dict[str, Callable[[Played], float]] = {
    "tokens per second": lambda played: played.tokens / played.seconds,
    "tokens per CPU second": lambda played: played.tokens / played.cpu_seconds,
}


# -- a run that plays when it is told to


@dataclass(frozen=True)
class Player:
    """A process with a run in it: neither side's libraries and threads are in the way of the other's."""

    line: Connection
    log: Path

    @classmethod
    @contextmanager
    def started(cls, model: Path, way: str) -> Iterator[Player]:
        """Ready to play; ended with this block."""
        spawning = multiprocessing.get_context("spawn")
        ours, theirs = spawning.Pipe()
        player = cls(ours, model / f"{way}.log")
        process = spawning.Process(target=play_when_told, args=(theirs, player.log, model, way))
        process.start()
        theirs.close()
        try:
            player.hear()
            yield player
        finally:
            ours.close()
            process.join(PATIENCE)
            process.kill()  # in the middle of a rollout; a server that it has is ended by its supervisor

    def hear(self) -> Any:
        """What the process says next.

        Raises:
            RuntimeError: it has ended; with its last words.
        """
        try:
            return self.line.recv()
        except EOFError:
            raise RuntimeError(self.log.read_text(encoding="utf-8", errors="replace")[-8000:]) from None

    def play(self, number: int, turns: int) -> Played:
        """A rollout of its own number, all of one kind.

        Raises:
            RuntimeError: an answer was shorter than the others.
        """
        self.line.send((number, turns))
        played: Played = self.hear()
        if played.tokens != EPISODES * turns * ANSWER:
            raise RuntimeError(f"{played.tokens} tokens in {EPISODES} episodes: not all answers had {ANSWER}")
        return played


def play_when_told(line: Connection, log: Path, model: Path, way: str) -> None:
    """The life of such a process: until nobody is on the line any more."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with prepared(model, way) as trainer:
        line.send("ready")
        with suppress(EOFError):
            while True:
                line.send(rollout(trainer, *line.recv()))


@contextmanager
def prepared(model: Path, way: str) -> Iterator[Any]:
    """The trainer of a run, with a vLLM server of its own if that is its way."""
    from aitrain.environment.runner import EnvRunner
    from aitrain.launch.managed_server import managed_server
    from aitrain.launch.preflight import check
    from aitrain.training.preparation import prepare
    from aitrain.training.run_context import RunContext

    plan = check(configuration(model, way), has_environment=True)
    folder = plan.open_folder()
    with managed_server(plan, folder, lambda _: None) as url, closing(EnvRunner(Talk(), plan.config)) as runner:
        config = plan.config.model_copy(update={"vllm_server_url": url} if url else {})
        yield prepare(RunContext(config, folder, runner, lambda _: None)).trainer


def configuration(model: Path, way: str) -> TrainConfig:
    """The same for all, but for who generates."""
    batch = {"batch_size": EPISODES, "rl_prompts_per_step": PROMPTS, "rl_num_generations": GENERATIONS}
    lengths = {"rl_top_k": 50, "rl_max_new_tokens": ANSWER, "rl_max_episode_tokens": 2 * max(TURNS) * ANSWER}
    where = {"model": str(model), "output_dir": str(model / "runs"), "project_name": way, "eval_cases": 0}
    return TrainConfig(**(SETTINGS | batch | lengths | where | WAYS[way]))


def rollout(trainer: Any, number: int, turns: int) -> Played:
    """As the step of this number does it."""
    first = (TURNS.index(turns) * ROUNDS + number % ROUNDS) * PROMPTS
    cases = [trainer.cases[first + place // GENERATIONS] for place in range(EPISODES)]
    trainer.state.global_step += 1  # so that vLLM is handed the weights, as in every step
    start, cpu = time.perf_counter(), cpu_seconds()
    episodes: Sequence[Any] = trainer.rollouts.play(cases, range(EPISODES), range(EPISODES))
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    return Played(sum(episode.trajectory.sampled_tokens for episode in episodes), seconds, cpu)


def cpu_seconds() -> float:
    """Used by this process and all that it started and that still run."""
    this = psutil.Process()
    all_times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(times.user + times.system for times in all_times)


if __name__ == "__main__":
    sys.exit(main())
