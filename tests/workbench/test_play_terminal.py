"""`aitrain env play` on a terminal: typed answers, the debugger, and Ctrl-C."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

from tests.conftest import write

TALK = """
class Talk:
    def build_dataset(self):
        return [{"prompt": [{"role": "user", "content": "Say yes."}]}]

    def episode(self):
        reply = yield
        breakpoint()
        said = input("why? ")
        print("because", said)
        while reply != "yes":
            reply = yield "No?"
        return 1.0
"""


def test_a_person_types_answers_and_the_debugger_and_input_have_the_terminal(here: Path) -> None:
    write(here, {"talk.py": TALK})
    pid, master = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "aitrain", "env", "play", "talk.py"])
    os.write(master, b"several\nlines\n\np reply\nc\nso it is\nyes\n\n")
    shown = b""
    with suppress(OSError):  # the other side is closed
        while part := os.read(master, 65536):
            shown += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown
    for text in (b"Type the answer; an empty line ends it.", rb"'several\nlines'", b"because so it is", b"score 1.000"):
        assert text in shown, shown


def test_ctrl_c_ends_it_while_a_person_is_asked(here: Path) -> None:
    write(here, {"talk.py": TALK})
    pid, master = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # also where the tests run in the background of a shell
        signal.alarm(60)  # ends it where Ctrl-C does not
        os.execv(sys.executable, [sys.executable, "-m", "aitrain", "env", "play", "talk.py"])
    shown = b""
    with suppress(OSError):
        while True:  # Python misses a Ctrl-C between its prompt and its wait for input: a person presses it again
            while select.select([master], [], [], 2)[0]:
                shown += os.read(master, 65536)
            if shown.endswith(b"> "):
                os.write(master, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130, shown
