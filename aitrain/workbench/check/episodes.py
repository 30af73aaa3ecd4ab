"""Checks of episodes: they end, repeat, do not disturb each other, run at the same time, and answer tool calls."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import cycle, islice

from aitrain.batch import plan_batch
from aitrain.environment.contract import Case
from aitrain.environment.tool_call_parser import ToolJson
from aitrain.environment.tools import function_part
from aitrain.workbench.check.scores import NOISE
from aitrain.workbench.check.subject import FEW, SLOW_SAMPLE, EnvFinding, Subject
from aitrain.workbench.player import EMPTY, JUNK, Policy, Script, is_of_service

MANY = 32
"""Episodes that are played at the same time; few of them if the environment is slow."""
SLOW = 1.0
"""Seconds per step from which the environment is called slow."""
BUDGET = 10.0
"""Seconds that the measurement may take, about."""
NEAR = 0.5
"""Share of --rl-env-timeout from which an episode is called slow."""
Pairs = list[tuple[Case, Policy]]


def _pairs(subject: Subject, count: int | None = None) -> Pairs:
    """The reference on the first cases of the sample, or a meaningless policy where there is none."""
    return [(case, subject.reference(case) or JUNK) for case in subject.sample[:count]]


def episode_end(subject: Subject) -> Iterator[EnvFinding]:
    """Episodes end by themselves."""
    scripts = [(case, script) for case in subject.sample[:SLOW_SAMPLE] if (script := subject.reference(case))]
    open_ended = [episode for episode in subject.play(scripts) if episode.stop in ("out_of_replies", "max_turns")]
    for episode in open_ended[:1]:
        yield EnvFinding(
            "warning",
            f"The episode continues after the reference's {len(episode.replies)} replies: {episode.stop}.",
            "Such episodes end at a limit, which costs turns, and their score is that of an unfinished episode.",
            "Return the score (or None from step) when the task is done.",
            episode.play.case.case_idx,
        )
    for policy, what in ((EMPTY, "empty replies"), (JUNK, "meaningless replies")):
        played = subject.play((case, policy) for case in subject.sample[:SLOW_SAMPLE])
        for episode in [episode for episode in played if episode.stop == "max_turns"][:1]:
            yield EnvFinding(
                "warning",
                f"With {what} an episode never ends by itself: it was stopped after {len(episode.replies)} turns.",
                "An early policy says such things, and every episode then costs --rl-max-turns generations.",
                "End the episode after a number of turns without progress, or lower --rl-max-turns.",
                episode.play.case.case_idx,
            )
            return


def repeatable_episode(subject: Subject) -> Iterator[EnvFinding]:
    """The same case, seed and replies give the same conversation."""
    pairs = _pairs(subject, 3)
    pairs += [(case, JUNK) for case in subject.sample[:2]]
    for before, after in zip(subject.play_alone(pairs), subject.play_alone(pairs), strict=True):
        is_known = not is_of_service(before.failure) and not is_of_service(after.failure)
        if is_known and before.heard != after.heard:
            yield EnvFinding(
                "fail",
                "The same case, seed and replies gave two different conversations.",
                "Episodes of a group then differ by luck: the difference of their scores is noise.",
                "Draw random numbers from random.Random(seed), and begin each episode with fresh state.",
                before.play.case.case_idx,
            )
            return


def isolation(subject: Subject) -> Iterator[EnvFinding]:
    """An episode is the same alone and between others."""
    pairs = _pairs(subject, 3)
    ways = subject.play_alone(pairs), subject.play_alone(pairs), subject.play_together(pairs)
    for before, again, after in zip(*ways, strict=True):
        first, second, third = [(episode.heard, episode.score) for episode in (before, again, after)]
        if first == second != third and not after.is_unknown:
            yield EnvFinding(
                "fail",
                f"An episode between others differs from the same one alone: score {before.score} and {after.score}.",
                "What one episode does changes another: scores belong to the wrong replies.",
                "Keep the state of an episode in local variables, or in the object that `start` returns.",
                before.play.case.case_idx,
            )
            return


def concurrency(subject: Subject) -> Iterator[EnvFinding]:
    """Many episodes at the same time give the same scores as one after another."""
    is_slow = any(episode.seconds > 0.05 for episode in subject.play(_pairs(subject, 2)))
    pairs = _pairs(subject)
    serial = subject.play_alone(pairs)
    many = list(islice(cycle(zip(pairs, serial, strict=True)), FEW if is_slow else MANY))
    for episode, (pair, alone) in zip(subject.play_together(pair for pair, _ in many), many, strict=True):
        if episode.is_unknown or alone.is_unknown:
            continue
        failure = None if alone.failure else episode.failure
        if failure or abs((episode.score or 0.0) - (alone.score or 0.0)) > NOISE:
            again = zip(subject.play_alone(pairs), serial, strict=True)
            if any(one.score != before.score and not one.is_unknown for one, before in again):
                break  # it is noise, which repeatable-score reports
            why = failure.message if failure else f"{episode.score} instead of {alone.score}"
            yield EnvFinding(
                "fail",
                f"With {len(many)} episodes at the same time: {why}.",
                "A training step plays its episodes at the same time, in threads.",
                "Protect shared state with a lock, keep it in the episode, or use --rl-env-isolation process.",
                pair[0].case_idx,
            )
            subject.is_serial = True  # the other checks look for other things
            break
    for note in subject.notes[:1]:
        yield EnvFinding("info", " ".join(note.split()))


def latency(subject: Subject) -> Iterator[EnvFinding]:
    """The episodes of a step take little time beside generation."""
    batch = plan_batch(subject.config, subject.config.num_processes or 1)
    wanted = batch.completions_per_step // batch.processes
    each = max(episode.seconds for episode in subject.play((case, JUNK) for case in subject.sample[:2]))
    count = max(1, min(wanted, int(BUDGET / max(each, 1e-6))))
    start = time.monotonic()
    played = subject.play_together(islice(cycle(_pairs(subject)), count))
    seconds = (time.monotonic() - start) * wanted / count
    slowest = max(played, key=lambda episode: episode.seconds)
    text = f"The environment adds {seconds:.2g} seconds to each step of {wanted} episodes"
    if seconds > SLOW:
        yield EnvFinding(
            "warning",
            f"{text}; the slowest took {slowest.seconds:.2g} seconds.",
            "The GPU waits for it in every step.",
            "Load data once in __init__; write calls that wait as `async def`; use --rl-env-isolation process for"
            " code that computes.",
            slowest.play.case.case_idx,
        )
    else:
        yield EnvFinding("info", f"{text}.")
    limit = subject.config.rl_env_timeout
    if slowest.failure is None and slowest.seconds > NEAR * limit:
        yield EnvFinding(
            "warning",
            f"An episode took {slowest.seconds:.3g} seconds of the environment's time; --rl-env-timeout is {limit:g}.",
            "On a busy machine calls time out, and their episodes are missing data.",
            "Make it faster, or raise --rl-env-timeout.",
            slowest.play.case.case_idx,
        )


# -- tools

EXAMPLES = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}


def tools(subject: Subject) -> Iterator[EnvFinding]:
    """Tools are described, and answer calls that make no sense with a message."""
    case = subject.sample[0]
    opened = subject.play_one(case, JUNK).reset
    functions = [function_part(schema) for schema in opened.tools]
    silent = [str(function.get("name")) for function in functions if not function.get("description")]
    if silent:
        yield EnvFinding(
            "warning",
            f"{len(silent)} of {len(functions)} tools have no description: {', '.join(silent[:5])}.",
            "The model sees only a name, and has to guess what the tool does.",
            "Write a docstring for each tool.",
        )
    for function in functions if opened.runs_tools else ():
        name = str(function.get("name"))
        for arguments in ({}, _example(function)):
            call = json.dumps({"name": name, "arguments": arguments})
            episode = subject.play_one(case, Script((f"<tool_call>{call}</tool_call>",)), again=True)
            if is_of_service(episode.failure):
                subject.episodes.append(episode)  # the check `exceptions` reports it
            elif episode.failure is not None and episode.failure.place == f"the tool {name}":
                yield EnvFinding(
                    "fail",
                    f"The tool {name} {episode.failure.message} for the arguments {json.dumps(arguments)}.",
                    "A policy that tries the tool loses the whole episode, and learns nothing from its mistake.",
                    "Return a message that says what is wrong with the arguments.",
                    case.case_idx,
                )
                break


def _example(function: ToolJson) -> dict[str, object]:
    """Arguments of the right types for a tool, without meaning."""
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    found: dict[str, object] = {}
    for name in parameters.get("required", properties):
        schema = properties.get(name, {})
        kinds = schema.get("type") or [one.get("type") for one in schema.get("anyOf", [])] or "string"
        kind = kinds if isinstance(kinds, str) else kinds[0]
        found[name] = schema["enum"][0] if schema.get("enum") else EXAMPLES.get(kind, "x")
    return found
