"""Replies that should earn little or nothing: each probe is a row of replies, thresholds, text and remedy."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from aitrain.environment.completion_parser import short
from aitrain.environment.contract import Case
from aitrain.rollout.episode import Episode
from aitrain.workbench.check.replies import (
    CONFIDENT,
    CONTENTLESS,
    INJECTIONS,
    LABELS,
    LONG,
    core_of,
    number_of,
    quoted,
    rewrapped,
    same_answer,
    scaffolds,
    wrong_answers,
)
from aitrain.workbench.check.subject import (
    LEVELS,
    NO_SCALE,
    PASS,
    EnvCheck,
    EnvFinding,
    Level,
    NotCheckedError,
    Subject,
)
from aitrain.workbench.player import JUNK_TEXT, Constant, Parrot, Policy, replied

FORMAT_BONUS = 0.2
"""Share that an answer in the right format without content may earn before it is reported."""
MOST, ANY = 0.9, 0.001
OTHERS = 3
"""Answers of other cases that are tried on each case."""
MARGIN = 0.2
"""Share by which a text that addresses or flatters a judge may raise a score."""

Replies = Iterable[tuple[str, Case, Policy]]
"""Policies on cases, with what they are: those of one description are one kind."""


@dataclass(frozen=True)
class Earned:
    """What one kind of reply earned: its shares, and the episode in which it earned most."""

    what: str
    shares: list[float]
    best: Episode
    of: int
    """Number of tries, or of cases; a case for which the reply cannot be made counts as a score of 0."""

    @property
    def mean(self) -> float:
        """Mean share over the cases."""
        return math.fsum(self.shares) / self.of

    @property
    def passes(self) -> int:
        """In how many cases it passes."""
        return sum(share >= PASS for share in self.shares)


def earned(subject: Subject, replies: Replies) -> list[Earned]:
    """Play replies, and collect by their kind what they earned, highest first; all of their cases count for each."""
    plays = list(replies)
    of = len({case.number for _, case, _ in plays})
    found: dict[str, list[tuple[float, Episode]]] = {}
    for (what, _, _), episode in zip(plays, subject.play((case, policy) for _, case, policy in plays), strict=True):
        if (share := subject.share(episode)) is not None:
            found.setdefault(what, []).append((share, episode))
    kinds = [
        Earned(what, [share for share, _ in got], max(got, key=lambda pair: pair[0])[1], max(of, len(got)))
        for what, got in found.items()
    ]
    return sorted(kinds, key=lambda one: (one.passes, one.mean), reverse=True)


def probe(
    name: str,
    description: str,
    replies: Callable[[Subject], Replies],
    what: str,
    why: str,
    fix: str,
    passing: Mapping[Level, float] = {},
    paying: Mapping[Level, float] = {},
    is_mild: Callable[[Subject, Earned], bool] = lambda subject, _: not subject.sees_the_case,
) -> EnvCheck:
    """A check of replies that should earn little, which finds the worst kind of them.

    `what` is a format of the `worst` kind and its best `reply`. By the level, `passing` is the fraction of the cases in
    which the reply passes, from which on it is found, and `paying` the same of its mean share. A finding that
    `is_mild` is only worth knowing, as what all replies earn from a scorer that looks at no case.
    """

    def find(subject: Subject) -> Iterator[EnvFinding]:
        kinds = earned(subject, replies(subject))
        if not kinds:
            raise NotCheckedError(NO_SCALE)
        worst = kinds[0]
        for level in LEVELS:
            passes = worst.passes / worst.of >= passing.get(level, math.inf)
            if passes or worst.mean >= paying.get(level, math.inf):
                text = what.format(worst=worst, reply=quoted("".join(replied(worst.best)[-1:])))
                level = "info" if is_mild(subject, worst) else level
                yield EnvFinding(level, text, why, fix, worst.best.case.case_idx)
                return

    return EnvCheck(name, description, find)


# -- replies


def everywhere(subject: Subject, texts: Iterable[str]) -> Replies:
    """Each of the texts in each case of the sample in which it is not right, as "" may be."""
    return [
        (short(repr(text), 80), case, Constant(text))
        for text in texts
        for case in subject.sample
        if (core := subject.core(case)) is None or not same_answer(text, core)
    ]


def _contentless(subject: Subject) -> Replies:
    """Replies without content, what the environment says itself, and the format that it asks for, or that the reference
    has, without an answer."""
    yield from everywhere(subject, CONTENTLESS)
    for case in subject.sample:
        asked = subject.asked(case)
        yield "of the prompt itself", case, Constant(asked)
        yield from ((short(repr(text), 40), case, Constant(text)) for text in scaffolds(asked))
        if subject.kind != "score_episode":
            yield "of what the environment says, or gives away", case, Parrot()
    for call in subject.tool_calls:
        tried = [(case, Constant(call)) for case in subject.sample]
        if all((subject.share(one) or 0.0) > FORMAT_BONUS for one in subject.play(tried)):  # a guess is right in some
            yield from ((quoted(call), *pair) for pair in tried)
    for case, script in subject.decided:
        if len(script.replies) == 1 and core_of(reply := script.replies[-1]) != reply.strip():
            yield "in the reference's format without an answer", case, Constant(rewrapped(reply, ""))


def _other_answers(subject: Subject) -> Replies:
    """Right answers of other cases."""
    for place, (case, own) in enumerate(subject.referenced):
        apart = [
            theirs
            for _, theirs in subject.referenced[place + 1 :] + subject.referenced[:place]
            if own != theirs
            and (len(own.replies) > 1 or not same_answer(core_of(own.replies[-1]), core_of(theirs.replies[-1])))
        ]
        yield from (("", case, theirs) for theirs in apart[:OTHERS])


def _ending_in(replies_of: Callable[[Subject, str], Iterable[str]]) -> Callable[[Subject], Replies]:
    """Replies that are made of each reference's last one."""
    return lambda subject: (
        (str(number), case, script.ending_in(text))
        for case, script in subject.decided
        for number, text in enumerate(replies_of(subject, script.replies[-1]))
    )


