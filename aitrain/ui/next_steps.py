"""What to do after a run: advice on its result, the commands for it, and the command that continues the run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from typing import TypedDict

from aitrain.options.optimization import default_rate
from aitrain.runs.checkpoint import checkpoints_of
from aitrain.runs.diagnosis import RunTraits
from aitrain.runs.early_stop import perfect_score
from aitrain.runs.held_out import recorded_table
from aitrain.runs.json_values import JsonObject, as_float, as_int, as_text
from aitrain.runs.metrics_line import MetricsLine, read_metrics
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.runs.run_options import read_options
from aitrain.runs.statistics import Mixture, bounds_of_mean, recorded_mixture
from aitrain.runs.verdict import Verdict, verdict_of_scores


class NextStep(TypedDict):
    """A command, and what it is for."""

    what: str
    command: str


def verdict_of_result(result: JsonObject) -> Verdict | None:
    """The verdict on the scores of a result.json, that of older runs included."""
    return verdict_of_scores(recorded_table(result.get("scores")))


def advice(folder: RunFolder) -> str:
    """What the result of a training suggests, in a sentence or two; empty if there is nothing to add to the verdict."""
    result = read_object(folder.result)
    if not _is_over(folder, result):
        return ""
    match verdict_of_result(result):
        case "worse":
            return "A lower learning rate may help, and --save-best, which keeps the best step as the model."
        case "undetected" if learned_nothing(read_metrics(folder.metrics)) and _is_solved(folder):
            return (
                "All completions had nearly the highest score from the start, so nothing was learned: use harder cases,"
                " and see with aitrain env check whether wrong answers score less."
            )
        case "undetected" if learned_nothing(read_metrics(folder.metrics)):
            return (
                "In no step did the completions of a group differ in score, so nothing was learned: use easier cases,"
                " give partial credit, or raise --rl-num-generations or --rl-temperature."
            )
        case "undetected":
            return (
                "More steps may help; more held-out cases (--eval-cases) or samples of each (--eval-samples) show"
                " smaller differences."
            )
        case None:
            return "No cases were scored before and after (--eval-cases): nothing says whether the model is better."
        case "better":
            return ""


def next_steps(folder: RunFolder) -> list[NextStep]:
    """Commands that follow on the result of a training, the most useful first; none if it did not come to its end."""
    result = read_object(folder.result)
    if not _is_over(folder, result):
        return []
    run = shlex.quote(str(folder.path))
    chat: NextStep = {"what": "talk to it", "command": f"aitrain chat {run}"}
    view: NextStep = {"what": "every rollout in a browser", "command": f"aitrain view {run}"}
    look: list[NextStep] = [{"what": "before and after, case by case", "command": f"aitrain compare {run}"}, view]
    again: NextStep = {"what": "train with a lower rate", "command": _gentler(folder, result)}
    on: NextStep = {"what": "train longer", "command": continuing(folder)}
    match verdict_of_result(result):
        case "worse":
            steps = [again, *look]
        case None:
            steps = [on, view, chat]
        case "undetected":
            steps = [*look, chat] if learned_nothing(read_metrics(folder.metrics)) else [on, *look, chat]
        case "better":
            score: NextStep = {"what": "score it with more samples", "command": f"aitrain eval {run} --samples 4"}
            export: NextStep = {"what": "hand it over", "command": f"aitrain export {run}"}
            steps = [chat, *look, score, export, on]
    return [step for step in steps if step["command"]]


def continuing(folder: RunFolder) -> str:
    """The command that continues a run; empty if nothing was saved, or the environment came from Python."""
    command, options, result = _command(folder), read_options(folder.config), read_object(folder.result)
    if not command or not checkpoints_of(folder):
        return ""
    because, steps = as_text(result.get("stopped_because")), as_int(result.get("steps"))
    if read_object(folder.status).get("status", "finished") == "finished" and steps:
        return f"{command} --resume --max-steps {2 * steps}"
    if "--until" in because:
        higher = _higher_target(options, _mixture(folder), as_int(result.get("eval_cases")) or 0)
        return "" if higher is None else f"{command} --resume --until {higher:g}"
    if "--patience" in because:
        return f"{command} --resume --patience {2 * (as_int(options.get('patience')) or 1)}"
    return f"{command} --resume"


def _is_over(folder: RunFolder, result: JsonObject) -> bool:
    """Whether it is the result of a training that came to its end, by its steps or by a rule; a training that is being
    continued has the result of its earlier end."""
    is_training = as_text(result.get("job")) in ("", "grpo")
    has_ended = result.get("status") == "finished" or as_float(result.get("score_after")) is not None
    return is_training and has_ended and read_object(folder.status).get("status") in (None, "finished", "stopped")


def learned_nothing(lines: Iterable[MetricsLine]) -> bool:
    """Whether in every logged step the completions of each group had the same score, or the learning rate was 0, as in
    the first step of a warm-up."""
    steps = [line.values for line in lines if not line.is_scoring]
    return bool(steps) and all(
        step.get("frac_reward_zero_std") == 1.0 or step.get("learning_rate") == 0.0 for step in steps
    )


def _is_solved(folder: RunFolder) -> bool:
    """Whether the mean reward of each logged step was near the highest score."""
    traits = RunTraits(bounds_of_mean(_mixture(folder)))
    return all(
        traits.is_solved({"reward": line.reward or 0.0}) for line in read_metrics(folder.metrics) if not line.is_scoring
    )


def _command(folder: RunFolder) -> str:
    options = read_options(folder.config)
    if not (options.get("rl_env") or options.get("rl_env_module")):
        return ""
    return f"aitrain grpo --config {shlex.quote(str(folder.config))}"


def _gentler(folder: RunFolder, result: JsonObject) -> str:
    """The command that trains once more, with a third of the learning rate and the best step as the model."""
    command, options = _command(folder), read_options(folder.config)
    rate = as_float(options.get("lr")) or default_rate(options.get("peft") is True)
    if not command:
        return ""
    has_evaluations = any(line.is_scoring for line in read_metrics(folder.metrics))
    every = max(1, (as_int(result.get("steps")) or 1) // 10)
    evaluate = "" if has_evaluations else f" --eval-strategy steps --eval-steps {every}"
    return f"{command} --lr {rate / 3:.1g}{'' if options.get('save_best') else ' --save-best'}{evaluate}"


def _mixture(folder: RunFolder) -> Mixture:
    return recorded_mixture(read_object(folder.environment), read_options(folder.config), {})


def _higher_target(options: JsonObject, mixture: Mixture, cases: int) -> float | None:
    """A target between --until and what perfect scores reach; None if there is none."""
    until, perfect = as_float(options.get("until")), perfect_score(mixture, cases // len(mixture))
    if until is None or perfect is None or perfect["low"] is None:
        return None
    higher = math.floor((until + perfect["low"]) / 2 * 100) / 100
    return higher if higher > until else None
