"""aitrain/envs/hotel_booking.py: its world, its tools and its score, also for those who book without care."""

import json
import random
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest

from aitrain import Score
from aitrain.environment import loader, locator
from aitrain.environment.tools import Tools
from aitrain.options.train import TrainConfig

TOPICS = ["city", "dates", "budget", "stars", "breakfast"]
ASK_ALL = ["On which dates, and for what budget?", "How many stars? Breakfast?"]
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


def rows(environment: Any) -> list[dict[str, Any]]:
    return [*environment.build_dataset(None), *environment.build_eval_dataset(None)]


def case_where_the_opening_tells(environment: Any, *told: str) -> int:
    return next(idx for idx, case in enumerate(environment.cases) if case.told == told)


# -- the dataset


def test_the_rows_are_numbered_from_training_on_to_held_out(environment: Any) -> None:
    train, held_out = environment.build_dataset(None), environment.build_eval_dataset(None)
    assert [row["case_idx"] for row in train] == list(range(400))
    assert [row["case_idx"] for row in held_out] == list(range(400, 500))


def test_the_same_seed_makes_the_same_cases_and_another_one_makes_others(environment: Any) -> None:
    assert load().cases == environment.cases
    assert load(seed=1).cases != environment.cases
    assert str(environment.cases[0].wish.check_in) == "2030-11-06", "the same on every machine and day"


def test_the_held_out_ones_stay_the_same_for_any_number_of_cases(environment: Any) -> None:
    assert load(cases=7).build_eval_dataset(None)[0]["prompt"] == environment.build_eval_dataset(None)[0]["prompt"]
    assert load(cases=7).cases[7:] == environment.cases[400:]


def test_no_two_cases_have_the_same_wish_or_world() -> None:
    cases = load(cases=3000, held_out=500).cases
    assert len({case.wish for case in cases}) == 3500
    assert len({tuple(case.hotels.values()) for case in cases}) == 3500


def test_the_opening_tells_the_city_and_sometimes_the_dates_and_nothing_else(environment: Any) -> None:
    for case, row in zip(environment.cases, rows(environment), strict=True):
        assert row["prompt"][-1] == {"role": "user", "content": case.opening}
        assert f" {case.wish.city}." in case.opening
        assert (case.wish.tell("dates") in case.opening) == ("dates" in case.told)
        assert not re.search(r"budget|at most|star|breakfast", case.opening, re.IGNORECASE)
    with_dates = sum("dates" in case.told for case in environment.cases)
    assert 0.15 < with_dates / len(environment.cases) < 0.35


def test_exactly_one_hotel_meets_every_wish_and_others_miss_just_one(environment: Any) -> None:
    for case in environment.cases:
        wish = case.wish
        missed = {
            hotel_id: [
                name
                for name, is_met in {
                    "city": hotel.city == wish.city,
                    "room": hotel.is_free(wish.check_in, wish.nights),
                    "budget": hotel.cost(wish.nights) <= wish.budget,
                    "stars": hotel.stars >= wish.stars,
                    "breakfast": hotel.breakfast == wish.breakfast,
                }.items()
                if not is_met
            ]
            for hotel_id, hotel in case.hotels.items()
        }
        assert [hotel_id for hotel_id, names in missed.items() if not names] == [case.right]
        assert {names[0] for names in missed.values() if len(names) == 1} == {
            "city", "room", "budget", "stars", "breakfast"
        }  # fmt: skip


def test_prompts_schemas_and_answers_are_short(environment: Any) -> None:
    assert max(sum(len(message["content"]) for message in row["prompt"]) for row in rows(environment)) <= 180
    assert sum(len(json.dumps(schema)) for schema in Tools.of(environment.start(0, 0)).schemas) <= 1100
    for case_idx in range(500):
        answers = play(environment.start(case_idx, 0), environment.reference(case_idx))
        assert all(len(json.dumps(answer)) <= 250 for answer in answers)


# -- the reference, and someone who knows no more than the model


