"""Hotel booking: an assistant with four tools learns what a user wishes, finds the one hotel that has it, and books it.

The user has five wishes: city, dates, budget, stars and breakfast. The opening tells the city, in a quarter of the
cases the dates too; `ask_user` tells the others, at most two at a time. The budget is for the whole stay with the
hotel's fee, which only `get_hotel` shows, as it does the free dates. One hotel meets every wish; the other nine of its
city are too dear, or only seem cheap for their large fee, or have no room, or have the wrong stars or breakfast.

The score is 0.2 for each wish that the user had told before the booking and that the booking meets. It is 0 without a
booking, and 0 when the stay costs more than the budget (of the nights booked and the nights wished, the more count: to
book fewer is no way round it). `book_hotel` refuses a hotel that does not exist or is not free on the dates given, and
a second booking. A wish that was never told does not count, as luck is no merit: who asks nothing gets at most 0.2, or
0.4 where the opening tells the dates.
"""

import json
import random
import re
from collections.abc import Callable
from datetime import date, timedelta
from operator import itemgetter
from typing import Any, NamedTuple

from aitrain import Score

CITIES = ["Arla", "Brom", "Corvo", "Delt", "Elmar", "Fjord", "Gant", "Halen", "Ister", "Jola", "Kerrin", "Lund"]
FIRST_NAMES = ["Rose", "Sea", "Sun", "Oak", "Swan", "Moon", "Park", "Star"]
LAST_NAMES = ["Inn", "Lodge", "Hotel", "House"]
OPENINGS = ["I need a hotel in {}.", "Hi! Please book me a hotel in {}.", "I am going to {}. Find me a hotel."]
SYSTEM = "You book hotels. Ask the user for dates, budget, stars and breakfast, find the right hotel, book it, say so."

TOPICS = {
    "city": r"\b(city|town|where|place|location|destination)",
    "dates": r"\b(date|when|day|night|check|arriv|how long)",
    "budget": r"\b(budget|price|cost|spend|pay|money|much|expens|afford)",
    "stars": r"\b(star|class|categor|rating|quality)",
    "breakfast": r"\b(breakfast|meal|food|eat)",
}
"""What a question is about, by the words in it."""

MAX_HITS = 3
MAX_NIGHTS = 30
OVER = "The conversation is over."


class Hotel(NamedTuple):
    """A hotel: `price` is per night, `fee` once per stay; its room is free from `free_from` to `free_until`."""

    name: str
    city: str
    stars: int
    breakfast: bool
    price: int
    fee: int
    free_from: date
    free_until: date

    def cost(self, nights: int) -> int:
        """What a stay costs in all."""
        return self.price * nights + self.fee

    def is_free(self, check_in: date, nights: int) -> bool:
        """Whether the room is free for the whole stay."""
        return self.free_from <= check_in and (self.free_until - check_in).days >= nights


class Wish(NamedTuple):
    """What a user wishes; `stars` is the least, `budget` the most."""

    city: str
    check_in: date
    nights: int
    budget: int
    stars: int
    breakfast: bool

    def tell(self, topic: str) -> str:
        """The user's words for one wish."""
        return {
            "city": f"In {self.city}.",
            "dates": f"From {self.check_in}, {self.nights} nights.",
            "budget": f"At most {self.budget} in all, fee included.",
            "stars": f"At least {self.stars} stars.",
            "breakfast": "With breakfast." if self.breakfast else "Without breakfast.",
        }[topic]


class HotelCase(NamedTuple):
    """A user, the hotels that there are, and the id of the right one; `told` is what the opening tells."""

    wish: Wish
    opening: str
    told: tuple[str, ...]
    hotels: dict[str, Hotel]
    right: str


