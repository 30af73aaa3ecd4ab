"""aitrain/envs/guess_number.py, played by hand."""

import pytest

from tests.adapters.conftest import made

JUNK = "Say a number from 1 to 7."


@pytest.mark.parametrize(
    ("number", "replies", "said", "score"),
    [
        (5, [" 5\n"], [], 1.0),
        (6, ["4", "6"], ["higher"], 0.75),
        (1, ["7", "6", "5", "1"], ["lower", "lower", "lower"], 0.25),
        (1, ["7", "6", "5", "4"], ["lower", "lower", "lower"], 0.0),
        *((4, [junk, "4"], [JUNK], 0.75) for junk in ("", "0", "8", "4.0", "²", "It is 4", "9" * 10_000)),
    ],
    ids=range(11),
)
def test_each_guess_that_misses_or_is_no_number_costs_a_quarter(
    number: int, replies: list[str], said: list[str], score: float
) -> None:
    environment = made("envs.guess_number")
    assert number in [row["case_idx"] for row in environment.build_dataset(None)]
    episode = environment.episode(number, seed=0)
    assert next(episode) is None
    assert [episode.send(reply) for reply in replies[:-1]] == said
    with pytest.raises(StopIteration) as stop:
        episode.send(replies[-1])
    assert stop.value.value == score
