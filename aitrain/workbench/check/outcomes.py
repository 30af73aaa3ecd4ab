"""Checks of what the environment's calls return or raise, over all episodes that were played."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aitrain.execution.failure import Failure
from aitrain.workbench.check.exploits import probe
from aitrain.workbench.check.finding import EnvFinding
from aitrain.workbench.check.replies import HOSTILE, HOSTILE_ANSWERS, core_of, rewrapped
from aitrain.workbench.check.subject import NO_MODEL, NotCheckedError, Subject
from aitrain.workbench.player import EMPTY, JUNK, Constant, PlayedEpisode, Script, is_of_service

SCORE_KINDS = ("wrong_type", "not_finite", "out_of_range")
MOST_FINDINGS = 3
REPEATS = 3
NOISE = 0.2
"""Spread of repeated scores, as a share of the reference's, from which training is hopeless."""


def score_range(subject: Subject) -> Iterator[EnvFinding]:
    """Scores are finite numbers in the range."""
    stopped = _play_hostile(subject)
    for episode, failure in _first_of_each(subject.episodes, SCORE_KINDS):
        is_range = failure.kind == "out_of_range"
        yield EnvFinding(
            "score-range",
            "fail",
            _told(episode, failure, _first_line(failure)),
            "Such an episode is missing data: it trains nothing, and many of them end the run.",
            "Declare the range with --rl-score-range, or scale the score." if is_range else "Return a number.",
            episode.play.case.case_idx,
        )
    yield from _unscored(subject)
    if stopped:
        raise stopped


def _unscored(subject: Subject) -> Iterator[EnvFinding]:
    empty = [episode for episode in subject.episodes if episode.score is None and episode.failure is None]
    if empty and 2 * len(empty) > len(subject.episodes):
        yield EnvFinding(
            "score-range",
            "warning",
            f"{len(empty)} of {len(subject.episodes)} episodes are unscored (None), such as {_named(empty[0])}.",
            "Unscored episodes are left out of training: a wrong reply that is not scored is not punished.",
            "Return 0 for a wrong reply, and None only if the score is unknown.",
            empty[0].play.case.case_idx,
        )


def exceptions(subject: Subject) -> Iterator[EnvFinding]:
    """No reply makes the environment raise or hang."""
    stopped = _play_hostile(subject)
    yield from _service_failures(subject)
    of_replies = [episode for episode in subject.episodes if not is_of_service(episode.failure)]
    for episode, failure in _first_of_each(of_replies, ("raised", "crashed", "timed_out")):
        is_late = failure.kind == "timed_out"
        yield EnvFinding(
            "exceptions",
            "fail",
            _told(episode, failure, failure.message),
            "The policy is not punished for such a reply: the episode counts as missing, and many of them end the run.",
            "Limit the time in the scorer: 0 if the reply is what takes long, None if something else is."
            if is_late
            else "Catch it where the reply is parsed, and return 0 (or an error message in a conversation).",
            episode.play.case.case_idx,
        )
    if stopped:
        raise stopped


def _service_failures(subject: Subject) -> Iterator[EnvFinding]:
    """A service failed that the environment asks: the score is unknown, whatever the reply was."""
    failed = [episode for episode in subject.episodes if is_of_service(episode.failure)]
    if failed and (first := failed[0].failure):
        share = len(failed) / len(subject.episodes)
        yield EnvFinding(
            "exceptions",
            "fail" if share > subject.config.rl_max_failed else "warning",
            f"A service failed in {len(failed)} of {len(subject.episodes)} episodes: {first.place} {first.message}",
            "The score of the reply is unknown, so that the episode is missing data; if most are, the run ends.",
            "Let it raise, or return None: a 0 would punish a reply that may be right. --rl-env-retries tries again.",
            failed[0].play.case.case_idx,
        )


def _told(episode: PlayedEpisode, failure: Failure, message: str) -> str:
    """What failed for which reply, with the further lines of the message below."""
    first, *more = f"{failure.place} {message}".split("\n")
    return "\n".join([f"{first}, for {_named(episode)}.", *more])


def _play_hostile(subject: Subject) -> NotCheckedError | None:
    """Play them as far as there is time; what the first ones did is worth knowing if it is over, perhaps because of
    them."""
    try:
        count = 2 if subject.limit > len(subject.sample[:4]) else 1
        subject.play((case, Constant(text)) for text in HOSTILE.values() for case in subject.sample[:count])
        answered = subject.answered[:count]
        subject.play((case, Script((rewrapped(reply, text),))) for case, reply in answered for text in HOSTILE_ANSWERS)
        shortest = [(case, text) for case, reply in answered for text in (core_of(reply), reply.split()[-1])]
        subject.play((case, Script((text,))) for case, text in shortest)
    except NotCheckedError as stopped:
        return stopped
    return None