class HotelBooking:
    """A user wants a hotel; the score says how many of the wishes the assistant learned and met."""

    def __init__(self, cases: int = 400, held_out: int = 100, seed: int = 0, max_turns: int = 8) -> None:
        drawn: dict[Wish, HotelCase] = {}  # by wish, so that no two are the same
        number = 0
        while len(drawn) < cases + held_out:
            case = draw_case(random.Random(f"hotels {seed} {number}"))
            drawn.setdefault(case.wish, case)
            number += 1
        both = list(drawn.values())
        self.max_turns = max_turns
        self.train_size = cases
        self.cases = both[held_out:] + both[:held_out]  # held-out ones stay the same for any number of cases

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """One row per user to train on."""
        return [self._row(case_idx) for case_idx in range(self.train_size)]

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """One row per user kept back from training, numbered on from those."""
        return [self._row(case_idx) for case_idx in range(self.train_size, len(self.cases))]

    def start(self, case_idx: int, seed: int) -> "Booking":
        """A new conversation; all of one case are alike, whatever the seed."""
        return Booking(self.cases[case_idx], self.max_turns)

    def reference(self, case_idx: int) -> list[str]:
        """The replies of an assistant that asks for what it needs, and knows the right hotel as soon as it is found."""
        wish, *_, right = self.cases[case_idx]
        stay = {"check_in": str(wish.check_in), "nights": wish.nights}
        wanted = {"min_stars": wish.stars, "breakfast": wish.breakfast}
        return [
            tool_call("ask_user", question="On which dates, and what is your budget?"),
            tool_call("ask_user", question="How many stars? Breakfast?"),
            tool_call("search_hotels", city=wish.city, **wanted),
            tool_call("get_hotel", hotel_id=right),
            tool_call("book_hotel", hotel_id=right, **stay),
            "It is booked.",
        ]

    def _row(self, case_idx: int) -> dict[str, Any]:
        user = {"role": "user", "content": self.cases[case_idx].opening}
        return {"prompt": [{"role": "system", "content": SYSTEM}, user], "case_idx": case_idx}


class Booking:
    """One conversation. Each tool call and each plain answer is a turn."""

    def __init__(self, case: HotelCase, max_turns: int) -> None:
        self.case, self.turns_left = case, max_turns
        self.told = set(case.told)
        self.questions = 0
        self.booked = self.is_affordable = False
        self.met = dict.fromkeys(TOPICS, False)

    def get_tools(self) -> list[Callable[..., Any]]:
        """The tools of this conversation."""
        return [self.search_hotels, self.get_hotel, self.book_hotel, self.ask_user]

    def step(self, reply: str) -> str | None:
        """What the user says to an answer without tool calls; None ends the conversation."""
        is_over = not self._take_turn() or self.booked or not self.turns_left
        return None if is_over else "Please ask with ask_user, and book me a hotel."

    def score(self) -> Score:
        """0.2 for each wish told and met, 0 for a stay over the budget; see the top of the file."""
        metrics = {"booked": float(self.booked), "questions": float(self.questions)}
        metrics |= {f"met_{topic}": float(is_met) for topic, is_met in self.met.items()}
        return Score(sum(self.met.values()) / len(self.met) if self.is_affordable else 0.0, metrics)

    def search_hotels(self, city: str, min_stars: int = 1, breakfast: bool | None = None) -> dict[str, Any] | str:
        """The cheapest hotels.

        Args:
            breakfast: With or without
        """
        if not self._take_turn():
            return OVER
        stars = whole(min_stars)
        if stars is None or breakfast not in (True, False, None):
            return "min_stars is a whole number, breakfast is true or false."
        hits = [
            {"id": hotel_id, "name": hotel.name, "stars": hotel.stars, "price": hotel.price}
            for hotel_id, hotel in self._in_city(city).items()
            if hotel.stars >= stars and breakfast in (None, hotel.breakfast)
        ]
        hits.sort(key=itemgetter("price"))
        return {"hotels": hits[:MAX_HITS], "more": len(hits[MAX_HITS:])} if hits else "There is no such hotel."

    def get_hotel(self, hotel_id: str) -> dict[str, Any] | str:
        """Its fee and free dates."""
        if not self._take_turn():
            return OVER
        hotel = self.case.hotels.get(str(hotel_id))
        if hotel is None:
            return "There is no such hotel."
        shown = hotel._asdict()
        shown["free"] = f"{shown.pop('free_from')} to {shown.pop('free_until')}"
        return shown

    def book_hotel(self, hotel_id: str, check_in: str, nights: int) -> str:
        """Can be done once.

        Args:
            check_in: YYYY-MM-DD
        """
        if not self._take_turn():
            return OVER
        hotel, first, length = self.case.hotels.get(str(hotel_id)), day(check_in), whole(nights)
        if self.booked:
            return "You have booked already."
        if hotel is None:
            return "There is no such hotel."
        if first is None:
            return "check_in is a date, such as 2030-01-31."
        if length is None or not 1 <= length <= MAX_NIGHTS:
            return f"nights is a number from 1 to {MAX_NIGHTS}."
        if not hotel.is_free(first, length):
            return f"{hotel.name} is not free then."
        self._book(hotel, first, length)
        return f"Booked: {hotel.name}, {first}, {length} nights."

    def ask_user(self, question: str) -> str:
        """Ask for one or two wishes."""
        if not self._take_turn():
            return OVER
        self.questions += 1
        found = {topic: re.search(words, str(question), re.IGNORECASE) for topic, words in TOPICS.items()}
        starts = {topic: match.start() for topic, match in found.items() if match}
        topics = sorted(starts, key=starts.__getitem__)[:2]
        self.told.update(topics)
        return " ".join(map(self.case.wish.tell, topics)) or "What would you like to know?"

    def _take_turn(self) -> bool:
        self.turns_left -= 1
        return self.turns_left >= 0

    def _in_city(self, city: str) -> dict[str, Hotel]:
        name = str(city).strip().casefold()
        return {hotel_id: hotel for hotel_id, hotel in self.case.hotels.items() if hotel.city.casefold() == name}

    def _book(self, hotel: Hotel, check_in: date, nights: int) -> None:
        wish = self.case.wish
        self.booked = True
        self.is_affordable = hotel.cost(max(nights, wish.nights)) <= wish.budget
        is_so = {
            "city": hotel.city == wish.city,
            "dates": (check_in, nights) == (wish.check_in, wish.nights),
            "budget": self.is_affordable,
            "stars": hotel.stars >= wish.stars,
            "breakfast": hotel.breakfast == wish.breakfast,
        }
        self.met = {topic: topic in self.told and is_so[topic] for topic in TOPICS}


