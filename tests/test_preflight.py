"""What is checked before anything is started: GPUs, processes, model, libraries, TRL's fields, checkpoints."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.batch import plan_batch
from aitrain.cli.train import grpo
from aitrain.launch.preflight import RunPlan, check, check_eval
from aitrain.options.other_names import OPTION_OF_FIELD, SET_BY_AITRAIN, trl_fields
from aitrain.options.train import EvalConfig
from aitrain.packages import installed
from aitrain.runs.checkpoint import MANIFEST, Manifest, seal
from aitrain.runs.model_reference import read_model
from aitrain.runs.run_folder import RunFolder
from tests.conftest import write

OURS = {"use_vllm": True, "vllm_mode": "server"}
THEIRS = {**OURS, "vllm_server_url": "http://localhost:8000"}
RESUME = {"project_name": "mine", "resume_from_checkpoint": "auto"}


def plan(**options: Any) -> RunPlan:
    return check(TrainConfig(**{"model": "tiny", **options}), has_environment=True)


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(**options)
    assert len(str(caught.value).splitlines()) <= 5
    return str(caught.value)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A vLLM to be found."""
    write(tmp_path, {"installed/vllm/__init__.py": ""})
    monkeypatch.syspath_prepend(tmp_path / "installed")


# -- GPUs and processes


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("visible", "options", "processes", "gpus", "server_gpus"),
    [
        ("0,1,2,3", {}, 4, "0123", ""),
        ("2, 5,-1,1", {}, 2, "25", ""),
        ("0,1,2,3", {"num_processes": 2}, 2, "01", ""),
        ("0,1,2,3", {**THEIRS, "vllm_server_url": "http://127.0.0.1:1,http://localhost:2,http://10.1.2.3:3"}, 2, "01",
         ""),
        ("0,1,2,3", {**OURS, "vllm_server_gpus": 2, "vllm_tensor_parallel_size": 2}, 2, "01", "23"),
    ],
)  # fmt: skip
def test_every_visible_gpu_trains_but_the_last_ones_which_servers_on_this_machine_get(
    visible: str, options: dict[str, Any], processes: int, gpus: str, server_gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    made = plan(**options)

    assert made.batch.processes == processes
    assert (made.gpus[:processes], made.server_gpus) == (tuple(gpus), tuple(server_gpus))


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_processes": 5}, "num_processes: 5 processes need 5 GPUs, and 4"),
        ({**THEIRS, "vllm_server_gpus": 4}, "take 4 GPUs of 4, and training needs one"),
    ],
)
def test_what_the_machine_does_not_have_is_refused(
    options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert told in refusal(**options)


# -- libraries


@pytest.mark.skipif(installed("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed_is_said_with_the_command_to_install_it(here: Path) -> None:
    """Somebody else's server needs none here."""
    write(here, {"vllm/__init__.py": "raise SystemExit('the user has a folder of this name')"})
    assert plan(**{**OURS, "vllm_server_url": "http://10.1.2.3:8000"}).config.use_vllm
    assert 'pip install "aitrain[vllm]"' in refusal(use_vllm=True)


# -- TRL's fields


def test_the_fields_of_trl_are_read_without_importing_it() -> None:
    from trl import GRPOConfig

    assert set(trl_fields()) == {field.name for field in fields(GRPOConfig)}


def test_every_field_that_aitrain_fills_is_refused_and_names_its_option() -> None:
    from aitrain.training.model import choose_precision
    from aitrain.training.trl_arguments import grpo_arguments

    config = TrainConfig(use_vllm=True, mixed_precision="no")
    filled = grpo_arguments(config, plan_batch(config, 1), choose_precision(config))

    ours = {name.removeprefix(prefix) for name in TrainConfig.model_fields for prefix in ("", "rl_")}
    assert {*filled, "fsdp", "fsdp_config"} - ours == {*OPTION_OF_FIELD, *SET_BY_AITRAIN}


VLLM = {"use_vllm": True}


@pytest.mark.parametrize(
    ("options", "field", "value", "what_to_do"),
    [
        ({}, "beta", 0.1, "rl_kl_coef"),
        ({}, "num_iteration", 2, "Did you mean num_iterations?"),
        (VLLM, "generation_kwargs", {"min_p": 0.1}, "Sampling has rl_temperature"),
        ({}, "vllm_importance_sampling_mode", "token_mask", "Add use_vllm"),
        (VLLM, "model_init_kwargs", {"revision": "x"}, "would not reach vLLM"),
    ],
)
@pytest.mark.usefixtures("vllm")
def test_a_field_of_trl_that_is_wrong_or_would_change_nothing_is_refused_with_what_to_use(
    options: dict[str, Any], field: str, value: Any, what_to_do: str
) -> None:
    said = refusal(**options, trl={field: value})

    assert said.startswith(f"trl: {field}")
    assert what_to_do in said


# -- the model


BASE = '{"base_model_name_or_path": "tiny"}'


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("./models/mien", "./models/mien does not exist"),
        ("adapter", "is an adapter, not a model"),
        ("empty", "empty has no model (status unknown)"),
    ],
)
def test_what_is_no_folder_of_a_model_is_refused(model: str, told: str, here: Path) -> None:
    models = {"adapter/adapter_config.json": BASE, "adapter/a.safetensors": ""}
    write(here, {**models, "empty": None})

    assert told in refusal(model=model)
    assert plan(model="someone/some-model")  # the Hub's


# -- resuming


def checkpoint(here: Path, step: int, **options: Any) -> Path:
    """A checkpoint as a run of these options writes it, with one file of the trainer."""
    folder = here / f"runs/mine/checkpoints/checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"1.5 2.5")
    config = TrainConfig(model="tiny", **options)
    seal(
        folder,
        Manifest(step, config.written(), {"class": "Env"}, "cases", 1, plan_batch(config, 1).completions_per_step),
    )
    return folder


def test_auto_resumes_the_newest_whole_checkpoint_by_its_step_and_not_its_time(here: Path) -> None:
    for step in (20, 100, 5):
        checkpoint(here, step)

    made = plan(**RESUME)

    assert made.checkpoint == (here / "runs/mine/checkpoints/checkpoint-100").resolve()
    assert made.folder == RunFolder(Path("runs/mine"))
    assert "Did you mean runs/mine/checkpoints/checkpoint-100?" in refusal(resume_from_checkpoint="runs/mine")


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("weights", b"1.5 2.4", "weights is missing, was changed"),
        ("weights", None, "weights is missing, was changed"),
        ("adapter_model.bin", b"", "adapter_model.bin is missing, was changed or does not belong to it"),
        (MANIFEST, b"{}", "manifest.json is missing or was changed"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_refused_where_it_is_named(
    file: str, content: bytes | None, why: str, here: Path
) -> None:
    checkpoint(here, 4)
    damaged = checkpoint(here, 8)
    if content is None:
        (damaged / file).unlink()
    else:
        (damaged / file).write_bytes(content)

    made = plan(**RESUME)

    assert made.checkpoint.name == "checkpoint-4"
    assert f"{damaged.name} is skipped: {why}" in made.notes[0]
    assert f"{damaged.name} is refused: {why}" in refusal(resume_from_checkpoint=str(damaged))


def test_options_of_what_is_not_switched_on_are_said_to_have_no_effect() -> None:
    notes = plan(lora_r=32, vllm_mode="server").notes
    assert notes == ("vllm_mode: no effect without use_vllm.", "lora_r: no effect without peft.")
    assert plan(lora_r=32, peft=False).notes == ()


def test_a_changed_option_is_refused_with_both_its_values_and_a_harmless_one_passes(here: Path) -> None:
    checkpoint(here, 4, lr=1e-5, trl={"num_iterations": 2}, eval_steps=5)
    resume = {**RESUME, "logging_steps": 3}

    assert "lr: 1e-05 -> 0.001; trl: {'num_iterations': 2} -> {'num_iterations': 1}" in refusal(
        **resume, lr=1e-3, trl={"num_iterations": 1}
    )
    assert plan(**resume, lr=1e-5, trl={"num_iterations": 2}, num_processes=1).checkpoint is not None
    assert plan(**resume, lr=1e-3, resume_anyway=True).checkpoint is not None


def test_a_finished_run_is_done_unless_an_option_is_given_that_it_did_not_have(here: Path) -> None:
    config = TrainConfig(model="tiny", rl_prompts_per_step=2, max_steps=3)
    folder = RunFolder(checkpoint(here, 3, rl_prompts_per_step=2, max_steps=3).parents[1])
    folder.write_config(config)
    folder.write_status("finished")
    write(folder.path, {"result.json": '{"status": "finished"}'})
    resume = {**RESUME, "max_steps": 3}

    assert plan(**resume).is_done
    assert not plan(**resume, gradient_accumulation=8, resume_anyway=True).is_done


def test_without_a_run_or_a_checkpoint_resuming_starts_from_the_beginning_and_says_so(here: Path) -> None:
    new = plan(**RESUME)
    assert not (here / "runs").exists()
    write(here, {"runs/mine/config.yaml": "model: tiny\n", "runs/mine/metrics.jsonl": '{"step": 3}\n'})
    killed = plan(**RESUME)

    assert new.checkpoint is killed.checkpoint is None
    assert new.folder == killed.folder == RunFolder(Path("runs/mine"))
    assert "no run runs/mine yet" in new.notes[0]
    assert "no checkpoint in runs/mine yet" in killed.notes[0]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"config.yaml": "", "status.json": '{"job": "eval"}'}, "runs/mine is an eval"),
        ({"thesis.tex": "", ".lock": ""}, "runs/mine is not a run folder"),
        ({"checkpoints/checkpoint-3/weights": ""}, "there is no complete checkpoint in runs/mine/checkpoints"),
    ],
    ids=["eval", "foreign", "damaged"],
)
def test_what_a_run_from_the_beginning_would_overwrite_is_refused(files: dict[str, str], why: str, here: Path) -> None:
    write(here / "runs/mine", files)
    said = refusal(**RESUME)
    assert f"resume_from_checkpoint: {why}" in said
    assert "--project-name" in said


