"""Tools of the ORS adapter on a server of the openreward package, with replies that are written down."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aitrain.environment.adapters.ors import OpenRewardServer
from aitrain.environment.contract import Case
from tests.adapters.real.conftest import in_environment, server
from tests.rehearsal import rehearse

pytestmark = in_environment("older")


def test_tools_are_called_and_the_one_that_finishes_ends_the_episode(tmp_path: Path) -> None:
    with server("ors_sums.py", tmp_path, "/health") as url:
        environment = OpenRewardServer(url, score_range="0,1")
        row = asyncio.run(environment.build_dataset())[4]
        calls = ['{"name": "hint"}', '{"name": "submit", "arguments": {"value": "x"}}']
        calls.append('{"name": "submit", "arguments": {"value": 5}}')
        played = rehearse(environment, [f"<tool_call>{call}</tool_call>" for call in calls], Case(4, [], row, 4))
    hint, refused, submitted = (move.messages[0]["content"] for move in played.moves)
    assert hint == "h" * 9000
    assert refused.startswith("error: ")
    assert submitted == "thanks"
    assert played.is_over
    assert played.scored.score == 1.0
