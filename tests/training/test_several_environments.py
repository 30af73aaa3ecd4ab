"""Runs with several environments: records, metrics and scores of each, exact resume, evals of the result."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from aitrain import EnvironmentFailed
from aitrain.runs.run_folder import RunFolder, read_object
from tests.conftest import read_lines
from tests.environments.grouped import Ranked
from tests.training.conftest import Train, rollouts
from tests.training.test_resume import EVERY_STEP, as_if_killed_after, assert_same

FILE = Path(__file__).parents[1] / "environments" / "several.py"
MIXED = {
    "rl_env": [f"Early={FILE}:Early", f"talk={FILE}:Talk", f"Ranked={FILE}:Ranked"],
    "rl_env_weights": "2,1,1",
    "rl_env_config": {"Early": {"count": 24}},
    "rl_prompts_per_step": 4,
    "batch_size": 16,
    "eval_cases": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
}


@pytest.mark.slow
def test_a_run_with_several_environments_resumes_exactly_and_has_the_share_and_scores_of_each(
    train: Train,
) -> None:
    options = {**EVERY_STEP, **MIXED, "rl_updates_per_rollout": 2, "max_steps": 4}
    whole = train(None, project_name="whole", **options)
    killed = as_if_killed_after(whole.folder, 3, "killed")
    train(None, project_name="killed", resume_from_checkpoint="auto", **options)
    assert_same(killed, whole.folder)

    folder = RunFolder(whole.folder)
    played = Counter(record["environment"] for record in rollouts(whole))
    assert played["talk"] == played["Ranked"] == played["Early"] / 2
    lines = list(read_lines(folder.metrics))
    step = next(line for line in lines if "reward" in line)
    assert {"env/Early/score", "env/Early/letters", "env/talk/score", "env/Ranked/score"} <= step.keys()
    scoring = next(line for line in lines if "eval_score" in line)
    each = {name: scoring[f"env/{name}/eval_score"] for name in played}
    assert scoring["eval_score"] == pytest.approx(each["Early"] / 2 + each["talk"] / 4 + each["Ranked"] / 4)

    written = read_object(folder.result)
    assert {name: written["scores"][f"sampled, {name}"]["after"]["count"] for name in played} == dict.fromkeys(
        played, 3
    )


@pytest.mark.parametrize(
    ("eval_cases", "why"),
    [
        (2, r"on all sampled episodes of held-out cases \(environment Gone\)"),
        (0, r"3 batches in a row.* \(environment Gone\)"),
    ],
)
def test_an_environment_that_always_fails_ends_the_run_although_the_others_are_scored(
    eval_cases: int, why: str, train: Train, tmp_path: Path
) -> None:
    """Before training, where held-out cases show it: no run folder is left."""
    fails = {
        "rl_env": [f"Early={FILE}:Early", f"Gone={FILE.with_name('ill.py')}:Gone"],
        "rl_env_config": {"Gone": {"held_out": False}},
    }
    with pytest.raises(EnvironmentFailed, match=why):
        train(None, **fails, eval_cases=eval_cases, max_steps=5)
    assert any((tmp_path / "runs").glob("*")) == (eval_cases == 0)


# -- groups


def test_a_group_is_scored_together_in_training_and_in_evaluation(train: Train) -> None:
    """And a case without room is not scored at all."""
    result = train(
        Ranked(), max_steps=2, rl_num_generations=4, rl_prompts_per_step=5, eval_samples=3, rl_max_new_tokens=5
    )

    sizes = {None: 4, "before_sampled": 3, "before_greedy": 1, "after_sampled": 3, "after_greedy": 1}
    for phase, size in sizes.items():
        records = rollouts(result, phase)
        assert {record["case_idx"] % 6 for record in records if record["stop"] == "no_room"} <= {2}
        assert {record["metrics"]["size"] for record in records if record["stop"] != "no_room"} == {size}
    assert any(record["advantage"] for record in rollouts(result))
