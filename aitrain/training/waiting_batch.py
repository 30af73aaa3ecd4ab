"""The generation batch of a checkpoint that was played and not trained on yet (--rl-ahead): a JSON file and a
safetensors file for each process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from aitrain.environment.contract import Case
from aitrain.environment.runner import EnvSession
from aitrain.environment.score_parsing import ScoreResult
from aitrain.environment.session import ResetResult
from aitrain.execution.failure import Failure
from aitrain.rollout.episode import Episode
from aitrain.rollout.trajectory import Trajectory, TurnTokens
from aitrain.runs.run_folder import to_jsonable
from aitrain.training.training_batch import DiscardedEpisode, TrainingBatch

TOKENS = {"prompt_ids": torch.int64, "ids": torch.int64, "mask": torch.int8, "logprobs": torch.float64}
"""The lists of a trajectory, and what they are written as."""

Json = dict[str, Any]


def write_batch(batch: TrainingBatch | None, folder: Path, rank: int) -> None:
    """Write this rank's share of the batch; no-op without one."""
    if batch is None:
        return
    values = {
        "step": batch.step,
        "places": [batch.places.start, batch.places.stop],
        "group_size": batch.group_size,
        "numbers": batch.numbers,
        "weight_version": batch.weight_version,
        "dropped": batch.dropped,
        "index": batch.index,
        "seconds": batch.seconds,
        "keys": batch.keys,
        "metrics": batch.metrics,
        "episodes": [_to_json(episode) for episode in batch.episodes],
        "discarded": [
            {"key": one.key, "round": one.round, "case": _name(one.episode.case), "episode": _to_json(one.episode)}
            for one in batch.discarded
        ],
    }
    save_file(_tensors([episode.trajectory for episode in batch.played]), folder / f"waiting_{rank}.safetensors")
    (folder / f"waiting_{rank}.json").write_text(json.dumps(values), encoding="utf-8")


def read_batch(folder: Path, rank: int, cases: Sequence[Case]) -> TrainingBatch | None:
    """The batch that `write_batch` wrote; None without one."""
    file = folder / f"waiting_{rank}.json"
    if not file.exists():
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
    values["places"], values["keys"] = range(*values["places"]), [tuple(key) for key in values["keys"]]
    played, discarded = values.pop("episodes"), values.pop("discarded")
    batch = TrainingBatch(cases=[cases[number] for number in values["numbers"]], **values)
    batch.episodes = [_episode(case, each) for case, each in zip(batch.cases, played, strict=True)]
    named = {_name(case): case for case in cases} if discarded else {}
    batch.discarded = [
        DiscardedEpisode(_episode(named[tuple(one["case"])], one["episode"]), tuple(one["key"]), one["round"])
        for one in discarded
    ]
    _fill([episode.trajectory for episode in batch.played], load_file(file.with_suffix(".safetensors")))
    return batch


def _name(case: Case) -> tuple[str, int]:
    return case.env, case.number


def _to_json(episode: Episode) -> Json:
    session, trajectory, result = episode.session, episode.trajectory, episode.result
    reset = {"tools": session.reset.tools, "prompt": session.reset.prompt}
    return {
        "session": {"seed": session.seed, "seconds": session.seconds, "reset": to_jsonable(reset)},
        "trajectory": {
            "turns": [[turn.start, turn.weight_version] for turn in trajectory.turns],
            "ended_by_policy": trajectory.ended_by_policy,
            "stop": trajectory.stop,
            "counts": {name: len(getattr(trajectory, name)) for name in TOKENS},
        },
        "result": {
            "score": result.score,
            "metrics": result.metrics,
            "failure": None if result.failure is None else to_jsonable(asdict(result.failure)),
        },
        "messages": to_jsonable(episode.messages),
        "rendered_prompt": episode.rendered_prompt,
        "tool_calls": episode.tool_calls,
        "wrong_tool_calls": episode.wrong_tool_calls,
        "too_long": episode.too_long,
        "is_dropped": episode.is_dropped,
    }


def _episode(case: Case, values: Json) -> Episode:
    session, result, tokens = values.pop("session"), values.pop("result"), values.pop("trajectory")
    reset = ResetResult(tools=tuple(session["reset"]["tools"]), prompt=session["reset"]["prompt"])
    failure = result["failure"] and Failure(**result["failure"])
    lengths: dict[str, Any] = {name: [0] * count for name, count in tokens["counts"].items()}
    return Episode(
        EnvSession(case, session["seed"], reset=reset, seconds=session["seconds"]),
        Trajectory(
            **lengths,
            turns=[TurnTokens(*turn) for turn in tokens["turns"]],
            ended_by_policy=tokens["ended_by_policy"],
            stop=tokens["stop"],
        ),
        result=ScoreResult(result["score"], result["metrics"], failure),
        **values,
    )


def _tensors(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """The tokens of all trajectories, one after the other."""
    return {
        name: torch.tensor([value for each in trajectories for value in getattr(each, name)], dtype=kind)
        for name, kind in TOKENS.items()
    }


def _fill(trajectories: Sequence[Trajectory], tensors: dict[str, torch.Tensor]) -> None:
    """Set the lists of trajectories, which have their lengths already."""
    for name in TOKENS:
        values = iter(tensors[name].tolist())
        for each in trajectories:
            setattr(each, name, list(islice(values, len(getattr(each, name)))))
