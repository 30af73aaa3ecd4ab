"""aitrain/envs/guess_number.py, played by hand."""

from typing import Any

import pytest

from aitrain.environment import loader, locator
from aitrain.options.train import TrainConfig

JUNK = "Say a number from 1 to 7."


@pytest.fixture
def environment() -> Any:
    return loader.load_env(locator.find_env(TrainConfig(model="any", rl_env="envs.guess_number")), {})


def play(environment: Any, number: int, *replies: str) -> tuple[list[str], float]:
    """What the environment said, and the score."""
    episode = environment.episode(number, seed=0)
    assert next(episode) is None
    said = []
    for reply in replies[:-1]:
        said.append(episode.send(reply))
    with pytest.raises(StopIteration) as stop:
        episode.send(replies[-1])
    return said, stop.value.value


def test_each_number_is_asked_for_once_by_a_prompt_that_does_not_tell_it(environment: Any) -> None:
    rows = environment.build_dataset(None)
    assert [row["case_idx"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert len({str(row["prompt"]) for row in rows}) == 1
    for row in rows:
        assert play(environment, row["case_idx"], *environment.reference(row["case_idx"])) == ([], 1.0)


@pytest.mark.parametrize(
    ("number", "replies", "said", "score"),
    [
        (5, [" 5\n"], [], 1.0),
        (6, ["4", "6"], ["higher"], 0.75),
        (1, ["7", "6", "5", "1"], ["lower", "lower", "lower"], 0.25),
        (1, ["7", "6", "5", "4"], ["lower", "lower", "lower"], 0.0),
        *((4, [junk, "4"], [JUNK], 0.75) for junk in ("", "0", "8", "4.0", "²", "It is 4", "9" * 10_000, "4\n4")),
        (4, ["4.0"] * 4, [JUNK] * 3, 0.0),
    ],
    ids=range(13),
)
def test_each_guess_that_misses_or_is_no_number_costs_a_quarter(
    environment: Any, number: int, replies: list[str], said: list[str], score: float
) -> None:
    assert play(environment, number, *replies) == (said, score)
