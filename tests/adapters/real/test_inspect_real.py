"""Tasks of Inspect: played with replies that are written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError
from aitrain.environment.contract import Case
from tests.adapters.real.conftest import in_environment
from tests.rehearsal import Rehearsed, call, rehearse

pytestmark = in_environment("newest")

TASKS = Path(__file__).parent / "inspect_tasks.py"


def played(name: str, *replies: str, **settings: Any) -> Rehearsed:
    """One sample, number 1, with these replies of the policy."""
    from aitrain.environment.adapters.inspect import InspectTask

    environment = InspectTask(f"{TASKS}@{name}", **settings)
    row = environment.build_dataset()[1]
    return rehearse(environment, replies, Case(1, [], row, 1))


def test_a_chain_of_solvers_and_its_scorer() -> None:
    chain = played("chain", "2", system="Be short.")
    assert [message["content"] for message in chain.opening.prompt or []] == ["Be short.", "Add.", "1+1="]
    assert chain.is_over
    assert (chain.scored.score, chain.scored.metrics) == (1.0, {"match": 1.0, "untrained_requests": 0.0})


def test_an_agent_goes_on_until_it_submits() -> None:
    agent = played("agent", call("add", x=1, y=1), "hm", call("submit", answer="2"))
    offered = {tool["function"]["name"]: tool["function"] for tool in agent.opening.tools}
    assert offered["add"].keys() == {"name", "description", "parameters"}
    assert agent.moves[0].messages[0]["role"] == "tool"
    assert agent.is_over
    assert agent.scored.score == 1.0


def test_a_limit_ends_a_sample_that_is_scored_as_it_stands() -> None:
    """That of the task, after eight messages, and one of the run, after which the policy does not answer any more."""
    for replies in (["hm"] * 4, ["2"]):
        agent = played("agent", *replies)
        assert agent.scored.score == float(replies == ["2"])


def test_scorers_may_ask_the_policy_without_training_what_it_answers() -> None:
    graded = played("graded", "2", "yes")
    assert [move.is_trained for move in graded.moves] == [False, True]
    assert graded.scored.metrics == {"asked/right": 1.0, "untrained_requests": 1.0}


def test_a_task_that_needs_a_sandbox_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a sandbox"):
        played("boxed")
