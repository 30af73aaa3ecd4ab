"""Checks of what episodes leave behind in their process, seen in a forked copy of it."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from aitrain.execution.async_calls import shared_loop
from aitrain.execution.failure import CallFailed
from aitrain.execution.forked_call import Answer, call_forked
from aitrain.workbench.check.finding import EnvFinding
from aitrain.workbench.check.outside import cut_connections, used, watch_connections
from aitrain.workbench.check.subject import NotCheckedError, Subject, spread
from aitrain.workbench.player import JUNK, Play, Player, Script

SECONDS = 30.0
CASES = 4
PRINTED = 2000
"""Bytes that an episode may print."""
T = TypeVar("T")
SETTLE = 2.0
"""Seconds that threads and files of the player itself get to end."""

Seen = dict[str, Any]
Look = Callable[[Callable[[], None]], Seen]
"""Looks at a process before and after it plays; gets the function that plays."""


def in_a_fork(subject: Subject, look: Look) -> Seen:
    """What `look` returns in a forked process that plays a few episodes in threads, without the connections of this
    one.

    Raises:
        NotCheckedError: that process hangs or ends, or needs a connection of this one.
    """
    subject.check_time()
    cases = spread(subject.cases, CASES)
    references = [Play(case, script) for case in cases if (script := subject.reference(case))]
    plays = [*references, *(Play(case, JUNK) for case in cases), *(Play(case, Script(("",))) for case in cases)]
    config = subject.config.model_copy(update={"rl_env_isolation": "thread"})

    def run(answer: Answer) -> Seen:
        cut = cut_connections(answer.connection.fileno())

        def play() -> None:
            player = Player(subject.environment, config)
            player.runner.offer(subject.model, subject.tokenizer)
            player.play(plays)
            player.stop()

        return {**look(play), "episodes": len(plays), "connections": list(used(cut))}

    try:
        seen = cast("Seen", call_forked(run, min(SECONDS, max(1.0, subject.clock.seconds_left))))
    except CallFailed as failed:
        raise NotCheckedError(f"a copy of the process {failed.failure.message}") from failed
    if seen["connections"]:
        raise NotCheckedError(f"episodes use an open connection to {seen['connections'][0]}, which a copy has not")
    return seen


# -- side effects


def side_effects(subject: Subject) -> Iterator[EnvFinding]:
    """Episodes leave the process as it was."""
    found = in_a_fork(subject, _changes)
    for what, why, fix in _SENTENCES:
        if detail := found.get(what):
            yield EnvFinding("side-effects", "warning", f"{what[0].upper()}{what[1:]}{detail}.", why, fix)
    printed = found["printed"] / found["episodes"]
    if printed > PRINTED:
        yield EnvFinding(
            "side-effects",
            "warning",
            f"An episode prints {printed / 1000:.1f} KB on average.",
            "It hides what matters in train.log, of which a run keeps the beginning and the end.",
            "Remove the prints, or log at a level that is off.",
        )


_OWN_COPY = "Episodes run at the same time, so that each one changes it under the others."
_NOISE = "Draw from random.Random(seed) of your own; `seed` is an argument of episode and start."
_SENTENCES = (
    ("episodes change the working directory", _OWN_COPY, "Use full paths: Path(__file__).parent / 'data'."),
    ("episodes change os.environ", _OWN_COPY, "Set variables in __init__, or give them to the program: env={...}."),
    (
        "episodes set the global random seed",
        "The others then draw the same numbers again and again, and what is random repeats.",
        _NOISE,
    ),
    (
        "episodes draw global random numbers",
        "Which episode draws which numbers depends on their timing, so no run can be repeated exactly.",
        _NOISE,
    ),
    (
        "episodes leave threads behind",
        "A run of thousands of episodes ends without memory or threads.",
        "End them in close() of the episode's object, or share one pool that __init__ makes.",
    ),
    (
        "episodes leave processes behind",
        "A run of thousands of episodes ends without memory or processes.",
        "Wait for them, or end them in close() of the episode's object.",
    ),
    (
        "episodes leave files open",
        "A run of thousands of episodes ends with `Too many open files`.",
        "Open files with `with`, or close them in close() of the episode's object.",
    ),
    (
        "episodes change the root logger",
        "Libraries of the run then log elsewhere, or too much.",
        "Configure a logger of your own: logging.getLogger(__name__).",
    ),
)


def _changes(play: Callable[[], None]) -> Seen:
    """In the forked process: what playing changes, by the beginning of its sentence; empty texts for nothing."""
    directory, variables = os.getcwd(), dict(os.environ)
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    shared_loop()  # of aitrain, for async methods: it starts a thread and opens three files, once
    threads, children, files = set(threading.enumerate()), _children(), _files()
    with tempfile.TemporaryFile() as output:
        for fd in (1, 2):
            os.dup2(output.fileno(), fd)
        sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
        files |= {output.fileno()}
        ends = [_random_states_after(play, seed) for seed in (1, 2)]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        printed = output.seek(0, os.SEEK_END)
        changed = sorted(name for name in {*variables, *os.environ} if variables.get(name) != os.environ.get(name))
        left = _left(lambda: {one for one in threading.enumerate() if one not in threads and one.is_alive()})
        processes, opened = _left(lambda: _children() - children), _left(lambda: _files() - files)
    (first, drew), (second, _) = ends
    return {
        "printed": printed,
        "episodes change the working directory": "" if os.getcwd() == directory else f", to {os.getcwd()}",
        "episodes change os.environ": f": {', '.join(changed[:3])}" if changed else "",
        "episodes set the global random seed": _named(name for name in first if first[name] == second[name]),
        "episodes draw global random numbers": _named(name for name in drew if first[name] != second[name]),
        "episodes leave threads behind": f": {', '.join(sorted(one.name for one in left)[:3])}" if left else "",
        "episodes leave processes behind": f": {len(processes)}" if processes else "",
        "episodes leave files open": f": {len(opened)}" if opened else "",
        "episodes change the root logger": "" if (handlers, level) == (logger.handlers, logger.level) else " (logging)",
    }


def _named(names: Iterator[str]) -> str:
    found = sorted(names)
    return f" of {', '.join(found)}" if found else ""


def _random_states_after(play: Callable[[], None], seed: int) -> tuple[dict[str, str], list[str]]:
    """The states of the global generators after playing with this seed, and the names of those that were used."""
    for _, reseed in _generators().values():
        reseed(seed)
    before = {name: str(state()) for name, (state, _) in _generators().items()}
    play()
    after = {name: str(_generators()[name][0]()) for name in before}
    return after, [name for name in before if before[name] != after[name]]


def _generators() -> dict[str, tuple[Callable[[], object], Callable[[int], object]]]:
    """(state, seed) of the global random generators of the libraries that are imported."""
    found: dict[str, tuple[Callable[[], object], Callable[[int], object]]] = {
        "random": (random.getstate, random.seed),
    }
    if numbers := sys.modules.get("numpy.random"):
        found["numpy"] = (
            lambda: [part.tolist() if hasattr(part, "tolist") else part for part in numbers.get_state()],
            numbers.seed,
        )
    if torch := sys.modules.get("torch"):
        found["torch"] = (lambda: torch.get_rng_state().tolist(), torch.manual_seed)
    return found


def _children() -> set[int]:
    import psutil  # here, because its import takes long

    return {child.pid for child in psutil.Process().children(recursive=True)}


def _files() -> set[int]:
    return {fd for fd in map(int, os.listdir("/dev/fd")) if _is_open(fd)}  # without that of the listing itself


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _left(look: Callable[[], set[T]]) -> set[T]:
    """What is still there after a moment, in which the player's own threads and files end."""
    end = time.monotonic() + SETTLE
    while (left := look()) and time.monotonic() < end:
        time.sleep(0.05)
    return left


