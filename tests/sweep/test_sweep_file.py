"""The file of a sweep, which is checked completely before the first trial, and the command that plays it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from aitrain.cli import main
from aitrain.cli.sweep_screen import SweepScreen
from aitrain.cli.verbosity import Verbosity
from aitrain.errors import ConfigError
from aitrain.events import Note
from aitrain.launch import sweep_plan
from aitrain.launch.search_space import SearchedOption, in_our_form, read_space
from aitrain.launch.sweep_plan import read_sweep
from aitrain.launch.trial_run import TrialRuns
from aitrain.runs.sweep_record import SweepRecord, Trial, TrialStatus
from tests.execution.waiting import eventually
from tests.sweep.scripted import OPTIONS, PLANTED, play


def write_file(**changes: object) -> Path:
    """sweep.yaml in the working directory; None leaves a key out."""
    values = {"project_name": "lrs", "options": OPTIONS, "search": PLANTED, **changes}
    path = Path("sweep.yaml")
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}, sort_keys=False))
    return path


def aitrain_sweep(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["aitrain", "sweep", *arguments])
    return main._run()


# -- checks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search": {"lrr": [1e-5, 1e-4]}}, "unknown option lrr (in search). Did you mean lr?"),
        ({"options": {**OPTIONS, "modle": "tiny"}}, "unknown option modle"),
        ({"n_trials": 3}, "Use trials."),

        ({"search": None}, "search: name an option"),
        ({"search": {"lr": 1e-5}}, "search: lr: must be a list of values, or a range"),


        ({"search": {"lr": {"low": 1e-5}}}, "search: lr: a range needs low and high"),

        ({"search": {"lr": {"low": 1e-4, "high": 1e-4}}}, "search: lr: low must be below high"),
        ({"search": {"rl_kl_coef": {"low": 0, "high": 1, "log": True}}}, "must be above 0"),
        ({"search": {"rl_loss_type": ["grpo", "dapoo"]}}, "Did you mean dapo?"),
        ({"search": {"lr": {"low": 1e-5, "high": 1e-4}}, "sampler": "grid"}, "a grid needs finitely many values"),
        ({"options": {**OPTIONS, "lr": 1e-5}}, "search: lr is also under options"),

        ({"search": {"eval_cases": [8, 16]}}, "search: eval_cases must be the same"),

        ({"options": {**OPTIONS, "eval_strategy": "no"}, "pruner": "median"}, "median needs held-out scores"),
        ({"search": {"trl": {"no_such_field": [1, 2]}}}, "no_such_field"),
        (
            {"search": {"batch_size": [3, 4], "rl_num_generations": [3, 4]}},
            "That is the trial with batch_size: 4, rl_num_generations: 3",
        ),
        ({"options": {**OPTIONS, "rl_env": "nowhere.py"}}, "nowhere.py"),
    ],
)  # fmt: skip
def test_a_mistake_is_found_before_the_first_trial(here: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sweep(write_file(**changes), {})
    assert message in str(caught.value)
    assert not Path("runs").exists()


def test_without_optuna_the_error_says_how_to_install_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_plan, "installed", lambda package: None)
    with pytest.raises(ConfigError, match=r"pip install \"aitrain\[sweep\]\""):
        read_sweep(write_file(), {})


def test_fixed_and_searched_fields_of_trl_go_together(here: Path) -> None:
    search = {"trl": {"num_iterations": [1, 2]}}
    plan = read_sweep(write_file(search=search, options={**OPTIONS, "trl": {"delta": 2.0}}), {})
    assert plan.trial_config(Trial(0, {"trl.num_iterations": 2}), here).trl == {"delta": 2.0, "num_iterations": 2}


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"type": "log_uniform", "low": 1e-6, "high": 1e-4}, SearchedOption("lr", (), 1e-6, 1e-4, log=True)),
        ({"type": "categorical", "values": [1e-6, 1e-4]}, SearchedOption("lr", (1e-6, 1e-4))),
        ([1e-6, 1e-4, "log_uniform"], SearchedOption("lr", (), 1e-6, 1e-4, log=True)),
    ],
)
def test_the_forms_of_aitrainings_sweep_params_are_understood(given: object, option: SearchedOption) -> None:
    assert read_space(in_our_form({"lr": given})).options == (option,)


def test_the_number_of_trials_follows_from_the_space_where_none_is_given(here: Path) -> None:
    sizes = [(8, {}), (8, {"trials": 50}), (10, {"search": {"lr": {"low": 1e-6, "high": 1e-4}}})]
    assert [read_sweep(write_file(**changes), {}).trials for _, changes in sizes] == [size for size, _ in sizes]
    assert read_sweep(write_file(trials=5), {"trials": "3"}).trials == 3


# -- the command


@pytest.fixture
def scripted(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`scripted(play)`: trials are played by this function."""

    def use(play: Callable[..., TrialStatus] = play) -> None:
        monkeypatch.setattr(TrialRuns, "play", lambda self, trial, is_pruned: play(trial, is_pruned))

    use()
    return use


