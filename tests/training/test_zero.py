"""DeepSpeed's configuration, and what is done without DeepSpeed; tests/deepspeed trains with it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from transformers.integrations import deepspeed as integration

from aitrain import ConfigError, TrainConfig
from aitrain.batch import plan_batch
from aitrain.launch.model_shape import read_model_shape
from aitrain.launch.resource_estimate import DeviceMemory, estimate_disk, estimate_memory
from aitrain.options.reading import resolve
from aitrain.runs.checkpoint import refuse_other_parts
from aitrain.training.zero import check_active, loaded_whole, own_part, zero_arguments


def deepspeed(**options: Any) -> TrainConfig:
    return TrainConfig.read({"distributed_backend": "deepspeed", **options})


def table(config: TrainConfig) -> dict[str, Any]:
    made: Any = zero_arguments(config)["deepspeed"]
    return dict(made)


def test_the_entries_of_a_file_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    file.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto", "steps_per_print": 7}))
    config = deepspeed(deepspeed_config=str(file))
    made = table(config)

    assert config.zero == 3
    assert made["zero_optimization"].items() >= zero.items()
    assert made["steps_per_print"] == 7
    written = TrainConfig(**config.written())
    file.unlink()
    assert table(written) == made, "config.yaml has the file's contents"


def test_a_file_is_read_in_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    monkeypatch.chdir(tmp_path)
    flags = {"distributed_backend": "deepspeed", "deepspeed_config": "ds.json"}
    assert resolve(TrainConfig, None, flags).deepspeed_config == {"zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError, match="deepspeed_config: names a file that cannot be read"):
        deepspeed(deepspeed_config="nowhere.json")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allow_pickle": True}, "--distributed-backend deepspeed"),
        ({"deepspeed_config": {"steps_per_print": 1}}, "deepspeed_config: ddp has no such setting"),
    ],
)
def test_settings_of_deepspeed_are_refused_without_it(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig.read(options)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optimizer": {"type": "AdamW"}}, "optimizer follows from options: use --optimizer"),
        ({"zero_optimization": {"stage": 1}}, "ZeRO stage 1 is not supported"),
    ],
)
def test_what_options_decide_is_refused_in_a_file(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        deepspeed(deepspeed_config=given)


@pytest.mark.parametrize("entry", [{"checkpoint": {"load_universal": True}}, {"datastates_ckpt": {"host_cache": 1}}])
def test_other_readers_of_pickles_are_to_be_allowed(entry: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="or add --allow-pickle"):
        deepspeed(deepspeed_config=entry)
    assert deepspeed(deepspeed_config=entry, allow_pickle=True).zero == 2


def test_what_contradicts_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="zero_stage: the file of --deepspeed-config has the stage"):
        deepspeed(zero_stage=3, deepspeed_config={"zero_optimization": {"stage": 2}})
    assert deepspeed(zero_stage=3, deepspeed_config={"steps_per_print": 1}).zero == 3
    assert resolve(TrainConfig, None, {"distributed_backend": "deepspeed", "zero_stage": "3"}).zero == 3
    with pytest.raises(ConfigError, match="quantized weights cannot be sharded with ZeRO-3"):
        deepspeed(zero_stage=3, peft=True, quantization="int4")


def test_deepspeed_that_is_not_active_is_refused() -> None:
    plain: Any = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU)
    with pytest.raises(ConfigError, match="deepspeed is not active"):
        check_active(deepspeed(), plain)
    check_active(TrainConfig(), plain)
    check_active(deepspeed(), SimpleNamespace(distributed_type=DistributedType.DEEPSPEED))  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 2]), (1, [3, 4]), (2, [])])
def test_padding_is_not_looked_at(rank: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.tensor([0.0, 1, 2, 3, 4, torch.nan, torch.nan, torch.nan, torch.nan]).split(3)
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_tensor, parameter.ds_numel = parts[rank], 5  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)

    assert own_part(parameter).tolist() == expected
    assert own_part(parts[0]) is parts[0]


def test_a_model_is_loaded_whole_while_zero_3_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = SimpleNamespace(is_zero3=lambda: True)
    monkeypatch.setattr(integration, "_hf_deepspeed_config_weak_ref", lambda: enabled)

    with loaded_whole():
        assert not integration.is_deepspeed_zero3_enabled()
    assert integration.is_deepspeed_zero3_enabled()


@pytest.mark.parametrize(("names", "written", "parts"), [
    (["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], 2, 1),
    ([f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (0, 1) for kind in ("model", "optim")], 3, 2),
])  # fmt: skip
def test_only_the_processes_and_the_stage_that_wrote_a_checkpoint_read_it(
    names: list[str], written: int, parts: int, tmp_path: Path
) -> None:
    (tmp_path / "global_step2").mkdir()
    for name in names:
        (tmp_path / "global_step2" / name).touch()

    refuse_other_parts(tmp_path, written, parts)
    for stage, processes in ((5 - written, parts), (written, parts + 1)):
        with pytest.raises(ConfigError, match=f"--num-processes {parts} --zero-stage {written}"):
            refuse_other_parts(tmp_path, stage, processes)


def test_the_plan_has_the_parts_of_a_process(small_model: Path) -> None:
    shape, gpu = read_model_shape(str(small_model)), DeviceMemory("GPU")
    assert shape is not None
    estimates = {}
    for name, options in {"ddp": {}, "2": {"zero_stage": 2}, "3": {"zero_stage": 3}}.items():
        backend = "ddp" if name == "ddp" else "deepspeed"
        config = TrainConfig(model=str(small_model), distributed_backend=backend, mixed_precision="no", **options)  # type: ignore[arg-type]
        batch = plan_batch(config, 4)
        estimates[name] = estimate_memory(shape, config, batch, gpu).stay, estimate_disk(shape, config, batch)
    (plain, on_disk), (second, second_disk), (third, third_disk) = estimates.values()

    assert second["weights"] == plain["weights"] == 4 * (plain["weights"] // 4)
    assert third["weights"] == plain["weights"] // 4
    assert second["optimizer"] == third["optimizer"] == 3 * plain["weights"] // 4, "moments, and weights in float32"
    assert on_disk.checkpoint < third_disk.checkpoint < second_disk.checkpoint
