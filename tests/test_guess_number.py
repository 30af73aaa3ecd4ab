"""aitrain/envs/guess_number.py, played by hand."""

from typing import Any

import pytest

from aitrain.environment import loader, locator
from aitrain.options.train import TrainConfig


def load(**config: Any) -> Any:
    return loader.load_env(locator.find_env(TrainConfig(model="any", rl_env="envs.guess_number")), config)


@pytest.fixture
def environment() -> Any:
    return load()


def play(environment: Any, number: int, *replies: str) -> tuple[list[str], float | None]:
    """What the environment said, and the score (None while the episode goes on)."""
    episode = environment.episode(number, seed=0)
    assert next(episode) is None
    said = []
    for reply in replies:
        try:
            said.append(episode.send(reply))
        except StopIteration as stop:
            assert reply == replies[-1], "the episode ended too early"
            return said, stop.value
    episode.close()
    return said, None


def test_each_number_is_asked_for_once_by_a_prompt_that_does_not_tell_it(environment: Any) -> None:
    rows = environment.build_dataset(None)
    assert [row["case_idx"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert len({str(row["prompt"]) for row in rows}) == 1
    assert "from 1 to 7" in rows[0]["prompt"][0]["content"]
    for row in rows:
        assert play(environment, row["case_idx"], *environment.reference(row["case_idx"])) == ([], 1.0)


@pytest.mark.parametrize(
    ("number", "replies", "said", "score"),
    [
        (4, ["4"], [], 1.0),
        (6, ["4", "6"], ["higher"], 0.75),
        (3, ["4", "2", "3"], ["lower", "higher"], 0.5),
        (1, ["7", "6", "5", "1"], ["lower", "lower", "lower"], 0.25),
        (1, ["7", "6", "5", "4"], ["lower", "lower", "lower"], 0.0),
        (5, [" 5\n"], [], 1.0),
    ],
)
def test_each_guess_that_misses_costs_a_quarter(
    environment: Any, number: int, replies: list[str], said: list[str], score: float
) -> None:
    assert play(environment, number, *replies) == (said, score)


@pytest.mark.parametrize("junk", ["", "0", "8", "-4", "4.0", "04", "²", "It is 4", "9" * 10_000, "4\n4"])
def test_junk_is_answered_and_costs_a_guess(environment: Any, junk: str) -> None:
    assert play(environment, 4, junk, "4") == (["Say a number from 1 to 7."], 0.75)
    assert play(environment, 4, *[junk] * 4) == (["Say a number from 1 to 7."] * 3, 0.0)