def test_the_reference_scores_1_in_every_case(environment: Any) -> None:
    for case_idx in range(500):
        booking = environment.start(case_idx, seed=case_idx)
        answers = play(booking, environment.reference(case_idx))
        assert answers[-1] is None
        assert booking.score() == Score(1.0, {"booked": 1, "questions": 2, **{f"met_{topic}": 1 for topic in TOPICS}})


def careful(booking: Any, told: str) -> None:
    """Reads the answers as a good model would, and looks no further than them."""
    told += "".join(f" {booking.ask_user(question)}" for question in ASK_ALL)
    city = re.search(r"(?:in|to) ([A-Z]\w+)\.", told)[1]
    check_in, nights = re.search(r"From (\S+), (\d) nights", told).groups()
    budget, stars = re.search(r"At most (\d+)", told)[1], re.search(r"least (\d)", told)[1]
    for hit in booking.search_hotels(city, stars, "With breakfast" in told)["hotels"]:
        hotel = booking.get_hotel(hit["id"])
        is_free = hotel["free"].split(" to ")[0] <= check_in
        if is_free and hotel["price"] * int(nights) + hotel["fee"] <= int(budget):
            booking.book_hotel(hit["id"], check_in, int(nights))
            break


def test_who_asks_and_reads_carefully_gets_1_within_the_8_turns(environment: Any) -> None:
    for case_idx in range(500):
        booking = environment.start(case_idx, 0)
        careful(booking, environment.cases[case_idx].opening)
        assert booking.step("Done.") is None
        assert booking.score().score == 1.0


# -- those who book without care


Way = Callable[[Any, str, tuple[str, int], random.Random], None]


def book_first_found(booking: Any, city: str, stay: tuple[str, int], rng: random.Random) -> None:
    booking.book_hotel(booking.search_hotels(city)["hotels"][0]["id"], *stay)


def book_cheapest_that_is_free(booking: Any, city: str, stay: tuple[str, int], rng: random.Random) -> None:
    for hit in booking.search_hotels(city)["hotels"]:
        booking.book_hotel(hit["id"], *stay)


def book_second_found(booking: Any, city: str, stay: tuple[str, int], rng: random.Random) -> None:
    booking.book_hotel(booking.search_hotels(city)["hotels"][1]["id"], *stay)


def book_best_stars(booking: Any, city: str, stay: tuple[str, int], rng: random.Random) -> None:
    booking.book_hotel(booking.search_hotels(city, min_stars=5)["hotels"][0]["id"], *stay)


def book_best_stars_found(booking: Any, city: str, stay: tuple[str, int], rng: random.Random) -> None:
    booking.book_hotel(max(booking.search_hotels(city)["hotels"], key=lambda hit: hit["stars"])["id"], *stay)


def book_first_good_one(booking: Any, city: str, stay: tuple[str, int], rng: random.Random) -> None:
    booking.book_hotel(booking.search_hotels(city, 4, True)["hotels"][0]["id"], *stay)


def book_h1(booking: Any, city: str, stay: tuple[str, int], rng: random.Random) -> None:
    booking.book_hotel("H1", *stay)


def book_any(booking: Any, city: str, stay: tuple[str, int], rng: random.Random) -> None:
    booking.book_hotel(f"H{rng.randint(1, 20)}", *stay)


def book_one_after_another(booking: Any, city: str, stay: tuple[str, int], rng: random.Random) -> None:
    for number in range(1, 21):
        booking.book_hotel(f"H{number}", *stay)


def book_one_night(booking: Any, city: str, stay: tuple[str, int], rng: random.Random) -> None:
    for hit in booking.search_hotels(city)["hotels"]:
        booking.book_hotel(hit["id"], stay[0], 1)