def draw_case(rng: random.Random) -> HotelCase:
    """A user and the hotels, of which exactly one is right."""
    city, *others = rng.sample(CITIES, 3)
    base = rng.randint(60, 120)  # per night, what the budget is made of
    nights = rng.randint(2, 5)
    check_in = date(2030, 1, 10) + timedelta(days=rng.randrange(340))
    wish = Wish(city, check_in, nights, base * nights + 30, rng.randint(3, 4), rng.random() < 0.5)
    hotels = draw_city(rng, wish, base)
    right = hotels[0]
    hotels += [right._replace(city=others[0]), *(draw_any(rng, wish, rng.choice(others)) for _ in range(9))]
    names = rng.sample([f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES], len(hotels))
    numbers = rng.sample(range(1, len(hotels) + 1), len(hotels))
    by_number = sorted(zip(numbers, names, hotels, strict=True))
    told = ("city", "dates") if rng.random() < 0.25 else ("city",)
    opening = " ".join([rng.choice(OPENINGS).format(city), *map(wish.tell, told[1:])])
    by_id = {f"H{number}": hotel._replace(name=name) for number, name, hotel in by_number}
    return HotelCase(wish, opening, told, by_id, f"H{numbers[0]}")


def draw_city(rng: random.Random, wish: Wish, base: int) -> list[Hotel]:
    """The hotels of the city wished: first the right one, then those that miss a wish or two."""
    free_from = wish.check_in - timedelta(days=rng.randint(0, 5))
    free_until = wish.check_in + timedelta(days=wish.nights + rng.randint(0, 5))

    def similar(hotel: Hotel) -> Hotel:
        return hotel._replace(price=base - rng.randint(0, 9), fee=rng.randint(0, 30))

    def full(hotel: Hotel) -> Hotel:
        return similar(hotel)._replace(free_from=wish.check_in + timedelta(days=1))

    def large_fee(hotel: Hotel) -> Hotel:
        price = base - rng.randint(2, 15)
        return hotel._replace(price=price, fee=wish.budget - price * wish.nights + rng.randint(5, 60))

    def dear(hotel: Hotel) -> Hotel:
        return similar(hotel)._replace(stars=5, price=base + rng.randint(16, 80))

    right = Hotel("", wish.city, rng.randint(wish.stars, 4), wish.breakfast, base, 30, free_from, free_until)
    other_breakfast = right._replace(breakfast=not wish.breakfast)
    few_stars = right._replace(stars=wish.stars - rng.randint(1, 2))
    return [
        *(similar(hotel) for hotel in (right, other_breakfast, few_stars)),
        *(full(hotel) for hotel in (right, rng.choice([other_breakfast, few_stars]))),
        *(large_fee(hotel) for hotel in (right, other_breakfast, few_stars)),
        *(dear(hotel) for hotel in (right, other_breakfast)),
    ]


def draw_any(rng: random.Random, wish: Wish, city: str) -> Hotel:
    """A hotel of another city, free or not."""
    free_from = wish.check_in + timedelta(days=rng.randint(-9, 3))
    price, fee = rng.randint(60, 240), rng.randint(0, 30)
    return Hotel("", city, rng.randint(1, 5), rng.random() < 0.5, price, fee, free_from, free_from + timedelta(days=12))


def tool_call(name: str, **arguments: Any) -> str:
    """A tool call as a model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def whole(value: Any) -> int | None:
    """A whole number, also one written as text."""
    try:
        return int(str(value))
    except ValueError:
        return None


def day(value: Any) -> date | None:
    """The date in a text such as 2030-01-31."""
    try:
        return date.fromisoformat(str(value))
    except ValueError:
        return None
