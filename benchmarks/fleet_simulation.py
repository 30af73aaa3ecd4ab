"""Simulates a training step of a fleet: weight sync, rollout on servers and environments, optimization.

A discrete-event simulation of what aitrain does. A step begins with the weights for the engines; then all episodes are
played, each with its turns: a completion, and a call of its environment; then the policy is trained. Servers decode all
of their sequences at the same time, slower the more there are. Calls of environments wait for a free worker.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace


@dataclass(frozen=True)
class SimulatedTurn:
    """A completion of this number of tokens, and the seconds of the environment's call after it."""

    tokens: int
    env_seconds: float


SimulatedEpisode = tuple[SimulatedTurn, ...]


@dataclass(frozen=True)
class Fleet:
    """The parts of a fleet, and how fast each of them is."""

    processes: int = 1
    """Training processes, each with its share of the episodes."""
    servers: int | None = None
    """vLLM servers; None: each training process generates by itself, in rounds, as without `--use-vllm`."""
    token_seconds: float = 0.0
    """A decoding step, apart from its sequences."""
    sequence_seconds: float = 0.0
    """What each sequence adds to a decoding step."""
    sequences: int = 256
    """Sequences that a server decodes at the same time."""
    env_workers: int = 64
    """Calls of the environment at the same time, for each training process."""
    turn_seconds: float = 0.0
    """The rollout's own time for a turn: what is left of a measured rollout beside completions and calls."""
    train_seconds: float = 0.0
    """Training on one sampled token, on one process."""
    fixed_seconds: float = 0.0
    """Training in a step, apart from its tokens."""
    sync_bytes: float = 0.0
    """Size of the weights that the servers get before each rollout."""
    write_speed: float = math.inf
    """Bytes per second at which the weights are written, once."""
    read_speed: float = math.inf
    """Bytes per second at which a server loads them; the servers do so at the same time."""
    link_speed: float = math.inf
    """Bytes per second at which they can be read by all servers together, and at which gradients are exchanged."""
    gradient_bytes: float = 0.0
    """Size of the gradients that the processes exchange in a step."""

    @property
    def sync_seconds(self) -> float:
        """From the end of the training to weights in all servers."""
        servers = self.servers or 0
        if not servers:
            return 0.0
        reading = max(self.sync_bytes / self.read_speed, servers * self.sync_bytes / self.link_speed)
        return self.sync_bytes / self.write_speed + reading

    def decoding_seconds(self, sequences: int) -> float:
        """A decoding step of that many sequences."""
        return max(1e-9, self.token_seconds + self.sequence_seconds * sequences)


