"""Checks of what episodes do to their process and outside of it, seen in a forked copy of the process."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from aitrain.environment.endpoint import running_address
from aitrain.execution.async_calls import shared_loop
from aitrain.execution.failure import CallFailed
from aitrain.execution.forked_call import Answer, call_forked
from aitrain.workbench.check.subject import EnvFinding, NotCheckedError, Subject
from aitrain.workbench.opening import spread
from aitrain.workbench.player import EMPTY, JUNK, Play, Player

SECONDS = 30.0
CASES = 4
PRINTED = 2000
"""Bytes that an episode may print."""
SETTLE = 2.0
"""Seconds that threads and files of the player itself get to end."""
EVENTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo")
"""Audit events of Python's socket module: which address, before anything is sent."""


# -- the process


def _random_states() -> dict[str, object]:
    """The states of the global random generators of the libraries that are imported."""
    states: dict[str, object] = {" of random": random.getstate()}
    if numpy := cast("Any", sys.modules.get("numpy.random")):
        states[" of numpy"] = str(numpy.get_state())
    if torch := cast("Any", sys.modules.get("torch")):
        states[" of torch"] = torch.get_rng_state().tolist()
    return states


def _children() -> dict[str, object]:
    import psutil  # here, because its import takes long

    return dict.fromkeys((str(child.pid) for child in psutil.Process().children(recursive=True)), True)


def _files() -> dict[str, object]:
    found: dict[str, object] = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # that of the listing itself
            os.fstat(int(name))
            found[name] = True
    return found


@dataclass(frozen=True)
class Effect:
    """What episodes may change of their process, or leave behind in it."""

    what: str
    look: Callable[[], Mapping[str, object]]
    """Parts of the process by their names; a part is changed if it is there with another value, or was not there."""
    why: str
    fix: str


OWN_COPY = "Episodes run at the same time, so that each one changes it under the others."
USED_UP = "A run of thousands of episodes ends without memory, threads, processes or open files."
EFFECTS = (
    Effect(
        "change the working directory",
        lambda: {f", to {os.getcwd()}": True},
        OWN_COPY,
        "Use full paths: Path(__file__).parent / 'data'.",
    ),
    Effect(
        "change os.environ",
        lambda: {f" {name}": value for name, value in os.environ.items()},
        OWN_COPY,
        "Set variables in __init__, or give them to the program: env={...}.",
    ),
    Effect(
        "draw or seed the global random numbers",
        _random_states,
        "Which episode draws which numbers depends on their timing, so no run can be repeated exactly; and after a seed"
        " all of them draw the same.",
        "Draw from random.Random(seed) of your own; `seed` is an argument of episode and start.",
    ),
    Effect(
        "leave threads behind",
        lambda: {f" {one.name}": one for one in threading.enumerate() if one.is_alive()},
        USED_UP,
        "End them in close() of the episode's object, or share one pool that __init__ makes.",
    ),
    Effect(
        "leave processes behind",
        _children,
        USED_UP,
        "Wait for them, or end them in close() of the episode's object.",
    ),
    Effect(
        "leave files open",
        _files,
        USED_UP,
        "Open files with `with`, or close them in close() of the episode's object.",
    ),
    Effect(
        "change the root logger",
        lambda: {" (logging)": (list(logging.getLogger().handlers), logging.getLogger().level)},
        "Libraries of the run then log elsewhere, or too much.",
        "Configure a logger of your own: logging.getLogger(__name__).",
    ),
)


def traces(subject: Subject) -> dict[str, Any]:
    """What a few episodes do in a forked process that plays them in threads, without the connections of this one: what
    they changed by the sentences of the effects, bytes printed by an episode, addresses, and functions of `signal` that
    were called outside of the main thread.

    Raises:
        NotCheckedError: that process hangs or ends, or needs a connection of this one.
    """
    if subject.traces:
        return subject.traces
    subject.check_time()
    cases = spread(subject.cases, CASES)
    plays = [Play(case, script) for case in cases if (script := subject.reference(case))]
    plays += [Play(case, policy) for policy in (JUNK, EMPTY) for case in cases]
    config = subject.config.model_copy(update={"rl_env_isolation": "thread"})

    def look(answer: Answer) -> dict[str, Any]:
        cut, addresses, signals = cut_connections(answer.connection.fileno()), list[str](), list[str]()
        watch_connections(addresses.append)
        for name in ("signal", "alarm", "setitimer"):
            setattr(signal, name, _noted(getattr(signal, name), signals))
        shared_loop()  # of aitrain, for async methods: it starts a thread and opens three files, once
        with tempfile.TemporaryFile() as output:
            for fd in (1, 2):
                os.dup2(output.fileno(), fd)
            sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
            before = [effect.look() for effect in EFFECTS]
            player = Player(subject.environment, config)
            player.runner.offer(subject.model, subject.tokenizer)
            player.play(plays)
            player.stop()
            sys.stdout.flush()
            end, found = time.monotonic() + SETTLE, {"": ""}
            while found and time.monotonic() < end:
                time.sleep(0.02)
                found = {}
                for effect, parts in zip(EFFECTS, before, strict=True):
                    if names := [name for name, part in effect.look().items() if parts.get(name) != part]:
                        found[effect.what] = ",".join(names[:3])
            printed = output.seek(0, os.SEEK_END) / len(plays)
        seen = {"effects": found, "printed": printed, "addresses": list(dict.fromkeys(addresses)), "signals": signals}
        return {**seen, "connections": list(used(cut))}

    try:
        seen = cast("dict[str, Any]", call_forked(look, min(SECONDS, max(1.0, subject.seconds_left))))
    except CallFailed as failed:
        raise NotCheckedError(f"a copy of the process {failed.failure.message}") from failed
    if seen["connections"]:
        raise NotCheckedError(f"episodes use an open connection to {seen['connections'][0]}, which a copy has not")
    subject.traces = seen
    return seen