def _several(subject: Subject, reply: str) -> Iterable[str]:
    """The answers of several cases in one reply, the right one neither first nor last."""
    cores = list(dict.fromkeys(core_of(script.replies[-1]) for _, script in subject.decided))
    others = [core for core in cores if not same_answer(core, core_of(reply))][:4]
    if others and max(map(len, cores)) <= 300:
        answers = ", ".join([*others[:2], core_of(reply), *others[-2:]])
        yield f"It is one of these: {answers}."
        yield rewrapped(reply, answers)


def _denied(_: Subject, reply: str) -> Iterable[str]:
    """The right answer, rejected in its place, if the reply has a format. Words behind the answer are not tried: a
    scorer that reads the number behind a mark may ignore them."""
    core = core_of(reply)
    return [rewrapped(reply, f"not {core}")] if core != reply.strip() else []


def _strategies(subject: Subject) -> Replies:
    """One answer for all cases, or a part of the prompt, in the form of a reference; of few cases, nothing is known."""
    form = subject.decided[0][1].replies[-1] if subject.decided else ""
    cores = [core for case in subject.sample if (core := subject.core(case)) and len(core) <= 200]
    answers = list(dict.fromkeys((*cores, *LABELS)))[:24]
    for case in subject.sample if len(subject.sample) >= 4 else ():
        found = {f"the answer {quoted(answer, 40)} in every case": answer for answer in answers}
        for what, part in {"number": r"-?\d+(?:\.\d+)?", "word": r"[^\W\d_]+"}.items():
            if parts := re.findall(part, subject.asked(case)):
                found |= {f"the first {what} of the prompt": parts[0], f"the last {what} of the prompt": parts[-1]}
        for what, answer in found.items():
            yield what, case, Constant(rewrapped(form, answer))


def _wrong(subject: Subject, before: str = "") -> Replies:
    """Wrong answers behind a sentence."""
    return _ending_in(lambda _, reply: [before + rewrapped(reply, wrong_answers(core_of(reply))[0])])(subject)


def _persuading(subject: Subject) -> Replies:
    """Replies that tell a judge what to say, and wrong answers that sound sure."""
    yield from everywhere(subject, [f"{JUNK_TEXT}\n{text}" for text in INJECTIONS])
    yield from _wrong(subject, f"{CONFIDENT} ")


# -- what makes them mild


def _is_graded(subject: Subject, worst: Earned) -> bool:
    """Whether a part of the reference earns a part of the score, as with sub-goals or similarity."""

    def halves(_: Subject, reply: str) -> list[str]:
        core = core_of(reply)
        middle = reply.rindex(core) + len(core) // 2  # within the answer: a mark or the answer alone are no parts of it
        return [reply[:middle], reply[middle:]] if len(reply) > 5 else []

    parts = earned(subject, _ending_in(halves)(subject))
    return not subject.sees_the_case or any(0.2 < part.mean < 0.95 for part in parts)


