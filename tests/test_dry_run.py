"""A dry run refuses what the run refuses before its first step, with the same words, and says what it leaves out."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aitrain
from aitrain import AitrainError, ConfigError, TrainConfig
from aitrain.events import Failed, Note
from aitrain.jobs import dry_run as job
from aitrain.jobs import environment_check
from aitrain.jobs.worker import EventChannel
from aitrain.launch.dry_run import DryRun, dry_run
from aitrain.launch.preflight import check
from aitrain.launch.unchecked import not_checked
from aitrain.options.in_python import in_python
from aitrain.runs.run_folder import RunFolder
from aitrain.workbench.check.before_training import check_quickly
from tests.conftest import Run, has_ended, listing, write

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
CHAT = ENV.replace('"prompt": f"say {number}"', '"prompt": [{"role": "user", "content": f"say {number}"}]')
EPISODES = (
    CHAT.replace("    def score_episode(self, completion, answer):\n        return 0.5\n", "")
    + """
    def episode(self, case_idx):
        reply = yield
        reply = yield "again"
        return 1.0
"""
)
TOOLS = (
    CHAT
    + """
    def get_tools(self):
        return [self.look_up]
    def look_up(self, word: str) -> str:
        "Look a word up."
        return word
"""
)


@dataclass
class DryRunner:
    """Dry runs in this process, which imports torch once; `small` is a model folder."""

    small: Path
    folder: Path

    def config(self, env: str = ENV, **options: Any) -> TrainConfig:
        write(Path.cwd(), {"env.py": env})
        quick = {"max_steps": 1, "rl_max_new_tokens": 4, "rl_kl_coef": 0.0, "save_strategy": "no", "eval_cases": 0}
        return TrainConfig(**{"model": str(self.small), "rl_env": "env.py", **quick, **options})

    def check(self, config: TrainConfig) -> DryRun:
        """What the process of a dry run sends."""
        plan, folder = check(config), RunFolder(self.folder / "dry")
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.path.mkdir()
        folder.write_config(plan.config)
        found = DryRun()
        arguments = [str(folder.path), str(plan.batch.processes), *([str(plan.checkpoint)] if plan.checkpoint else [])]
        with (self.folder / "events").open("w+") as stream:
            code = job.main(arguments, EventChannel(stream, 0))
            stream.seek(0)
            for line in stream:
                found.hear(line)
        assert found.end is not None
        assert code == (found.end.exit_code if isinstance(found.end, Failed) else 0)
        return found


@pytest.fixture
def dry(here: Path, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DryRunner:
    monkeypatch.setattr(environment_check, "check_quickly", partial(check_quickly, seconds=60.0))  # on any machine
    return DryRunner(small_model, tmp_path)


def of_python(refused: tuple[str, int]) -> tuple[str, int]:
    """The message as `aitrain.train` says it."""
    return in_python(refused[0], TrainConfig.model_fields), refused[1]


def message_of(act: Callable[[], object]) -> tuple[str, int]:
    """The message and the exit code of an error; two empty values if there is none."""
    try:
        act()
    except AitrainError as error:
        return str(error), error.exit_code
    return "", 0


def replaced(old: str, new: str, text: str = ENV) -> str:
    assert old in text
    return text.replace(old, new)


REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    # the environment, imported and constructed
    "missing module": ("import not_there\n" + ENV, {}, 3, "No module named 'not_there'"),
    "missing module when constructed": (replaced("self.city = city", "import not_there"), {}, 3, "not_there"),
    "constructor that raises": (replaced("self.city = city", "1 / 0"), {}, 3, "Env() raised: ZeroDivisionError"),
    "wrong keyword": (ENV, {"rl_env_config": {"town": 1}}, 2, "Env does not take town"),
    "wrong keyword of what is inherited": (
        ENV + "\nclass Other(type(Env())): ...\n", {"rl_env_config": {"town": 1}, "rl_env_class": "Other"}, 2,
        "Other does not take town",
    ),
    "no score_episode": (replaced("score_episode", "score"), {}, 3, "Env has no score_episode"),
    "wrong requirements": (
        replaced("class Env:", "import aitrain\nclass Env:\n    requirements = aitrain.EnvRequirements(max_turns=0)"),
        {}, 3, "Env.requirements: rl_max_turns",
    ),
    # its dataset
    "missing data file": (replaced("list(ROWS)", "open('data.jsonl')"), {}, 3, "No such file or directory"),
    "empty dataset": (replaced("list(ROWS)", "[]"), {}, 3, "build_dataset returned no rows"),
    "no dataset": (replaced("list(ROWS)", "None"), {}, 3, "build_dataset returned None"),
    "row without a prompt": (replaced('"prompt"', '"question"'), {}, 3, "row 0 of build_dataset has no prompt"),
    "mixed prompts": (
        replaced("list(ROWS)", "[*ROWS, {'prompt': [{'role': 'user', 'content': 'x'}], 'answer': 1}]"), {}, 3,
        "mixes prompt types",
    ),
    "misspelt column": (replaced("completion, answer", "completion, anwser"), {}, 3, "unknown parameter, anwser"),
    "column that some rows lack": (replaced("list(ROWS)", "[*ROWS, {'prompt': 'x'}]"), {}, 3, "parameter, answer"),
    "held-out rows of another kind": (
        ENV + "    def build_eval_dataset(self):\n        return [{'prompt': [{'role': 'user', 'content': 'x'}]}]\n",
        {}, 3, "must have the same kind of prompt",
    ),
    "held-out rows that are missing": (
        ENV + "    def build_eval_dataset(self):\n        return open('eval.jsonl')\n", {}, 3, "eval.jsonl",
    ),
    "too few cases for a batch": (ENV, {"rl_prompts_per_step": 32}, 2, "One step needs 32 prompts and there are 20"),
    "too many held out": (ENV, {"eval_cases": 20}, 2, "eval_cases: cannot hold out 20 of 20"),
    "prompts longer than the limit": (ENV, {"rl_max_prompt_length": 2}, 2, "20 had a prompt of more than 2 tokens"),
    "prompts longer than the context": (replaced('f"say {number}"', '"x" * 9000'), {}, 2, "20 had a prompt of more"),
    "no room for a prompt": (ENV, {"rl_max_new_tokens": 4096}, 2, "rl_max_new_tokens: 4096 new tokens leave no room"),
    # the chat template
    "template that is not there": (ENV, {"chat_template": "foo"}, 2, "chat_template: foo is neither"),
    "template that refuses a prompt": (
        replaced('"role": "user"', '"role": "user", "x": 1', CHAT), {"chat_template": "raises.jinja"}, 3,
        "chat template refuses a prompt",
    ),
    "template that rewrites earlier turns": (EPISODES, {"chat_template": "rewrites.jinja"}, 2, "not prefix-preserving"),
    "tools that the template cannot show": (TOOLS, {"chat_template": "zephyr"}, 2, "cannot write calls and results"),
    "tools for prompts that are strings": (ENV + TOOLS.split(CHAT)[1], {}, 2, "get_tools"),
    "tool without a name": (
        replaced("[self.look_up]", "[lambda word: word]", TOOLS), {}, 3, "it has no name to call it by",
    ),
    # the model
    "model folder without a tokenizer": (ENV, {"model": "no-tokenizer"}, 2, "it has no tokenizer"),
    "attention that is not there": (ENV, {"attn_implementation": "foo"}, 2, "attn_implementation: "),
    "layers that are not there": (ENV, {"peft": True, "target_modules": "foo"}, 2, "foo"),
    "adapter on the output layer": (ENV, {"peft": True, "target_modules": "lm_head"}, 2, "lm_head"),
    # the machine
    "int4 on a CPU": (ENV, {"quantization": "int4", "peft": True}, 2, "int4 needs a CUDA GPU"),
    "fp16 on a CPU": (ENV, {"mixed_precision": "fp16"}, 2, "fp16 needs a CUDA GPU"),
    "push without a token": (ENV, {"push_to_hub": True}, 2, "there is no token to upload with"),
    "output below a file": (ENV, {"output_dir": "env.py/runs"}, 2, "cannot make a run folder in env.py/runs"),
    # names, and what TRL and transformers refuse
    "unknown optimizer": (ENV, {"optimizer": "adamx"}, 2, "transformers has no optimizer adamx"),
    "optimizer of a package that is missing": (ENV, {"optimizer": "lomo"}, 2, "lomo"),
    "unknown scheduler": (ENV, {"scheduler": "cos"}, 2, "transformers has no scheduler cos"),
    "scheduler without a needed setting": (ENV, {"scheduler": "cosine_with_min_lr"}, 2, "min_lr"),
    "fields of TRL that exclude each other": (
        ENV, {"trl": {"generation_batch_size": 8, "steps_per_generation": 2}}, 2, "TRL refuses these settings",
    ),
    "auxiliary loss of a dense model": (ENV, {"trl": {"router_aux_loss_coef": 0.1}}, 2, "router_aux_loss_coef"),
    "misspelt field of TRL": (ENV, {"trl": {"scale_reward": "none"}}, 2, "scale_rewards"),
    "tracker that is not installed": (ENV, {"log": "wandb"}, 2, "wandb"),
}  # fmt: skip
FILES = {
    "raises.jinja": "{{ raise_exception('no x') }}",
    "rewrites.jinja": "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}",
}


@pytest.mark.parametrize(("env", "options", "code", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.slow
def test_a_dry_run_refuses_what_the_run_refuses_with_the_same_words(
    env: str, options: dict[str, Any], code: int, words: str, dry: DryRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    write(Path.cwd(), FILES)
    if options.get("model"):
        shutil.copytree(dry.small, options["model"], ignore=shutil.ignore_patterns("tokenizer*"))

    def of_dry_run() -> None:
        end = dry.check(dry.config(env, **options)).end
        if isinstance(end, Failed):
            error = AitrainError(end.message)
            error.exit_code = end.exit_code
            raise error

    refused = message_of(of_dry_run)
    assert refused[1] == code, refused
    assert words in refused[0]
    assert len(refused[0].splitlines()) <= 5
    assert message_of(lambda: aitrain.train(dry.config(env, **options))) == of_python(refused)
    assert not (Path.cwd() / "runs").exists()


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_attribute_that_other_processes_cannot_get_is_refused_where_there_are_some(
    isolation: str, dry: DryRunner
) -> None:
    env = "import threading\n" + replaced("return list(ROWS)", "self.lock = threading.Lock(); return list(ROWS)")
    alone = dry.check(dry.config(env, rl_env_isolation=isolation)).end
    two = dry.check(dry.config(env, rl_env_isolation=isolation, num_processes=2)).end

    assert isinstance(alone, Failed) == (isolation == "process")
    assert isinstance(two, Failed)
    assert "build_dataset set self.lock, which cannot be copied" in two.message
    assert two.exit_code == 3


def test_batches_are_divided_by_the_processes_of_the_run(dry: DryRunner) -> None:
    config = dry.config(num_processes=2, rl_num_generations=8, batch_size=4, rl_prompts_per_step=1)
    assert not isinstance(dry.check(config).end, Failed)

    wrong = dry.config(num_processes=2, rl_num_generations=4, batch_size=4, trl={"generation_batch_size": 12})
    end = dry.check(wrong).end
    assert isinstance(end, Failed)
    assert "generation_batch_size" in end.message


def test_rows_that_cannot_be_sent_to_another_process_are_refused(dry: DryRunner) -> None:
    env = replaced('"answer": number', '"answer": (lambda: number)')
    assert not isinstance(dry.check(dry.config(env)).end, Failed)

    end = dry.check(dry.config(env, num_processes=2)).end
    assert isinstance(end, Failed)
    assert "rows of build_dataset cannot be sent to the other processes" in end.message


@pytest.mark.slow
def test_a_run_that_is_resumed_with_other_cases_is_refused_as_the_run_does(dry: DryRunner) -> None:
    aitrain.train(dry.config(save_strategy="steps", save_steps=1, project_name="mine"))
    again: dict[str, Any] = {"resume_from_checkpoint": "auto", "project_name": "mine", "max_steps": 2}
    again |= {"save_strategy": "steps", "save_steps": 1}
    assert not isinstance(dry.check(dry.config(**again)).end, Failed)

    other = replaced("say {number}", "tell {number}")
    end = dry.check(dry.config(other, **again)).end
    assert isinstance(end, Failed)
    assert message_of(lambda: aitrain.train(dry.config(other, **again))) == of_python((end.message, end.exit_code))


def test_what_the_environment_requires_counts_in_a_dry_run(dry: DryRunner) -> None:
    env = "import aitrain\n" + replaced(
        "class Env:", "class Env:\n    requirements = aitrain.EnvRequirements(max_new_tokens=4096)"
    )
    config = dry.config(env).model_dump()
    del config["rl_max_new_tokens"]
    given = {name: config[name] for name in ("model", "rl_env", "max_steps")}
    found = dry.check(TrainConfig(**given))
    assert Note("Env requires --rl-max-new-tokens 4096.", "info") in found.notes
    assert isinstance(found.end, Failed)
    assert "rl_max_new_tokens: 4096 new tokens leave no room" in found.end.message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("'0.5'", "returned '0.5' (str)"),
        ("float('nan')", "returned nan"),
        ("1.5", "returned 1.5"),
        ("1 / 0", "ZeroDivisionError"),
        ("input()", "EOFError"),
    ],
)
@pytest.mark.slow
def test_an_environment_that_cannot_score_any_answer_is_refused_as_the_run_does(
    value: str, words: str, dry: DryRunner
) -> None:
    env = replaced("return 0.5", f"return {value}")
    end = dry.check(dry.config(env)).end
    assert isinstance(end, Failed)
    assert end.exit_code == 3
    assert words in end.message
    assert len(end.message.splitlines()) <= 5
    message, code = message_of(lambda: aitrain.train(dry.config(env, eval_cases=2)))
    assert "failed on all 2 held-out cases" in message
    assert code == 3


def test_an_environment_that_scores_some_answers_is_not_refused(dry: DryRunner) -> None:
    env = (
        replaced("return 0.5", "return {'yes': 1.0}[completion]")
        + "    def reference(self, case_idx):\n        return 'yes'\n"
    )
    found = dry.check(dry.config(env))
    assert not isinstance(found.end, Failed)
    assert any("Environment check exceptions" in note.text for note in found.notes)


# -- what cannot be known


def test_a_hub_model_that_cannot_be_asked_for_is_not_checked_but_its_dataset_is(dry: DryRunner) -> None:
    found = dry.check(dry.config(model="no-such/model"))
    assert not isinstance(found.end, Failed)
    assert found.unchecked[0].startswith("no-such/model: it is not on this machine and the Hub cannot be reached")

    for env, words in (
        (replaced("list(ROWS)", "[]"), "build_dataset returned no rows"),
        (replaced("list(ROWS)", "open('data.jsonl')"), "built with the tokenizer of `tiny`"),
        (replaced("completion, answer", "anwser"), "unknown parameter, anwser"),
    ):
        end = dry.check(dry.config(env, model="no-such/model")).end
        assert isinstance(end, Failed)
        assert words in end.message
        assert end.exit_code == 3
    end = dry.check(
        dry.config(model="no-such/model", scheduler="cosine_with_min_lr", trl={"generation_batch_size": 7})
    ).end
    assert isinstance(end, Failed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["the weights of ", "memory of the CPU", "the model's own answers"]),
        ({"model": "no-such/model"}, ["the download of no-such/model"]),
        ({"num_processes": 2}, ["the 2 training processes"]),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_url": "http://127.0.0.1:1"},
            ["the vLLM server at http"],
        ),
        ({"push_to_hub": True}, ["whether the token may write"]),
        ({"log": "tensorboard"}, ["the login of tensorboard"]),
    ],
)
def test_what_a_dry_run_leaves_to_the_run_is_said(
    options: dict[str, Any], words: list[str], dry: DryRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aitrain.launch.preflight.check_packages", lambda config: None)
    said = list(not_checked(check(dry.config(**options))))
    assert all(any(line.startswith(word) or word in line for line in said) for word in words), said


def test_an_adapter_that_vllm_cannot_serve_is_refused_before_vllm_is_started(
    dry: DryRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aitrain.launch.preflight.check_packages", lambda config: None)
    served: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server", "peft": True}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert check(dry.config(**served)).config.lora_r == 16
    with pytest.raises(ConfigError, match="lora_r: vLLM serves adapters of rank 512 at most, not 1000"):
        check(dry.config(**served, lora_r=1000))


# -- its process


def test_a_dry_run_shows_the_plan_the_cases_and_what_is_not_checked(aitrain_grpo: Run, here: Path) -> None:
    write(here, {"env.py": replaced("class Env:", "print('noise')\nclass Env:")})
    done = aitrain_grpo("--model", "tiny", "--rl-env", "env.py", "--dry-run")

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert any(line.startswith("12 cases to train on, 8 held out, 6 steps") for line in lines)
    assert "not checked: the weights of tiny" in lines
    assert "noise" not in done.stdout
    assert listing(here) == ["env.py"]


@pytest.mark.slow
def test_the_plan_command_loads_the_environment_as_well(here: Path) -> None:
    write(here, {"env.py": "import not_there\n" + ENV})
    command = [sys.executable, "-m", "aitrain", "plan", "--model", "tiny", "--rl-env", "env.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 3
    assert "No module named 'not_there'" in done.stderr
    assert "memory       about" in done.stdout

    done = subprocess.run([*command, "--options-only"], capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 0
    assert (
        "not checked: the environment, its dataset, the tokenizer, and what TRL refuses (--options-only)" in done.stdout
    )


def test_options_only_is_for_dry_runs(aitrain_grpo: Run, here: Path) -> None:
    write(here, {"env.py": ENV})
    done = aitrain_grpo("--model", "tiny", "--rl-env", "env.py", "--options-only")
    assert done.returncode == 2
    assert "--options-only: add --dry-run" in done.stderr


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("os.kill(os.getpid(), 9)", 1, "ended without an error message while loading the environment: SIGKILL"),
        ("os._exit(0)", 1, "ended without an error message while loading the environment: exit code 0"),
        ("import time; time.sleep(60)", 3, "took more than 5 seconds (--stall-timeout), while"),
        ("input()", 3, "EOFError"),
    ],
)
@pytest.mark.slow
def test_an_environment_that_ends_or_hangs_its_process_is_refused(
    line: str, code: int, words: str, dry: DryRunner
) -> None:
    config = dry.config(replaced("self.city = city", line), stall_timeout=5.0 if "sleep" in line else 60.0)
    message, found = message_of(lambda: dry_run(check(config)))
    assert words in message
    assert found == code


def test_what_the_environment_started_ends_with_the_dry_run(dry: DryRunner) -> None:
    started = "import subprocess\n" + replaced(
        "self.city = city",
        "open('pid', 'w').write(str(subprocess.Popen(['sleep', '600']).pid)); raise ValueError('no')",
    )
    message, code = message_of(lambda: dry_run(check(dry.config(started))))
    assert "ValueError: no" in message
    assert code == 3
    assert has_ended(int(Path("pid").read_text()))


@pytest.mark.slow
def test_ctrl_c_ends_the_dry_run_and_its_process(here: Path) -> None:
    hanging = replaced("self.city = city", "open('pid', 'w').write(str(os.getpid())); import time; time.sleep(600)")
    write(here, {"env.py": hanging})
    command = [sys.executable, "-m", "aitrain", "grpo", "--model", "tiny", "--rl-env", "env.py", "--dry-run"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    as_from_a_shell = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore it
    child = subprocess.Popen(command, cwd=here, preexec_fn=as_from_a_shell, **pipes)
    while not ((here / "pid").exists() and (here / "pid").read_text()):
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in stderr
    assert has_ended(int((here / "pid").read_text()))


def test_debug_shows_the_traceback_and_what_was_printed(aitrain_grpo: Run, here: Path) -> None:
    write(here, {"env.py": "print('look here')\nimport not_there\n" + ENV})
    done = aitrain_grpo("--model", "tiny", "--rl-env", "env.py", "--dry-run", "--debug")
    assert done.returncode == 3
    assert "look here" in done.stderr
    assert "Traceback" in done.stderr
