"""Hotel booking: an assistant with four tools learns what a user wishes, finds the one hotel that has it, and books it.

The user has five wishes: city, dates, budget, stars and breakfast. The opening tells the city, `ask_user` each of the
others. `search_hotels` shows the cheapest hotels, only `get_hotel` their free dates. One hotel meets every wish, and
each of the others misses one.

The score is 0.2 for each wish that the user had told before the booking and that the booking meets, and 0 without a
booking. The budget is for the nights wished, however few are booked. A wish that was never told does not count, as luck
is no merit: who asks nothing gets at most 0.2. `book_hotel` refuses a hotel that does not exist or is not free on the
dates given, and a second booking.
"""

import json
import random
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from aitrain import EnvRequirements, Score

CITIES = ["Arla", "Brom", "Corvo", "Delt", "Elmar", "Fjord", "Gant", "Halen", "Ister", "Jola", "Kerrin", "Lund"]
SYSTEM = "You book hotels. Ask the user for dates, budget, stars and breakfast, find the right hotel, book it, say so."

TOPICS = ["city", "dates", "budget", "stars", "breakfast"]
MAX_HITS = 3


class Hotel(NamedTuple):
    """A hotel: `price` is per night; its room is free between two days of June."""

    city: str
    stars: int
    breakfast: bool
    price: int
    free_from: int
    free_until: int


class Wish(NamedTuple):
    """What a user wishes; `stars` is the least, `budget` the most."""

    city: str
    check_in: int
    nights: int
    budget: int
    stars: int
    breakfast: bool

    def tell(self, topic: str) -> str:
        """The user's words for one wish."""
        return {
            "city": f"In {self.city}.",
            "dates": f"From June {self.check_in}, {self.nights} nights.",
            "budget": f"At most {self.budget} in all.",
            "stars": f"At least {self.stars} stars.",
            "breakfast": "With breakfast." if self.breakfast else "Without breakfast.",
        }[topic]


class HotelCase(NamedTuple):
    """A user's wish, the hotels that there are, and the id of the right one."""

    wish: Wish
    hotels: dict[str, Hotel]
    right: str


def draw_case(rng: random.Random) -> HotelCase:
    """A user and the hotels, of which exactly one is right."""
    city, other_city = rng.sample(CITIES, 2)
    price, nights, check_in = rng.randint(60, 120), rng.randint(2, 5), rng.randint(6, 20)
    wish = Wish(city, check_in, nights, price * nights, rng.randint(3, 4), rng.random() < 0.5)
    misses: list[dict[str, Any]] = [
        {"city": other_city},
        {"free_from": check_in + 1},
        {"price": price + rng.randint(5, 80)},
        {"stars": wish.stars - rng.randint(1, 2)},
        {"breakfast": not wish.breakfast},
    ]
    changes = [{}, *misses, *misses]
    ids = rng.sample([f"H{number}" for number in range(1, len(changes) + 1)], len(changes))
    hotels = {}
    for id, change in zip(ids, changes, strict=True):
        free = check_in - rng.randint(0, 5), check_in + nights + rng.randint(0, 5)
        hotel = Hotel(city, rng.randint(wish.stars, 5), wish.breakfast, price - rng.randint(0, 20), *free)
        hotels[id] = hotel._replace(**change)
    return HotelCase(wish, hotels, ids[0])


