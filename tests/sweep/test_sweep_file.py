"""The file of a sweep, which is checked before the first trial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from aitrain.errors import ConfigError
from aitrain.launch.sweep import SweepPlan, check_sweep
from aitrain.options.reading import resolve
from aitrain.options.sweep import SweepConfig
from tests.conftest import run_in_process
from tests.sweep.test_sweep import OPTIONS, PLANTED, write_file

pytestmark = pytest.mark.usefixtures("here")


def read(**changes: object) -> SweepPlan:
    return check_sweep(resolve(SweepConfig, write_file(**changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search": {"lrr": [1e-5, 1e-4]}}, "unknown option lrr. Did you mean lr?"),
        ({"n_trials": 3}, "Use trials."),
        ({"search": {"lr": 1e-5}}, "search: lr: a fixed value belongs under options"),
        ({"search": {"lr": {"low": 1e-5, "hgih": 1e-4}}}, "unexpected keyword argument 'hgih'"),
        ({"search": {"lr": {"low": 1e-5, "high": 1e-4}}, "sampler": "grid"}, "a grid has lists"),
        ({"search": {"rl_temperature": [0.7, 1.0]}}, "Add `objective: greedy`"),
        ({"options": {**OPTIONS, "lr": 1e-5}}, "search: lr is also"),
        ({"options": {**OPTIONS, "project_name": "x"}}, "project_name: a sweep sets it"),
        ({"search": {"rl_env_weights": ["1,2", "2,1"]}}, "search: rl_env_weights must be the same"),
        ({"options": {**OPTIONS, "eval_cases": 0}}, "eval_cases"),
        ({"search": {**PLANTED, "rl_num_generations": [4, 7]}}, "cannot be divided"),
    ],
)  # fmt: skip
def test_a_mistake_is_found_before_the_first_trial(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    assert message in str(caught.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize("package", ["optuna", "plotly"])
def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr("aitrain.cli.sweep.installed", lambda name: None if name == package else name)
    code, _, err = run_in_process(f"sweep {write_file()}")
    assert code == 2
    assert 'Install them with: pip install "aitrain[sweep]"' in err


def test_the_number_of_trials_follows_from_the_space_where_none_is_given() -> None:
    endless = {"search": {"lr": {"low": 1e-6, "high": 1e-4}}}
    sizes = [
        (8, {"sampler": "grid"}),
        (8, {"sampler": "tpe"}),
        (8, {"trials": 50}),
        (5, {"trials": 5}),
        (10, endless),
    ]
    plans = [read(**{"trials": None, **changes}) for _, changes in sizes]
    assert [plan.trials for plan in plans] == [size for size, _ in sizes]


def test_a_dry_run_shows_the_plan_and_makes_nothing() -> None:
    write_file(search={"lr": {"low": 1e-6, "high": 1e-4, "log": True}, "peft": [True, False]})
    shown = run_in_process("sweep sweep.yaml --dry-run")[1]
    assert yaml.safe_load(shown)["search"]["peft"] == [True, False]
    document = json.loads(run_in_process("sweep sweep.yaml --dry-run --json")[1])
    assert (document["folder"], document["trials"]) == ("runs/lrs", 8)
    assert not Path("runs").exists()
