"""Real trainings that hang at each place where one can: what is said, what is kept, and that the process goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aitrain import RunFailed, activity, notebook
from aitrain.activity import SLOT, Activity
from aitrain.engines.colocated import counting_tokens
from aitrain.engines.hf import HFEngine
from aitrain.runs import watchdog
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.runs.watchdog import Watchdog
from aitrain.training.model import count_forward_passes
from aitrain.ui.overview import Overview
from tests.finished_runs import Words
from tests.training.conftest import Train, random_adapter


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the phase of another test's run."""
    monkeypatch.setattr(activity, "own", Activity(bytearray(SLOT)))


@pytest.fixture
def dogs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watchdog]]:
    """The watchdog of the run under way, which looks twenty times a second."""
    monkeypatch.setattr(watchdog, "LONGEST_POLL", 0.05)
    dogs: list[Watchdog] = []

    def made(*arguments: Any, **keywords: Any) -> Watchdog:
        dogs.append(Watchdog(*arguments, **keywords))
        return dogs[-1]

    monkeypatch.setattr(notebook, "Watchdog", made)
    yield dogs
    assert not any(dog._thread.is_alive() for dog in dogs)


@pytest.fixture
def hang(dogs: list[Watchdog]) -> Callable[..., Any]:
    """`hang()` waits for ever. The watchdog's patience, which is that of a real run until then, ends soon after."""

    def hangs(*_: Any, **__: Any) -> None:
        dogs[-1].timeout = 0.2
        threading.Event().wait(60.0)
        pytest.fail("the run was not interrupted")

    return hangs


@pytest.mark.parametrize(
    ("owner", "method", "phase"),
    [(Words, "build_dataset", "building the dataset"), (HFEngine, "sample", "training, generating.")],
)
def test_a_run_that_hangs_says_where_and_ends(
    owner: type, method: str, phase: str, train: Train, hang: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    original = getattr(owner, method)

    def act(*arguments: Any) -> Any:
        is_now = activity.read(activity.own.memory, 0).name.startswith(phase[:8])  # not while cases are scored
        return hang() if is_now else original(*arguments)

    monkeypatch.setattr(owner, method, act)
    with pytest.raises(RunFailed) as failure:
        train(Words(), max_steps=1, eval_cases=2, rl_max_new_tokens=2)

    assert f"It hangs in: {phase}" in str(failure.value)
    folder = RunFolder(tmp_path / "runs" / "project-name")
    assert read_object(folder.status)["status"] == "stalled"
    assert Overview(folder.path).status == "stalled"
    log = folder.log.read_text()
    assert f"Stalled: {phase.partition(' after')[0].removesuffix('.')}" in log
    assert "test_stalls.py" in log  # the line that hangs


def test_a_call_to_the_environment_may_take_as_long_as_its_own_deadline(
    train: Train, dogs: list[Watchdog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the watchdog's patience, and shorter than `rl_env_timeout`."""
    looks = threading.Semaphore(0)
    is_stalled = Watchdog._is_stalled
    monkeypatch.setattr(Watchdog, "_is_stalled", lambda *given: (is_stalled(*given), looks.release())[0])

    class Patient(Words):
        def score_episode(self, completion: str) -> float:
            (dog,) = dogs
            if dog.timeout > 1:
                dog.timeout = 0.0
                while looks.acquire(blocking=False):
                    continue
                assert looks.acquire(timeout=60)
                assert looks.acquire(timeout=60)
                dog.timeout = 1e9
            return 0.5

    assert train(Patient(), max_steps=1, eval_cases=0, rl_max_new_tokens=2, rl_check=False).steps == 1


def test_a_token_of_a_colocated_engine_is_progress() -> None:
    step = counting_tokens(list)
    before = activity.own.slot.count
    assert step() == []
    assert activity.own.slot.count == before + 1


@pytest.mark.parametrize("has_adapter", [False, True])
def test_each_token_of_generate_and_each_forward_pass_are_progress(has_adapter: bool, small_model: Path) -> None:
    model: Any = (random_adapter if has_adapter else AutoModelForCausalLM.from_pretrained)(small_model)
    count_forward_passes(model)
    ids, before = torch.tensor([[5, 6, 7]]), activity.own.slot.count

    model.generate(input_ids=ids, max_new_tokens=8, min_new_tokens=8)
    assert activity.own.slot.count == before + 8
    model(input_ids=ids)
    assert activity.own.slot.count == before + 9
