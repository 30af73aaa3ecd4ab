"""Tasks of Inspect: played with replies that are written down, and trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError
from aitrain.environment.contract import Case
from aitrain.environment.session import AssistantTurn, Message
from aitrain.environment.session_kinds import session_for
from aitrain.environment.tool_call_parser import read_calls
from aitrain.execution.failure import CallFailed
from tests.adapters.real.conftest import Train, in_environment

pytestmark = in_environment("newest")

TASKS = Path(__file__).parent / "inspect_tasks.py"
ADD = '<tool_call>{"name": "add", "arguments": {"x": 1, "y": 1}}</tool_call>'
SUBMIT = '<tool_call>{"name": "submit", "arguments": {"answer": "2"}}</tool_call>'


class Played:
    """One sample, number 1, with these replies of the policy, in the order in which it is asked."""

    def __init__(self, name: str, *replies: str, **settings: Any) -> None:
        from aitrain.environment.adapters.inspect import InspectTask

        environment = InspectTask(f"{TASKS}@{name}", **settings)
        row = environment.build_dataset()[1]
        session, left = session_for(environment), list(replies)
        self.trained: list[Message] = []
        self.untrained: list[Message] = []
        try:
            reset = session.open(Case(1, [], row, 1).arguments(seed=0))
            response: Any = reset
            self.tools = reset.tools
            self.trained += reset.prompt or [] if reset.untrained is None else []
            while not getattr(response, "is_over", False) and left:
                asked = response.untrained
                self.untrained += asked.messages if asked else []
                text, calls = read_calls(left.pop(0))
                if not asked:
                    self.trained.append({"role": "assistant", "content": text})
                response = session.respond(AssistantTurn(text, tuple(calls)))
                begun = getattr(response, "reset", None)
                self.trained += begun.prompt if begun else response.messages
            self.is_over = getattr(response, "is_over", False)
            self.score = session.score({})
        finally:
            session.close()


def test_a_chain_of_solvers_and_its_scorer() -> None:
    played = Played("chain", "2")
    assert [message["content"] for message in played.trained] == ["Add.", "1+1=", "2"]
    assert played.is_over
    assert (played.score.score, played.score.metrics) == (1.0, {"match": 1.0, "untrained_requests": 0.0})
    assert Played("chain", "2", system="Be short.").trained[0]["content"] == "Be short."


def test_an_agent_goes_on_until_it_submits() -> None:
    played = Played("agent", ADD, "hm", SUBMIT)
    assert "add" in [tool["function"]["name"] for tool in played.tools]
    assert "tool" in [message["role"] for message in played.trained]
    assert played.is_over
    assert played.score.score == 1.0


def test_other_conversations_are_not_trained_and_the_mean_of_the_scorers_is_the_score() -> None:
    played = Played("critique", "2", "could be shorter", "2")
    assert len(played.untrained) == 1
    assert "critique the answer" in played.untrained[0]["content"]
    assert played.score.metrics == {
        "match": 1.0, "shortness/short": 0.5, "shortness/polite": 0.5, "untrained_requests": 1.0,
    }  # fmt: skip
    assert played.score.score == 0.75


def test_a_simulated_user_that_speaks_first_is_not_trained() -> None:
    played = Played("dialogue", "Hello!", "Hi.", "Bye!", "It is 2.")
    assert [message["content"] for message in played.untrained] == ["You are the user."] * 2
    assert [message["content"] for message in played.trained] == ["1+1=", "Hello!", "Hi.", "Bye!", "It is 2."]
    assert played.score.score == 1.0


def test_a_task_that_rewrites_the_conversation_fails_with_what_it_rewrote() -> None:
    with pytest.raises(CallFailed, match="rewrote messages"):
        Played("rewritten", "2", "4")


@pytest.mark.parametrize(
    ("name", "message"),
    [("@boxed", "needs a sandbox"), ("@chains", r"Did you mean chain\?")],
)
def test_tasks_that_cannot_be_run_are_refused(name: str, message: str) -> None:
    from aitrain.environment.adapters.inspect import InspectTask

    with pytest.raises(ConfigError, match=message):
        InspectTask(f"{TASKS}{name}")


# -- trained


def test_several_conversations_train_on_two_ranks_in_processes(train: Train) -> None:
    flags = ["--num-processes=2", "--rl-env-isolation=process"]
    trained = train(f"inspect:{TASKS}@critique", *flags)
    assert trained.missing("shortness/short") == []
    assert all(line.get("env/untrained_requests", 1.0) == 1.0 for line in trained.metrics)
    assert all(len(one["turns"]) == 2 for one in trained.records)
