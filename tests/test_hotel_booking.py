"""aitrain/envs/hotel_booking.py: its world, its tools and its score."""

from collections.abc import Iterable
from typing import Any

import pytest

from aitrain import Score
from tests.adapters.conftest import made

TOPICS = ["city", "dates", "budget", "stars", "breakfast"]
ASK_ALL = TOPICS[1:]


@pytest.fixture(scope="module")
def environment() -> Any:
    return made("envs.hotel_booking")


def hotels_that_miss(case: Any, *missed: str) -> list[str]:
    """The ids of hotels that miss these wishes and no other, when the whole stay wished is booked in them."""
    wish, found = case.wish, []
    for hotel_id, hotel in case.hotels.items():
        meets = {
            "city": hotel.city == wish.city,
            "room": hotel.free_from <= wish.check_in and wish.check_in + wish.nights <= hotel.free_until,
            "budget": hotel.price * wish.nights <= wish.budget,
            "stars": hotel.stars >= wish.stars,
            "breakfast": hotel.breakfast == wish.breakfast,
        }
        if missed == tuple(name for name, is_met in meets.items() if not is_met):
            found.append(hotel_id)
    return found


# -- the dataset


def test_exactly_one_hotel_meets_every_wish_and_others_miss_just_one(environment: Any) -> None:
    for case in environment.cases:
        assert hotels_that_miss(case) == [case.right]
        assert all(hotels_that_miss(case, missed) for missed in ("city", "room", "budget", "stars", "breakfast"))


# -- the score


def book_and_score(environment: Any, case_idx: int, topics: Iterable[str], **change: Any) -> Score:
    """Book the right hotel, or one that differs from it."""
    booking, wish = environment.start(case_idx), environment.cases[case_idx].wish
    for topic in topics:
        booking.ask_user(topic)
    stay = {"hotel_id": environment.cases[case_idx].right, "check_in": wish.check_in, "nights": wish.nights}
    booking.book_hotel(**(stay | change))
    return booking.score()


@pytest.mark.parametrize(
    ("topics", "score"),
    [([], 0.2), (["dates", "stars"], 0.6), (ASK_ALL, 1)],
)
def test_a_wish_counts_only_when_it_was_told(environment: Any, topics: list[str], score: float) -> None:
    assert book_and_score(environment, 0, topics).score == pytest.approx(score)


def test_a_booking_that_misses_one_wish_gets_the_other_four(environment: Any) -> None:
    case = environment.cases[0]
    one_wish = {missed: {"hotel_id": hotels_that_miss(case, missed)[0]} for missed in ("city", "stars", "breakfast")}
    for missed, change in {**one_wish, "dates": {"nights": case.wish.nights - 1}}.items():
        result = book_and_score(environment, 0, ASK_ALL, **change)
        assert result.score == 0.8
        assert [topic for topic in TOPICS if not result.metrics[f"met_{topic}"]] == [missed]
    dear = book_and_score(environment, 0, ASK_ALL, hotel_id=hotels_that_miss(case, "budget")[0], nights=1)
    assert not dear.metrics["met_budget"]  # of the nights wished
