"""Checks of episodes: they end, do not disturb each other, take little time, and do nothing to their process or outside
of it.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from typing import Any

import psutil

from aitrain.batch import plan_batch
from aitrain.environment.endpoint import running_address
from aitrain.environment.rollout_session import is_served
from aitrain.execution.async_calls import shared_loop
from aitrain.workbench.check.subject import SLOW_SAMPLE, EnvFinding, NotCheckedError, Subject
from aitrain.workbench.player import EMPTY, JUNK, replied

SLOW = 1.0
"""Seconds per step from which the environment is called slow."""
BUDGET = 10.0
"""Seconds that the measurement may take, about."""


def episode_end(subject: Subject) -> Iterator[EnvFinding]:
    """Episodes end by themselves."""
    cases = subject.sample[:SLOW_SAMPLE]
    pairs = [(case, policy) for case in cases for policy in (subject.reference(case), EMPTY, JUNK) if policy]
    for episode in [one for one in subject.play(pairs) if one.stop in ("out_of_replies", "max_turns")][:1]:
        replies = replied(episode)
        yield EnvFinding(
            "warning",
            f"An episode does not end by itself: {episode.stop} after {len(replies)} replies, such as {replies[:1]}.",
            "Such an episode costs up to --rl-max-turns generations, and its score is that of an unfinished one.",
            "Return the score (or None from step) when the task is done, or after some turns without progress.",
            episode.case.case_idx,
        )


def latency(subject: Subject) -> Iterator[EnvFinding]:
    """The episodes of a step take little time beside generation."""
    batch = plan_batch(subject.config, subject.config.num_processes or 1)
    wanted = batch.completions_per_step // batch.processes
    count = max(1, min(wanted, int(BUDGET / max(subject.episode_seconds, 1e-6))))
    start = time.monotonic()
    subject.replay(islice(cycle(subject.pairs), count), count)
    seconds = (time.monotonic() - start) * wanted / count
    if seconds > SLOW:
        yield EnvFinding(
            "warning",
            f"The environment adds {seconds:.2g} seconds to each step of {wanted} episodes.",
            "The GPU waits for it in every step.",
            "Load data once in __init__; await what takes long in an `async def`, where time.sleep or requests block"
            " all others; use --rl-env-isolation process for code that computes.",
        )


# -- effects

SETTLE = 2.0
"""Seconds that threads of the player itself get to end."""
EVENTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo")
"""Audit events of Python's socket module: which address, before anything is sent."""


@dataclass(frozen=True)
class Effect:
    """What episodes may change of their process, or leave behind in it."""

    what: str
    """The beginning of a sentence that ends with the names of what is changed."""
    look: Callable[[], Mapping[str, object]]
    """Parts of the process by their names; a part is changed if it is there with another value, or was not there."""
    why: str
    fix: str


OWN_COPY = "Episodes run at the same time, so that each one changes it under the others."
OUR_THREADS = "environment-"
"""Beginning of the names of threads that call the environment: one that hangs is found by `exceptions`."""
USED_UP = "A run of thousands of episodes ends without memory, threads or processes."
EFFECTS = (
    Effect(
        "change the working directory, to",
        lambda: {os.getcwd(): True},
        OWN_COPY,
        "Use full paths: Path(__file__).parent / 'data'.",
    ),
    Effect(
        "change os.environ:",
        lambda: dict(os.environ),
        OWN_COPY,
        "Set variables in __init__, or give them to the program: env={...}.",
    ),
    Effect(
        "draw or seed the global random numbers of",
        lambda: {
            "random": random.getstate(),  # and that of numpy, if something has imported it
            "numpy": "numpy.random" in sys.modules and str(sys.modules["numpy.random"].get_state()),
        },
        "Which episode draws which numbers depends on their timing, so no run can be repeated exactly; and after a seed"
        " all of them draw the same.",
        "Draw from random.Random(seed) of your own; `seed` is an argument of episode and start.",
    ),
    Effect(
        "leave threads behind:",
        lambda: {one.name: one for one in threading.enumerate() if not one.name.startswith(OUR_THREADS)},
        USED_UP,
        "End them in close() of the episode's object, or share one pool that __init__ makes.",
    ),
    Effect(
        "leave processes behind:",
        lambda: {str(child.pid): True for child in psutil.Process().children(recursive=True)},
        USED_UP,
        "Wait for them, or end them in close() of the episode's object.",
    ),
)


def side_effects(subject: Subject) -> Iterator[EnvFinding]:
    """A few episodes, played in threads, leave the process as it was, need no network, and set no signal handlers."""
    if is_served(subject.environment) or subject.config.rl_env_isolation == "process":
        raise NotCheckedError("episodes run in other processes")
    addresses, threads, set_handler = list[str](), list[str](), signal.signal
    cases = subject.chosen[:SLOW_SAMPLE]
    pairs = [(case, policy) for case in cases for policy in (subject.reference(case), JUNK, EMPTY) if policy]

    def noted(number: int, handler: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            threads.append(threading.current_thread().name)
        return set_handler(number, handler)

    shared_loop()  # of aitrain, for async methods: it starts a thread, once
    before = {effect: effect.look() for effect in EFFECTS}
    connection_watchers().append(addresses.append)
    signal.signal = noted  # type: ignore[assignment]
    subject.player.play(pairs)
    signal.signal = set_handler

    def changes() -> dict[Effect, list[str]]:
        return {
            effect: [name for name, value in effect.look().items() if parts.get(name) != value]
            for effect, parts in before.items()
        }

    end = time.monotonic() + SETTLE
    while any(changes().values()) and time.monotonic() < end:
        time.sleep(0.02)
    for effect, names in changes().items():
        if names:
            yield EnvFinding("warning", f"Episodes {effect.what} {', '.join(names[:3])}.", effect.why, effect.fix)
    if addresses:
        yield EnvFinding(
            "warning",
            f"Episodes connect to {', '.join(list(dict.fromkeys(addresses))[:3])}.",
            "Each step waits for it, and if it fails, the episode is missing data.",
            "Keep what is needed on this machine; for a judge or a tool server, set a timeout of its own below"
            " --rl-env-timeout.",
        )
    if threads:
        yield EnvFinding(
            "fail",
            "Episodes call signal.signal, which raises in threads: `signal only works in main thread`.",
            "The call fails, and where the code catches that, all answers seem to be wrong (math-verify does so).",
            "Train with --rl-env-isolation process, or declare it: requirements = EnvRequirements(isolation='process');"
            " or switch the library's timeout off.",
        )


@cache
def connection_watchers() -> list[Callable[[str], object]]:
    """Functions, of which the last one is called with the address before each connection, name look-up or datagram of
    this process, until it ends: an audit hook cannot be removed, and each one slows every call of `id`. Connections to
    the run's own endpoint do not count."""
    watchers: list[Callable[[str], object]] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if watchers and event in EVENTS:
            address = tuple(arguments[:2]) if event == "socket.getaddrinfo" else arguments[1]
            if address != running_address():
                watchers[-1](":".join(map(str, address[:2])) if isinstance(address, tuple) else str(address))

    sys.addaudithook(hook)
    return watchers
