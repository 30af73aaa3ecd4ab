"""`aitrain export` on adapters made by hand: what it writes, refuses, and uploads to a stand-in of the Hub."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain import Result
from aitrain.jobs.export import Export, main
from aitrain.runs.export_request import ExportRequest
from aitrain.runs.model_reference import read_model
from tests.conftest import listing, write
from tests.environments.vowels import Vowels
from tests.training.hub_standin import Hub, running_hub

TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
SAMPLING = {"eos_token_id": [258, 10], "temperature": 0.6}
CONVERTER = """
import sys
from pathlib import Path
folder, arguments = Path(sys.argv[1]), sys.argv[2:]
if (folder / "bad").exists():
    sys.exit("Model LlamaForCausalLM is not supported")
Path(arguments[arguments.index("--outfile") + 1]).write_text(arguments[arguments.index("--outtype") + 1])
"""


@pytest.fixture
def run(here: Path, small_model: Path) -> Path:
    """A run folder with an adapter of random weights, and a checkpoint with the same one."""
    base = here / "base"
    shutil.copytree(small_model, base)
    (base / "generation_config.json").write_text(json.dumps(SAMPLING))
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    folder = here / "runs" / "mine"
    for place in (folder / "model", folder / "checkpoints" / "checkpoint-2"):
        adapter.save_pretrained(place)
        tokenizer.save_pretrained(place)
    result = {"status": "finished", "steps": 4, "seconds": 1.0, "environment": "Vowels", "scores": {}}
    options = "model: base\npeft: true\nproject_name: mine\nrl_env: envs.arithmetic\n"
    write(folder, {"config.yaml": options, "result.json": json.dumps(result), "status.json": "{}",
                   "environment.json": "{}", "checkpoints/checkpoint-2/optimizer.pt": "x"})  # fmt: skip
    return folder


def export(model: str | Path, **given: Any) -> int:
    return main(ExportRequest(str(model), **given))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).eval()


def tuned(here: Path) -> Any:
    return PeftModel.from_pretrained(load(here / "base"), str(here / "runs" / "mine" / "model")).eval()


def logits(model: Any) -> torch.Tensor:
    rows = torch.randint(0, 259, (4, 48), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        found: torch.Tensor = model(rows).logits
    return found


def digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in listing(folder)}


# -- the whole model


def test_the_export_computes_what_base_plus_adapter_compute_and_leaves_both_alone(here: Path, run: Path) -> None:
    before = digests(here / "base"), digests(run / "checkpoints" / "checkpoint-2")
    assert export(run) == 0

    whole, beside = load(here / "exports" / "mine"), tuned(here)
    assert (logits(whole) - logits(beside)).abs().max() < 1e-4
    assert (logits(load(here / "base")) - logits(beside)).abs().max() > 0.1
    tokenizer = AutoTokenizer.from_pretrained(here / "exports" / "mine")
    prompt = tokenizer("12+30=", return_tensors="pt")
    said = [model.generate(**prompt, do_sample=False, max_new_tokens=16).tolist() for model in (whole, beside)]
    assert said[0] == said[1]
    assert before == (digests(here / "base"), digests(run / "checkpoints" / "checkpoint-2"))


def test_it_is_complete_and_readable_in_shards_with_template_and_generation_config(here: Path, run: Path) -> None:
    assert export(run, shard_size="500KB", out="out") == 0

    out = here / "out"
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.iterdir())
    assert AutoTokenizer.from_pretrained(out).apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"]) == ([258, 10], 0.6)
    assert str(here) not in "".join(path.read_text() for path in out.glob("*.json"))
    card = (out / "README.md").read_text()
    assert "library_name: transformers" in card
    assert "merged into the base" in card
    assert not list(here.glob(".saving*"))


def test_a_dry_run_shows_the_files_that_are_written_and_writes_none(
    here: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run, dry_run=True, as_json=True, shard_size="500KB") == 0
    planned = json.loads(capsys.readouterr().out)
    assert not (here / "exports").exists()
    assert export(run, as_json=True, shard_size="500KB") == 0
    written = json.loads(capsys.readouterr().out)

    assert planned["files"].keys() == written["files"].keys()
    for name, size in written["files"].items():
        assert planned["files"][name] == pytest.approx(size, rel=0.1), name
    assert planned["card"] == (here / "exports" / "mine" / "README.md").read_text()
    assert written["logit_difference"] < 1e-4 < written["adapter_effect"]


def test_a_checkpoint_and_a_lone_adapter_are_exported_without_scores_and_without_the_trainers_files(
    here: Path, run: Path
) -> None:
    lone = here / "lone"
    shutil.copytree(run / "model", lone)
    assert export(run / "checkpoints" / "checkpoint-2") == 0
    assert export(lone, adapter_only=True) == 0

    assert "after step 2" in (here / "exports" / "mine-step2" / "README.md").read_text()
    assert not (here / "exports" / "mine-step2" / "optimizer.pt").exists()
    copied = here / "exports" / "lone"
    assert (copied / "adapter_model.safetensors").read_bytes() == (lone / "adapter_model.safetensors").read_bytes()
    assert "library_name: peft" in (copied / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(copied).chat_template == TEMPLATE
    assert not list(copied.glob("model*.safetensors"))


def test_a_merge_that_computes_something_else_leaves_nothing(
    here: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LoraModel, "merge_and_unload", LoraModel.unload)
    assert export(run) == 1
    assert "does not compute what was trained" in capsys.readouterr().err
    assert listing(here / "exports") == []


@pytest.mark.slow
def test_an_adapter_on_one_of_two_tied_embeddings_changes_only_that_one(
    here: Path, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = AutoModelForCausalLM.from_pretrained(small_model)
    assert base.config.tie_word_embeddings
    lora = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(base, lora).eval()
    adapted.save_pretrained(here / "head")
    assert export(here / "head") == 0

    whole = load(here / "exports" / "head")
    assert (logits(whole) - logits(adapted)).abs().max() < 1e-4
    assert not whole.config.tie_word_embeddings
    assert "UserWarning" not in capsys.readouterr().err


# -- refused


def test_a_quantized_base_is_refused_with_what_works(here: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((here / "base" / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (here / "base" / "config.json").write_text(json.dumps(quantized))
    assert export(run) == 2
    told = capsys.readouterr().err
    assert "quantized (gptq)" in told
    assert "--adapter-only" in told
    assert f"aitrain serve {run}" in told
    assert export(run, adapter_only=True) == 0


def test_a_folder_with_something_in_it_is_not_overwritten(
    here: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, {"full/mine": "mine", "empty": None})
    assert export(run, out="full", adapter_only=True) == 2
    assert "full exists, and is not overwritten" in capsys.readouterr().err
    assert listing(here / "full") == ["mine"]
    assert export(run, out="empty", adapter_only=True) == 0


# -- the type of the weights


@pytest.mark.parametrize(
    ("options", "saved", "gpus", "dtype"),
    [
        ("peft: true", None, [], "float32"),
        ("peft: true", None, ["a GPU"], "bfloat16"),
        ("peft: true\nuse_vllm: true", None, ["a GPU"], "float32"),
        ("peft: true\ndtype: float16", None, ["a GPU"], "float16"),
        ("peft: true", "float32", ["a GPU without bfloat16"], "float32"),
        ("of_another_version: 1", None, [], "float32"),
    ],
)
def test_the_weights_get_the_type_of_the_training(
    run: Path, options: str, saved: str | None, gpus: list[str], dtype: str
) -> None:
    write(run, {"config.yaml": f"model: base\n{options}\n", "environment.json": json.dumps({"gpus": gpus})})
    if saved:
        write(run, {"model/merged/config.json": json.dumps({"dtype": saved})})
    assert Export(ExportRequest(str(run)), read_model(str(run))).dtype == dtype


# -- the Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "not-a-real-token")
        yield server


def test_a_push_uploads_every_byte_to_a_private_repository(here: Path, run: Path, hub: Hub) -> None:
    assert export(run, push_to_hub=True, shard_size="500KB") == 0

    assert hub.private == {"somebody/mine": True}
    folder = here / "exports" / "mine"
    assert hub.files == {name: (folder / name).read_bytes() for name in listing(folder)}


def test_nothing_that_is_uploaded_tells_where_the_base_is_on_this_machine(here: Path, run: Path, hub: Hub) -> None:
    write(run, {"config.yaml": f"model: {here}/base\npeft: true\nrl_env: {here}/own.py:Own\noutput_dir: {here}\n"})
    config = json.loads((run / "model" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"{here}/base"
    write(run, {"model/adapter_config.json": json.dumps(config)})
    shutil.copytree(run / "model", here / "lone")
    for model in (run, here / "lone"):
        assert export(model, push_to_hub=True, adapter_only=True) == 0

        assert not [name for name, content in hub.files.items() if str(here).encode() in content]
        assert json.loads(hub.files["adapter_config.json"]) == {**config, "base_model_name_or_path": "base"}
        assert b"base, trained with GRPO" in hub.files["README.md"]
    assert f"{here}/base" in (here / "exports" / "lone" / "adapter_config.json").read_text()


def test_a_private_model_is_not_uploaded_to_a_public_repository(
    here: Path, run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.private["us/public"] = False
    assert export(run, push_to_hub=True, repo_id="us/public") == 2
    assert "us/public exists and is public" in capsys.readouterr().err
    assert not (here / "exports").exists()
    assert export(run, push_to_hub=True, repo_id="us/public", hub_private=False, adapter_only=True) == 0
    assert "adapter_config.json" in hub.files


@pytest.mark.slow
def test_a_failed_upload_keeps_the_export_which_can_be_uploaded_later(
    here: Path, run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuses = True
    assert export(run, push_to_hub=True) == 1
    assert "The model is saved in exports/mine" in capsys.readouterr().err
    hub.refuses = False
    write(here / "exports" / "mine", {".secret": "x", "optimizer.pt": "x"})
    assert export(here / "exports" / "mine", push_to_hub=True) == 0
    assert {"model.safetensors", "README.md"} <= hub.files.keys()
    assert {".secret", "optimizer.pt"}.isdisjoint(hub.files)


def test_a_push_without_a_token_is_refused_before_anything_is_written(
    here: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("aitrain.training.hub.get_token", lambda: None)
    assert export(run, push_to_hub=True) == 2
    assert "hf auth login" in capsys.readouterr().err
    assert not (here / "exports").exists()


# -- GGUF


@pytest.fixture
def converter(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Puts a stand-in of llama.cpp's converter where LLAMA_CPP leads."""

    def install() -> None:
        write(here, {"llama.cpp/convert_hf_to_gguf.py": CONVERTER})
        monkeypatch.setenv("LLAMA_CPP", "llama.cpp")

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    return install


