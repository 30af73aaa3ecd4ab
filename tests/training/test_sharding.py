"""FSDP2 on two CPU processes, which a shim makes shard: the same weights as DDP, checkpoints, weight sync, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from aitrain import ConfigError, TrainConfig
from aitrain.training.sharding import load_weights, refuse_unsharded
from tests.training.conftest import are_equal, difference, run_group, weights


@pytest.fixture(scope="module")
def runs(small_model: Path, preloaded_aitrain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of scripted_run.py: ddp/NAME and fsdp2/NAME."""
    out = tmp_path_factory.mktemp("sharded")
    run_group(preloaded_aitrain, 2, small_model, out / "ddp", "ddp", "talk", "adapter")
    run_group(
        preloaded_aitrain, 2, small_model, out / "fsdp2", "fsdp2", "talk", "trimmed", "adapter",
        "talk-resumed<talk", "adapter-resumed<adapter",
        "talk-resumed-from-ddp<../ddp/talk", "adapter-resumed-from-ddp<../ddp/adapter",
    )  # fmt: skip
    run_group(preloaded_aitrain, 4, small_model, out / "fsdp2", "fsdp2", "talk-resumed-by-4<talk")
    resumed = [f"{name}-resumed-from-fsdp2<../fsdp2/{name}" for name in ("talk", "adapter")]
    run_group(preloaded_aitrain, 2, small_model, out / "ddp", "ddp", *resumed)
    return out


# -- training


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other", "most"),
    [
        *((f"fsdp2/{name}", "ddp/talk", 1e-6) for name in ("talk", "trimmed")),
        ("fsdp2/talk-resumed", "fsdp2/talk", 0.0),
        ("fsdp2/talk-resumed-by-4", "fsdp2/talk", 1e-6),
        ("fsdp2/talk-resumed-from-ddp", "fsdp2/talk", 1e-6),
        ("ddp/talk-resumed-from-fsdp2", "ddp/talk", 1e-6),
    ],
)
def test_a_run_ends_like_one_that_was_not_sharded_or_not_stopped(
    one: str, other: str, most: float, runs: Path, small_model: Path
) -> None:
    """All weights, with KL, accumulation, several turns, episodes without a score, held-out cases, and completions of
    other lengths on each process."""
    assert difference(runs / one / "model", runs / other / "model") <= most
    assert difference(runs / one / "model", small_model) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2/adapter-resumed", "fsdp2/adapter-resumed-from-ddp", "ddp/adapter",
                                  "ddp/adapter-resumed-from-fsdp2"])  # fmt: skip
def test_a_sharded_adapter_ends_equal_to_the_last_bit(name: str, runs: Path) -> None:
    ours = weights(runs / "fsdp2/adapter/model")

    assert are_equal(ours, weights(runs / name / "model"))
    assert any(tensor.abs().max() > 0 for name, tensor in ours.items() if "lora_B" in name)


# -- checkpoints


def test_weights_that_have_other_names_in_files_are_loaded(tmp_path: Path) -> None:
    """transformers joins the experts of a layer into one weight; its own trainer only warns that it is missing."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "head_dim": 4}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
    written, loaded = (Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=16, **sizes, **counts)) for _ in range(2))
    written.save_pretrained(tmp_path)

    load_weights(loaded, tmp_path)

    assert any("experts.0." in name for name in load_file(tmp_path / "model.safetensors"))
    assert are_equal(loaded.state_dict(), written.state_dict())


# -- weight sync


@pytest.mark.slow
def test_the_weights_for_a_server_are_those_of_the_model_and_merged_ones_are_rounded_once(
    runs: Path, small_model: Path
) -> None:
    assert difference(runs / "fsdp2/talk/by-disk", runs / "fsdp2/talk/model") == 0.0
    run = runs / "fsdp2" / "adapter"
    assert are_equal(weights(run / "by-adapter"), weights(run / "model"))
    base = AutoModelForCausalLM.from_pretrained(small_model)
    merged = PeftModel.from_pretrained(base, str(run / "model")).merge_and_unload().state_dict()
    written = load_file(run / "by-disk" / "model.safetensors")
    assert written
    assert all(torch.equal(tensor, merged[name].to(torch.bfloat16)) for name, tensor in written.items())


# -- refusals


def test_sharding_that_is_not_active_or_cannot_be_is_refused() -> None:
    sharded = TrainConfig(distributed_backend="fsdp2")
    for found in (("cuda", True), ("cpu",)):
        with pytest.raises(ConfigError, match="each process would hold the whole model"):
            refuse_unsharded(sharded, *found)
        refuse_unsharded(TrainConfig(), *found)
    refuse_unsharded(sharded, "cuda")
