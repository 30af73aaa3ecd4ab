"""Checks of scores: right answers earn them in any form, they repeat, and no reply breaks the scorer."""

import math
from collections.abc import Iterator
from itertools import cycle, islice

from aitrain.environment.call_policy import RAN_BESIDE
from aitrain.environment.contract import Case
from aitrain.rollout.episode import Episode
from aitrain.workbench.check.probes import earned
from aitrain.workbench.check.replies import (
    HOSTILE,
    HOSTILE_ANSWERS,
    SPACES,
    equivalent_forms,
    quoted,
    rewrapped,
)
from aitrain.workbench.check.subject import (
    NO_SCALE,
    PASS,
    SLOW_SECONDS,
    EnvFinding,
    NotCheckedError,
    Subject,
    may_be_answer,
)
from aitrain.workbench.opening import NO_MODEL
from aitrain.workbench.player import JUNK, Constant, Policy, replied

MANY = 32
"""Episodes that are played at the same time, unless one takes longer than QUICK."""
QUICK = 0.05
MOST_FINDINGS = 3
REPEATS = 3
NOISE = 0.2
"""Difference of repeated scores from which training is hopeless."""


def reference(subject: Subject) -> Iterator[EnvFinding]:
    """The reference earns the highest score; without one that answers, a column that does is taken for it."""
    if not (subject.referenced or subject.reference_errors):
        column = subject.take_column() if subject.kind == "score_episode" else ""
        if not column:
            what = "There is no reference, nor a column that earns the highest score: what needs one is not checked."
            yield EnvFinding("info", what)
            return
        yield EnvFinding("info", f"There is no reference; column {column}, which earns the highest score, is taken.")
        wrong = [case for case in subject.sample if not subject.reference(case) and may_be_answer(case.row.get(column))]
        for case in wrong[:1]:
            yield EnvFinding(
                "warning",
                f"Column {column} earns less in {len(wrong)} of {len(subject.sample)} cases: {case.row[column]!r:.60}",
                "If the column has the right answers, they are not rewarded in these cases.",
                "Compare the scorer with it: letter case, spaces and type must fit. Or write `reference`.",
                case.case_idx,
            )
        return
    for error in subject.reference_errors[:1]:
        fix = "Return the right answer for each case_idx; check which case a row's case_idx means."
        yield EnvFinding("fail", error, fix=fix)
    low, high = subject.config.score_bounds
    zero = 0.0 if low <= 0.0 < high else low
    played = subject.play(subject.referenced)
    scored = [(score, one) for one in played if (score := one.result.score) is not None]
    if not scored:
        return
    score, worst = min(scored, key=lambda pair: pair[0])
    below = sum(one <= max(score, zero) for one, _ in scored)
    what = f"The reference earns {score:g} in {below} of {len(scored)} cases: {quoted(' | '.join(replied(worst)))}"
    if score <= zero:
        yield EnvFinding(
            "fail",
            f"{what}, stop {worst.stop}.",
            "Right answers are not rewarded, so that nothing can be learned in these cases.",
            "Compare the scorer with the reference: format, type and case must fit. Name the parameter `text` to get"
            " the reply as a string; `completion` is messages if the prompt is.",
            worst.case.case_idx,
        )
    elif score < high - 0.001 < math.inf:
        yield EnvFinding("info", f"{what}.", case_idx=worst.case.case_idx)


def equivalent_answers(subject: Subject) -> Iterator[EnvFinding]:
    """The reference in other forms.

    Raises:
        NotCheckedError: there is none that earns anything.
    """
    if not subject.decided:
        raise NotCheckedError(NO_SCALE)
    forms = [
        (name, case, script.ending_in(form))
        for case, script in subject.decided
        for name, form in equivalent_forms(script.replies[-1]).items()
    ]
    worst = [kind.what for kind in earned(subject, forms) if min(kind.shares) < PASS]
    for name, case, script in sorted(forms, key=lambda form: form[0] not in SPACES):
        if name in worst and (subject.share(subject.play_one(case, script)) or 0.0) < PASS:
            yield EnvFinding(
                "warning" if name in SPACES else "info",
                f"The reference {name} loses score: {script.replies[-1]!r:.60}. Forms that do: {', '.join(worst)}.",
                "Right answers in this form earn too little; if the model always writes so, all of its answers do.",
                "Compare reply.strip(), say in the prompt which form counts, or read the answer out of the reply.",
                case.case_idx,
            )
            return


# -- what the calls return or raise, over all episodes that were played

MISSING = "Such an episode is missing data: it trains nothing, and many of them end the run."
CATCH = "Catch it where the reply is parsed, and return 0 (or an error message in a conversation)."
OWN_STATE = (
    "Keep the state of an episode in local variables or in the object that `start` returns, protect what is shared with"
    " a lock, or use --rl-env-isolation process."
)
REMEDIES = {
    "out_of_range": "Declare the range with --rl-score-range, or scale it.",
    "wrong_type": "Return a number, in a conversation after the first answer.",
    "not_finite": "Return a number.",
    "timed_out": "Limit the time in the scorer: 0 if the reply is what takes long, None if something else is.",
    "server": "Let it raise, or return None: a 0 would punish a reply that may be right. It is tried again twice.",
}
"""How to mend a failure, by its kind; CATCH for the others."""


