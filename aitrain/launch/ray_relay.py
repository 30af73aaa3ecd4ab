"""The actor between the command and the training processes on a Ray cluster: events one way, requests the other.

A plain class, so that it runs in tests without Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from aitrain.activity import Snapshot
from aitrain.errors import to_aitrain_error
from aitrain.runs.checkpoint import newest_checkpoint
from aitrain.runs.node_info import NodeInfo, as_json
from aitrain.runs.run_folder import RunFolder


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs, and what is needed to start it together with the others."""

    rank: int
    host: str
    address: str
    version: str
    """Of aitrain there."""
    gpus: str = ""
    """As in CUDA_VISIBLE_DEVICES."""
    port: int = 0
    """A free port; that of rank 0 is used."""
    problem: str = ""
    """Why the run cannot be started there."""

    def __str__(self) -> str:
        return f"{self.host}, {self.address}" if self.host != self.address else self.host


@dataclass(frozen=True)
class Meeting:
    """All ranks of one start, and the checkpoint that they continue from."""

    places: tuple[RankPlace, ...]
    checkpoint: str | None
    problem: str = ""
    """Why the ranks must not start."""
    server: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables with the address of the run's own vLLM server, and its key."""
    start: str = ""
    """Id of this start."""

    def nodes(self) -> list[dict[str, object]]:
        """The machines, for status.json."""
        ranks: dict[str, list[RankPlace]] = {}
        for place in self.places:
            ranks.setdefault(place.address, []).append(place)
        gpus = {address: sum(bool(place.gpus) for place in places) for address, places in ranks.items()}
        return as_json(
            NodeInfo(number, places[0].host, address, gpus[address])
            for number, (address, places) in enumerate(ranks.items())
        )


@dataclass(frozen=True)
class RankNews:
    """What one rank has to say since its last message."""

    rank: int
    lines: tuple[str, ...] = ()
    """Events, as its process wrote them."""
    activity: Snapshot | None = None
    waits: bool | None = None
    """The answer to a request for stacks: whether it waits for another rank."""
    exit: str = ""
    """How the process ended, if it ended without an error message."""


@dataclass(frozen=True)
class Requests:
    """What the command wants of the ranks. `stops`: 1 asks them to finish their step, save and leave, 2 kills them."""

    stops: int = 0
    stacks: int = 0
    """Number of times that stacks were asked for."""
    over: str = ""
    """Id of a start whose processes are killed, as one of them has failed and others did not end; not a later one's."""


@dataclass
class RunRelay:
    """Passes news of ranks to the command, and its requests to the ranks."""

    folder: RunFolder
    ranks: int
    checkpoint: str | None
    """Where the first start continues from."""
    requests: Requests = field(default_factory=Requests)
    server: Mapping[str, str] = field(default_factory=dict, repr=False)
    _present: dict[str, dict[int, RankPlace]] = field(default_factory=dict)
    _met: dict[str, asyncio.Future[Meeting]] = field(default_factory=dict)
    _news: list[Meeting | RankNews] = field(default_factory=list)
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)
    _has_trained: bool = False

    # -- for ranks

    async def meet(self, start: str, place: RankPlace) -> Meeting:
        """Wait until all ranks of a start are here. `start` is its id: ranks of an earlier one may still be waiting."""
        present = self._present.setdefault(start, {})
        met = self._met.setdefault(start, asyncio.get_running_loop().create_future())
        present[place.rank] = place
        if len(present) == self.ranks:
            meeting = await self._meeting(start, tuple(present[rank] for rank in sorted(present)))
            self._say(meeting)
            met.set_result(meeting)
        return await asyncio.shield(met)

    async def tell(self, news: RankNews) -> Requests:
        """Pass news on to the command; returns what it wants."""
        self._has_trained = self._has_trained or any('"Step"' in line for line in news.lines)
        self._say(news)
        return self.requests

    async def _meeting(self, start: str, places: tuple[RankPlace, ...]) -> Meeting:
        problem = next((place.problem for place in places if place.problem), "") or _disagreement(places)
        checkpoint = self.checkpoint
        if self._has_trained and not problem:  # a restart
            try:
                newest = await asyncio.to_thread(newest_checkpoint, self.folder, lambda _: None)
                checkpoint = checkpoint if newest is None else str(newest)
            except Exception as error:
                problem = str(to_aitrain_error(error))
        return Meeting(places, checkpoint, problem, self.server, start)

    def _say(self, news: Meeting | RankNews) -> None:
        self._news.append(news)
        self._has_news.set()

    # -- for the command

    async def take(self, seconds: float) -> list[Meeting | RankNews]:
        """The news since the last call; waits at most `seconds` for some."""
        try:
            await asyncio.wait_for(self._has_news.wait(), seconds)
        except TimeoutError:
            return []
        self._has_news.clear()
        news, self._news = self._news, []
        return news

    async def serve(self, variables: Mapping[str, str]) -> None:
        """Set the variables by which training processes reach vLLM."""
        self.server = variables

    async def ask(self, requests: Requests) -> None:
        """Set what the command wants of the ranks."""
        self.requests = requests


def _disagreement(places: tuple[RankPlace, ...]) -> str:
    first = places[0]
    other = next((place for place in places if place.version != first.version), None)
    if other is None:
        return ""
    return (
        f"The machines have different versions of aitrain: {first.version} on {first.host}, {other.version} on"
        f" {other.host}\nInstall the same one on each machine."
    )
