"""Checks of episodes: they end, repeat, do not disturb each other, and run at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from aitrain.environment.contract import Case
from aitrain.workbench.check.finding import EnvFinding
from aitrain.workbench.check.outcomes import NOISE
from aitrain.workbench.check.subject import FEW, SLOW_SAMPLE, Subject
from aitrain.workbench.player import EMPTY, JUNK, PlayedEpisode, Policy, is_of_service, is_unknown

MANY = 32
"""Episodes that are played at the same time; few of them if the environment is slow."""


def episode_end(subject: Subject) -> Iterator[EnvFinding]:
    """Episodes end by themselves."""
    if subject.kind == "score_episode":
        return
    sample = subject.sample[:SLOW_SAMPLE]
    scripts = [(case, script) for case in sample if (script := subject.reference(case))]
    open_ended = [episode for episode in subject.play(scripts) if episode.stop in ("out_of_replies", "max_turns")]
    if open_ended:
        yield EnvFinding(
            "episode-end",
            "warning",
            f"The episode continues after the reference's {len(open_ended[0].turns)} replies: {open_ended[0].stop}.",
            "Such episodes end at a limit, which costs turns, and their score is that of an unfinished episode.",
            "Return the score (or None from step) when the task is done.",
            open_ended[0].play.case.case_idx,
        )
    for policy, what in ((EMPTY, "empty replies"), (JUNK, "meaningless replies")):
        endless = [
            episode for episode in subject.play((case, policy) for case in sample) if episode.stop == "max_turns"
        ]
        if endless:
            yield EnvFinding(
                "episode-end",
                "warning",
                f"With {what} an episode never ends by itself: it was stopped after {len(endless[0].turns)} turns.",
                "An early policy says such things, and every episode then costs --rl-max-turns generations.",
                "End the episode after a number of turns without progress, or lower --rl-max-turns.",
                endless[0].play.case.case_idx,
            )
            return


def repeatable_episode(subject: Subject) -> Iterator[EnvFinding]:
    """The same case, seed and replies give the same conversation."""
    if subject.kind == "score_episode":
        return
    pairs = _pairs(subject, subject.sample[:3])
    pairs += [(case, JUNK) for case in subject.sample[:2]]
    first, second = [[subject.play_one(*pair, again=True) for pair in pairs] for _ in range(2)]
    for before, after in zip(first, second, strict=True):
        if is_of_service(before.failure) or is_of_service(after.failure):
            continue
        if _said(before) != _said(after):
            yield EnvFinding(
                "repeatable-episode",
                "fail",
                "The same case, seed and replies gave two different conversations.",
                "Episodes of a group then differ by luck: the difference of their scores is noise.",
                "Draw random numbers from random.Random(seed), and begin each episode with fresh state.",
                before.play.case.case_idx,
            )
            return


def isolation(subject: Subject) -> Iterator[EnvFinding]:
    """An episode is the same alone and between others."""
    if subject.kind == "score_episode" or len(subject.sample) < 2:
        return
    pairs = _pairs(subject, subject.sample[:3])
    alone = [subject.play_one(*pair, again=True) for pair in pairs]
    repeated = [subject.play_one(*pair, again=True) for pair in pairs]
    together = subject.play_together(pairs)
    for before, again, after in zip(alone, repeated, together, strict=True):
        is_steady = _said(before) == _said(again) and before.score == again.score and not is_unknown(after)
        if is_steady and (_said(before) != _said(after) or before.score != after.score):
            yield EnvFinding(
                "isolation",
                "fail",
                f"An episode between others differs from the same one alone: score {before.score} and {after.score}.",
                "What one episode does changes another: scores belong to the wrong replies.",
                "Keep the state of an episode in local variables, or in the object that `start` returns.",
                before.play.case.case_idx,
            )
            return


def concurrency(subject: Subject) -> Iterator[EnvFinding]:
    """Many episodes at the same time give the same scores as one after another."""
    is_slow = any(episode.seconds > 0.05 for episode in subject.play(_pairs(subject, subject.sample[:2])))
    pairs = _pairs(subject, subject.sample)
    serial = [subject.play_one(*pair, again=True) for pair in pairs]
    many = list(islice(cycle(zip(pairs, serial, strict=True)), FEW if is_slow else MANY))
    for episode, (pair, alone) in zip(subject.play_together(pair for pair, _ in many), many, strict=True):
        if is_unknown(episode) or is_unknown(alone):
            continue
        failed = episode.failure is not None and alone.failure is None
        differs = abs((episode.score or 0.0) - (alone.score or 0.0)) > NOISE
        if failed or differs:
            again = [(subject.play_one(*one, again=True), before) for one, before in many]
            if any(one.score != before.score and not is_unknown(one) for one, before in again):
                break  # it is noise, which repeatable-score reports
            why = episode.failure.message if episode.failure else f"{episode.score} instead of {alone.score}"
            yield EnvFinding(
                "concurrency",
                "fail",
                f"With {len(many)} episodes at the same time: {why}.",
                "A training step plays its episodes at the same time, in threads.",
                "Protect shared state with a lock, keep it in the episode, or use --rl-env-isolation process.",
                pair[0].case_idx,
            )
            subject.is_serial = True  # the other checks look for other things
            break
    for note in subject.notes[:1]:
        yield EnvFinding("concurrency", "info", " ".join(note.split()), "", "")


def _pairs(subject: Subject, cases: Sequence[Case]) -> list[tuple[Case, Policy]]:
    """The reference on each case, or a meaningless policy where there is none."""
    return [(case, subject.reference(case) or JUNK) for case in cases]


def _said(episode: PlayedEpisode) -> tuple[object, ...]:
    """What the environment said in an episode."""
    own = [message["content"] for message in episode.messages if message["role"] != "assistant"]
    return (*(message["content"] for message in episode.conversation.reset.messages), *own)