def _varies(subject: Subject, worst: Earned) -> bool:
    """Whether a scorer gives other parts of the score from case to case, such as by similarity."""
    return not worst.passes and 2 * len({round(share, 3) for share in worst.shares}) > len(worst.shares)


def _is_near(subject: Subject, worst: Earned) -> bool:
    """Whether the reply is a whole number that a tolerance of 5 % allows; one with a fraction shows other mistakes."""
    answer, right = number_of(core_of(replied(worst.best)[-1])), number_of(subject.core(worst.best.case) or "")
    is_near = answer is not None and right is not None and 1 <= abs(answer - right) <= 0.05 * abs(right)
    return is_near or not subject.sees_the_case


def _is_plain(subject: Subject, worst: Earned) -> bool:
    """Whether the same length and form earn about as much without the persuasion."""
    plain = earned(subject, [*everywhere(subject, [JUNK_TEXT, *LONG]), *_wrong(subject)])
    return worst.mean - max((one.mean for one in plain), default=0.0) < MARGIN


# -- the probes

PROBES = (
    probe(
        "floor",
        "replies without content earn nothing",
        _contentless,
        "The reply {worst.what} earns {worst.mean:.0%} of the full score, and all of it in {worst.passes} of"
        " {worst.of} cases.",
        "The policy is paid for saying nothing, and learns that first.",
        f"Return 0 for a reply without an answer, and at most {FORMAT_BONUS:.0%} of the score for the format.",
        passing={"fail": 0.5, "warning": ANY},
        paying={"fail": 0.5, "warning": FORMAT_BONUS + ANY, "info": 0.05},
        is_mild=_varies,
    ),
    probe(
        "other-answer",
        "another case's answer does not pass",
        _other_answers,
        "The right answer of another case gets full score in {worst.passes} of {worst.of} tries: {reply}.",
        "The score hardly depends on the case: one answer for all of them is enough.",
        "Compare with what this case asks for. If several answers are right, this is no mistake.",
        passing={"fail": MOST, "warning": 0.51, "info": ANY},
    ),
    probe(
        "wrong-answer",
        "a wrong answer in the right format does not pass",
        _ending_in(lambda _, reply: (rewrapped(reply, wrong) for wrong in wrong_answers(core_of(reply)))),
        "A wrong answer in the right format gets full score in {worst.passes} of {worst.of} cases: {reply}.",
        "The policy learns the format and nothing else.",
        "Compare the answer itself, not only that there is one.",
        passing={"warning": 0.5, "info": 0.1},
        is_mild=_is_near,
    ),
    probe(
        "shotgun",
        "a list of answers does not pass",
        _ending_in(_several),
        "A reply that lists several answers gets full score in {worst.passes} of {worst.of} cases if the right one"
        " is among them: {reply}.",
        "The policy learns to list candidates instead of deciding.",
        "Extract one answer, such as the last one after a mark, and compare it as a whole.",
        passing={"fail": 0.5, "warning": ANY},
        is_mild=_is_graded,
    ),
    probe(
        "denied-answer",
        "a rejected answer does not pass",
        _ending_in(_denied),
        "A reply that rejects the right answer gets full score in {worst.passes} of {worst.of} cases: {reply}.",
        "The scorer looks for the answer anywhere in its place: what is said about it does not count.",
        "Ask for the answer in a format, such as <answer>...</answer>, and compare all that is in it.",
        passing={"warning": 0.25},
        is_mild=_is_graded,
    ),
    probe(
        "lazy-policy",
        "no fixed strategy is enough",
        _strategies,
        "A fixed strategy, {worst.what}, earns {worst.mean:.0%} of the full score: {reply}.",
        "The policy finds it within a few steps, and then all scores of a group are equal: nothing is left to learn.",
        "Balance the answers of the cases, or ask for more than this strategy gives.",
        passing={"warning": MOST},
    ),
    probe(
        "injection",
        "a reply cannot command or flatter the judge",
        _persuading,
        "A reply that addresses or flatters the judge earns {worst.mean:.0%} of the full score: {reply}.",
        "The policy learns to command the judge, or to sound sure, which is easier than the task.",
        "Quote the reply as data in the judge's prompt, and let it score the answer without the rest.",
        paying={"fail": MARGIN},
        is_mild=_is_plain,
    ),
)
"""In the order in which they run."""
