"""Groups of episodes on the real trainer: scored together, dropped together, on one rank and on two."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from aitrain import EnvironmentFailed, Result, TrainConfig
from aitrain.engines.hf import HFEngine
from aitrain.environment.dataset import Cases
from aitrain.environment.failure_count import FailureCount
from aitrain.environment.runner import start_runner
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.episode import Rollout
from aitrain.rollout.limits import Limits
from aitrain.runs.run_folder import read_lines
from aitrain.training.evaluation import EvalPhase, EvalPlan, RecordedScores, evaluate
from aitrain.training.policy_rollouts import PolicyRollouts
from tests.environments.grouped import Moves, Ranked
from tests.rollout.scripted import END, Letters
from tests.rollout.scripted import Scripted as ScriptedEngine
from tests.training.conftest import difference
from tests.training.scripted_policy import scripted
from tests.training.scripted_run import Scripted, scripted_sample
from tests.training.test_left_out import PLAIN_STEPS, of_cases
from tests.training.test_processes import Command, command

__all__ = ["command"]

Train = Callable[..., Result]


def steps(result: Result) -> list[dict[str, Any]]:
    return [line for line in result.history if "reward" in line]


def records(folder: Path) -> list[dict[str, Any]]:
    return [record for file in folder.glob("rollouts/*.jsonl") for record in read_lines(file)]


# -- dropped cases


class NoRoom(Scripted):
    """In every second case the environment says more than the context holds."""

    score_episode = None  # type: ignore[assignment]

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        reply = yield "y" * 5000 if case_idx % 2 else None
        return sum(letter < "n" for letter in reply) / max(1, len(reply))


UNLIKE = ("step_time", "elapsed", "seconds", "tokens_per_second", "num_tokens", "memory", "stopped/no_room")
"""Metrics that differ: times, TRL's count of tokens, which has one for each dropped prompt, and the share of those."""


