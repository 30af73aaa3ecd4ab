"""What a model argument names, found from its files alone."""

import json
from pathlib import Path

import pytest

from aitrain.errors import ConfigError
from aitrain.runs.model_reference import before_training, read_model, run_options
from aitrain.runs.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("here")

PEFT_TINY = {"base_model_name_or_path": "/elsewhere/site-packages/aitrain/tiny_model"}


def weights(folder: Path, adapter: dict[str, object] | None = None) -> Path:
    folder.mkdir(parents=True)
    kind = "config.json" if adapter is None else "adapter_config.json"
    (folder / kind).write_text(json.dumps(adapter or {}))
    (folder / "model.safetensors").touch()
    return folder


def run_folder(path: Path, config: str = "model: tiny\nrl_env: env.py:Env\noutput_dir: runs\n") -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config)
    (path / "status.json").write_text(json.dumps({"status": "finished"}))
    (path / "result.json").write_text(json.dumps({"model_step": 40, "steps": 50}))
    return path


def test_the_base_is_of_the_hub_shipped_beside_its_adapter_or_named_as_missing() -> None:
    assert (read_model("Qwen/Qwen3-0.6B").kind, read_model("Qwen/Qwen3-0.6B").base) == ("hub", "Qwen/Qwen3-0.6B")
    weights(Path("adapter"), PEFT_TINY)
    assert read_model("adapter").base == "tiny"
    weights(Path("deep/base"))
    weights(Path("deep/adapter"), {"base_model_name_or_path": "../base"})
    assert Path(read_model("deep/adapter").base).resolve() == Path("deep/base").resolve()
    weights(Path("other"), {"base_model_name_or_path": "/gone/base"})
    with pytest.raises(ConfigError, match="/gone/base"):
        read_model("other")


def test_a_run_is_its_model_folder_and_its_checkpoints_and_the_folders_below_model_belong_to_it() -> None:
    run = run_folder(Path("runs/sums"))
    weights(run / "model", PEFT_TINY)
    weights(run / "model/merged")
    weights(run / "checkpoints/checkpoint-20", PEFT_TINY)
    for given in ("runs/sums", "sums"):
        found = read_model(given)
        assert (found.kind, found.step, found.label, found.base) == ("run", 40, "sums", "tiny")
        assert found.adapter == Path("runs/sums/model")
    checkpoint, merged, adapter = map(
        read_model, ("runs/sums/checkpoints/checkpoint-20", "runs/sums/model/merged", "runs/sums/model")
    )
    assert (checkpoint.kind, checkpoint.step, checkpoint.base) == ("checkpoint", 20, "tiny")
    assert (merged.kind, merged.adapter, merged.step) == ("folder", None, 40)
    assert (adapter.kind, adapter.base, adapter.step) == ("folder", "tiny", 40)
    assert {one.run for one in (checkpoint, merged, adapter)} == {run.resolve()}


def test_a_run_without_a_model_and_weights_in_pickles_are_refused() -> None:
    run = run_folder(Path("runs/sums"))
    (run / "status.json").write_text('{"status": "running"}')
    with pytest.raises(ConfigError, match="status dead"):
        read_model("runs/sums")
    for step in (9, 20):
        weights(run / f"checkpoints/checkpoint-{step}")
    with pytest.raises(ConfigError, match="runs/sums/checkpoints/checkpoint-20"):
        read_model("runs/sums")
    weights(Path("old")).joinpath("model.safetensors").rename("old/pytorch_model.bin")
    with pytest.raises(ConfigError, match="a pickle"):
        read_model("old")


@pytest.mark.parametrize("given", ["./nowhere", "a/b/c", "runs/smus", "a name", "env.py"])
def test_what_does_not_exist_is_refused(given: str) -> None:
    Path("runs/sums").mkdir(parents=True)
    Path("env.py").touch()
    with pytest.raises(ConfigError) as error:
        read_model(given)
    assert "Did you mean sums?" in str(error.value) or given != "runs/smus"


def test_an_address_is_an_engine_and_may_not_hold_a_key() -> None:
    found = read_model("http://127.0.0.1:8000/v1/")
    assert (found.kind, found.base, found.label) == ("url", "http://127.0.0.1:8000/v1", "127.0.0.1-8000")
    for given in ("https://user:word@host/v1", "https://host/v1?key=1"):
        with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
            read_model(given)


def test_relative_paths_in_the_options_of_a_run_are_those_of_the_folder_that_it_was_started_in(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = "model: base\nchat_template: null\nrl_env: env.py:Env\nseed: 7\noutput_dir: runs\nproject_name: sums\n"
    run = run_folder(Path("runs/sums"), config)
    weights(run / "model", PEFT_TINY)
    weights(Path("base"))
    (here / "env.py").touch()
    RunFolder(run).claimed()
    (here / "other").mkdir()
    (here / "other" / "env.py").touch()
    monkeypatch.chdir(here / "other")
    found = read_model("../runs/sums")
    options = run_options(found.run)
    assert options == {
        "model": str(here / "base"), "chat_template": None, "rl_env": f"{here}/env.py:Env", "seed": 7
    }  # fmt: skip
    assert before_training(found) == read_model(str(here / "base"))
    assert run_options(None) == {}
    (here / "runs/sums/status.json").write_text('{"directory": 5}')  # of somebody else's folder
    assert run_options(found.run)["rl_env"] == "env.py:Env"
