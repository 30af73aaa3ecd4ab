"""Stands in for a training process: does what worker.py does for the watchdog, then hangs in one of several ways."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from aitrain import activity
from aitrain.events import Phase, encode
from aitrain.runs.watchdog import DUMP


def lock() -> None:
    """Two locks, taken in opposite orders, would do it; so does one that is taken twice."""
    with (held := threading.Lock()), held:
        pass


def holds_the_gil() -> None:
    """C code during which no thread of Python's runs."""
    while True:
        ctypes.PyDLL(None).poll(0, 0, 1_000_000)


def ignores_signals() -> None:
    """Neither SIGTERM nor Ctrl-C ends it."""
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(1_000_000)


def child() -> None:
    """A process that it waits for, and that has one of its own; both in sessions of their own."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    subprocess.run([sys.executable, "-c", code], start_new_session=True, check=False)


HANGS: dict[str, Callable[[], None]] = {hang.__name__: hang for hang in (lock, holds_the_gil, ignores_signals, child)}


def main(what: str, folder: Path) -> None:
    """`what`: one of HANGS."""
    faulthandler.register(DUMP, file=2, all_threads=True)
    activity.share(0)
    (folder / "pid").write_text(str(os.getpid()))
    activity.own.enter("training")
    with activity.own.doing(f"planting {what}"):
        print(encode(Phase("training")), end="", flush=True)
        HANGS[what]()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
