"""What is checked before anything is started: GPUs, processes, model, libraries, TRL's fields, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.batch import plan_batch
from aitrain.cli.grpo import plan_lines, train_options
from aitrain.launch import resource_check
from aitrain.launch.nvidia import visible_gpus
from aitrain.launch.preflight import RunPlan, check, training_gpus
from aitrain.options.trl_effects import OF_GENERATE, OF_NCCL, check_trl_effects
from aitrain.options.trl_fields import OPTION_OF_FIELD, SET_BY_AITRAIN, WITHOUT_EFFECT, enum_values, trl_fields
from aitrain.packages import installed
from aitrain.runs.checkpoint import MANIFEST, Manifest, seal
from aitrain.runs.run_folder import RunFolder
from tests.conftest import write

ENVIRONMENT = "class Env:\n    def build_dataset(self, tokenizer): ...\n    def score_episode(self): ...\n"


def plan(**options: Any) -> RunPlan:
    return check(TrainConfig(model="tiny", **options), has_environment=True)


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(TrainConfig(**{"model": "tiny", **options}), has_environment=True)
    assert len(str(caught.value).splitlines()) <= 4
    return str(caught.value)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The options of a served vLLM, and a vLLM to be found."""
    write(tmp_path, {"installed/vllm/__init__.py": ""})
    monkeypatch.syspath_prepend(tmp_path / "installed")
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_url": "http://localhost:8000"}


# -- memory for vLLM


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: dict[str, Any]) -> None:
    """Two GPUs of 140 GiB, the second one with 100 GiB free; and a vLLM to be found."""
    lines = "0, NVIDIA H200, 143771, 143164\n1, NVIDIA H200, 143771, 102400"
    write(tmp_path, {"bin/nvidia-smi": f"#!/bin/sh\ncase $1 in --query*) echo '{lines}';; *) exit 0;; esac\n"})
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