@dataclass(frozen=True)
class SimulatedStep:
    """Seconds of a step and of its parts, which follow each other, and what was busy meanwhile."""

    sync: float
    rollout: float
    train: float
    generate: float
    """Seconds of the rollout in which an episode waited for a completion."""
    environment: float
    """Seconds of the rollout in which an episode waited for its environment."""
    tokens: float
    server_use: float
    """Share of the step in which a server decodes, over all of them."""
    worker_use: float
    """Share of the step in which a worker of the environment is in a call, over all of them."""
    trainer_use: float
    """Share of the step in which the training processes train."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.sync + self.rollout + self.train


def simulate_step(fleet: Fleet, episodes: Sequence[SimulatedEpisode]) -> SimulatedStep:
    """One step of these episodes."""
    if fleet.servers is None:
        shares = [_InRounds(fleet).play(part) for part in parts_of(episodes, fleet.processes)]
        slowest = max(shares, key=lambda rollout: rollout.seconds)
        rollout = replace(
            slowest,
            decoding=sum(share.decoding for share in shares),
            in_calls=sum(share.in_calls for share in shares),
        )
    else:
        rollout = _FreeRunning(fleet).play(episodes)
    most_tokens = max(map(tokens_of, parts_of(episodes, fleet.processes)))
    exchange = 2 * (fleet.processes - 1) / fleet.processes * fleet.gradient_bytes / fleet.link_speed
    train = fleet.fixed_seconds + fleet.train_seconds * most_tokens + exchange
    whole = max(fleet.sync_seconds + rollout.seconds + train, 1e-12)
    return SimulatedStep(
        sync=fleet.sync_seconds,
        rollout=rollout.seconds,
        train=train,
        generate=rollout.generate,
        environment=rollout.environment,
        tokens=tokens_of(episodes),
        server_use=rollout.decoding / (whole * (fleet.servers or fleet.processes)),
        worker_use=rollout.in_calls / (whole * fleet.env_workers * fleet.processes),
        trainer_use=train / whole,
    )


def simulate_steps(fleet: Fleet, steps: Sequence[Sequence[SimulatedEpisode]]) -> SimulatedStep:
    """The mean of several steps, each with its episodes."""
    done = [astuple(simulate_step(fleet, episodes)) for episodes in steps]
    return SimulatedStep(*(sum(values) / len(done) for values in zip(*done, strict=True)))


CHANGES: Mapping[str, Callable[[Fleet], Fleet]] = {
    "twice the servers": lambda fleet: replace(fleet, servers=2 * (fleet.servers or 1)),
    "half the decoding latency": lambda fleet: replace(fleet, token_seconds=fleet.token_seconds / 2),
    "twice the environment workers": lambda fleet: replace(fleet, env_workers=2 * fleet.env_workers),
    "twice the training processes": lambda fleet: replace(
        fleet, processes=2 * fleet.processes, env_workers=max(1, fleet.env_workers // 2)
    ),
    "twice the sync speed": lambda fleet: replace(
        fleet,
        write_speed=2 * fleet.write_speed, read_speed=2 * fleet.read_speed, link_speed=2 * fleet.link_speed,
    ),
}  # fmt: skip
"""What may saturate, and the fleet with more of it. Latency is that of a decoding step apart from its sequences: what
the longest episode waits for, and more servers do not change."""


def saturation(fleet: Fleet, steps: Sequence[Sequence[SimulatedEpisode]]) -> dict[str, float]:
    """How many times faster a step is after each change, the most useful first: what it changes saturates first."""
    seconds = simulate_steps(fleet, steps).seconds
    names = [name for name in CHANGES if name != "twice the servers" or fleet.servers is not None]
    gains = {name: seconds / simulate_steps(CHANGES[name](fleet), steps).seconds for name in names}
    return dict(sorted(gains.items(), key=lambda gain: -gain[1]))


def parts_of(episodes: Sequence[SimulatedEpisode], processes: int) -> list[Sequence[SimulatedEpisode]]:
    """The episodes of each process."""
    size = math.ceil(len(episodes) / processes)
    return [episodes[rank * size : (rank + 1) * size] for rank in range(processes)]


def tokens_of(episodes: Iterable[SimulatedEpisode]) -> int:
    """Sampled tokens of all of them."""
    return sum(turn.tokens for episode in episodes for turn in episode)


# -- rollouts


@dataclass(frozen=True)
class _Rollout:
    seconds: float
    generate: float
    environment: float
    decoding: float
    """Seconds of decoding, over all engines."""
    in_calls: float
    """Seconds of calls, over all workers."""


class _InRounds:
    """One process: all live episodes get a completion together, then their environments are called."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def play(self, episodes: Sequence[SimulatedEpisode]) -> _Rollout:
        generate = environment = in_calls = own = 0.0
        for number in range(max(map(len, episodes), default=0)):
            live = [episode[number] for episode in episodes if len(episode) > number]
            # every row of a batch is generated until the longest one ends
            generate += max(turn.tokens for turn in live) * self.fleet.decoding_seconds(len(live))
            calls = [turn.env_seconds for turn in live]
            environment += _makespan(calls, self.fleet.env_workers)
            in_calls += sum(calls)
            own += len(live) * self.fleet.turn_seconds
        return _Rollout(generate + environment + own, generate, environment, generate, in_calls)


def _makespan(calls: Sequence[float], workers: int) -> float:
    free = [0.0] * min(workers, len(calls))
    for seconds in calls:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free, default=0.0)