# -- network


def network(subject: Subject) -> Iterator[EnvFinding]:
    """Episodes need no network."""

    def look(play: Callable[[], None]) -> Seen:
        asked: list[str] = []

        def refuse(address: str) -> None:
            asked.append(address)
            raise OSError("the network is closed during this check of aitrain")

        watch_connections(refuse)
        play()
        return {"used": list(dict.fromkeys(asked))}

    addresses = in_a_fork(subject, look)["used"]
    if addresses:
        yield EnvFinding(
            "network",
            "warning",
            f"Episodes connect to {', '.join(addresses[:3])}.",
            "Each step waits for it, and if it fails, the episode is missing data.",
            "Keep what is needed on this machine; for a judge or a tool server, set --rl-env-retries and a timeout"
            " of its own below --rl-env-timeout.",
        )


# -- signals


def signals(subject: Subject) -> Iterator[EnvFinding]:
    """Episodes set no signal handlers, which only the main thread can."""
    if subject.config.rl_env_isolation == "process":
        return  # calls run in the main threads of their processes
    found = in_a_fork(subject, _signals_in_threads)["used"]
    if found:
        yield EnvFinding(
            "signals",
            "fail",
            f"Episodes call signal.{found[0]}, which raises in threads: `signal only works in main thread`.",
            "The call fails, and where the code catches that, all answers seem to be wrong (math-verify does so).",
            "Train with --rl-env-isolation process, or declare it: requirements = EnvRequirements(isolation='process');"
            " or switch the library's timeout off.",
        )


def _signals_in_threads(play: Callable[[], None]) -> Seen:
    """In the forked process: the functions of `signal` that were called outside of the main thread."""
    called: list[str] = []

    def watched(name: str) -> Callable[..., object]:
        function = getattr(signal, name)

        def call(*arguments: object) -> object:
            if threading.current_thread() is not threading.main_thread():
                called.append(name)
            return function(*arguments)

        return call

    for name in ("signal", "alarm", "setitimer"):
        setattr(signal, name, watched(name))
    play()
    return {"used": called}