def book_least_in_all(booking: Any, city: str, stay: tuple[str, int], rng: random.Random) -> None:
    hotels = {hit["id"]: booking.get_hotel(hit["id"]) for hit in booking.search_hotels(city)["hotels"]}
    for hotel_id in sorted(hotels, key=lambda hotel_id: hotels[hotel_id]["price"] * stay[1] + hotels[hotel_id]["fee"]):
        booking.book_hotel(hotel_id, *stay)


def book_right_one_by_luck(booking: Any, city: str, stay: tuple[str, int], rng: random.Random) -> None:
    wish = booking.case.wish
    booking.book_hotel(booking.case.right, str(wish.check_in), wish.nights)


def mean_score(environment: Any, way: Way, questions: Iterable[str] = ()) -> float:
    """Over 200 cases; who was not told the dates takes some."""
    scores = []
    for case_idx in range(200):
        booking, told = environment.start(case_idx, 0), environment.cases[case_idx].opening
        told += "".join(f" {booking.ask_user(question)}" for question in questions)
        dates = re.search(r"From (\S+), (\d) nights", told)
        stay = (dates[1], int(dates[2])) if dates else ("2030-06-01", 2)
        way(booking, environment.cases[case_idx].wish.city, stay, random.Random(case_idx))
        booking.step("It is booked.")
        scores.append(booking.score().score)
    return sum(scores) / len(scores)


CARELESS = [
    book_first_found, book_cheapest_that_is_free, book_second_found, book_best_stars, book_best_stars_found,
    book_first_good_one, book_h1, book_any, book_one_after_another, book_one_night,
]  # fmt: skip


@pytest.mark.parametrize("way", [*CARELESS, book_least_in_all], ids=lambda way: way.__name__)
def test_who_asks_nothing_gets_little(environment: Any, way: Way) -> None:
    assert mean_score(environment, way) <= 0.1


def test_who_asks_nothing_gets_little_even_with_all_the_luck_there_is(environment: Any) -> None:
    assert mean_score(environment, book_right_one_by_luck) <= 0.28


@pytest.mark.parametrize("way", CARELESS, ids=lambda way: way.__name__)
def test_who_asks_for_the_dates_and_books_without_care_gets_little(environment: Any, way: Way) -> None:
    assert mean_score(environment, way, ["When?"]) <= 0.2


@pytest.mark.parametrize("way", CARELESS, ids=lambda way: way.__name__)
def test_who_asks_for_everything_and_heeds_little_of_it_gets_little(environment: Any, way: Way) -> None:
    assert mean_score(environment, way, ASK_ALL) <= 0.3


@pytest.mark.parametrize("reply", ["", "   ", "It is booked.", "H1", "{}", "<tool_call>", "🏨" * 9000, None, 7, []])
def test_empty_and_junk_replies_get_nothing(environment: Any, reply: Any) -> None:
    for case_idx in range(200):
        booking = environment.start(case_idx, 0)
        said = [booking.step(reply) for _ in range(8)]
        assert said == ["Please ask with ask_user, and book me a hotel."] * 7 + [None]
        assert booking.score().score == 0.0


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
    ("questions", "score"),
    [
        ([], 0.2),
        (["When?"], 0.4),
        (["Budget?"], 0.4),
        (ASK_ALL[:1], 0.6),
        ([*ASK_ALL[:1], "Stars?"], 0.8),
        (ASK_ALL, 1),
    ],
)
def test_a_wish_counts_only_when_it_was_told(environment: Any, questions: list[str], score: float) -> None:
    case_idx = case_where_the_opening_tells(environment, "city")
    assert book_and_score(environment, case_idx, questions).score == pytest.approx(score)


def test_what_the_opening_told_need_not_be_asked(environment: Any) -> None:
    case_idx = case_where_the_opening_tells(environment, "city", "dates")
    assert book_and_score(environment, case_idx, []).score == 0.4
    assert book_and_score(environment, case_idx, ["Budget?", ASK_ALL[1]]).score == 1.0


def test_what_is_asked_after_the_booking_does_not_count(environment: Any) -> None:
    case_idx = case_where_the_opening_tells(environment, "city")
    *before, book, done = environment.reference(case_idx)
    booking = environment.start(case_idx, 0)
    play(booking, [book, *before[:2], done])
    assert booking.score().score == 0.2


