"""aitrain/envs/hotel_booking.py: its world, its tools and its score."""

import json
import re
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest

from aitrain import Score
from aitrain.environment import loader, locator
from aitrain.options.train import TrainConfig

TOPICS = ["city", "dates", "budget", "stars", "breakfast"]
ASK_ALL = ["On which dates, and for what budget?", "How many stars? Breakfast?"]
NOTHING_MET = {f"met_{topic}": 0 for topic in TOPICS}
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def load(**config: Any) -> Any:
    return loader.load_env(locator.find_env(TrainConfig(model="any", rl_env="envs.hotel_booking")), config)


@pytest.fixture(scope="module")
def environment() -> Any:
    return load()


def play(booking: Any, replies: Iterable[str]) -> list[Any]:
    """What comes back for scripted replies: the tools' answers, and the user's; None at the end."""
    tools = {tool.__name__: tool for tool in booking.get_tools()}
    answers: list[Any] = []
    for reply in replies:
        calls = [json.loads(text) for text in CALL.findall(reply)]
        answers += [tools[call["name"]](**call["arguments"]) for call in calls] or [booking.step(reply)]
    return answers


def wishes_met(case: Any, hotel: Any) -> dict[str, bool]:
    """Which wishes a hotel meets, when the whole stay wished is booked in it."""
    wish = case.wish
    return {
        "city": hotel.city == wish.city,
        "room": hotel.is_free(wish.check_in, wish.nights),
        "budget": hotel.cost(wish.nights) <= wish.budget,
        "stars": hotel.stars >= wish.stars,
        "breakfast": hotel.breakfast == wish.breakfast,
    }


def hotel_that_misses(environment: Any, case_idx: int, missed: str) -> str:
    """The id of a hotel that meets every wish but one."""
    case = environment.cases[case_idx]
    wanted = {name: name != missed for name in ("city", "room", "budget", "stars", "breakfast")}
    return next(hotel_id for hotel_id, hotel in case.hotels.items() if wishes_met(case, hotel) == wanted)


# -- the dataset


def test_the_rows_are_numbered_and_the_held_out_ones_stay_the_same_for_any_number_of_cases(environment: Any) -> None:
    train, held_out = environment.build_dataset(None), environment.build_eval_dataset(None)
    assert [row["case_idx"] for row in train] == list(range(400))
    assert [row["case_idx"] for row in held_out] == list(range(400, 500))
    assert load(cases=7).cases[7:] == environment.cases[400:]
    assert load(seed=1).cases != environment.cases
    assert str(environment.cases[0].wish.check_in) == "2030-11-06", "the same on every machine and day"
    assert len({case.wish for case in environment.cases}) == 500


def test_exactly_one_hotel_meets_every_wish_and_others_miss_just_one(environment: Any) -> None:
    for case in environment.cases:
        right = [hotel_id for hotel_id, hotel in case.hotels.items() if all(wishes_met(case, hotel).values())]
        assert right == [case.right]
    for missed in ("city", "room", "budget", "stars", "breakfast"):
        assert all(hotel_that_misses(environment, case_idx, missed) for case_idx in range(500))


def test_the_reference_scores_1_in_every_case_whatever_the_seed(environment: Any) -> None:
    for case_idx in range(500):
        booking = environment.start(case_idx, seed=case_idx)
        assert play(booking, environment.reference(case_idx))[-1] is None
        assert booking.score() == Score(1.0, {"booked": 1, "questions": 2, **dict.fromkeys(NOTHING_MET, 1)})


# -- the score


def book_and_score(environment: Any, case_idx: int, questions: Iterable[str], **change: Any) -> Score:
    """Book the right hotel, or one that differs from it."""
    booking, wish = environment.start(case_idx, 0), environment.cases[case_idx].wish
    for question in questions:
        booking.ask_user(question)
    stay = {"hotel_id": environment.cases[case_idx].right, "check_in": str(wish.check_in), "nights": wish.nights}
    booking.book_hotel(**(stay | change))
    return booking.score()


@pytest.mark.parametrize(
    ("told", "questions", "score"),
    [
        (["city"], [], 0.2),
        (["city"], ASK_ALL[:1], 0.6),
        (["city"], ASK_ALL, 1),
        (["city", "dates"], [], 0.4),
        (["city", "dates"], ["Budget?", ASK_ALL[1]], 1),
    ],
)
def test_a_wish_counts_only_when_it_was_told(
    environment: Any, told: list[str], questions: list[str], score: float
) -> None:
    case_idx = next(idx for idx, case in enumerate(environment.cases) if case.told == tuple(told))
    assert book_and_score(environment, case_idx, questions).score == pytest.approx(score)