class HotelBooking:
    """A user wants a hotel; the score says how many of the wishes the assistant learned and met."""

    requirements = EnvRequirements(max_turns=8)

    def __init__(self, cases: int = 400, held_out: int = 100, seed: int = 0) -> None:
        rng, drawn = random.Random(f"hotels {seed}"), dict[Wish, HotelCase]()  # by wish, so that no two are the same
        while len(drawn) < cases + held_out:
            case = draw_case(rng)
            drawn.setdefault(case.wish, case)
        both = list(drawn.values())
        self.train_size = cases
        self.cases = both[held_out:] + both[:held_out]  # held-out ones stay the same for any number of cases

    def build_dataset(self) -> list[dict[str, Any]]:
        """One row per user to train on."""
        return self._rows(range(self.train_size))

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        """One row per user kept back from training, numbered on from those."""
        return self._rows(range(self.train_size, len(self.cases)))

    def start(self, case_idx: int) -> "Booking":
        """A new conversation; all of one case are alike."""
        return Booking(self.cases[case_idx])

    def reference(self, case_idx: int) -> list[str]:
        """The replies of an assistant that asks for what it needs, and knows the right hotel as soon as it is found."""
        wish, _, right = self.cases[case_idx]
        return [
            "".join(tool_call("ask_user", topic=topic) for topic in TOPICS[1:]),
            tool_call("search_hotels", city=wish.city, min_stars=wish.stars, breakfast=wish.breakfast),
            tool_call("get_hotel", hotel_id=right),
            tool_call("book_hotel", hotel_id=right, check_in=wish.check_in, nights=wish.nights),
            "It is booked.",
        ]

    def _rows(self, numbers: range) -> list[dict[str, Any]]:
        system = {"role": "system", "content": SYSTEM}
        openings = [f"I need a hotel in {self.cases[number].wish.city}." for number in numbers]
        return [
            {"prompt": [system, {"role": "user", "content": opening}], "case_idx": number}
            for opening, number in zip(openings, numbers, strict=True)
        ]


class Booking:
    """One conversation, with its tools."""

    def __init__(self, case: HotelCase) -> None:
        self.case, self.told = case, {"city"}
        self.plain_answers, self.booked = 0, False
        self.met = dict.fromkeys(TOPICS, False)

    def get_tools(self) -> list[Callable[..., Any]]:
        """The tools of this conversation."""
        return [self.search_hotels, self.get_hotel, self.book_hotel, self.ask_user]

    def step(self, reply: str) -> str | None:
        """What the user says to an answer without tool calls; None ends the conversation, as does the third one."""
        self.plain_answers += 1
        is_over = self.booked or self.plain_answers == 3
        return None if is_over else "Please ask with ask_user, and book me a hotel."

    def score(self) -> Score:
        """0.2 for each wish told and met."""
        metrics = {f"met_{topic}": float(is_met) for topic, is_met in self.met.items()}
        return Score(sum(self.met.values()) / len(self.met), {**metrics, "booked": float(self.booked)})

    def search_hotels(self, city: str, min_stars: int = 1, breakfast: bool | None = None) -> list[dict[str, Any]] | str:
        """Search the cheapest hotels of a city.

        Args:
            breakfast: With or without
        """
        hits = sorted(
            (hotel.price, id, hotel.stars)
            for id, hotel in self.case.hotels.items()
            if hotel.city.casefold() == city.strip().casefold()
            and hotel.stars >= min_stars
            and breakfast in (None, hotel.breakfast)
        )
        shown = [{"id": id, "stars": stars, "price": price} for price, id, stars in hits[:MAX_HITS]]
        return shown or "There is no such hotel."

    def get_hotel(self, hotel_id: str) -> dict[str, Any] | str:
        """Show a hotel's price, stars, breakfast and free dates."""
        hotel = self.case.hotels.get(hotel_id)
        return "There is no such hotel." if hotel is None else hotel._asdict()

    def book_hotel(self, hotel_id: str, check_in: int, nights: int) -> str:
        """Book a hotel, once.

        Args:
            check_in: The day of June
        """
        wish, hotel = self.case.wish, self.case.hotels.get(hotel_id)
        if self.booked:
            return "You have booked already."
        if hotel is None:
            return "There is no such hotel."
        if nights < 1 or check_in < hotel.free_from or check_in + nights > hotel.free_until:
            return f"{hotel_id} is not free then."
        self.booked = True
        is_so = {
            "city": hotel.city == wish.city,
            "dates": (check_in, nights) == (wish.check_in, wish.nights),
            "budget": hotel.price * max(nights, wish.nights) <= wish.budget,
            "stars": hotel.stars >= wish.stars,
            "breakfast": hotel.breakfast == wish.breakfast,
        }
        self.met = {topic: topic in self.told and is_so[topic] for topic in TOPICS}
        return f"Booked: {hotel_id}, June {check_in}, {nights} nights."

    def ask_user(self, topic: Literal["dates", "budget", "stars", "breakfast"]) -> str:
        """Ask for a wish."""
        self.told.add(topic)
        return self.case.wish.tell(topic)


def tool_call(name: str, **arguments: Any) -> str:
    """A tool call as a model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