@pytest.mark.slow
def test_gguf_is_converted_or_the_commands_are_told(
    here: Path, run: Path, converter: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    out = here / "exports" / "mine"
    assert export(run, gguf=True) == 1
    told = capsys.readouterr().err
    assert "git clone --depth 1 https://github.com/ggml-org/llama.cpp" in told
    assert "convert_hf_to_gguf.py exports/mine --outfile exports/mine.gguf --outtype f32" in told
    assert (out / "model.safetensors").exists()

    converter()
    (out / "bad").touch()
    assert export(out, gguf=True) == 1
    assert "converter failed: Model LlamaForCausalLM is not supported" in capsys.readouterr().err
    (out / "bad").unlink()
    assert export(out, gguf=True) == 0
    assert (here / "exports" / "mine.gguf").read_text() == "f32"
    assert export(out, gguf=True) == 2
    assert [path.name for path in (here / "exports").iterdir() if path.is_file()] == ["mine.gguf"]


# -- what training saves


def test_a_base_with_a_temperature_and_no_sampling_is_trained_and_saved_with_sampling(
    train: Callable[..., Result], small_model: Path, tmp_path: Path
) -> None:
    """transformers loads such a generation config, and refuses to save it."""
    base = tmp_path / "warm"
    shutil.copytree(small_model, base)
    (base / "generation_config.json").write_text(json.dumps(SAMPLING))
    result = train(Vowels(), model=str(base), max_steps=1, eval_cases=0, save_strategy="steps", save_steps=1)

    generation = json.loads((result.model / "generation_config.json").read_text())
    assert (generation["temperature"], generation["do_sample"]) == (0.6, True)
    assert result.folder.joinpath("checkpoints", "checkpoint-1").is_dir()