def test_a_dry_run_shows_the_plan_and_makes_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(search={"lr": {"low": 1e-6, "high": 1e-4}, "peft": [True, False]})
    assert aitrain_sweep(monkeypatch, "sweep.yaml", "--dry-run") == 0
    assert "1e-06 to 0.0001" in capsys.readouterr().out
    assert aitrain_sweep(monkeypatch, "sweep.yaml", "--dry-run", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["folder"], document["combinations"]) == ("runs/lrs", None)
    assert document["search"]["peft"] == [True, False]
    assert not Path("runs").exists()


def test_the_end_of_a_sweep_shows_its_trials_the_best_one_and_what_to_do_next(
    scripted: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file()
    assert aitrain_sweep(monkeypatch, "sweep.yaml", "--quiet") == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].split()[1:] == ["0.0003", "32", "-", "0.832"]
    best = SweepRecord.read(Path("runs/lrs")).best
    assert best is not None
    assert f"aitrain eval runs/lrs/{best.name} --samples 8" in shown
    assert f"aitrain grpo --config runs/lrs/{best.name}/config.yaml --project-name lrs-best --output-dir runs" in shown
    assert Path("runs/lrs/sweep.html").exists()
    assert aitrain_sweep(monkeypatch, "runs/lrs/sweep.yaml", "--resume", "--quiet") == 0
    assert capsys.readouterr().out == shown
    assert aitrain_sweep(monkeypatch, "sweep.yaml", "--json", "--trials", "3") == 0
    result = json.loads(capsys.readouterr().out)
    assert (len(result["trials"]), result["status"]) == (3, "finished")
    assert result["folder"] == "runs/lrs-2", "a second one of the name has a folder of its own"
    assert result["trials"][result["best"]]["score"] == max(trial["score"] for trial in result["trials"])


def test_notes_of_trials_are_shown_once_with_their_mark_and_escaped(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = SweepScreen(SweepRecord(here, {}, 2), 2, Verbosity())
    for number in range(2):
        screen.of_trial(Trial(number, {}))(Note("case 3 \x1b[31mfailed"))
    assert capsys.readouterr().err == "! trial-0: case 3 \\x1b[31mfailed\n"


def test_ctrl_c_stops_after_the_running_trial_and_says_how_to_continue(
    scripted: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped: list[TrialRuns] = []
    monkeypatch.setattr(TrialRuns, "stop", lambda self: stopped.append(self) or setattr(self, "stops", 1))

    def interrupted(trial: Trial, is_pruned: Callable[[int, float], bool]) -> TrialStatus:
        if trial.number < 1:
            return play(trial, is_pruned)
        os.kill(os.getpid(), signal.SIGINT)
        assert eventually(lambda: stopped)
        return "stopped"

    scripted(interrupted)
    write_file()
    assert aitrain_sweep(monkeypatch, "sweep.yaml", "--quiet") == 130
    assert "aitrain sweep runs/lrs --resume" in capsys.readouterr().err
    scripted(play)
    assert aitrain_sweep(monkeypatch, "runs/lrs", "--resume", "--quiet") == 0
    assert {trial.status for trial in SweepRecord.read(Path("runs/lrs")).trials} == {"finished"}
