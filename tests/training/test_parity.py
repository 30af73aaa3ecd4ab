"""aitrain adds nothing to the mathematics: the same weights as plain TRL, and the same for any number of processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import episodes_of
from tests.training.conftest import are_equal, difference, run_group, weights
from tests.training.scripted_run import KINDS

LETTERS = Path(__file__).parents[2] / "benchmarks" / "letters.py"

SAME: dict[str, Any] = {
    "max_steps": 4, "num_train_epochs": 1, "learning_rate": 1e-3, "beta": 0.1, "epsilon": 0.2, "num_generations": 4,
    "loss_type": "grpo", "max_completion_length": 6, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "warmup_steps": 0.1, "optim": "adamw_torch",
    "lr_scheduler_type": "linear", "seed": 7, "use_cpu": True, "bf16": False, "gradient_checkpointing": True,
    "save_strategy": "no", "report_to": "none", "logging_steps": 1, "disable_tqdm": True,
}  # fmt: skip
"""What TRL is given; the flags below say the same."""

FLAGS = [
    "--max-steps=4", "--lr=1e-3", "--rl-kl-coef=0.1", "--rl-num-generations=4", "--rl-max-new-tokens=6",
    "--batch-size=4", "--gradient-accumulation=2", "--seed=7", "--save-strategy=no", "--project-name=ours",
    "--no-rl-trim-padding", "--no-share-prefixes", "--eval-cases=0",
]  # fmt: skip


def run(*command: object) -> None:
    """Run it to its end; its output is shown when it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


LORA = {"r": 4, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("lora", [None, pytest.param(LORA, marks=pytest.mark.slow)], ids=["all weights", "an adapter"])
def test_a_run_ends_with_the_weights_of_a_plain_trl_script(
    lora: dict[str, Any] | None, small_model: Path, tmp_path: Path, preloaded_aitrain: Path
) -> None:
    task = json.dumps({"clock": str(tmp_path / "clock"), "completions_per_step": 8, "chat": lora is not None})
    (tmp_path / "plain.json").write_text(json.dumps({"model": str(small_model), "grpo": SAME, "lora": lora}))
    script = [preloaded_aitrain / "preloaded-python", "-P", "-m", "benchmarks.plain_trl"]
    run(*script, tmp_path / "plain.json", task, tmp_path / "plain")
    command = ["grpo", "--model", small_model, "--rl-env", f"{LETTERS}:Letters", f"--rl-env-config={task}"]
    command += ["--peft", "--lora-r=4"] if lora else []
    run(preloaded_aitrain / "aitrain", *command, "--output-dir", tmp_path, *FLAGS)

    ours, start = weights(tmp_path / "ours/model"), {} if lora else weights(small_model)
    assert are_equal(weights(tmp_path / "plain"), ours)
    assert any(
        (weight - start.get(name, 0)).abs().max() > 1e-4 for name, weight in ours.items() if "lora_A" not in name
    )


# -- one process and two


@pytest.fixture(scope="module")
def scripted(small_model: Path, tmp_path_factory: pytest.TempPathFactory, preloaded_aitrain: Path) -> Path:
    """Runs of scripted_run.py, by one process and by two: one/NAME and two/NAME."""
    out = tmp_path_factory.mktemp("scripted")
    for processes, folder in ((1, "one"), (2, "two")):
        run_group(preloaded_aitrain, processes, small_model, out / folder, "ddp", *KINDS, "held-out")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_end_like_one(kind: str, scripted: Path, small_model: Path) -> None:
    one, two = scripted / "one" / kind / "model", scripted / "two" / kind / "model"

    assert difference(one, two) <= 1e-6
    assert difference(one, small_model) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before_sampled", "before_greedy"])
def test_two_processes_score_held_out_cases_like_one(when: str, scripted: Path) -> None:
    """What the policy samples, what the environment samples with it, and what that is worth."""

    def records(run: Path) -> list[dict[str, Any]]:
        return sorted(episodes_of(run, when), key=lambda record: int(record["case_idx"]))

    one, two = (records(scripted / number / "held-out") for number in ("one", "two"))
    assert [record["case_idx"] for record in one] == list(range(9))
    for name in ("case_idx", "completion", "score", "metrics"):
        assert [record[name] for record in one] == [record[name] for record in two], name
    same_prompt = {record["completion"] for record in one if record["case_idx"] % 2}
    assert len(same_prompt) == (4 if when == "before_sampled" else 1)
