"""`aitrain reproduce`: a run that is trained again from its folder, and what it says where something differs."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import Run, json_lines, run_in_process, write

ENVIRONMENT = """\
import answers

class Doubles:
    def build_dataset(self):
        return [{"prompt": f"{n} + {n} = ?", "answer": str(2 * n)} for n in range(10, 60)]

    def score_episode(self, text, answer):
        return answers.score(text, answer)
"""
PARTS = ("records", "metrics", "weights")
ANSWERS = "def score(text, answer):\n    return sum(a == b for a, b in zip(text, answer)) / len(answer)\n"


def test_a_run_on_two_processes_is_the_same_bits_from_the_source_that_it_kept(here: Path, aitrain: Run) -> None:
    write(here, {"doubles.py": ENVIRONMENT, "answers.py": ANSWERS})
    options = "--max-steps 2 --rl-prompts-per-step 4 --rl-num-generations 4 --num-processes 2 --eval-cases 8 --peft"
    first = aitrain("grpo", "--model", "tiny", "--rl-env", "doubles.py", *shlex.split(options))
    assert first.returncode == 0, first.stderr
    (here / "answers.py").write_text(ANSWERS.replace("sum(", "0.5 * sum("))

    done = aitrain("reproduce", "project-name")

    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [f"{part:8} the same bits" for part in PARTS]
    assert "doubles.py has changed since the run or is gone" in done.stderr


Change = Callable[[Path], object]


@pytest.fixture
def runs(here: Path) -> Path:
    """The run `one` of two steps, in runs/."""
    records = [
        {"step": step, "row_number": case, "messages": [{"role": "assistant", "content": f"{case}"}], "score": 0.5}
        for step in (1, 2)
        for case in range(3)
    ]
    metrics = [{"step": step, "loss": 1e-7, "reward": 0.5, "seconds": float(step)} for step in (1, 2)]
    write(
        here / "runs" / "one",
        {
            "config.yaml": "lr: 0.1\nrl_env: sums.py\nproject_name: one\n",
            "status.json": '{"status": "finished"}',
            "result.json": '{"steps": 2, "model_step": 2}',
            "environment.json": '{"packages": {"torch": "2.13.0", "trl": "1.16.0"}, "gpus": []}',
            "rollouts/rank0.jsonl": json_lines(records),
            "metrics.jsonl": json_lines(metrics),
            "model/config.json": "{}",
        },
    )
    save_file({"weight": torch.arange(4.0)}, here / "runs" / "one" / "model" / "model.safetensors")
    return here / "runs"


def replaced(name: str, before: str, after: str, count: int = -1) -> Change:
    """A change of a text file of the run."""
    return lambda run: (run / name).write_text((run / name).read_text().replace(before, after, count))


def weights(change: float) -> Change:
    return lambda run: save_file({"weight": torch.arange(4.0) + change}, run / "model" / "model.safetensors")


SAME, ROUNDED, DIFFERENT, GONE = "the same bits", "the same to rounding", "different", "not compared"


@pytest.mark.parametrize(
    ("change", "expected", "about"),
    [
        (replaced("metrics.jsonl", '"seconds": 1.0', '"seconds": 9.0'), [SAME] * 3, ""),
        (replaced("metrics.jsonl", "1e-07", "2e-07"), [SAME, ROUNDED, SAME], "1.0e-05"),
        (weights(1e-6), [SAME, SAME, ROUNDED], "model/ of step 2"),
        (weights(1e-2), [SAME, SAME, DIFFERENT], "step 2: weight by 3.3e-03"),
        (weights(float("nan")), [SAME, SAME, DIFFERENT], "weight by nan"),
        (replaced("metrics.jsonl", '"reward": 0.5', '"reward": null', 1), [SAME, DIFFERENT, SAME], "step 1: reward"),
        (
            replaced("rollouts/rank0.jsonl", '"content": "2"}], "score": 0.5', '"content": "two"}], "score": 0.0', 1),
            [DIFFERENT, SAME, SAME],
            "step 1, case 2: messages",
        ),
        (replaced("rollouts/rank0.jsonl", '{"step": 2, "row_number": 2', "x"), [DIFFERENT, SAME, SAME], "6 and 5"),
        (lambda run: [shutil.rmtree(run / name) for name in ("rollouts", "model")], [GONE, SAME, GONE], "no episodes"),
    ],
)
def test_what_differs_is_found_and_where_it_began(runs: Path, change: Change, expected: list[str], about: str) -> None:
    shutil.copytree(runs / "one", runs / "two")
    change(runs / "two")
    code, out, err = run_in_process("reproduce one two --json")
    found = json.loads(out)
    assert [found[part]["same"] for part in PARTS] == expected
    assert about in " ".join(found[part]["about"] for part in PARTS)
    assert code == (4 if DIFFERENT in expected else 0)
    assert ("runs/two is not the same as runs/one" in err) == (DIFFERENT in expected)


def test_versions_that_differ_are_shown_side_by_side(runs: Path) -> None:
    shutil.copytree(runs / "one", runs / "two")
    replaced("environment.json", "1.16.0", "1.17.0")(runs / "two")
    code, out, _ = run_in_process("reproduce one two")
    assert code == 0
    assert out.splitlines()[3].split() == ["!", "trl", "1.16.0", "1.17.0"]


def test_what_has_not_trained_is_refused(runs: Path) -> None:
    (runs / "one" / "result.json").unlink()
    code, _, err = run_in_process("reproduce one")
    assert code == 2
    assert "has no result" in err
