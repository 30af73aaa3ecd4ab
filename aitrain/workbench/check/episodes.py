"""Checks of episodes: they end, do not disturb each other, and take little time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import cycle, islice

from aitrain.batch import plan_batch
from aitrain.environment.contract import Case
from aitrain.rollout.episode import Episode
from aitrain.workbench.check.scores import NOISE, OWN_STATE
from aitrain.workbench.check.subject import AT_ONCE, SLOW_SAMPLE, EnvFinding, Subject
from aitrain.workbench.player import EMPTY, JUNK, Policy, heard, is_unknown, replied

MANY = 32
"""Episodes that are played at the same time; AT_ONCE if one takes longer than QUICK."""
QUICK = 0.05
SLOW = 1.0
"""Seconds per step from which the environment is called slow."""
BUDGET = 10.0
"""Seconds that the measurement may take, about."""


def _pairs(subject: Subject) -> list[tuple[Case, Policy]]:
    """The reference of each case of the sample, or a meaningless policy where there is none."""
    return [(case, subject.reference(case) or JUNK) for case in subject.sample]


def episode_end(subject: Subject) -> Iterator[EnvFinding]:
    """Episodes end by themselves."""
    cases = subject.sample[:SLOW_SAMPLE]
    pairs = [(case, policy) for case in cases for policy in (subject.reference(case), EMPTY, JUNK) if policy]
    for episode in [one for one in subject.play(pairs) if one.stop in ("out_of_replies", "max_turns")][:1]:
        replies, stop = replied(episode), episode.stop
        yield EnvFinding(
            "warning",
            f"An episode does not end by itself: {stop} after {len(replies)} replies, such as {replies[:1]}.",
            "Such an episode costs up to --rl-max-turns generations, and its score is that of an unfinished one.",
            "Return the score (or None from step) when the task is done, or after some turns without progress.",
            episode.case.case_idx,
        )


def concurrency(subject: Subject) -> Iterator[EnvFinding]:
    """Episodes at the same time are as they are one after another."""
    pairs = _pairs(subject)
    alone = [subject.play_one(*pair, again=True) for pair in pairs]
    count = MANY if subject.episode_seconds < QUICK else AT_ONCE
    beside = subject.play_together(islice(cycle(pairs), count))
    different = [(one, other) for one, other in zip(cycle(alone), beside, strict=False) if not _are_alike(one, other)]
    # else it is noise, which `repeatable` finds
    if different and all(
        _are_alike(one, subject.play_one(*pair, again=True)) for pair, one in zip(pairs, alone, strict=True)
    ):
        before, after = different[0]
        said = "" if heard(before) == heard(after) else ", and another conversation"
        what = f"a score of {after.result.score} instead of {before.result.score}{said}"
        failure = after.result.failure
        yield EnvFinding(
            "fail",
            f"With {count} episodes at the same time: {failure.message if failure else what}.",
            "A training step plays its episodes at the same time: scores belong to the wrong replies.",
            OWN_STATE,
            before.case.case_idx,
        )
        subject.is_serial = True  # the other checks look for other things
    for note in subject.notes[:1]:
        yield EnvFinding("info", " ".join(note.split()))


def _are_alike(one: Episode, other: Episode) -> bool:
    """Whether two episodes of the same replies are the same, as far as is known."""
    if is_unknown(one) or is_unknown(other):
        return True
    is_alike = heard(one) == heard(other) and (one.result.failure is None) == (other.result.failure is None)
    return is_alike and abs((one.result.score or 0.0) - (other.result.score or 0.0)) <= NOISE


def latency(subject: Subject) -> Iterator[EnvFinding]:
    """The episodes of a step take little time beside generation."""
    batch = plan_batch(subject.config, subject.config.num_processes or 1)
    wanted = batch.completions_per_step // batch.processes
    count = max(1, min(wanted, int(BUDGET / max(subject.episode_seconds, 1e-6))))
    start = time.monotonic()
    played = subject.play_together(islice(cycle(_pairs(subject)), count))
    seconds = (time.monotonic() - start) * wanted / count
    slowest = max(episode.session.seconds for episode in played)
    is_slow = seconds > SLOW
    yield EnvFinding(
        "warning" if is_slow else "info",
        f"The environment adds {seconds:.2g} seconds to each step of {wanted} episodes; the slowest took"
        f" {slowest:.2g} seconds.",
        "The GPU waits for it in every step." if is_slow else "",
        "Load data once in __init__; await what takes long in an `async def`, where time.sleep or requests block all"
        " others; use --rl-env-isolation process for code that computes."
        if is_slow
        else "",
    )
