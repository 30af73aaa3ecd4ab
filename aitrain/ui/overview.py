"""A run read once: what terminal, table of runs, page, model card and JSON show of it, and what to do next."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from aitrain.options.train import EvalConfig, TrainConfig
from aitrain.packages import public_base
from aitrain.redaction import is_secret_name, redact, without_secrets
from aitrain.runs.checkpoint import checkpoints_of
from aitrain.runs.diagnosis import findings_of
from aitrain.runs.heartbeat import state_of
from aitrain.runs.held_out import (
    IntervalValues,
    ScoreRow,
    ScoreTable,
    Verdict,
    grouped,
    recorded_table,
    verdict_of,
    verdict_of_scores,
)
from aitrain.runs.json_values import JsonObject, as_float, as_object, as_objects, regular
from aitrain.runs.model_reference import read_options
from aitrain.runs.records import read_metrics
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.runs.statistics import (
    Mixture,
    bounds_of_mean,
    interval_of_mean,
    named,
    recorded_mixture,
)

Item = TypeVar("Item")
Series = dict[str, list[float | None]]
DEAD = "The run's process has ended without a word: it was killed, or the machine went down."
POINTS, ROW_POINTS = 1_000, 48
"""Maximum points of a curve, and of the one in the table of runs."""
MOST_METRICS = 32 * 2**20
"""Bytes at the end of metrics.jsonl that the table of runs reads."""
LOG_BYTES, LOG_LINES = 16_000, 60
"""Limits of the end of train.log that a page shows."""
UNSCORED: ScoreRow = {"before": None, "after": None, "change": None}
ADVICE: dict[Verdict | None, str] = {
    None: "No cases were scored before and after (--eval-cases): nothing says whether the model is better.",
    "worse": "A lower learning rate may help, and --save-best, which keeps the best step as the model.",
    "undetected": "More steps may help; more held-out cases (--eval-cases) or samples of each (--eval-samples) show"
    " smaller differences.",
}
OF_A_PLACE = ("project_name", "output_dir")
"""Options that differ in any two runs."""


class Overview:
    """The run in a folder; files that are missing or damaged count as empty, as do rollouts that are not read (yet): a
    run in progress then has no intervals."""

    def __init__(self, folder: Path, rollouts: RolloutIndex | None = None) -> None:
        self.run, self.rollouts = RunFolder(folder), rollouts or RolloutIndex(folder)
        self.recorded, self.result = read_object(self.run.status), read_object(self.run.result)
        """status.json and result.json."""

    @cached_property
    def environment(self) -> dict[str, Any]:
        """environment.json."""
        return read_object(self.run.environment)

    @cached_property
    def options(self) -> dict[str, Any]:
        """config.yaml."""
        return dict(read_options(self.run.config))

    # -- how far it is

    @cached_property
    def status(self) -> str:
        """The status as `aitrain show` lists it; `unknown` without one."""
        return state_of(self.run, self.recorded or self.result)

    @property
    def job(self) -> str:
        """`grpo`, `eval` or `sweep`."""
        return str(self.recorded.get("job") or self.result.get("job") or "grpo")

    @property
    def step(self) -> int | None:
        """Steps done: optimizer steps, episodes of an eval, trials of a sweep."""
        step = self.recorded.get("step")
        return self.result.get("steps") if step is None else step

    @property
    def state(self) -> JsonObject:
        """Status and progress; what is unknown is None or empty."""
        has_failed = self.status in ("failed", "stalled", "dead")
        reason = self.recorded.get("reason") if has_failed else ""
        if self.status == "stopped":
            reason = self.result.get("stopped_because")
        log = end_of(self.run.log, LOG_BYTES).decode("utf-8", errors="replace") if has_failed else ""
        return {
            "status": self.status,
            "job": self.job,
            "phase": self.recorded.get("phase") or "",
            "step": self.step,
            "steps": self.recorded.get("steps"),
            "ends_at": self.recorded.get("ends_at"),
            "heartbeat": as_float(self.recorded.get("heartbeat")) or 0.0,
            "reason": DEAD if self.status == "dead" else reason or "",
            "next": self.continuing() if has_failed or self.status == "stopped" else "",
            "log": redact("\n".join(log.splitlines()[-LOG_LINES:])),
        }

    # -- what it trains

    @property
    def model(self) -> str:
        """The model's name; of one in a folder of this machine, that of the folder."""
        of_eval = as_object(self.result.get("model")).get("label")
        return public_base(redact(str(self.result.get("base_model") or of_eval or self.options.get("model") or "")))

    @property
    def environment_name(self) -> str:
        """The class of its environment, or of each of several; in the first seconds what the options say of it."""
        name = self.result.get("environment") or self.environment.get("class") or self.options.get("rl_env") or ""
        return redact(str(name))

    @property
    def option_rows(self) -> list[JsonObject]:
        """Its options with their defaults, as text."""
        defaults = vars((EvalConfig if self.job == "eval" else TrainConfig).model_construct())
        return [
            {
                "name": name,
                "value": _as_shown(without_secrets(value)),
                "default": _as_shown(defaults.get(name)),
            }
            for name, value in self.options.items()
        ]

    def mixture(self) -> Mixture:
        """Its environments, with the held-out cases of its rollouts."""
        return recorded_mixture(self.environment, self.options, self.rollouts.held_out)

    # -- scores

    @cached_property
    def scores(self) -> ScoreTable:
        """The held-out scores of result.json, those of an eval as scores after training; without them, the score before
        training, if there is one."""
        result = {} if self.status == "running" else self.result  # which is that of its earlier end
        if table := recorded_table(result.get("scores")):
            return table
        before, after = result.get("score_before", self.recorded.get("score_before")), result.get("score_after")
        row: ScoreRow = {"before": _bare(before), "after": _bare(after), "change": None}
        return {"sampled": row} if row["before"] or row["after"] else {}

    @property
    def verdict(self) -> Verdict | None:
        """Whether the model is better."""
        return verdict_of_scores(self.scores)

    @property
    def held_out(self) -> list[JsonObject]:
        """The held-out scores by weight version: of the cases that were played during the training, if there are any.
        For the step of model/, the scores after training replace earlier ones."""
        entries = [entry for entry in self.rollouts.entries if entry.eval_phase]
        mixture, during = self.mixture(), {entry.case for entry in entries if entry.eval_phase.startswith("step")}
        scorings = grouped(
            ((entry.weight_version, entry.eval_phase.startswith("after"), entry.eval_phase), entry)
            for entry in entries
            if entry.case in during or not during
        )
        curve = dict[int, JsonObject]()
        for (step, _, phase), found in sorted(scorings.items()):
            scores = grouped((entry.case, entry.score) for entry in found if entry.score is not None)
            point = curve.setdefault(step, {"step": step})
            point[phase.rpartition("_")[2]] = interval_of_mean(scores, mixture)
            if phase.endswith("sampled"):
                point["environments"] = {one.name: interval_of_mean(scores, (one,)) for one in named(mixture)}
        return list(curve.values())

    # -- curves

    @cached_property
    def curves(self) -> tuple[list[int], Series]:
        """Steps, evenly spread if there are many, and the numbers of the training by their names, each as long."""
        lines = evenly([line for line in read_metrics(self.run.metrics) if not line.is_scoring], POINTS)
        names = dict.fromkeys(name for line in lines for name in line.values)
        drawn = {name: [line.values.get(name) for line in lines] for name in names}
        return [line.step for line in lines], {name: y for name, y in drawn.items() if set(y) != {None}}

    @property
    def rewards(self) -> list[float]:
        """The rewards of the training, without steps that have none."""
        return [value for value in self.curves[1].get("reward", []) if value is not None]

    # -- episodes

    @property
    def episodes(self) -> dict[str, Any]:
        """Numbers of episodes by kind, and the steps that have training episodes."""
        entries = self.rollouts.entries
        failures = Counter(entry.failure for entry in entries if entry.failure)
        return {
            "all": len(entries),
            "held_out": sum(entry.is_held_out for entry in entries),
            "failed": failures.total(),
            "damaged": self.rollouts.damaged,
            "failures": failures,
            "stops": Counter(entry.stop for entry in entries),
            "eval_phases": list(dict.fromkeys(entry.eval_phase for entry in entries if entry.eval_phase)),
            "steps": sorted({entry.step for entry in entries if not entry.eval_phase}),
        }

    # -- what next

    @property
    def is_over(self) -> bool:
        """Whether it is a training that came to its end, by its steps or by a rule; one that is being continued has the
        result of its earlier end."""
        has_ended = self.result.get("status") == "finished" or self.result.get("score_after") is not None
        return self.job == "grpo" and has_ended and self.status in ("finished", "stopped")

    @property
    def advice(self) -> str:
        """What the result of a training suggests; empty if there is nothing to add to the verdict."""
        return ADVICE.get(self.verdict, "") if self.is_over else ""

    @property
    def next_steps(self) -> list[dict[str, str]]:
        """Commands that follow on the result of a training that came to its end, and what each is for."""
        run, has_model = shlex.quote(str(self.run.path)), self.run.model.is_dir()
        has_rollouts = bool(self.run.rollout_files)  # to save space, both may have been deleted
        commands = {
            "talk to it": f"aitrain chat {run}" if has_model else "",
            "before and after, case by case": f"aitrain compare {run}" if has_rollouts and self.verdict else "",
            "every rollout in a browser": f"aitrain view {run}" if has_rollouts else "",
            "score it with more samples": f"aitrain eval {run} --samples 4" if has_model else "",
            "hand it over": f"aitrain export {run}" if has_model else "",
            "train longer": self.continuing(),
        }
        return [{"what": what, "command": command} for what, command in commands.items() if self.is_over and command]

    def continuing(self) -> str:
        """The command that continues the run; empty if nothing was saved, or the environment came from Python."""
        has_environment = self.options.get("rl_env") or self.options.get("rl_env_module")
        if not has_environment or not checkpoints_of(self.run):
            return ""
        command = f"aitrain grpo --config {shlex.quote(str(self.run.config))}"
        steps = self.result.get("steps")
        if self.recorded.get("status", "finished") == "finished" and steps:
            return f"{command} --resume --max-steps {2 * steps}"
        if "--patience" in (self.result.get("stopped_because") or ""):
            return f"{command} --resume --patience {2 * self.options['patience']}"
        return f"{command} --resume"

    # -- for pages

    def to_json(self) -> JsonObject:
        """The part of a page above the cases and rollouts, and `aitrain show --json`."""
        step, series = self.curves
        return {
            **self.state,
            "name": self.run.path.name,
            "model": self.model,
            "result": self.result,
            "environment": self.environment,
            "options": self.option_rows,
            "curves": {"step": step, "series": series},
            "machines": as_objects(self.recorded.get("nodes")),
            "scores": self.scores,
            "bounds": bounds_of_mean(self.mixture()),
            "held_out": self.held_out,
            "episodes": self.episodes,
            "verdict": self.verdict,
            "verdicts": {name: verdict_of(row["change"]) for name, row in self.scores.items()},
            "findings": [asdict(finding) for finding in findings_of(self.run)],
            "advice": self.advice,
            "next_steps": self.next_steps,
        }

    def row(self) -> dict[str, Any]:
        """The run in the table of runs, which has no time to parse: from small files and the end of metrics.jsonl."""
        metrics = end_of(self.run.metrics, MOST_METRICS).rpartition(b"\n")[0]
        rewards = re.findall(rb'"reward": (-?[\d.]+(?:e-?\d+)?)', metrics)
        state, row = self.state, next(iter(self.scores.values()), UNSCORED)
        return {
            **state,
            "name": self.run.path.name,
            "reason": str(state["reason"]).partition("\n")[0],
            "log": "",
            "model": self.model,
            "environment": self.environment_name,
            "options": self._plain_options(),
            "rewards": list(map(float, evenly(rewards, ROW_POINTS))),
            **row,
            "verdict": verdict_of(row["change"]),
            "seconds": self.result.get("seconds"),
        }

    def _plain_options(self) -> dict[str, str]:
        """The options of one line each, by which runs differ, without secrets; reading YAML of thousands of runs would
        take long."""
        text = end_of(self.run.config, 2**16).decode("utf-8", errors="replace")
        return {
            name: str(without_secrets(value))
            for name, value in re.findall(r"^(\w+): ([^{\[].{0,99})$", text, re.MULTILINE)
            if name not in OF_A_PLACE and (value.isdecimal() or not is_secret_name(name))  # tokens_per_pass: 64 is none
        }


def evenly(items: Sequence[Item], most: int) -> Sequence[Item]:
    """At most `most` items, evenly spread, with the first and the last one."""
    if len(items) <= most:
        return items
    return [items[round(place * (len(items) - 1) / max(1, most - 1))] for place in range(most)]


def _bare(mean: float | None) -> IntervalValues | None:
    """A score without an interval."""
    return None if mean is None else {"mean": mean, "low": None, "high": None, "count": None}


def _as_shown(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)


def end_of(path: Path, most: int) -> bytes:
    """The last bytes of a file, at most `most`."""
    try:
        with open(path, "rb", opener=regular) as file:
            file.seek(max(0, path.stat().st_size - most))
            return file.read(most)
    except OSError:
        return b""