def exceptions(subject: Subject) -> Iterator[EnvFinding]:
    """All replies get a score in the range: nothing raises or hangs, and no service fails that the environment asks."""
    try:
        for case in subject.sample[:2]:
            # a column is often the right answer, and there may be no reference
            texts = [*HOSTILE, *subject.tool_calls, *(str(value)[:2000] for value in case.row.values())]
            subject.play((case, Constant(text)) for text in texts)
        for case, script in subject.decided[:2]:
            texts = [rewrapped(script.replies[-1], answer) for answer in HOSTILE_ANSWERS]
            subject.play((case, script.ending_in(text)) for text in texts)
    finally:  # what the first ones did is worth knowing if the time is over, perhaps because of them
        yield from _failures(subject)


def _failures(subject: Subject) -> Iterator[EnvFinding]:
    """The first failure at each place of the user's code, at most MOST_FINDINGS, and the first one of a service."""
    found: dict[str, EnvFinding] = {}
    unscored = [one for one in subject.episodes if one.result.score is None and one.result.failure is None]
    for episode in subject.episodes:
        failure = episode.result.failure
        if failure is None or (subject.model.used and NO_MODEL in failure.message):
            continue
        is_of_service = failure.kind == "server"  # which says nothing about the reply
        place = failure.kind if is_of_service else failure.message.partition("\n")[2] or failure.place
        fix = OWN_STATE if RAN_BESIDE in failure.message else REMEDIES.get(failure.kind, CATCH)
        what = f"For {_last_reply(episode)}: {failure.place} {failure.message}"
        finding = EnvFinding("warning" if is_of_service else "fail", what, MISSING, fix, episode.case.case_idx)
        found.setdefault(place, finding)
    yield from list(found.values())[:MOST_FINDINGS]
    if 2 * len(unscored) > len(subject.episodes):
        yield EnvFinding(
            "warning",
            f"{len(unscored)} of {len(subject.episodes)} episodes are unscored (None), as {_last_reply(unscored[0])}.",
            "Unscored episodes are left out of training: a wrong reply that is not scored is not punished.",
            "Return 0 for a wrong reply, and None only if the score is unknown.",
            unscored[0].case.case_idx,
        )


def _last_reply(episode: Episode) -> str:
    """The last reply of an episode in a few words."""
    text = "".join(replied(episode)[-1:])
    return f"the reply {quoted(text)}" if text.split() else "an empty reply"


def repeatable(subject: Subject) -> Iterator[EnvFinding]:
    """The same case, seed and replies give the same conversation and score: one episode after another (a few at once
    where they are slow), whatever was played before, and many at the same time."""
    pairs: list[tuple[Case, Policy]] = [*subject.referenced[:6]]
    pairs += [(case, JUNK) for case in subject.sample[:6]]
    pairs += [(subject.sample[0], Constant(call)) for call in subject.tool_calls]
    rows = [] if subject.referenced else subject.sample[:2]  # a column is often the right answer
    pairs += [(case, Constant(str(value))) for case in rows for value in case.row.values() if may_be_answer(value)]
    few = 1 if subject.episode_seconds <= SLOW_SECONDS else subject.at_once
    first = subject.replay(pairs, few)
    many = MANY if subject.episode_seconds < QUICK else subject.at_once
    for at_once in (*[few] * REPEATS, many):
        pairs, first = pairs[::-1], first[::-1]
        played = subject.replay(islice(cycle(pairs), max(len(pairs), at_once)), at_once)
        for before, after in zip(cycle(first), played, strict=False):
            change, what = difference(before, after)
            if change <= (1e-6 if at_once == few else NOISE):
                continue
            texts = (
                f"The same case, seed and replies got {what}: {_last_reply(before)}.",
                "Episodes of a group then differ by luck: the difference of their scores is noise.",
                "Draw from random.Random(seed), not from global random numbers; keep nothing from call to call.",
            )
            if at_once > few:
                subject.at_once = 1  # the other checks look for other things
                texts = (
                    f"With {many} episodes at the same time, and one by one, the same replies got {what}.",
                    "A training step plays its episodes at the same time: scores belong to the wrong replies.",
                    OWN_STATE,
                )
            yield EnvFinding("warning" if change < NOISE else "fail", *texts, before.case.case_idx)
            return
    for note in subject.notes[:1]:
        yield EnvFinding("info", note)


def difference(before: Episode, after: Episode) -> tuple[float, str]:
    """By how much the scores of two episodes with the same replies differ, infinite for other conversations or where
    only one failed; and what they got. An episode whose score is unknown differs from none."""
    results = before.result, after.result
    failures = [result.failure for result in results if result.failure and result.failure.kind != "server"]
    scores = [result.score for result in results if result.score is not None]
    if len(failures) + len(scores) < 2 or not scores:
        return 0.0, ""
    one, other = ([message.get("content") for message in episode.conversation] for episode in (before, after))
    if one != other:
        return math.inf, "different conversations"
    if failures:
        return math.inf, f"a score, and in the other episode: {failures[0].message}"
    return abs(scores[0] - scores[1]), f"scores of {scores[0]} and {scores[1]}"


def model_use(subject: Subject) -> Iterator[EnvFinding]:
    """score_episode does not generate with the model by itself."""
    subject.play_one(subject.sample[0], JUNK)
    if subject.model.used:
        yield EnvFinding(
            "warning",
            f"score_episode uses the model ({', '.join(sorted(subject.model.used))})."
            " Scores that need it were not checked.",
            "What the model says inside the scorer is not trained: only the first reply of a conversation learns.",
            "For a conversation write `episode` or `start`, in which every turn is trained.",
        )
