"""DeepSpeed's ZeRO on two CPU processes, in the environment of `.ci/deepspeed`; skipped without DeepSpeed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from aitrain import ConfigError
from aitrain.runs.checkpoint import refuse_other_parts
from aitrain.training.zero import CHECKPOINT_ENGINE, CLASSES, _load_own_classes_only
from tests.training.conftest import difference
from tests.training.test_sharding import adapter, reports, run_group

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed; .ci/deepspeed installs it"
)
STAGES = ["zero2", "zero3"]


@pytest.fixture(scope="module")
def runs(small_model: Path, preloaded_aitrain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of sharded_run.py: ddp/NAME, zero2/NAME and zero3/NAME."""
    out = tmp_path_factory.mktemp("zero")
    run_group(preloaded_aitrain, 2, small_model, out / "ddp", "ddp", "talk", "merged", "nan")
    for stage in STAGES:
        jobs = ["talk", "merged", "nan", "best", "talk-resumed<talk", "merged-resumed<merged"]
        run_group(preloaded_aitrain, 2, small_model, out / stage, stage, *jobs)
    return out


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_ends_like_one_that_is_not_sharded(stage: str, runs: Path, small_model: Path) -> None:
    """All weights, with KL, accumulation, several turns, episodes without a score and held-out cases."""
    model = runs / stage / "talk" / "model"

    assert difference(model, runs / "ddp" / "talk" / "model") <= 1e-6
    assert difference(model, small_model) > 1e-4


@pytest.mark.parametrize("stage", STAGES)
def test_an_adapter_ends_like_one_that_is_not_sharded_and_is_merged(stage: str, runs: Path) -> None:
    ours, other = (adapter(runs / backend / "merged" / "model") for backend in (stage, "ddp"))

    assert ours.keys() == other.keys()
    assert max((ours[name] - other[name]).abs().max().item() for name in ours) <= 1e-6
    assert difference(runs / stage / "merged/model/merged", runs / "ddp/merged/model/merged") <= 1e-6


def test_only_zero_3_shards_the_weights(runs: Path) -> None:
    second, third = reports(runs / "zero2" / "talk"), reports(runs / "zero3" / "talk")

    assert all(part["own"] == part["all"] for part in second)
    assert sum(part["own"] for part in third) == third[0]["all"]
    assert all(part["own"] < 0.6 * part["all"] for part in third)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["talk", "merged"])
def test_a_resumed_run_ends_like_one_that_was_not_stopped(name: str, stage: str, runs: Path) -> None:
    file = "model.safetensors" if name == "talk" else "adapter_model.safetensors"
    whole, resumed = (load_file(runs / stage / run / "model" / file) for run in (name, f"{name}-resumed"))
    assert all(torch.equal(whole[weight], resumed[weight]) for weight in whole)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_is_not_finite_is_skipped_by_all_processes(stage: str, runs: Path) -> None:
    assert [report["skipped"] for report in reports(runs / stage / "nan")] == [1, 1]
    assert difference(runs / stage / "nan/model", runs / "ddp/nan/model") <= 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_the_best_weights_are_restored(stage: str, runs: Path) -> None:
    notes = reports(runs / stage / "best")[0]["notes"]
    step = next(2 if "after step 2" in note else 4 for note in notes if note.startswith("The best held-out score"))
    assert difference(runs / stage / "best/model", runs / stage / f"best/checkpoints/checkpoint-{step}") == 0.0


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_has_tied_weights_once_and_loads(stage: str, runs: Path) -> None:
    model = runs / stage / "talk" / "model"
    assert load_file(model / "model.safetensors").keys() == load_file(runs / "ddp/talk/model/model.safetensors").keys()
    AutoModelForCausalLM.from_pretrained(model)


@pytest.mark.parametrize(("stage", "number"), [("zero2", 2), ("zero3", 3)])
def test_other_processes_or_another_stage_are_refused(stage: str, number: int, runs: Path) -> None:
    checkpoint = runs / stage / "talk" / "checkpoints" / "checkpoint-2"

    refuse_other_parts(checkpoint, number, 2)
    with pytest.raises(ConfigError, match=f"by 2 processes with ZeRO-{number}"):
        refuse_other_parts(checkpoint, 5 - number, 2)
    with pytest.raises(ConfigError, match="--num-processes 2"):
        refuse_other_parts(checkpoint, number, 4)


class Opened:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("stage", STAGES)
def test_pickled_code_in_a_checkpoint_is_not_run(stage: str, runs: Path, tmp_path: Path) -> None:
    written = sorted((runs / stage / "talk/checkpoints/checkpoint-2").glob("global_step2/*_optim_states.pt"))[0]
    file = tmp_path / written.name
    shutil.copy(written, file)
    state = _load_own_classes_only(None, str(file))
    torch.save(state | {"more": Opened(tmp_path / "ran")}, file)

    with pytest.raises(ConfigError, match="--allow-pickle only if you know who wrote it"):
        _load_own_classes_only(None, str(file))
    assert not (tmp_path / "ran").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "ran").exists()  # so the test would see it


def test_the_classes_that_may_be_unpickled_run_no_code() -> None:
    for module, name in CLASSES:
        kind = getattr(importlib.import_module(f"deepspeed.{module}"), name)
        assert not {"__reduce__", "__setstate__", "__del__"} & vars(kind).keys()
    engine = importlib.import_module(CHECKPOINT_ENGINE).TorchCheckpointEngine
    assert list(inspect.signature(engine.load).parameters) == ["self", "path", "map_location"]


def test_what_is_replaced_inside_of_deepspeed_is_there() -> None:
    """`training/zero.py` sets `__compatible_ops__` and `check_grad_overflow`, and reads `ds_tensor`, `ds_numel`."""
    deepspeed = importlib.import_module("deepspeed")
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    for module in ("stage_1_and_2", "stage3"):
        source = Path(inspect.getfile(importlib.import_module(f"deepspeed.runtime.zero.{module}"))).read_text()
        assert "self.overflow" in source
        assert "check_grad_overflow" in source or module == "stage3"