@dataclass
class _Server:
    """Decodes its sequences at the same time. `done` counts the decoding steps; a sequence ends at a number of them."""

    number: int
    fleet: Fleet
    done: float = 0.0
    since: float = 0.0
    busy: float = 0.0
    changes: int = 0
    """Number of the last change of its batch; an end that was predicted before is void."""
    ends: list[tuple[float, int]] = field(default_factory=list)
    """Of each sequence that is decoded: the decoding step that ends it, and the episode."""
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    """Episodes that wait for room, with their tokens."""
    in_flight: int = 0
    """Tokens of all its requests."""

    def advance(self, now: float) -> None:
        """Decode until now."""
        if self.ends:
            self.done += (now - self.since) / self.fleet.decoding_seconds(len(self.ends))
            self.busy += now - self.since
        self.since = now

    def admit(self) -> float | None:
        """Fill the batch from the queue; returns when the next sequence ends, None if there is none."""
        while self.queue and len(self.ends) < self.fleet.sequences:
            episode, tokens = self.queue.popleft()
            heapq.heappush(self.ends, (self.done + tokens, episode))
        self.changes += 1
        if not self.ends:
            return None
        left = max(0.0, self.ends[0][0] - self.done)
        return self.since + left * self.fleet.decoding_seconds(len(self.ends))


class _Share:
    """Seconds in which at least one episode is in a part of the rollout."""

    def __init__(self) -> None:
        self.inside, self.since, self.seconds = 0, 0.0, 0.0

    def change(self, now: float, by: int) -> None:
        if not self.inside:
            self.since = now
        self.inside += by
        if not self.inside:
            self.seconds += now - self.since


class _FreeRunning:
    """Servers: an episode asks for its next completion when its environment has answered, and keeps its server."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.servers = [_Server(number, fleet) for number in range(fleet.servers or 1)]
        self.free_workers = fleet.env_workers * fleet.processes
        self.calls: deque[int] = deque()
        self.events: list[tuple[float, int, str, int, int]] = []
        self.generate, self.environment = _Share(), _Share()
        self.now = self.in_calls = 0.0
        self.numbers = iter(range(1 << 62))

    def play(self, episodes: Sequence[SimulatedEpisode]) -> _Rollout:
        self.episodes, self.turn = episodes, [0] * len(episodes)
        self.server_of: dict[int, _Server] = {}
        for episode in range(len(episodes)):
            self._request(episode)
        while self.events:
            self.now, _, what, which, change = heapq.heappop(self.events)
            if what == "answered":
                self._answered(which)
            elif self.servers[which].changes == change:
                self._completed(self.servers[which])
        decoding = sum(server.busy for server in self.servers)
        return _Rollout(self.now, self.generate.seconds, self.environment.seconds, decoding, self.in_calls)

    def _request(self, episode: int) -> None:
        """Ask the episode's server, at first the one with the fewest tokens in flight."""
        tokens = self.episodes[episode][self.turn[episode]].tokens
        if episode not in self.server_of:
            self.server_of[episode] = min(self.servers, key=lambda server: (server.in_flight, server.number))
        server = self.server_of[episode]
        self.generate.change(self.now, +1)
        server.advance(self.now)
        server.in_flight += tokens
        server.queue.append((episode, tokens))
        self._predict(server)

    def _predict(self, server: _Server) -> None:
        end = server.admit()
        if end is not None:
            heapq.heappush(self.events, (end, next(self.numbers), "completed", server.number, server.changes))

    def _completed(self, server: _Server) -> None:
        server.advance(self.now)
        _, episode = heapq.heappop(server.ends)
        server.in_flight -= self.episodes[episode][self.turn[episode]].tokens
        self._predict(server)
        self.environment.change(self.now, +1)
        self.generate.change(self.now, -1)
        self.calls.append(episode)
        self._call()

    def _call(self) -> None:
        while self.calls and self.free_workers:
            episode = self.calls.popleft()
            seconds = self.episodes[episode][self.turn[episode]].env_seconds
            self.free_workers -= 1
            self.in_calls += seconds
            end = self.now + seconds + self.fleet.turn_seconds
            heapq.heappush(self.events, (end, next(self.numbers), "answered", episode, 0))

    def _answered(self, episode: int) -> None:
        self.free_workers += 1
        self._call()
        self.turn[episode] += 1
        if self.turn[episode] < len(self.episodes[episode]):
            self._request(episode)
        self.environment.change(self.now, -1)
