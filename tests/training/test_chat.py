"""`aitrain chat` with the tiny model: base and adapter from one set of weights, and questions of a pipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aitrain.jobs.chat import ChatSession, answer_lines, open_session
from aitrain.packages import TINY_FOLDER
from tests.conftest import write
from tests.training.conftest import save_adapter


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose adapter spoils the answers of the tiny model."""
    folder = tmp_path_factory.mktemp("chat")
    write(folder, {"runs/spoilt/config.yaml": "model: tiny\n"})
    save_adapter(TINY_FOLDER, folder / "runs" / "spoilt" / "model", lora_alpha=64)
    return folder


@pytest.fixture
def session(run: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(run)
    opened = open_session("runs/spoilt", {"rl_max_new_tokens": 8}, greedy=True)
    yield opened
    opened.close()


def test_base_and_tuned_answer_from_one_model_with_the_adapter_off_and_on(session: ChatSession) -> None:
    heard = list[tuple[str, str]]()
    engines: Any = [chat.engine for chat in session.chats]
    answers = session("12 + 30 = ?", lambda *answer: heard.append(answer))

    assert engines[0].model is engines[1].model
    assert answers["base"] == "42" != answers["tuned"]
    assert heard[:2] == [("base", "4"), ("base", "42")]
    session.reset()
    assert session("12 + 30 = ?") == answers  # the adapter is off and on again


def test_questions_of_a_pipe_are_answered_one_by_one(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", ["12 + 30 = ?\n", "\n", "20 + 20 = ?\n"])
    answer_lines(session)

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["answers"]["base"] for line in lines] == ["42", "40"]


def test_a_further_question_is_computed_from_where_the_last_answer_ended(session: ChatSession) -> None:
    columns: list[int] = []
    engine: Any = session.chats[0].engine
    embedding = engine.model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, ids, __: columns.append(ids[0].shape[1]))
    session("What is the sum of these numbers: " + "1 + " * 10)
    longest = max(columns)
    columns.clear()
    session("2?")
    assert max(columns) < longest / 2
