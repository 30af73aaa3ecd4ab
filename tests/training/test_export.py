"""`aitrain export` on adapters made by hand, and what a run uploads to a stand-in of the Hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from peft import PeftModel
from peft.tuners.lora import LoraModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain import ConfigError, RunFailed, TrainConfig
from aitrain.jobs.export import main
from aitrain.runs.run_folder import read_object
from aitrain.training.saving import upload
from tests.conftest import listing, write
from tests.environments.vowels import Vowels
from tests.execution.waiting import eventually
from tests.training.conftest import Train, save_adapter

TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
SAMPLING = {"eos_token_id": [258, 10], "temperature": 0.6}
TOKEN = "not-a-real-token"


@pytest.fixture
def run(here: Path, small_model: Path) -> Path:
    """A run folder with an adapter of random weights."""
    base = here / "base"
    shutil.copytree(small_model, base)
    (base / "generation_config.json").write_text(json.dumps(SAMPLING))
    folder = here / "runs" / "mine"
    save_adapter(base, folder / "model")
    result = {"status": "finished", "steps": 4, "seconds": 1.0, "environment": "Vowels", "scores": {}}
    options = "model: base\npeft: true\nproject_name: mine\nrl_env: envs.arithmetic\n"
    write(folder, {"model/chat_template.jinja": TEMPLATE, "config.yaml": options, "result.json": json.dumps(result),
                   "status.json": "{}", "environment.json": "{}"})  # fmt: skip
    return folder


def export(model: str | Path, **given: Any) -> int:
    usual = {"out": "exports/mine", "dtype": None, "trust_remote_code": False, "as_json": False}
    return main({"model": str(model), **usual, **given})


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).eval()


def logits(model: Any) -> torch.Tensor:
    rows = torch.randint(0, 259, (4, 48), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        found: torch.Tensor = model(rows).logits
    return found


# -- the whole model


def test_the_export_computes_what_base_plus_adapter_compute_and_leaves_both_alone(
    here: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the run's chat template and the base's generation config."""
    before = {file: file.read_bytes() for file in (here / "base").iterdir()}
    assert export(run, out="out", as_json=True) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert files == {name: (here / "out" / name).stat().st_size for name in listing(here / "out")}

    whole, beside = load(here / "out"), PeftModel.from_pretrained(load(here / "base"), str(run / "model")).eval()
    assert (logits(whole) - logits(beside)).abs().max() < 1e-4
    assert (logits(load(here / "base")) - logits(beside)).abs().max() > 0.1
    assert before == {file: file.read_bytes() for file in (here / "base").iterdir()}
    assert AutoTokenizer.from_pretrained(here / "out").chat_template == TEMPLATE
    generation = read_object(here / "out" / "generation_config.json")
    assert generation.items() >= SAMPLING.items()
    assert str(here) not in "".join(path.read_text() for path in (here / "out").glob("*.json"))


def test_a_merge_that_computes_something_else_leaves_nothing(
    here: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraModel, "merge_and_unload", LoraModel.unload)
    assert export(run) == 1
    assert listing(here / "exports") == []


# -- refused


def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    here: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, {"full/mine": "mine"})
    config = read_object(here / "base" / "config.json")
    quantized = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (here / "base" / "config.json").write_text(json.dumps(quantized))
    assert export(run) == 2
    assert "aitrain serve" in capsys.readouterr().err
    (here / "base" / "config.json").write_text(json.dumps(config))
    assert export(run, out="full") == 2
    assert "full" in capsys.readouterr().err
    assert listing(here / "full") == ["mine"]
    assert not (here / "exports").exists()


# -- the Hub


class Hub:
    """The repositories of a stand-in: whether each is private, and what was uploaded."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.refuses = False
        self.before: Callable[[], object] = lambda: None

    def whoami(self) -> dict[str, str]:
        return {"name": "somebody"}

    def model_info(self, name: str) -> Any:
        if name not in self.private:
            raise RepositoryNotFoundError(
                "there is none", response=httpx.Response(404, request=httpx.Request("GET", ""))
            )
        return SimpleNamespace(private=self.private[name])

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> Any:
        self.before()
        if self.refuses:
            raise OSError("the disk of the Hub is full")
        self.private.setdefault(name, private)
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, folder_path: Path, ignore_patterns: Any, **_: Any) -> None:
        names = filter_repo_objects(listing(folder_path), ignore_patterns=ignore_patterns)
        self.files |= {name: (folder_path / name).read_bytes() for name in names}

    def upload_file(self, path_in_repo: str, path_or_fileobj: bytes, **_: Any) -> None:
        self.files[path_in_repo] = path_or_fileobj


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr("aitrain.training.saving.HfApi", lambda: made)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return made


def test_nothing_that_is_uploaded_tells_where_the_base_is_on_this_machine(here: Path, run: Path, hub: Hub) -> None:
    """A failed upload keeps the model, which can be uploaded later."""
    config = read_object(run / "model" / "adapter_config.json")
    config["base_model_name_or_path"] = f"{here}/base"
    write(run, {"model/adapter_config.json": json.dumps(config), "model/README.md": "the card of the run"})
    mine = TrainConfig(project_name="mine")
    hub.refuses = True
    with pytest.raises(RunFailed, match="saved in"):
        upload(mine, run / "model")
    hub.refuses = False
    upload(mine, run / "model")

    assert hub.private == {"somebody/mine": True}
    assert not [name for name, content in hub.files.items() if str(here).encode() in content]
    assert json.loads(hub.files["adapter_config.json"]) == {**config, "base_model_name_or_path": "base"}


def test_a_private_model_is_not_uploaded_to_a_public_repository(
    hub: Hub, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private["us/public"] = False
    with pytest.raises(ConfigError, match="us/public exists and is public"):
        train(Vowels(), push_to_hub=True, repo_id="us/public")
    monkeypatch.setattr("aitrain.training.saving.get_token", lambda: None)
    with pytest.raises(ConfigError, match="hf auth login"):
        train(Vowels(), push_to_hub=True)


def test_a_run_uploads_its_model_and_leaves_the_token_in_no_file(
    train: Train, hub: Hub, small_model: Path, tmp_path: Path
) -> None:
    """Its base has a temperature and no sampling: transformers loads such a config, and refuses to save it. The run is
    no finished one before the upload ends."""
    base = tmp_path / "warm"
    shutil.copytree(small_model, base)
    (base / "generation_config.json").write_text(json.dumps(SAMPLING))
    push = {"push_to_hub": True, "username": "us", "project_name": "mine"}
    status = tmp_path / "runs" / "mine" / "status.json"

    def look() -> None:
        assert eventually(lambda: read_object(status)["phase"] == "uploading")
        assert read_object(status)["status"] == "running"

    hub.before = look
    result = train(Vowels(), model=str(base), **push, max_steps=1, save_strategy="steps", save_steps=1, eval_cases=0)
    generation = read_object(result.model / "generation_config.json")
    assert (generation["temperature"], generation["do_sample"]) == (0.6, True)
    assert result.folder.joinpath("checkpoints", "checkpoint-1").is_dir()
    assert hub.private == {"us/mine": True}
    assert hub.files["model.safetensors"] == (result.model / "model.safetensors").read_bytes()
    for file in result.folder.rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file
    hub.before = dict
    upload(TrainConfig(repo_id="us/other", hub_private=False), result.model)
    assert hub.private == {"us/mine": True, "us/other": False}