def _first_of_each(episodes: Sequence[PlayedEpisode], kinds: Sequence[str]) -> list[tuple[PlayedEpisode, Failure]]:
    """The first episode with each kind of failure at each place of the user's code, at most MOST_FINDINGS."""
    found: dict[tuple[str, str], tuple[PlayedEpisode, Failure]] = {}
    for episode in episodes:
        failure = episode.failure
        if failure is not None and failure.kind in kinds and NO_MODEL not in failure.message:
            where = failure.message.partition("\n")[2] or failure.place
            found.setdefault((failure.kind, where), (episode, failure))
    return list(found.values())[:MOST_FINDINGS]


def _named(episode: PlayedEpisode) -> str:
    """The reply of an episode in a few words."""
    policy = episode.play.policy
    text = policy.text if isinstance(policy, Constant) else " | ".join(turn.text for turn in episode.turns)
    kind = next((name for name, hostile in HOSTILE.items() if hostile == text), None)
    if kind:
        return kind
    line = " ".join(text.split())
    return f'the reply "{line if len(line) <= 60 else line[:57] + "..."}"' if line else "an empty reply"


def _first_line(failure: Failure) -> str:
    return failure.message.partition("\n")[0]


def repeatable_score(subject: Subject) -> Iterator[EnvFinding]:
    """The same reply gets the same score, whatever was scored before."""
    pairs = [(case, script) for case in subject.sample[:6] if (script := subject.reference(case))]
    pairs += [(case, Script(("the answer",))) for case in subject.sample[:6]]
    first = subject.play(pairs)
    for number in range(REPEATS):
        order = pairs[::-1] if number % 2 == 0 else pairs
        again = subject.play(order, again=True)
        for before, after in zip(first, again[::-1] if number % 2 == 0 else again, strict=True):
            if before.score is None or after.score is None or abs(before.score - after.score) < 1e-6:
                continue
            share = abs((subject.share(after) or after.score) - (subject.share(before) or before.score))
            yield EnvFinding(
                "repeatable-score",
                "fail" if share >= NOISE else "warning",
                f"The same reply got {before.score:g} and then {after.score:g}: {_named(before)}.",
                "The difference between scores of a group is noise instead of the policy's merit.",
                "Use random.Random(seed) instead of global random numbers, and keep nothing from call to call.",
                before.play.case.case_idx,
            )
            return
    for place in list(dict.fromkeys(subject.unseeded))[:1]:
        yield EnvFinding(
            "repeatable-score",
            "warning",
            f"A random generator has no seed, {place}",
            "It draws other numbers in every process and every run: equal replies may be scored differently, and no run"
            " can be repeated.",
            "Give it one: random.Random(seed); `seed` is an argument of episode and start.",
        )


def group_score(subject: Subject) -> Iterator[EnvFinding]:
    """score_group returns a score for each episode, and the reference's is not below that of a meaningless reply."""
    played = [
        subject.play([(case, script), (case, JUNK), (case, EMPTY), (case, script)])
        for case in subject.sample[:2]
        for script in [subject.reference(case) or Script(("the answer",))]
    ]
    for group, results in zip(played, subject.player.score_groups(played), strict=True):
        failure = next((one.failure for one in results if one.failure and not is_of_service(one.failure)), None)
        right, junk = results[0].score, results[1].score
        if failure is not None and failure.place == "score_group":
            what, fix = f"score_group {failure.message}", "Return a list with one score, or None, for each episode."
        elif subject.reference(group[0].play.case) and right is not None and junk is not None and right < junk:
            what = f"score_group gives the reference {right:g}, and a meaningless reply of the same group {junk:g}"
            fix = "Rank the episodes the other way round."
        else:
            continue
        why = "The scores of score_group are those that are trained on."
        yield EnvFinding("group-score", "fail", f"{what}.", why, fix, group[0].play.case.case_idx)
        return


def model_use(subject: Subject) -> Iterator[EnvFinding]:
    """score_episode does not generate with the model by itself."""
    probe(subject, {"reference": [(case, Script(("the answer",))) for case in subject.sample[:1]]})
    if subject.model.used:
        yield EnvFinding(
            "model-use",
            "warning",
            f"score_episode uses model.{subject.model.used[0]}. Scores that need the model were not checked.",
            "What the model says inside the scorer is not trained: only the first reply of a conversation learns.",
            "For a conversation write `episode` or `start`, in which every turn is trained.",
        )