def other_hotel(environment: Any, case_idx: int, **change: Any) -> str:
    """The id of a hotel for which each of `change` is so, as a function of hotel and wish, and the others as wished."""
    case = environment.cases[case_idx]
    wish = case.wish
    return next(
        hotel_id
        for hotel_id, hotel in case.hotels.items()
        if {
            "city": hotel.city == wish.city,
            "room": hotel.is_free(wish.check_in, wish.nights),
            "budget": hotel.cost(wish.nights) <= wish.budget,
            "stars": hotel.stars >= wish.stars,
            "breakfast": hotel.breakfast == wish.breakfast,
        }
        == dict.fromkeys(["city", "room", "budget", "stars", "breakfast"], True) | change
    )


@pytest.mark.parametrize("missed", ["city", "stars", "breakfast"])
def test_a_booking_that_misses_one_wish_gets_the_other_four(environment: Any, missed: str) -> None:
    for case_idx in range(50):
        hotel_id = other_hotel(environment, case_idx, **{missed: False})
        result = book_and_score(environment, case_idx, ASK_ALL, hotel_id=hotel_id)
        assert result.score == 0.8
        assert [topic for topic in TOPICS if not result.metrics[f"met_{topic}"]] == [missed]


@pytest.mark.parametrize("nights", [0, 1])
def test_a_booking_for_other_dates_misses_that_wish(environment: Any, nights: int) -> None:
    idx = next(i for i, case in enumerate(environment.cases) if case.hotels[case.right].free_from < case.wish.check_in)
    wish = environment.cases[idx].wish
    day_before = str(wish.check_in - timedelta(days=1))
    result = book_and_score(environment, idx, ASK_ALL, check_in=day_before, nights=wish.nights - nights)
    assert result.score == 0.8
    assert [topic for topic in TOPICS if not result.metrics[f"met_{topic}"]] == ["dates"]


def test_a_stay_over_the_budget_gets_nothing(environment: Any) -> None:
    for case_idx in range(50):
        hotel_id = other_hotel(environment, case_idx, budget=False)
        result = book_and_score(environment, case_idx, ASK_ALL, hotel_id=hotel_id)
        assert result.score == 0.0
        assert result.metrics["booked"] == 1
        assert result.metrics["met_budget"] == 0


def test_fewer_nights_are_no_way_round_the_budget(environment: Any) -> None:
    for case_idx in range(50):
        hotel_id = other_hotel(environment, case_idx, budget=False)
        assert book_and_score(environment, case_idx, ASK_ALL, hotel_id=hotel_id, nights=1).score == 0.0
        assert book_and_score(environment, case_idx, ASK_ALL, nights=1).score == 0.8


def test_more_nights_than_wished_may_be_over_the_budget(environment: Any) -> None:
    case_idx = next(
        idx
        for idx, case in enumerate(environment.cases)
        if (case.hotels[case.right].free_until - case.wish.check_in).days > case.wish.nights
    )
    nights = environment.cases[case_idx].wish.nights + 1
    assert book_and_score(environment, case_idx, ASK_ALL, nights=nights).score == 0.0


def test_without_a_booking_there_is_nothing(environment: Any) -> None:
    booking = environment.start(0, 0)
    play(booking, environment.reference(0)[:-2])
    assert booking.score() == Score(0.0, {"booked": 0, "questions": 2, **{f"met_{topic}": 0 for topic in TOPICS}})


# -- the tools