def test_environments_that_import_different_files_of_one_name_are_refused(here: Path) -> None:
    for folder in "ab":
        write(here / folder, {"env.py": "import rules\nclass E: ...", "rules.py": folder})
    with pytest.raises(ConfigError, match=r"b/rules.py and .*a/rules.py"):
        check(TrainConfig(model="tiny", rl_env=["x=a/env.py:E", "y=b/env.py:E"]))


def test_the_config_of_a_copied_run_resumes_the_copy(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"config.yaml": "project_name: mine\noutput_dir: runs\n", "status.json": "{}"}
    write(here / "copies/other", run)
    for resume, place in ((True, ("copies", "other")), (False, ("runs", "mine"))):
        monkeypatch.setattr("aitrain.cli.train.train", train := MagicMock(return_value=0))
        grpo(config=Path("copies/other/config.yaml"), resume=resume)
        options = train.call_args.args[0]
        assert (options.output_dir, options.project_name) == place


@pytest.mark.usefixtures("vllm")
def test_the_server_of_an_eval_may_take_the_only_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    options = {"model": "tiny", "rl_env": "envs.arithmetic", "use_vllm": True, "vllm_mode": "server"}
    found = check_eval(EvalConfig(**options), read_model("tiny"))
    assert (found.gpus, found.server_gpus) == ((), ("0",))
    with pytest.raises(ConfigError, match="2 GPUs"):
        check_eval(EvalConfig(**options, vllm_servers=2), read_model("tiny"))
