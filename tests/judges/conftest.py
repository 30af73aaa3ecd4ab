"""A model server for tests of judges, and judges that ask it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from aitrain.environment.judges import model_judge
from tests.adapters.http_servers import Handler, Server


class JudgeHandler(Handler):
    def do_POST(self) -> None:
        body = self.body()
        self.owner.asked.append(body)
        self.owner.keys.append(self.headers.get("Authorization"))
        said = self.owner.say(body)
        if isinstance(said, str):
            said = {"choices": [{"message": {"content": said}}]}
        status, answer = (said, {"error": "busy"}) if isinstance(said, int) else (200, said)
        self.answer(answer, status)


class JudgeModel(Server):
    """A server of a model that judges: what it answers, and what it was asked."""

    def __init__(self) -> None:
        super().__init__(JudgeHandler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    def say(self, body: dict[str, Any]) -> Any:
        """The text of the reply to a request; a status as a number fails it, anything else is the whole answer."""
        return '{"score": 10}'


@pytest.fixture(autouse=True)
def forget_judges() -> Iterator[None]:
    """Checks of environments ask which judges of this process were not asked."""
    yield
    model_judge.not_asked.clear()


def quoted_in(body: dict[str, Any], name: str = "answer") -> list[str]:
    """The quoted texts of a request, by the name of their tags."""
    data = body["messages"][1]["content"]
    return [found[2] for found in re.finditer(rf"<({name}[\w-]*)>\n(.*?)\n</\1>", data, re.DOTALL)]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeModel]:
    """A running server; pauses between retries are short."""
    monkeypatch.setattr(model_judge, "FIRST_PAUSE", 0.001)
    with (served := JudgeModel()).running():
        yield served