def _noted(function: Callable[..., object], called: list[str]) -> Callable[..., object]:
    """The function, whose calls outside of the main thread are noted."""

    def call(*arguments: object) -> object:
        if threading.current_thread() is not threading.main_thread():
            called.append(function.__name__)
        return function(*arguments)

    return call


def side_effects(subject: Subject) -> Iterator[EnvFinding]:
    """Episodes leave the process as it was."""
    seen = traces(subject)
    for effect in EFFECTS:
        if names := seen["effects"].get(effect.what):
            yield EnvFinding("warning", f"Episodes {effect.what}{names}.", effect.why, effect.fix)
    if seen["printed"] > PRINTED:
        yield EnvFinding(
            "warning",
            f"An episode prints {seen['printed'] / 1000:.1f} KB on average.",
            "It hides what matters in train.log, of which a run keeps the beginning and the end.",
            "Remove the prints, or log at a level that is off.",
        )


def network(subject: Subject) -> Iterator[EnvFinding]:
    """Episodes need no network."""
    if addresses := traces(subject)["addresses"]:
        yield EnvFinding(
            "warning",
            f"Episodes connect to {', '.join(addresses[:3])}.",
            "Each step waits for it, and if it fails, the episode is missing data.",
            "Keep what is needed on this machine; for a judge or a tool server, set --rl-env-retries and a timeout"
            " of its own below --rl-env-timeout.",
        )


def signals(subject: Subject) -> Iterator[EnvFinding]:
    """Episodes set no signal handlers, which only the main thread can; calls in processes run there."""
    if subject.config.rl_env_isolation == "thread" and (called := traces(subject)["signals"]):
        yield EnvFinding(
            "fail",
            f"Episodes call signal.{called[0]}, which raises in threads: `signal only works in main thread`.",
            "The call fails, and where the code catches that, all answers seem to be wrong (math-verify does so).",
            "Train with --rl-env-isolation process, or declare it: requirements = EnvRequirements(isolation='process');"
            " or switch the library's timeout off.",
        )


# -- outside of the process


def watch_connections(on_use: Callable[[str], object]) -> None:
    """Call `on_use` with the address before each connection, name look-up or datagram of this process, from now on
    until it ends: an audit hook cannot be removed. Connections to the run's own endpoint do not count."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS:
            address = tuple(arguments[:2]) if event == "socket.getaddrinfo" else arguments[1]
            if address != running_address():
                on_use(_shown(address))

    sys.addaudithook(hook)


def _shown(address: object) -> str:
    if isinstance(address, tuple):
        return ":".join(str(part) for part in address[:2] if part is not None)
    return os.fsdecode(address) if isinstance(address, bytes) else str(address)


def open_database() -> str:
    """The file of an open SQLite database, which a forked process must not touch; empty if there is none."""
    sqlite3 = sys.modules.get("sqlite3")
    if sqlite3 is None:
        return ""
    # by type: isinstance asks the object, and lazy ones import what they stand for
    for one in [found for found in gc.get_objects() if issubclass(type(found), sqlite3.Connection)]:
        with suppress(sqlite3.Error):  # closed, or of another thread
            if name := one.execute("PRAGMA database_list").fetchone()[2]:
                return str(name)
    return ""


Cuts = dict[socket.socket, str]
"""Connections and pipes of the parent by their other ends, which this process holds in their place."""


def cut_connections(keep: int) -> Cuts:
    """In a forked process: replace all inherited sockets and pipes but `keep`, as they belong to the parent. What is
    written to them stays here, and whoever waits for an answer from one waits for ever."""
    found: Cuts = {}
    for fd in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # closed meanwhile
            mode = os.fstat(fd).st_mode
            if fd <= 2 or fd == keep or not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                continue
            name = "another program"
            if stat.S_ISSOCK(mode):
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
                    name = _shown(one.getpeername()) or name
            own, other = socket.socketpair()
            os.dup2(own.fileno(), fd, inheritable=False)
            own.close()
            found[other] = name
    return found


def used(cuts: Cuts) -> Iterator[str]:
    """Names of the connections and pipes that something was written to."""
    for end, name in cuts.items():
        with suppress(OSError):
            if end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                yield name
