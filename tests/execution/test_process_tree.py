"""A program and what it starts: nothing is left, however the program or its parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from aitrain.execution.process_tree import ProcessTree

STARTS = {
    "a fork that holds the output": """
if not os.fork():
    note(); wait()
""",
    "a daemon that ignores SIGTERM": """
if not os.fork():
    os.setsid()
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(); wait()
    os._exit(0)
os.wait()
""",
    "a program in a session of its own, with a child": """
code = f"import subprocess; p = subprocess.Popen(['sleep', '600']); open('pid', 'w').write(str(p.pid)); p.wait()"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
""",
}
BEGIN = """
import os, signal, subprocess, sys, time
def note():
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
def wait():
    while True:
        time.sleep(1)
"""
STARTED = """
while not os.path.exists("pid") or not open("pid").read():
    time.sleep(0.005)
"""
PARENT = """
import math, os, sys
from aitrain.execution.process_tree import ProcessTree
tree = ProcessTree([sys.executable, "-c", sys.argv[2]], float(sys.argv[1]), env=os.environ)
tree.wait()
"""


def start(here: Path, code: str, patience: float = 0.0) -> ProcessTree:
    command = [sys.executable, "-c", BEGIN + code]
    return ProcessTree(command, patience, env=os.environ, stdout=subprocess.PIPE, cwd=str(here))


def started(here: Path) -> psutil.Process:
    """The process that the program has started."""
    while not (here / "pid").exists() or not (here / "pid").read_text():
        time.sleep(0.005)
    return psutil.Process(int((here / "pid").read_text()))


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A service that was started before."""
    running = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield running
    running.kill()
    running.wait()


@pytest.mark.parametrize(("what", "code"), [*zip(STARTS, (-signal.SIGSEGV, 7, 7), strict=True)])
def test_when_a_program_ends_so_does_all_that_it_has_started(
    here: Path, what: str, code: int, bystander: subprocess.Popen[bytes]
) -> None:
    end = f"sys.exit({code})" if code > 0 else f"os.kill(os.getpid(), {-code})"
    until_seen = "while not os.path.exists('seen'): time.sleep(0.005)"
    tree = start(here, f"{STARTS[what]}{STARTED}{until_seen}\nprint('said', flush=True)\n{end}")
    left = started(here)
    (here / "seen").touch()
    assert tree.stdout.read() == b"said\n"
    assert tree.wait() == code
    assert not left.is_running()
    assert bystander.poll() is None


def test_when_aitrain_is_killed_so_are_a_program_that_has_no_time_and_all_that_it_has_started(here: Path) -> None:
    code = f"{BEGIN}{STARTS['a program in a session of its own, with a child']}{STARTED}wait()"
    with subprocess.Popen([sys.executable, "-c", PARENT, "0", code], cwd=here) as parent:
        left = started(here)
        parent.kill()
    psutil.wait_procs([left], timeout=60)
    assert not left.is_running()
