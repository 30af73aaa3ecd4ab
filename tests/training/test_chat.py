"""`aitrain chat` with the tiny model: base and adapter from one set of weights, cases, and the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM

from aitrain import EnvironmentFailed
from aitrain.jobs.chat import answer_lines
from aitrain.jobs.chat_session import ChatSession, answers_and_scores, open_session
from aitrain.runs.chat_setup import ChatSetup, chat_options
from aitrain.training.model import TINY_MODEL
from aitrain.ui.chat_view import ChatView
from tests.conftest import write

DOUBLES = """
class Doubles:
    def build_dataset(self):
        return [{"prompt": [{"role": "user", "content": f"{a} + {a} = ?"}], "a": a} for a in range(10, 60)]

    def episode(self, a):
        reply = yield
        if reply.strip() == str(2 * a):
            return 1.0
        reply = yield f"Not {reply}. {a} + {a} = ?"
        if a == 13:
            raise ValueError("thirteen")
        return 0.5
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose adapter spoils the answers of the tiny model."""
    folder = tmp_path_factory.mktemp("chat")
    write(folder, {"doubles.py": DOUBLES, "runs/spoilt/config.yaml": "model: tiny\nrl_env: doubles.py:Doubles\n"})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    adapted = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(folder / "runs" / "spoilt" / "model")
    return folder


@pytest.fixture
def session(run: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(run)
    options = chat_options("runs/spoilt", None, {"rl_max_new_tokens": 8})
    opened = open_session(ChatSetup("runs/spoilt", options, greedy=True, answer_tokens=8))
    yield opened
    opened.close()


class Heard(ChatView):
    """Notes what is said, in its order."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True), {})
        self.said_by: list[tuple[str, str]] = []
        self.texts: dict[str, list[str]] = {}

    def answer(self, name: str, text: str) -> None:
        self.texts.setdefault(name, []).append(text)

    def said(self, name: str, messages: Any) -> None:
        self.said_by += [(name, str(message["content"])) for message in messages]


def test_base_and_tuned_answer_from_one_model_with_the_adapter_off_and_on(session: ChatSession) -> None:
    heard = Heard()
    base, tuned = (chat.model for chat in session.chats)
    answers = session.ask("12 + 30 = ?", heard)

    assert base is tuned
    assert answers["base"] == "42" != answers["tuned"]
    assert heard.texts["base"][:2] == ["4", "42"]
    session.reset()
    assert session.ask("12 + 30 = ?") == answers  # the adapter is off and on again


def test_a_case_is_played_with_the_environments_turns_and_scores_for_both(session: ChatSession) -> None:
    heard = Heard()
    answers, scores = answers_and_scores(session.play(session.case("2"), heard))

    assert (answers["base"], scores) == ("24", {"base": 1.0, "tuned": 0.5})
    assert [(name, said[-11:]) for name, said in heard.said_by] == [("tuned", "12 + 12 = ?")]
    roles = [message["role"] for message in session.chats[1].messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    with pytest.raises(EnvironmentFailed, match=r"thirteen\n.*doubles\.py, line 12"):
        answers_and_scores(session.play(session.case("3"), heard))


def test_questions_of_a_pipe_are_answered_one_by_one(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", ["12 + 30 = ?\n", "\n", "20 + 20 = ?\n"])
    assert answer_lines(session, "2", as_json=True) == 0

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["scores"] == {"base": 1.0, "tuned": 0.5}
    assert [line["answers"]["base"] for line in lines] == ["24", "42", "40"]


def test_a_further_question_is_computed_from_where_the_last_answer_ended(session: ChatSession) -> None:
    columns: list[int] = []
    embedding = session.chats[0].model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, ids, __: columns.append(ids[0].shape[1]))
    session.ask("What is the sum of these numbers: " + "1 + " * 10)
    longest = max(columns)
    columns.clear()
    session.ask("2?")
    assert max(columns) < longest / 2