@pytest.mark.parametrize("missed", ["city", "stars", "breakfast"])
def test_a_booking_that_misses_one_wish_gets_the_other_four(environment: Any, missed: str) -> None:
    for case_idx in range(50):
        hotel_id = hotel_that_misses(environment, case_idx, missed)
        result = book_and_score(environment, case_idx, ASK_ALL, hotel_id=hotel_id)
        assert result.score == 0.8
        assert [topic for topic in TOPICS if not result.metrics[f"met_{topic}"]] == [missed]


def test_a_stay_on_other_dates_misses_that_wish_and_one_over_the_budget_gets_nothing(environment: Any) -> None:
    roomy = next(
        idx
        for idx, case in enumerate(environment.cases)
        if case.hotels[case.right].is_free(case.wish.check_in - timedelta(days=1), case.wish.nights + 2)
    )
    wish = environment.cases[roomy].wish
    for change in ({"check_in": str(wish.check_in - timedelta(days=1))}, {"nights": wish.nights - 1}):
        result = book_and_score(environment, roomy, ASK_ALL, **change)
        assert result.score == 0.8
        assert [topic for topic in TOPICS if not result.metrics[f"met_{topic}"]] == ["dates"]
    dear = hotel_that_misses(environment, roomy, "budget")
    for change in ({"nights": wish.nights + 1}, {"hotel_id": dear}, {"hotel_id": dear, "nights": 1}):
        result = book_and_score(environment, roomy, ASK_ALL, **change)
        assert (result.score, result.metrics["booked"], result.metrics["met_budget"]) == (0.0, 1, 0)


def test_only_what_was_told_before_the_first_booking_counts(environment: Any) -> None:
    case_idx = next(idx for idx, case in enumerate(environment.cases) if case.told == ("city",))
    *before, book, done = environment.reference(case_idx)
    booking = environment.start(case_idx, 0)
    answers = play(booking, [book, *before[:2], book, done])
    assert answers[-2:] == ["You have booked already.", None]
    assert booking.score().score == 0.2


# -- the tools


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(({"hotel_id": value}, "no such hotel") for value in ["H0", None]),
        *(({"check_in": value}, "check_in is a date") for value in ["2030-02-30", None, "9" * 9999]),
        *(({"nights": value}, "nights is a number") for value in [0, 31, 2.5, None]),
        ({"check_in": "2029-01-01"}, "is not free"),
        ({"nights": 30}, "is not free"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_booked_is_refused_in_words_and_takes_nothing_away(
    environment: Any, change: dict[str, Any], said: str
) -> None:
    booking, case = environment.start(0, 0), environment.cases[0]
    stay = {"hotel_id": case.right, "check_in": str(case.wish.check_in), "nights": case.wish.nights}
    assert said in booking.book_hotel(**(stay | change))
    assert booking.score() == Score(0.0, {"booked": 0, "questions": 0, **NOTHING_MET})
    assert booking.book_hotel(**stay).startswith("Booked: ")


@pytest.mark.parametrize(
    ("question", "topics"),
    [
        ("How long will you stay?", ["dates"]),
        ("HOW MANY STARS?", ["stars"]),
        ("budget dates stars breakfast city", ["budget", "dates"]),
    ],
)
def test_the_user_answers_what_was_asked_and_no_more_than_two_wishes(
    environment: Any, question: str, topics: list[str]
) -> None:
    booking, wish = environment.start(0, 0), environment.cases[0].wish
    assert booking.ask_user(question) == " ".join(map(wish.tell, topics))
    assert booking.told == {*environment.cases[0].told, *topics}


# -- the conversation


def test_after_its_turns_the_tools_say_no_more_and_each_call_is_a_turn() -> None:
    last = load(cases=1, held_out=1, max_turns=5).start(0, 0)
    replies = load(cases=1, held_out=1).reference(0)
    assert play(last, ["".join(replies[:5]), replies[5]])[-1] is None
    assert last.score().score == 1.0
    short = load(cases=1, held_out=1, max_turns=4).start(0, 0)
    assert play(short, replies)[-2:] == ["The conversation is over.", None]
    assert short.score().metrics == {"booked": 0, "questions": 2, **NOTHING_MET}