@pytest.mark.slow
def test_a_case_without_room_is_as_if_it_were_not_in_the_batch(
    train: Train, small_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights and metrics are those of the other case alone, but for the share of dropped episodes."""
    monkeypatch.setattr(HFEngine, "sample", scripted_sample)
    alone = train(of_cases(NoRoom, 1), **PLAIN_STEPS, rl_prompts_per_step=1, project_name="alone")
    capsys.readouterr()
    both = train(of_cases(NoRoom, 2), **PLAIN_STEPS, rl_prompts_per_step=2, rl_loss_type="grpo", project_name="both")

    assert difference(alone.model, small_model) > 1e-4
    assert difference(alone.model, both.model) < 1e-6
    for one, two in zip(steps(alone), steps(both), strict=True):
        assert (one["stopped/no_room"], two["stopped/no_room"]) == (0.0, 0.5)
        names = [name for name in one if not name.startswith(("time/", *UNLIKE))]
        assert {"reward", "entropy", "completions/mean_length", "frac_reward_zero_std", "turns"} <= {*names}
        assert {name: two[name] for name in names} == pytest.approx(
            {name: one[name] for name in names}, rel=1e-5, abs=1e-6
        )
    err = " ".join(capsys.readouterr().err.split())
    assert err.count("is dropped: its prompt has") == 1
    assert "Case 1 is dropped: its prompt has 5006 tokens, which leaves no room for an answer" in err
    dropped = [record for record in records(both.folder) if record["stop"] == "no_room"]
    assert len(dropped) == 3 * 4
    assert {(record["score"], record["error"], record["case_idx"]) for record in dropped} == {(None, None, 1)}


@pytest.mark.slow
def test_a_run_whose_cases_are_all_dropped_says_so(train: Train) -> None:
    class Never(Scripted):
        score_episode = None  # type: ignore[assignment]

        def episode(self) -> Generator[str, str, float]:
            yield "y" * 5000
            return 1.0

    with pytest.raises(EnvironmentFailed, match="Every case of 3 batches in a row was dropped"):
        train(Never(), max_steps=5)


# -- groups in an evaluation


class Compared:
    """Scores an answer by its place in the group."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    def score_episode(self, completion: str) -> float | None:
        if completion == "bad":
            raise ValueError("bad")
        return None

    def score_group(self, texts: list[str], scores: list[float | None]) -> list[float]:
        assert scores == [None] * len(texts)
        self.groups.append(texts)
        return [place / len(texts) for place, _ in enumerate(texts)]


def rollouts_of(environment: Any, engine: ScriptedEngine, limits: Limits, notes: list[str]) -> PolicyRollouts:
    rollout = Rollout(start_runner(environment, TrainConfig()), engine, ChatFormat(Letters()), limits, END)
    return PolicyRollouts(rollout, Accelerator(cpu=True), 0, notes.append, FailureCount(), nullcontext, lambda: 0)


def evaluated(
    environment: Any, engine: ScriptedEngine, plan: EvalPlan, limits: Limits | None = None
) -> tuple[Any, list[Any], list[str]]:
    written, notes = list[Any](), list[str]()
    rollouts = rollouts_of(environment, engine, limits or Limits(9, 99), notes)
    with closing(rollouts.rollout.runner), closing(rollouts):
        return evaluate(rollouts, plan, EvalPhase("eval", 0, 0), written.extend), written, notes


def test_the_samples_of_a_held_out_case_are_a_group_and_the_greedy_answer_is_one_of_its_own() -> None:
    environment = Compared()
    plan = EvalPlan(Cases([{"prompt": f"{n}?"} for n in range(2)], range(2)), samples=4, batch_size=3)
    found, written, _ = evaluated(environment, ScriptedEngine(lambda text: f"{text[0]}$"), plan)

    assert found.sampled == {"0": [0.0, 0.25, 0.5, 0.75], "1": [0.0, 0.25, 0.5, 0.75]}
    assert found.greedy == {"0": [0.0], "1": [0.0]}
    assert environment.groups == [["0"] * 4, ["1"] * 4, ["0"], ["1"]]
    assert [record.score for record in written[:4]] == [0.0, 0.25, 0.5, 0.75]


def test_a_failed_sample_is_a_member_without_a_score() -> None:
    environment, answers = Compared(), iter(["a$", "bad$", "c$", "a$"])
    plan = EvalPlan(Cases([{"prompt": "?"}], range(1)), samples=3)
    found, written, _ = evaluated(environment, ScriptedEngine(lambda _: next(answers)), plan)

    assert environment.groups[0] == ["a", "bad", "c"]
    assert found.sampled == {"0": [0.0, pytest.approx(2 / 3)]}
    assert [record.error and record.error.place for record in written[:3]] == [None, "score_episode", None]


def test_a_group_of_which_samples_are_missing_on_record_is_played_again() -> None:
    environment = Compared()
    recorded: RecordedScores = {"sampled": {(0, 0): 0.9, (1, 0): 0.9, (1, 1): 0.8}}
    plan = EvalPlan(Cases([{"prompt": f"{n}?"} for n in range(2)], range(2)), samples=2, recorded=recorded)
    found, _, _ = evaluated(environment, ScriptedEngine(lambda text: f"{text[0]}$"), plan)

    assert found.sampled == {"1": [0.9, 0.8], "0": [0.0, 0.5]}
    assert environment.groups[0] == ["0", "0"]


# -- real templates

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}


# -- real trainings


