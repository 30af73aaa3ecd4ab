"""`--seed` and generation by a vLLM server: the same seed samples the same episodes, also after a resume."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from aitrain import Result
from aitrain.environment.seeds import EpisodeSeeds, SampleSeed, derived_seed
from aitrain.runs.run_folder import read_lines
from tests.training.conftest import difference
from tests.training.small_server import SmallServer
from tests.training.test_resume import as_if_killed_after

Train = Callable[..., Result]


class Talk:
    """Two turns of the policy."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number % 3}:"} for number in range(6)]

    def episode(self) -> Generator[str | None, str, float]:
        said = yield None
        said += yield " more:"
        return sum(letter < "n" for letter in said) / max(1, len(said))


def played(result: Result) -> list[Any]:
    """What was sampled in training, and what came of it."""
    records = read_lines(result.folder / "rollouts" / "rank0.jsonl")
    names = ("step", "group", "case_idx", "completion", "score", "metrics")
    return [[record[name] for name in names] for record in records if "eval_phase" not in record]


@pytest.fixture(scope="module")
def server(small_model: Path) -> Iterator[SmallServer]:
    serving = SmallServer(small_model)
    yield serving
    serving.stop()


@pytest.fixture
def by_server(train: Train, server: SmallServer) -> Train:
    """`train` with the server, as a new one has it."""

    def run(environment: Any, **options: Any) -> Result:
        server.restart()
        short = {"eval_cases": 0, "rl_prompts_per_step": 2, "batch_size": 8, "rl_max_episode_tokens": 60}
        reached = {"use_vllm": True, "vllm_mode": "server", "vllm_server_url": server.url, "rl_top_k": 0}
        return train(environment, **{**short, **reached, **options})

    return run


@pytest.mark.slow
def test_a_resumed_run_samples_what_it_would_have_sampled_and_another_seed_something_else(by_server: Train) -> None:
    saving = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    whole = by_server(Talk(), **saving)
    as_if_killed_after(whole.folder, 1, "part")
    resumed = by_server(Talk(), project_name="part", resume_from_checkpoint="auto", **saving)
    other = by_server(Talk(), seed=2, max_steps=1)

    assert played(resumed) == played(whole)
    assert difference(resumed.model, whole.model) < 1e-6  # the stand-in's probabilities are rounded differently
    assert played(other) != played(whole)[: len(played(other))]
    for group in (0, 1):  # the members of a group are not copies of each other
        assert len({row[3] for row in played(whole) if row[:2] == [1, group]}) > 1


def test_seeds_follow_from_names_and_places() -> None:
    assert derived_seed(1, "a", 2) == derived_seed(1, "a", 2) != derived_seed(1, "a", 3)
    assert len({SampleSeed(5, position).request_seed for position in range(100)}) == 100
    assert SampleSeed(5, 3).token_seed(2) == SampleSeed(5, 5).token_seed(0) != SampleSeed(5, 5).request_seed
    seeds = EpisodeSeeds(5)
    assert len({seeds.next_call() for _ in range(100)}) == 100
