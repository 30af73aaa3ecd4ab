"""A dry run refuses what the run refuses before its first step, with the same words, and says what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aitrain
from aitrain import AitrainError, TrainConfig
from aitrain.launch.command_processes import dry_run
from aitrain.launch.preflight import check
from tests.conftest import Run, is_alive, listing, write
from tests.execution.waiting import eventually

Make = Callable[..., TrainConfig]

ENV = """
import os
ROWS = [{"prompt": f"say {number}", "answer": number} for number in range(20)]
class Env:
    def __init__(self, city="Rome"):
        self.city = city
    def build_dataset(self, tokenizer):
        return list(ROWS)
    def score_episode(self, completion, answer):
        return 0.5
"""


@pytest.fixture
def preloaded(preloaded_aitrain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dry runs are forked from a process that has imported torch already."""
    monkeypatch.setattr("aitrain.launch.processes.PYTHON", [str(preloaded_aitrain / "preloaded-python"), "-P"])


@pytest.fixture
def config(here: Path, small_model: Path) -> Make:
    """`config(env, **options)`: of a short run."""

    def make(env: str = ENV, **options: Any) -> TrainConfig:
        write(here, {"env.py": env})
        quick = {"max_steps": 1, "rl_max_new_tokens": 4, "rl_kl_coef": 0.0, "save_strategy": "no", "eval_cases": 0}
        return TrainConfig(**{"model": str(small_model), "rl_env": "env.py", **quick, **options})

    return make


def replaced(old: str, new: str, text: str = ENV) -> str:
    assert old in text
    return text.replace(old, new)


REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "held-out rows of another kind": (
        ENV + "    def build_eval_dataset(self):\n        return [{'prompt': [{'role': 'user', 'content': 'x'}]}]\n",
        {}, 3, "The rows mix prompt types",
    ),
    "too few cases for a batch": (ENV, {"rl_prompts_per_step": 32}, 2, "32 prompts"),
    "a layer that is not there": (ENV, {"peft": True, "target_modules": "v_proj,q_prod"}, 2, "Did you mean q_proj?"),
}  # fmt: skip


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize(("env", "options", "code", "word"), REFUSED.values(), ids=REFUSED)
def test_a_dry_run_refuses_what_the_run_refuses_with_the_same_words(
    env: str, options: dict[str, Any], code: int, word: str, config: Make
) -> None:
    with pytest.raises(AitrainError) as refused:
        dry_run(check(config(env, **options)))
    message = str(refused.value)
    assert (refused.value.exit_code, word in message) == (code, True), message

    with pytest.raises(AitrainError) as of_the_run:
        aitrain.train(config(env, **options))
    assert str(of_the_run.value) == message
    assert of_the_run.value.exit_code == code


@pytest.mark.usefixtures("preloaded")
def test_groups_that_are_scored_together_are_whole_on_each_process(config: Make) -> None:
    env = ENV + "    def score_group(self, scores):\n        return scores\n"
    with pytest.raises(AitrainError, match="a multiple of the 2 processes"):
        dry_run(check(config(env, num_processes=2, rl_prompts_per_step=3)))
    assert not (Path.cwd() / "runs").exists()


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("value", ["'0.5'", "1 / 0", "input()"])
def test_an_environment_that_cannot_score_any_answer_is_refused(value: str, config: Make) -> None:
    with pytest.raises(AitrainError, match="aitrain env play") as caught:
        dry_run(check(config(replaced("return 0.5", f"return {value}"))))
    assert caught.value.exit_code == 3


# -- its process


def test_a_dry_run_shows_the_plan_the_cases_and_what_is_not_checked(aitrain_grpo: Run, here: Path) -> None:
    told = "[{'role': 'system', 'content': 'Count.'}, {'role': 'user', 'content': str(number)}]"
    env = replaced("class Env:", "print('noise')\nclass Env:", replaced('f"say {number}"', told))
    write(
        here, {"env.py": env, "users.jinja": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"}
    )
    aitrainings = ["--rl_env_module", "env", "--rl_prompts_per_step=6"]
    named = ["--model", "tiny", "--project-name", "mine", *aitrainings]
    done = aitrain_grpo(*named, "--num-processes=3", "--epochs=3", "--dry-run", "--chat-template=users.jinja")

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    plan = {line[:12].strip(): line[13:] for line in lines}
    step = "6 prompts x 4 completions = 24 a step = 3 processes x 8"
    assert plan["batch"] == f"{step}, in forward passes of up to 8 completions"
    assert (plan["processes"], plan["run folder"]) == ("3 on CPU", "runs/mine")
    assert any(line.startswith("12 cases to train on, 8 held out, 6 steps") for line in lines)
    assert "not checked: the weights of tiny" in lines
    assert "! The chat template leaves system messages out: the model does not see the environment's." in lines
    assert "noise" not in done.stdout
    assert listing(here) == ["env.py", "users.jinja"]


def test_what_the_environment_started_ends_with_the_dry_run(config: Make) -> None:
    started = "import subprocess\n" + replaced(
        "self.city = city",
        "open('pid', 'w').write(str(subprocess.Popen(['sleep', '600']).pid)); os.kill(os.getpid(), 9)",
    )
    with pytest.raises(AitrainError, match="SIGKILL") as caught:
        dry_run(check(config(started)))
    assert caught.value.exit_code == 1
    assert eventually(lambda: not is_alive(int(Path("pid").read_text())))


@pytest.mark.slow
def test_an_environment_that_hangs_is_refused_at_its_deadline(config: Make) -> None:
    hangs = replaced("self.city = city", "import time; time.sleep(600)")
    with pytest.raises(AitrainError, match="--stall-timeout") as caught:
        dry_run(check(config(hangs, stall_timeout=5.0)))
    assert caught.value.exit_code == 3
