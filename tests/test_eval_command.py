"""`aitrain eval`: which options an eval has, in which folder it is, and what is printed. No process is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aitrain.cli.eval import eval_table
from aitrain.launch.preflight import RunPlan
from aitrain.options.generation import THOUGHT_TOKENS
from aitrain.options.reading import resolve
from aitrain.options.train import EvalConfig, TrainConfig
from aitrain.runs.model_reference import read_model
from aitrain.runs.records import RolloutRecord
from aitrain.runs.result import EvalResult, with_scores
from aitrain.runs.run_folder import RunFolder, write_json
from tests.conftest import run_in_process
from tests.runs.scorings import only

ARITHMETIC = "--rl-env envs.arithmetic"


class Evals:
    """In the place of the process: notes each eval, and writes a result."""

    def __init__(self) -> None:
        self.configs, self.plans = list[EvalConfig](), list[RunPlan]()

    def __call__(self, folder: RunFolder, plan: RunPlan, _: object) -> None:
        config = resolve(EvalConfig, folder.config)
        self.configs.append(config)
        self.plans.append(plan)
        record = RolloutRecord(row_number=0, sample=0, score=0.5, eval_phase="eval_sampled", turns=[{"tokens": 3}])
        begun = EvalResult(folder.path, read_model(config.model).facts, "Arithmetic", 42, 1, 1)
        with_scores(begun, only(["0"]), [record]).write()


@pytest.fixture
def evals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evals:
    monkeypatch.chdir(tmp_path)
    made = Evals()
    monkeypatch.setattr("aitrain.cli.running.run_in", made)
    return made


@pytest.fixture
def trained(evals: Evals) -> Path:
    """A run of a LoRA training with options of its own."""
    config = TrainConfig(
        model="tiny", rl_env="envs.arithmetic", peft=True, seed=7, rl_max_new_tokens=9, eval_cases=11, lr=1e-3,
        project_name="sums", rl_temperature=0.7, use_vllm=True, gradient_accumulation=3,
    )  # fmt: skip
    folder = RunFolder.create(config)
    folder.write_config(config)
    folder.model.mkdir()
    (folder.model / "adapter_config.json").write_text('{"r": 4, "base_model_name_or_path": "x"}')
    (folder.model / "adapter_model.safetensors").write_bytes(b"weights")
    (folder.result).write_text(json.dumps({"steps": 5}))
    folder.rollouts.mkdir()
    for rank in range(4):  # of earlier starts
        (folder.rollouts / f"rank{rank}.jsonl").touch()
    write_json(folder.environment, {"processes": 2})
    return folder.path


def run(arguments: str) -> str:
    """All that an eval prints."""
    return "".join(run_in_process(f"eval {arguments}")[1:])


def test_a_runs_options_are_taken_over_also_for_the_base_beside_it_and_flags_win(evals: Evals, trained: Path) -> None:
    run("tiny sums")
    base, tuned = evals.configs
    for config in (base, tuned):
        assert (config.rl_env, config.seed, config.rl_max_new_tokens, config.eval_cases, config.rl_temperature) == (
            "envs.arithmetic", 7, 9, 11, 0.7,
        )  # fmt: skip
        assert (config.peft, config.use_vllm, config.lr) == (True, False, TrainConfig().lr)
        assert config.gradient_accumulation == 3 * 2  # of both processes
    assert (base.model, tuned.model) == ("tiny", str(Path.cwd() / trained))
    assert [config.project_name for config in evals.configs] == ["eval-tiny", "eval-sums"]
    assert evals.plans[1].config.model == "tiny"  # what a vLLM server is started with
    run("sums --seed 3 --cases 2 --samples 4 --decoding sampled")
    given = evals.configs[-1]
    assert (given.seed, given.eval_cases, given.eval_samples, given.decodings) == (3, 2, 4, ("sampled",))
    run("sums --thinking on")
    assert evals.configs[-1].completion_tokens == 9 + THOUGHT_TOKENS  # an answer of the run's length, beside a thought


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("tiny", "tiny is not a run, whose environment"),
        (f"http://key@127.0.0.1:1/v1 {ARITHMETIC}", "OPENAI_API_KEY"),
    ],
)
def test_what_cannot_work_is_refused_before_a_folder_is_made(evals: Evals, arguments: str, word: str) -> None:
    assert word in run(arguments)
    assert not Path("runs").exists()
    assert not evals.configs


def test_a_row_has_the_name_of_its_model_and_not_that_of_the_evals_folder(trained: Path, tmp_path: Path) -> None:
    facts = [read_model(name).facts for name in ("tiny", "sums")]
    results = [EvalResult(tmp_path / f"eval-{n}", one, "Arithmetic", 42, 1, 1) for n, one in enumerate(facts)]
    assert [line.split() for line in str(eval_table(results)).splitlines()[1:]] == [["tiny"], ["sums"]]


def test_models_with_one_name_are_told_apart_by_what_was_given(tmp_path: Path) -> None:
    facts = [{"label": "sums", "given": place} for place in ("a/sums", "b/sums")]
    results = [EvalResult(tmp_path, one, "Arithmetic", 42, 1, 1) for one in facts]
    assert [line.split() for line in str(eval_table(results)).splitlines()[1:]] == [["a/sums"], ["b/sums"]]


def test_an_export_onto_a_folder_is_refused_before_its_process_imports_torch(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aitrain.launch.command_processes.run_on_terminal", pytest.fail)
    Path("exports/sums").mkdir(parents=True)
    Path("exports/sums/config.json").write_text("{}")
    code, _, err = run_in_process("export sums")
    assert (code, "exports/sums exists" in err) == (2, True)