def test_a_group_is_scored_together_in_training_and_in_evaluation(train: Train, tmp_path: Path) -> None:
    result = train(
        Ranked(str(tmp_path)), max_steps=2, rl_num_generations=4, rl_prompts_per_step=5, eval_samples=3,
        rl_max_new_tokens=5,
    )  # fmt: skip

    lines = steps(result)
    assert [line["env/size"] for line in lines] == [4.0] * 2
    played = [record for record in records(result.folder) if record["stop"] != "no_room"]
    trained = [record for record in played if "eval_phase" not in record]
    assert any(record["advantage"] for record in trained)
    for record in trained:
        assert record["prompt"] == []
        assert record["messages"][0]["content"].startswith("Say word")
        assert record["metrics"]["size"] == 4
    sizes = {record["eval_phase"]: record["metrics"]["size"] for record in played if "eval_phase" in record}
    assert sizes == {"before_sampled": 3, "before_greedy": 1, "after_sampled": 3, "after_greedy": 1}
    config = (result.folder / "config.yaml").read_text()
    assert "rl_max_turns: 2\n" in config  # declared
    assert "rl_max_new_tokens: 5\n" in config  # given
    assert [path.name.startswith("closed-by-0-") for path in tmp_path.glob("closed-*")] == [True]
    noted = [record for record in records(result.folder) if record["stop"] == "no_room"]
    assert {record["case_idx"] for record in noted} <= {2, 8}
    assert 8 in {record["case_idx"] for record in noted}


@pytest.mark.slow
def test_two_ranks_score_groups_that_straddle_them_and_close_their_environments(command: Command) -> None:
    notes = json.dumps({"notes": str(command.folder)})
    grouped = Path(__file__).parents[1] / "environments" / "grouped.py"
    done = command.run(
        "Shared", "--rl-env", f"{grouped}:Ranked", "--num-processes=2", "--max-steps=2", "--rl-num-generations=8",
        "--rl-prompts-per-step=5", "--batch-size=4", f"--rl-env-config={notes}", "--eval-samples=3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    everything = records(command.folder / "run")
    played = [record for record in everything if record["stop"] != "no_room"]
    trained = [record for record in played if "eval_phase" not in record]
    assert {record["metrics"]["size"] for record in trained} == {8}
    assert len({record["metrics"]["hash"] for record in played}) == 1  # of the hash seed, the same on both ranks
    groups: dict[Any, list[dict[str, Any]]] = {}
    for record in trained:
        groups.setdefault((record["step"], record["group"]), []).append(record)
    for group in groups.values():
        own = [record["metrics"]["own"] for record in group]
        assert len(own) == 8
        assert len({record["metrics"]["pid"] for record in group}) == 1
        assert [record["score"] for record in group] == [sorted(own).index(one) / 8 for one in own]
    pids = {record["metrics"]["pid"] for record in trained}
    assert len(pids) == 2
    closed = sorted(path.name for path in command.folder.glob("closed-by-*"))
    assert [name[:11] for name in closed] == ["closed-by-0", "closed-by-1"]
    assert done.stderr.count("is dropped") == 1
    assert done.stderr.count("Ranked requires --rl-max-turns 2.") == 1
    lines = [line for line in read_lines(command.folder / "run" / "metrics.jsonl") if "reward" in line]
    dropped = [record for record in everything if record["stop"] == "no_room" and "eval_phase" not in record]
    assert sum(line["stopped/no_room"] for line in lines) * 40 == pytest.approx(len(dropped))


@pytest.mark.slow
def test_an_environment_that_speaks_first_and_gets_the_calls_trains(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = '<tool_call>{"name": "move", "arguments": {"to": "b"}}</tool_call><|im_end|>'
    answers = ["no<|im_end|>", written, "I go. " + written, written + "x<|im_end|>"]
    monkeypatch.setattr(HFEngine, "sample", scripted(lambda position, _: answers[position % 4]))
    result = train(Moves(), max_steps=2, rl_num_generations=4, batch_size=4, rl_max_new_tokens=120, eval_cases=0)

    trained = [record for record in records(result.folder) if "eval_phase" not in record]
    assert {record["metrics"]["calls"] for record in trained} >= {0, 3}
    assert {record["stop"] for record in trained} == {"max_turns"}
    assert min(record["score"] for record in trained) == -1
    called = next(record for record in trained if record["metrics"]["calls"] == 3)
    assert [message["role"] for message in called["messages"]] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "assistant"
    ]  # fmt: skip
    assert [tool["function"]["name"] for tool in called["tools"]] == ["move"]
    assert any(record["advantage"] for record in trained)
    assert all(line["tools/wrong_calls"] == 0 for line in steps(result))
