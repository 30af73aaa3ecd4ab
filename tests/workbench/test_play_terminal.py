"""`aitrain env play` on a terminal: typed answers, and the debugger."""

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
        breakpoint()
        said = input("why? ")
        print("because", said)
        while reply != "yes":
            reply = yield "No?"
        return 1.0
"""


def test_a_person_types_answers_and_the_debugger_and_input_have_the_terminal(here: Path) -> None:
    write(here, {"talk.py": TALK})
    terminal = start(here, ["env", "play", "talk.py"])
    terminal.wait_for("> ")
    terminal.type("several\nlines\n\n")
    terminal.wait_for("(Pdb) ")
    terminal.type("p reply\n")
    terminal.wait_for(r"'several\nlines'")
    terminal.type("c\n")
    terminal.wait_for("why? ")
    terminal.type("so it is\n")
    terminal.wait_for("No?<|im_end|>")
    terminal.type("yes\n\n")
    assert terminal.end() == 0
    for shown in ("Type the answer; an empty line ends it.", "because so it is", "score 1.000"):
        assert shown in terminal.shown
