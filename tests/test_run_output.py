"""How much of a run its command shows: the real one, on the small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from aitrain.errors import RunFailed
from aitrain.runs.run_folder import RunFolder
from tests.conftest import Run, run_in_process, write

TALKS = """
class Talks:
    def build_dataset(self):
        return [{"prompt": f"{n}:"} for n in range(12)]

    def score_episode(self, completion, case_idx):
        print("I was here")
        if case_idx % 2:
            raise ValueError("no luck " + chr(27) + "[2J")
        return 0.5
"""
SHORT = ["--model", "tiny", "--rl-env", "talks.py", "--max-steps", "2", "--rl-max-new-tokens", "4", "--eval-cases", "2"]


@pytest.mark.slow
def test_a_run_shows_its_progress_and_notes_apart_from_its_result(aitrain_grpo: Run, here: Path) -> None:
    write(here, {"talks.py": TALKS})
    plain = aitrain_grpo(*SHORT)
    assert plain.returncode == 0
    assert "report: runs/project-name/report.html" in plain.stdout
    assert "I was here" not in plain.stderr
    assert "held-out score after: 0.500" in plain.stderr
    assert r"no luck \x1b[2J" in plain.stderr
    assert (plain.stdout + plain.stderr).replace("\n", "").isprintable()  # as nothing can be drawn over here


def test_a_server_that_does_not_start_leaves_the_log_that_the_error_names(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Processes:
        def __init__(self, plan: object, folder: RunFolder, *_: object) -> None:
            self.log = folder.path / "vllm-server.log"

        def run(self) -> None:
            self.log.write_text("why")
            raise RunFailed(f"vLLM did not start\nSee {self.log}")

    monkeypatch.setattr("aitrain.cli.running.Processes", Processes)
    code, _, err = run_in_process("grpo --model tiny --rl-env envs.arithmetic")
    assert (code, "See runs/project-name/vllm-server.log" in err) == (1, True)
    assert (here / "runs/project-name/vllm-server.log").read_text() == "why"