def test_only_the_first_booking_counts(environment: Any) -> None:
    booking, case = environment.start(0, 0), environment.cases[0]
    too_dear = other_hotel(environment, 0, budget=False)
    stay = (str(case.wish.check_in), case.wish.nights)
    assert booking.book_hotel(too_dear, *stay).startswith("Booked: ")
    assert booking.book_hotel(case.right, *stay) == "You have booked already."
    assert booking.score().score == 0.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            ({"hotel_id": value}, "There is no such hotel.")
            for value in ["H0", "H21", "", "h1 ", None, 1, [], {"a": 1}]
        ),
        *(
            ({"check_in": value}, "check_in is a date, such as 2030-01-31.")
            for value in ["", "tomorrow", "31.01.2030", "2030-02-30", "2030-1-5", None, 20, 1e99, [], "9" * 9999]
        ),
        *(
            ({"nights": value}, "nights is a number from 1 to 30.")
            for value in [0, -1, 31, 10**30, "9" * 9999, 2.5, "two", None, True, [], float("nan")]
        ),
        *(({"check_in": value}, "is not free then.") for value in ["2029-01-01", "0001-01-01", "9999-12-31"]),
        ({"nights": 30}, "is not free then."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_booked_is_refused_in_words(environment: Any, change: dict[str, Any], said: str) -> None:
    booking, case = environment.start(0, 0), environment.cases[0]
    stay = {"hotel_id": case.right, "check_in": str(case.wish.check_in), "nights": case.wish.nights}
    assert booking.book_hotel(**(stay | change)).endswith(said)
    assert booking.score().metrics["booked"] == 0
    assert booking.book_hotel(**stay).startswith("Booked: "), "a refusal takes nothing away"


def test_a_hotel_without_room_on_the_dates_cannot_be_booked(environment: Any) -> None:
    for case_idx in range(50):
        hotel_id = other_hotel(environment, case_idx, room=False)
        assert book_and_score(environment, case_idx, ASK_ALL, hotel_id=hotel_id).score == 0.0


def test_the_room_is_free_to_the_last_day_and_no_longer(environment: Any) -> None:
    hotel = environment.cases[0].hotels[environment.cases[0].right]
    days = (hotel.free_until - hotel.free_from).days
    assert hotel.is_free(hotel.free_from, days)
    assert not hotel.is_free(hotel.free_from, days + 1)
    assert not hotel.is_free(hotel.free_from.replace(year=2029), 1)


def test_a_search_shows_the_three_cheapest_that_fit_and_how_many_more(environment: Any) -> None:
    for case_idx, case in enumerate(environment.cases[:50]):
        found = environment.start(case_idx, 0).search_hotels(f" {case.wish.city.upper()} ")
        in_city = sorted(hotel.price for hotel in case.hotels.values() if hotel.city == case.wish.city)
        assert [hit["price"] for hit in found["hotels"]] == in_city[:3]
        assert found["more"] == 7
        good = environment.start(case_idx, 0).search_hotels(case.wish.city, 3, False)["hotels"]
        assert good
        assert all(case.hotels[hit["id"]].stars >= 3 and not case.hotels[hit["id"]].breakfast for hit in good)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"city": "Nowhere"}, "There is no such hotel."),
        ({"city": ""}, "There is no such hotel."),
        ({"city": None}, "There is no such hotel."),
        ({"min_stars": 6}, "There is no such hotel."),
        ({"min_stars": 10**40}, "There is no such hotel."),
        *(
            ({name: value}, "min_stars is a whole number, breakfast is true or false.")
            for name in ("min_stars", "breakfast")
            for value in ["many", "", 2.5, [], {}]
        ),
    ],
    ids=str,
)
def test_a_search_for_the_absurd_finds_nothing(environment: Any, arguments: dict[str, Any], said: str) -> None:
    city = environment.cases[0].wish.city
    assert environment.start(0, 0).search_hotels(**({"city": city} | arguments)) == said


def test_the_details_tell_what_the_search_does_not(environment: Any) -> None:
    case = environment.cases[0]
    hotel = case.hotels[case.right]
    assert environment.start(0, 0).get_hotel(case.right) == {
        "name": hotel.name, "city": hotel.city, "stars": hotel.stars, "breakfast": hotel.breakfast,
        "price": hotel.price, "fee": hotel.fee, "free": f"{hotel.free_from} to {hotel.free_until}",
    }  # fmt: skip
    assert environment.start(0, 0).get_hotel("H99") == "There is no such hotel."
    assert environment.start(0, 0).get_hotel([]) == "There is no such hotel."


