"""aitrain/envs/guess_number.py, played by hand."""

from typing import Any

import pytest

from aitrain.environment import loader, locator
from aitrain.options.train import TrainConfig


@pytest.fixture
def environment() -> Any:
    return loader.load_env(locator.find_env(TrainConfig(model="any", rl_env="envs.guess_number")), {})


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


def test_each_number_is_asked_for_once_and_is_in_the_range_told(environment: Any) -> None:
    rows = environment.build_dataset(None)
    assert [row["case_idx"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert all("from 1 to 7" in row["prompt"][0]["content"] for row in rows)


def test_the_prompt_does_not_tell_the_number(environment: Any) -> None:
    assert len({str(row["prompt"]) for row in environment.build_dataset(None)}) == 1


def test_the_reference_scores_1(environment: Any) -> None:
    for row in environment.build_dataset(None):
        replies = environment.reference(row["case_idx"])
        assert play(environment, row["case_idx"], *replies) == ([], 1.0)


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


@pytest.mark.parametrize(
    "junk", ["", " ", "0", "8", "-4", "4.0", "04", "²", "四", "It is 4", "1 2 3 4 5 6 7", "9" * 10_000, "4\n4"]
)
def test_junk_is_answered_and_costs_a_guess(environment: Any, junk: str) -> None:
    assert play(environment, 4, junk, "4") == (["Say a number from 1 to 7."], 0.75)
    assert play(environment, 4, *[junk] * 4) == (["Say a number from 1 to 7."] * 3, 0.0)


def test_halving_finds_every_number_and_no_fixed_guesses_do_as_well(environment: Any) -> None:
    def halve(number: int) -> float:
        replies, low, high = [], 1, 7
        while not replies or replies[-1] != str(number):
            middle = (low + high) // 2
            replies.append(str(middle))
            low, high = (middle + 1, high) if middle < number else (low, middle - 1)
        return play(environment, number, *replies)[1] or 0.0

    def blind(number: int) -> float:
        replies = ["4", "2", "6", "3"]
        return play(environment, number, *replies[: replies.index(str(number)) + 1 if str(number) in replies else 4])[1]

    halving, fixed = (sum(map(way, range(1, 8))) / 7 for way in (halve, blind))
    assert halving == pytest.approx(4.5 / 7)
    assert fixed == pytest.approx(2.5 / 7)


def test_episodes_do_not_meet(environment: Any) -> None:
    one, other = environment.episode(2, seed=0), environment.episode(6, seed=0)
    next(one), next(other)
    assert one.send("4") == "lower"
    assert other.send("4") == "higher"
    assert one.send("3") == "lower"
    assert other.send("3") == "higher"


def test_an_episode_that_a_limit_ends_is_worth_nothing(environment: Any) -> None:
    episode = environment.episode(2, seed=0)
    next(episode)
    episode.send("4")
    with pytest.raises(GeneratorExit):
        episode.throw(GeneratorExit)


def test_how_high_and_how_often_can_be_set() -> None:
    source = locator.find_env(TrainConfig(model="any", rl_env="envs.guess_number"))
    environment = loader.load_env(source, {"highest": 100, "guesses": 2})
    assert len(environment.build_dataset(None)) == 100
    assert play(environment, 100, "99", "100") == (["higher"], 0.5)