@pytest.mark.usefixtures("busy")
def test_a_gpu_must_have_free_what_vllm_will_take_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(use_vllm=True).gpus == ("0", "1")  # 0.3 beside the model
    assert "vllm_gpu_memory_utilization: 0.8 of GPU 1 is 112.3 GiB, and 100.0 of its 140.4 GiB are free" in refusal(
        use_vllm=True, vllm_gpu_memory_utilization=0.8
    )
    assert "0.9 of GPU 1" in refusal(use_vllm=True, vllm_mode="server")
    assert plan(use_vllm=True, vllm_mode="server", vllm_gpu_memory_utilization=0.7).server_gpus == ("1",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert plan(use_vllm=True, vllm_mode="server").server_gpus == ("0",)


def test_the_machine_must_have_free_what_vllms_engines_on_the_cpu_were_told_to_take(
    monkeypatch: pytest.MonkeyPatch, server: dict[str, Any], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(resource_check, "free_memory", lambda: 20.5 * 2**30)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    assert plan(use_vllm=True, num_processes=2).config.use_vllm
    assert "3 x 8 GiB for vLLM's cache, and 20.5 GiB of memory are free" in refusal(use_vllm=True, num_processes=3)
    assert plan(use_vllm=True, vllm_mode="server", num_processes=3).config.use_vllm  # one engine


# -- GPUs and processes


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("", ()),
        ("-1", ()),
        ("0", ("0",)),
        ("2, 5", ("2", "5")),
        ("0,-1,1", ("0",)),
        ("GPU-8932f937,MIG-41b3", ("GPU-8932f937", "MIG-41b3")),
    ],
)
def test_the_gpus_are_those_that_cuda_visible_devices_names(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpus: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert visible_gpus() == gpus


def test_without_nvidias_tool_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert visible_gpus() == ()


def test_the_driver_is_asked_where_no_gpus_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771, 143164'\necho '1, NVIDIA H200, 143771, 143164'\n")
    tool.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert visible_gpus() == ("0", "1")


@pytest.mark.usefixtures("four_gpus")
def test_every_visible_gpu_gets_a_process() -> None:
    assert plan().gpus == ("0", "1", "2", "3")
    assert plan().batch.processes == 4


@pytest.mark.usefixtures("four_gpus")
def test_fewer_processes_take_the_first_gpus() -> None:
    assert plan(num_processes=2).gpus == ("0", "1")


@pytest.mark.usefixtures("four_gpus")
def test_more_processes_than_gpus_are_refused() -> None:
    assert "num_processes: 5 processes need 5 GPUs, and 4 are available" in refusal(num_processes=5)


def test_on_a_cpu_there_is_one_process_or_as_many_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert plan().batch.processes == 1
    assert plan(num_processes=3).batch.processes == 3
    assert plan(num_processes=3).gpus == ()


@pytest.mark.usefixtures("four_gpus")
def test_a_server_on_this_machine_keeps_its_gpus(server: dict[str, Any]) -> None:
    assert plan(**server).gpus == ("0", "1", "2")
    assert plan(**server, vllm_server_gpus=3).gpus == ("0",)
    assert "vllm_server_gpus: 4 GPUs are visible" in refusal(**server, vllm_server_gpus=4)
    assert plan(**server, vllm_server_gpus=0).gpus == ("0", "1", "2", "3")
    two = {**server, "vllm_server_url": "http://127.0.0.1:8000,http://localhost:8001,http://10.1.2.3:8000"}
    assert plan(**two).gpus == ("0", "1")


@pytest.mark.usefixtures("four_gpus", "server")
def test_a_server_of_our_own_gets_the_last_gpus() -> None:
    ours = {"use_vllm": True, "vllm_mode": "server"}

    assert (plan(**ours).gpus, plan(**ours).server_gpus) == (("0", "1", "2"), ("3",))
    two = plan(**ours, vllm_server_gpus=2, vllm_tensor_parallel_size=2)
    assert (two.gpus, two.server_gpus) == (("0", "1"), ("2", "3"))
    assert "vllm_server_gpus: 4 GPUs are visible" in refusal(**ours, vllm_server_gpus=4)
    assert "2 GPUs for a server that has 1" in refusal(**ours, vllm_tensor_parallel_size=2)
    assert "vllm_server_gpus: a server that aitrain starts has GPUs" in refusal(**ours, vllm_server_gpus=0)
    three = plan(**ours, vllm_servers=3)
    assert (three.gpus, three.server_gpus) == (("0",), ("1", "2", "3"))
    assert "vLLM servers hold 4: none is left to train on" in refusal(**ours, vllm_servers=2, vllm_server_gpus=2)


@pytest.mark.usefixtures("server")
def test_servers_listen_at_an_address_of_this_machine_that_others_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ours = {"use_vllm": True, "vllm_mode": "server"}

    assert plan(**ours, vllm_listen_address="127.0.0.2").config.vllm_listen_address == "127.0.0.2"
    for address in ("192.0.2.1", "0.0.0.0", "no host at all"):
        assert f"vllm_listen_address: {address} is not an address of this machine" in refusal(
            **ours, vllm_listen_address=address
        )
    two = {"nnodes": 2, "master_addr": "127.0.0.1", "vllm_listen_address": "192.0.2.1"}
    assert "not an address of this machine" in refusal(**ours, **two, node_rank=0)
    assert plan(**ours, **two, node_rank=1).config.vllm_listen_address == "192.0.2.1"  # of machine 0


def test_on_the_cpu_a_server_of_our_own_needs_no_gpu(server: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    alone = plan(use_vllm=True, vllm_mode="server")

    assert (alone.gpus, alone.server_gpus) == ((), ())


@pytest.mark.usefixtures("four_gpus")
def test_a_server_on_another_machine_takes_no_gpu_from_this_one(server: dict[str, Any]) -> None:
    far = TrainConfig(**{**server, "vllm_server_url": "http://10.1.2.3:8000"})

    assert training_gpus(far) == ("0", "1", "2", "3")


@pytest.mark.usefixtures("four_gpus", "server")
def test_engines_that_processes_cannot_be_divided_into_are_refused() -> None:
    assert plan(use_vllm=True, vllm_tensor_parallel_size=2).batch.processes == 4
    assert "vllm_tensor_parallel_size: 4 processes cannot be divided into engines of 3" in refusal(
        use_vllm=True, vllm_tensor_parallel_size=3
    )


# -- libraries


@pytest.mark.skipif(installed("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed_is_said_with_the_command_to_install_it(here: Path) -> None:
    """Somebody else's server needs none here, unless it is fed by TRL's own way."""
    write(here, {"vllm/__init__.py": "raise SystemExit('the user has a folder of this name')"})
    elsewhere = {"use_vllm": True, "vllm_mode": "server", "vllm_server_url": "http://10.1.2.3:8000"}
    assert plan(**elsewhere).config.use_vllm
    assert "vLLM is not installed" in refusal(**elsewhere, vllm_sync="nccl")

    assert 'pip install "aitrain[vllm]"' in refusal(use_vllm=True)


def test_a_folder_named_like_a_library_does_not_hide_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(here, {"trl/__init__.py": "", "transformers/__init__.py": "", "yaml.py": ""})
    monkeypatch.syspath_prepend(here)
    trl_fields.cache_clear()

    assert "min_p" in trl_fields()


# -- TRL's fields


def test_the_fields_that_trl_has_are_read_without_importing_it() -> None:
    from trl import GRPOConfig

    assert set(trl_fields()) == {field.name for field in fields(GRPOConfig)}


def test_every_field_that_aitrain_fills_is_refused_and_names_its_option() -> None:
    from aitrain.training.model import choose_precision
    from aitrain.training.trl_arguments import grpo_arguments

    config = TrainConfig(use_vllm=True, mixed_precision="no")
    filled = grpo_arguments(config, plan_batch(config, 1), choose_precision(config))

    assert {*filled, "output_dir", "fsdp"} == {*OPTION_OF_FIELD, *SET_BY_AITRAIN}
    assert set(OPTION_OF_FIELD.values()) <= set(TrainConfig.model_fields)
    assert "--trl beta: aitrain has an option for it: --rl-kl-coef" in refusal(trl={"beta": 0.1})
    assert "--trl use_cpu: aitrain sets it by itself" in refusal(trl={"use_cpu": True})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("scale_reward", "none", "TRL has no such field. Did you mean scale_rewards?"),
        ("num_iterations", "two", "must be int, not 'two'"),
        ("num_iterations", True, "must be int, not True"),
        ("num_iterations", None, "must be int, not None"),
        ("num_iterations", 0, "must be at least 1, not 0"),
        ("steps_per_generation", 0, "must be at least 1, not 0"),
        ("generation_batch_size", -4, "must be at least 1, not -4"),
        ("top_entropy_quantile", "[1", "must be float, not '[1'"),
        ("entropy_coef", "x", "must be float, not 'x'"),
        ("log_completions", 3, "must be bool, not 3"),
        ("reward_weights", 1.0, "must be list[float] or None, not 1.0"),
    ],
)
def test_a_field_that_trl_has_not_or_that_holds_something_else_is_refused(field: str, value: Any, message: str) -> None:
    assert refusal(trl={field: value}) == f"--trl {field}: {message}"


def test_the_plan_says_what_a_reshaped_sampling_distribution_leaves_inexact() -> None:
    (note,) = plan(rl_top_k=50).notes

    assert note.startswith("Sampling with --rl-top-k 50: the update")
    assert plan().notes == ()


def test_the_plan_counts_the_steps_of_several_updates_with_each_batch() -> None:
    (steps,) = [line for line in plan_lines(plan(trl={"num_iterations": 2}, epochs=3)) if line.startswith("steps")]

    assert steps.endswith("3 x training cases / 2 x 2 updates with each batch, rounded up to whole rollouts")


def test_the_plan_says_when_a_run_may_end_early() -> None:
    config = plan(max_steps=9, until=0.8, patience=2, eval_strategy="steps", eval_steps=3)
    (steps,) = [line for line in plan_lines(config) if line.startswith("steps")]

    assert steps.endswith(
        " 9, fewer after a held-out score whose interval begins at 0.8 or above or 2 evaluations in a row without a"
        " better one; an evaluation every 3 steps"
    )


def test_fields_of_trl_that_hold_what_they_should_are_passed() -> None:
    assert plan(trl={"delta": None, "num_iterations": 2, "top_entropy_quantile": 1, "chat_template_kwargs": {"a": 1}})


VLLM = {"use_vllm": True}
SERVER = {**VLLM, "vllm_mode": "server"}


@pytest.mark.parametrize(
    ("options", "field", "value", "what_to_do"),
    [
        ({}, "generation_kwargs", {"min_p": 0.1}, "--rl-min-p, --rl-stop"),
        (VLLM, "generation_kwargs", {"seed": 1}, "--rl-min-p, --rl-stop"),
        (VLLM, "vllm_structured_outputs_regex", "a+", "cannot be compared"),
        ({}, "eval_steps", 5, "--eval-steps"),
        ({}, "push_to_hub", True, "--push-to-hub"),
        ({}, "max_tool_calling_iterations", 3, "--rl-max-turns"),
        ({}, "vllm_importance_sampling_mode", "token_mask", "Add --use-vllm"),
        (VLLM, "cache_implementation", "static", "here vLLM generates"),
        (SERVER, "use_transformers_continuous_batching", True, "here vLLM generates"),
        (SERVER, "vllm_server_port", 8001, "--vllm-server-url"),
        (SERVER, "vllm_model_impl", "transformers", "--vllm-mode colocate"),
        (VLLM, "model_init_kwargs", {"revision": "x"}, "would not reach vLLM"),
        ({}, "model_init_kwargs", {"dtype": "bfloat16"}, "Use --dtype"),
        ({"rl_stop": "x"}, "use_transformers_continuous_batching", True, "does not support --rl-stop"),
        ({"rl_min_p": 0.1}, "use_transformers_continuous_batching", True, "does not support --rl-min-p"),
    ],
)
def test_a_field_of_trl_that_would_change_nothing_is_refused_with_what_to_use(
    options: dict[str, Any], field: str, value: Any, what_to_do: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_trl_effects(TrainConfig(**options, trl={field: value}))

    assert str(refused.value).startswith(f"--trl {field}")
    assert what_to_do in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 5


def test_the_fields_that_are_refused_for_having_no_effect_are_trls() -> None:
    assert {*WITHOUT_EFFECT, *OF_GENERATE, *OF_NCCL} <= set(trl_fields())
    assert not set(WITHOUT_EFFECT) & set(OPTION_OF_FIELD)


def test_fields_of_trl_that_have_an_effect_are_passed() -> None:
    check_trl_effects(TrainConfig(trl={"model_init_kwargs": {"revision": "main"}, "cache_implementation": "static"}))
    check_trl_effects(TrainConfig(**VLLM, trl={"vllm_model_impl": "auto", "vllm_importance_sampling_clip_max": 2.0}))


@pytest.mark.parametrize(
    ("option", "given", "near"), [("optimizer", "adam", "adamw_torch"), ("scheduler", "cos", "cosine")]
)
def test_a_name_that_transformers_does_not_have_is_refused_with_those_near_it(
    option: str, given: str, near: str
) -> None:
    assert f"{option}: transformers has no {option} {given}\nIt has {near}" in refusal(**{option: given})


def test_the_names_that_transformers_has_are_read_without_importing_it() -> None:
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    assert enum_values("transformers", "training_args.py", "OptimizerNames") == [item.value for item in OptimizerNames]
    assert enum_values("transformers", "trainer_utils.py", "SchedulerType") == [item.value for item in SchedulerType]


# -- the model


def test_a_model_folder_that_is_not_there_is_refused_with_the_one_that_is(here: Path) -> None:
    write(here, {"models/mine/config.json": "{}"})

    assert "model: there is no folder ./models/mien. Did you mean mine?" in refusal(model="./models/mien")


def test_an_adapter_is_refused_as_a_model(here: Path) -> None:
    write(here, {"adapter/adapter_config.json": "{}"})

    assert "is an adapter, not a model" in refusal(model="adapter")


def test_a_folder_without_a_model_is_refused_with_the_model_in_it(here: Path) -> None:
    write(here, {"runs/mine/model/config.json": "{}", "empty": None, "file": ""})

    assert "Did you mean runs/mine/model?" in refusal(model="runs/mine")
    assert "has no config.json" in refusal(model="empty")
    assert "has no config.json" in refusal(model="file")


def test_a_name_on_the_hub_is_left_to_the_hub() -> None:
    assert check(TrainConfig(model="someone/some-model"), has_environment=True)


# -- resuming


def checkpoint(here: Path, step: int, run: str = "runs/mine/checkpoints", **options: Any) -> Path:
    """A checkpoint as a run of these options writes it, with one file of the trainer."""
    folder = here / run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"1.5 2.5")
    config = TrainConfig(model="tiny", **options)
    seal(folder, Manifest(step, config.written(), {"class": "Env"}, "cases", 1, {}))
    return folder


def test_auto_resumes_the_newest_whole_checkpoint_by_its_step_and_not_its_time(here: Path) -> None:
    for step in (20, 100, 5):
        checkpoint(here, step)
    write(here, {"runs/mine/checkpoints/checkpoint-300": None})

    made = plan(project_name="mine", resume_from_checkpoint="auto")

    assert made.checkpoint == (here / "runs/mine/checkpoints/checkpoint-100").resolve()
    assert made.folder is not None
    assert made.folder.path == Path("runs/mine")
    assert made.notes == (
        "runs/mine/checkpoints/checkpoint-300 is skipped:"
        " it has no manifest.json: it was not written completely, or not by aitrain",
    )


def cut(folder: Path) -> None:
    (folder / "weights").write_bytes(b"1.5")


def flip(folder: Path) -> None:
    (folder / "weights").write_bytes(b"1.5 2.4")


def lose(folder: Path) -> None:
    (folder / "weights").unlink()


def add(folder: Path) -> None:
    (folder / "adapter_model.bin").write_bytes(b"")


def edit(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"processes": 1', '"processes": 2'))


def garble(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(b"\0" * 40)


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("checkpoint-9"))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut, "weights has 3 bytes instead of 7"),
        (flip, "weights was changed (its sha256 differs)"),
        (lose, "weights is missing"),
        (add, "adapter_model.bin does not belong to it"),
        (edit, "manifest.json was changed"),
        (garble, "manifest.json was changed"),
        (rename, "manifest.json is that of step 8"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_refused_where_it_is_named(
    damage: Callable[[Path], None], why: str, here: Path
) -> None:
    checkpoint(here, 4)
    damage(checkpoint(here, 8))
    damaged = next(path for path in (here / "runs/mine/checkpoints").iterdir() if path.name != "checkpoint-4")

    made = plan(project_name="mine", resume_from_checkpoint="auto")
    said = refusal(resume_from_checkpoint=str(damaged))

    assert made.checkpoint is not None
    assert made.checkpoint.name == "checkpoint-4"
    assert made.notes == (f"runs/mine/checkpoints/{damaged.name} is skipped: {why}",)
    assert f"{damaged.name} is refused: {why}\n" in said


def test_a_changed_option_is_refused_with_both_its_values_and_a_harmless_one_passes(here: Path) -> None:
    checkpoint(here, 4, lr=1e-5, trl={"num_iterations": 2}, eval_steps=5)
    resume = {"resume_from_checkpoint": "auto", "project_name": "mine", "logging_steps": 3}

    said = refusal(**resume, lr=1e-3, trl={"num_iterations": 1}, rl_num_generations=8)

    assert "rl_num_generations: 4 -> 8" in said
    assert len(said.splitlines()) <= 5
    assert "lr: 1e-05 -> 0.001; trl.num_iterations: 2 -> 1" in refusal(**resume, lr=1e-3, trl={"num_iterations": 1})
    assert "processes: 1 -> 2" in refusal(**resume, trl={"num_iterations": 2}, num_processes=2)
    assert plan(**resume, lr=1e-5, trl={"num_iterations": 2}, num_processes=1).checkpoint is not None
    assert plan(**resume, lr=1e-3, resume_anyway=True).checkpoint is not None


def test_a_derived_accumulation_is_no_change(here: Path) -> None:
    checkpoint(here, 4, rl_prompts_per_step=4)
    resume = {"resume_from_checkpoint": "auto", "project_name": "mine"}

    assert plan(**resume, rl_prompts_per_step=4).checkpoint is not None
    assert "rl_prompts_per_step: 4 -> 2" in refusal(**resume, rl_prompts_per_step=2)


def test_without_a_run_or_a_checkpoint_resuming_starts_from_the_beginning_and_says_so(here: Path) -> None:
    resume = {"project_name": "mine", "resume_from_checkpoint": "auto"}
    new = plan(**resume)
    assert not (here / "runs").exists()
    write(here, {"runs/mine/config.yaml": "model: tiny\n", "runs/mine/metrics.jsonl": '{"step": 3}\n'})
    killed = plan(**resume)

    assert new.checkpoint is killed.checkpoint is None
    assert new.folder == killed.folder == RunFolder(Path("runs/mine"))
    assert new.notes == ("There is no run runs/mine yet: the run starts from the beginning.",)
    assert killed.notes == ("There is no checkpoint in runs/mine yet: the run starts from the beginning.",)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (
            {"config.yaml": "lr: 0.1", "result.json": '{"status": "finished"}'},
            "runs/mine has finished, and has no check",
        ),
        ({"config.yaml": "", "status.json": '{"job": "eval"}'}, "runs/mine is an eval"),
        ({"thesis.tex": "", ".lock": ""}, "runs/mine is not a run folder"),
        ({"checkpoints/checkpoint-3/weights": ""}, "there is no complete checkpoint in runs/mine/checkpoints"),
    ],
    ids=["finished", "eval", "foreign", "damaged"],
)
def test_what_a_run_from_the_beginning_would_overwrite_is_refused(files: dict[str, str], why: str, here: Path) -> None:
    write(here / "runs/mine", files)
    said = refusal(project_name="mine", resume_from_checkpoint="auto")
    assert f"resume_from_checkpoint: {why}" in said
    assert "--project-name" in said


def test_nothing_is_left_to_do_where_the_run_has_finished_with_the_same_options(here: Path) -> None:
    options = {"project_name": "mine", "max_steps": 4, "lr": 1e-4}
    checkpoint(here, 4, **options)
    finished = '{"status": "finished"}'
    write(here / "runs/mine", {"status.json": finished, "result.json": finished})
    RunFolder(here / "runs/mine").write_config(plan(**options).config)

    assert plan(**options, resume_from_checkpoint="auto").is_done
    assert plan(**options, resume_from_checkpoint="auto", output_dir=str(here / "runs")).is_done
    assert not plan(**options, resume_from_checkpoint="runs/mine/checkpoints/checkpoint-4").is_done
    assert not plan(**options | {"max_steps": 8}, resume_from_checkpoint="auto").is_done
    write(here / "runs/mine", {"status.json": '{"status": "running"}'})  # killed while it was being continued
    assert not plan(**options, resume_from_checkpoint="auto").is_done


def test_the_config_of_a_copied_run_resumes_the_copy(here: Path) -> None:
    run = {"config.yaml": "project_name: mine\noutput_dir: runs\n", "status.json": "{}"}
    write(here / "runs/mine", run)
    write(here / "copies/other", run)
    write(here / "settings", {"config.yaml": run["config.yaml"]})

    def place(file: str, *, resume: bool = True, **flags: str) -> Path:
        config = train_options(Path(file), flags, resume)
        return Path(config.output_dir) / config.project_name

    assert place("copies/other/config.yaml") == Path("copies/other")
    assert place(f"{here}/copies/other/config.yaml") == Path("copies/other")
    assert place("copies/other/config.yaml", project_name="third") == Path("copies/third")
    assert place("copies/other/config.yaml", resume=False) == Path("runs/mine")
    assert place("settings/config.yaml") == Path("runs/mine")


def test_resuming_from_a_run_folder_names_its_newest_checkpoint(here: Path) -> None:
    checkpoint(here, 7)

    said = refusal(resume_from_checkpoint="runs/mine")

    assert "Did you mean runs/mine/checkpoints/checkpoint-7?" in said


def test_a_checkpoint_by_its_path_is_taken(here: Path) -> None:
    checkpoint(here, 7, "c")

    assert plan(resume_from_checkpoint="c/checkpoint-7").checkpoint == (here / "c/checkpoint-7").resolve()


# -- all of it


def test_a_check_leaves_nothing_behind_and_runs_none_of_the_users_code(here: Path) -> None:
    write(here, {"env.py": ENVIRONMENT + "open('was_here', 'w')\n"})

    made = check(TrainConfig(model="tiny", rl_env="env.py", rl_prompts_per_step=4, num_processes=1))

    assert made.sources[""].file == (here / "env.py").resolve()
    assert made.batch.prompts_per_step == 4
    assert [path.name for path in here.iterdir()] == ["env.py"]
