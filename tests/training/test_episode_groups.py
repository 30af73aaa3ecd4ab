"""Groups of episodes in a training: scored together, dropped together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aitrain import Result, TrainConfig
from aitrain.options.reading import read_file
from aitrain.runs.run_folder import read_object
from tests.environments.grouped import Ranked
from tests.training.conftest import rollouts

Train = Callable[..., Result]


def test_a_group_is_scored_together_in_training_and_in_evaluation(train: Train, tmp_path: Path) -> None:
    """And a case without room is not scored at all; the environment is closed once; what it requires is written."""
    result = train(
        Ranked(str(tmp_path)), max_steps=2, rl_num_generations=4, rl_prompts_per_step=5, eval_samples=3,
        rl_max_new_tokens=5,
    )  # fmt: skip

    sizes = {None: 4, "before_sampled": 3, "before_greedy": 1, "after_sampled": 3, "after_greedy": 1}
    for phase, size in sizes.items():
        records = rollouts(result, phase)
        assert {record["case_idx"] % 6 for record in records if record["stop"] == "no_room"} <= {2}
        assert {record["metrics"]["size"] for record in records if record["stop"] != "no_room"} == {size}
    assert any(record["advantage"] for record in rollouts(result))
    written = read_file(TrainConfig, result.folder / "config.yaml")
    assert (written["rl_max_turns"], written["rl_max_new_tokens"]) == (2, 5)
    facts = read_object(result.folder / "environment.json")
    assert facts["requires"] == Ranked.requirements.as_options()
    assert [path.name.startswith("closed-by-0-") for path in tmp_path.glob("closed-*")] == [True]
