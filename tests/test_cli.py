"""The command line itself: help, and options that are searched."""

from __future__ import annotations

import json
import re

from tests.properties import run_in_process


def test_a_missing_command_is_answered_with_the_help() -> None:
    code, _, err = run_in_process()
    assert code == 2
    assert err.startswith("Usage: aitrain")


def test_options_are_searched_by_words_of_names_and_descriptions_and_by_other_tools_names() -> None:
    def found(*words: str) -> str:
        return run_in_process("options", *words)[1]

    assert re.findall(r"^  --\S+", found("clip", "dual"), re.MULTILINE) == ["  --rl-dual-clip"]
    assert "--rl-kl-coef" in found("--", "--beta")
    assert {"max_steps": "--max-steps"}.items() <= {
        one["name"]: one["flag"] for one in json.loads(found("max-steps", "--json"))
    }.items()
    assert run_in_process("options", "zzz")[0] == 2