@pytest.mark.parametrize(
    ("question", "topics"),
    [
        ("What is your budget?", ["budget"]),
        ("How much may it cost?", ["budget"]),
        ("When do you arrive?", ["dates"]),
        ("How long will you stay?", ["dates"]),
        ("HOW MANY STARS?", ["stars"]),
        ("Do you want breakfast?", ["breakfast"]),
        ("Which city?", ["city"]),
        ("Breakfast and stars?", ["breakfast", "stars"]),
        ("budget dates stars breakfast city", ["budget", "dates"]),
    ],
)
def test_the_user_answers_what_was_asked_and_no_more_than_two_wishes(
    environment: Any, question: str, topics: list[str]
) -> None:
    booking, wish = environment.start(0, 0), environment.cases[0].wish
    assert booking.ask_user(question) == " ".join(map(wish.tell, topics))
    assert booking.told == {*environment.cases[0].told, *topics}


@pytest.mark.parametrize("question", ["", "Tell me everything.", "What do you wish?", "?" * 99_999, None, 3, []])
def test_an_unclear_question_is_asked_back(environment: Any, question: Any) -> None:
    booking = environment.start(0, 0)
    assert booking.ask_user(question) == "What would you like to know?"
    assert booking.told == set(environment.cases[0].told)


# -- the conversation


def test_after_eight_turns_the_tools_say_no_more(environment: Any) -> None:
    for replies in (['<tool_call>{"name": "ask_user", "arguments": {"question": "?"}}</tool_call>'] * 8, ["Hm."] * 8):
        booking = environment.start(0, 0)
        play(booking, replies)
        assert play(booking, environment.reference(0)) == ["The conversation is over."] * 5 + [None]
        assert booking.score().metrics == {
            "booked": 0,
            "questions": booking.questions,
            **{f"met_{t}": 0 for t in TOPICS},
        }


def test_several_calls_in_one_answer_are_several_turns(environment: Any) -> None:
    booking = environment.start(0, 0)
    play(booking, ["".join(environment.reference(0)[:3] * 3)])
    assert booking.ask_user("When?") == "The conversation is over."


def test_a_limit_of_turns_can_be_set() -> None:
    environment = load(cases=1, held_out=1, max_turns=5)
    booking = environment.start(0, 0)
    assert play(booking, environment.reference(0))[-1] is None
    assert booking.score().score == 1.0
    booking = load(cases=1, held_out=1, max_turns=4).start(0, 0)
    assert play(booking, environment.reference(0))[-2:] == ["The conversation is over.", None]
    assert booking.score().score == 0.0


def test_plain_text_ends_the_conversation_only_after_a_booking(environment: Any) -> None:
    booking = environment.start(0, 0)
    *before, done = environment.reference(0)
    assert play(booking, [done, *before, done])[::6] == ["Please ask with ask_user, and book me a hotel.", None]


def test_the_same_actions_in_the_same_case_come_to_the_same_whatever_the_seed(environment: Any) -> None:
    again = load()
    for case_idx in range(50):
        replies = [*environment.reference(case_idx)[:4], "Hm."]
        one, other = environment.start(case_idx, seed=1), again.start(case_idx, seed=2)
        assert play(one, replies) == play(other, replies)
        assert one.score() == other.score()


def test_conversations_do_not_meet(environment: Any) -> None:
    one, other = environment.start(0, 0), environment.start(0, 0)
    for reply in environment.reference(0):
        play(one, [reply])
        play(other, ["Hm."])
    assert one.score().score == 1.0
    assert other.score().metrics == {"booked": 0, "questions": 0, **{f"met_{topic}": 0 for topic in TOPICS}}
    assert environment.cases == load().cases
