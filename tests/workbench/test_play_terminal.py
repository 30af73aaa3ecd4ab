"""`aitrain env play` on a terminal: typed answers, the debugger, Ctrl-C and Ctrl-D."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import write
from tests.workbench.terminal import start

TALK = """
class Talk:
    def build_dataset(self):
        return [{"prompt": [{"role": "user", "content": "Say yes."}]}]

    def episode(self):
        reply = yield
        while reply != "yes":
            reply = yield "No?"
        return 1.0
"""


def test_a_person_types_answers_until_the_episode_ends(here: Path) -> None:
    write(here, {"talk.py": TALK})
    terminal = start(here, ["env", "play", "talk.py"])
    terminal.wait_for("> ")
    terminal.type("several\nlines\n\n")
    terminal.wait_for("> ", 2)
    terminal.type("yes\n\n")
    assert terminal.end() == 0
    assert "Type the answer; an empty line ends it." in terminal.shown
    assert "<|im_start|>user\nNo?<|im_end|>" in terminal.shown
    assert "score 1.000" in terminal.shown
    assert max(map(len, terminal.shown.splitlines())) <= 80


def test_breakpoint_and_input_in_the_environment_have_the_terminal(here: Path) -> None:
    stops = '        breakpoint()\n        said = input("why? ")\n        print("because", said)\n'
    write(here, {"talk.py": TALK.replace("        while", stops + "        while"), "replies": "yes\n"})
    terminal = start(here, ["env", "play", "talk.py", "--policy", "script", "replies"])
    terminal.wait_for("(Pdb) ")
    terminal.type("p 'reply is ' + reply\n")
    terminal.wait_for("'reply is yes'")
    terminal.type("c\n")
    terminal.wait_for("why? ")
    terminal.type("so it is\n")
    assert terminal.end() == 0
    assert "because so it is" in terminal.shown
    assert "score 1.000" in terminal.shown
