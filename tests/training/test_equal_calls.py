"""Several processes that share a vLLM server ask it together: each of them gets the answers to its own prompts."""

from __future__ import annotations

import signal
import subprocess
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aitrain.runs.run_folder import read_lines
from tests.training.conftest import weights
from tests.training.server_run import turns_of


@pytest.fixture(scope="module")
def played(small_model: Path, tmp_path_factory: pytest.TempPathFactory, preloaded_aitrain: Path) -> Path:
    """The folder of a run by two processes."""
    out = tmp_path_factory.mktemp("server")
    python = [str(preloaded_aitrain / "preloaded-python"), "-P", "-m"]
    torchrun = [*python, "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    running = subprocess.Popen(
        [*torchrun, "-m", "tests.training.server_run", str(small_model), str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = running.communicate(timeout=240)
    finally:
        running.send_signal(signal.SIGTERM)  # torchrun ends its processes, if they wait for each other
    assert running.returncode == 0, said
    return out


def records(played: Path, rank: int) -> list[dict[str, Any]]:
    """What one process has played, the held-out cases included."""
    return list(read_lines(played / "run" / "rollouts" / f"rank{rank}.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_every_answer_is_the_one_to_its_own_prompt(played: Path, rank: int) -> None:
    for record in records(played, rank):
        case = record["case_idx"]
        answers = [message["content"] for message in record["messages"] if message["role"] == "assistant"]
        assert answers == [f"{case}/{turn}" for turn in range(turns_of(case))]
        assert record["stop"] == "done"
        assert record["error"] is None


@pytest.mark.slow
def test_the_server_is_handed_all_weights_before_it_is_asked_with_a_new_policy(played: Path, small_model: Path) -> None:
    """What TRL's own way comes to, as far as it can be seen without GPUs: which calls, in which order, with what."""
    calls = list(read_lines(played / "calls"))
    order = [name for name, _ in groupby(call["call"] for call in calls)]
    a_policy = ["update_named_params", "reset_prefix_cache", "generate"]
    assert order == ["init_communicator", *a_policy * 5]  # before the first step, and after each of the four

    model = AutoModelForCausalLM.from_pretrained(small_model)
    expected = [[name, "float32", list(weight.shape)] for name, weight in model.named_parameters()]
    for call in calls:
        if call["call"] == "update_named_params":
            assert call["announced"] == call["sent"] == expected
    last, trained = torch.load(played / "weights.pt"), weights(played / "run" / "model")
    assert all(torch.equal(last[name], trained[name]) for name in last)
    assert any(not torch.equal(last[name], weight) for name, weight in model.named_parameters())
