"""Checks of scores: right answers earn them in any form, no other reply does, and they are numbers that repeat."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from aitrain.environment.contract import Case
from aitrain.workbench.check.replies import (
    CONFIDENT,
    CONTENTLESS,
    HOSTILE,
    HOSTILE_ANSWERS,
    INJECTIONS,
    LABELS,
    NOT_A_NUMBER,
    SPACES,
    core_of,
    denials,
    denials_in_format,
    equivalent_forms,
    lazy_answers,
    quoted,
    rewrapped,
    same_answer,
    scaffolds,
    shotguns,
    text_of,
    wrong_answers,
)
from aitrain.workbench.check.subject import NO_MODEL, PASS, EnvFinding, Level, NotCheckedError, Subject
from aitrain.workbench.player import (
    EMPTY,
    JUNK,
    JUNK_TEXT,
    Constant,
    Parrot,
    PlayedEpisode,
    Policy,
    Script,
    as_messages,
    is_of_service,
)

NOTHING = 0.05
"""Share up to which a reply earns nothing."""
LITTLE = 0.1
"""Share below which a reply without content earns so little that it is only mentioned."""
FORMAT_BONUS = 0.2
"""Share that an answer in the right format without content may earn before it is reported."""
MOST, ANY = 0.9, 0.001
GRADES = 6
"""Different scores of replies without content from which a scorer is taken to be graded, such as by similarity."""
ECHO = "The prompt itself"
OTHERS = 3
"""Answers of other cases that are tried on each case."""
MARGIN = 0.2
"""Share by which a text that addresses or flatters a judge may raise a score."""
MOST_FINDINGS = 3
REPEATS = 3
NOISE = 0.2
"""Spread of repeated scores, as a share of the reference's, from which training is hopeless."""
THE_ANSWER = Script(("the answer",))

Replies = Iterable[tuple[str, Case, Policy]]
"""Policies on cases, with what they are: those of one description are one kind."""


@dataclass(frozen=True)
class Earned:
    """What one kind of reply earned: its shares, and the episode in which it earned most."""

    what: str
    shares: list[float]
    best: PlayedEpisode
    of: int
    """Number of the cases; one in which the reply cannot be made earns nothing."""

    @property
    def reply(self) -> str:
        """What it said there, shortened; the last reply of a conversation."""
        return quoted(self.best.replies[-1]) if self.best.replies else "no reply"

    @property
    def mean(self) -> float:
        """Mean share over the cases."""
        return math.fsum(self.shares) / self.of

    @property
    def passes(self) -> int:
        """In how many cases it passes."""
        return sum(share >= PASS for share in self.shares)

    @property
    def passing(self) -> float:
        """Fraction of the cases in which it passes."""
        return self.passes / self.of

    @property
    def count(self) -> str:
        """`3 of 4`: the cases in which it passes."""
        return f"{self.passes} of {self.of}"

    def finding(self, level: Level, what: str, why: str, fix: str) -> EnvFinding:
        """A finding, with the case in which it earned most."""
        return EnvFinding(level, what, why, fix, self.best.play.case.case_idx)


def earned(subject: Subject, replies: Replies, of: int = 0) -> list[Earned]:
    """Play replies, and collect by their kind what they earned in `of` cases, or in those in which there is a score;
    highest first."""
    plays = list(replies)
    found: dict[str, list[tuple[float, PlayedEpisode]]] = {}
    for (what, _, _), episode in zip(plays, subject.play((case, policy) for _, case, policy in plays), strict=True):
        if (share := subject.share(episode)) is not None:
            found.setdefault(what, []).append((share, episode))
    kinds = [
        Earned(what, [share for share, _ in got], max(got, key=lambda pair: pair[0])[1], max(of, len(got)))
        for what, got in found.items()
    ]
    return sorted(kinds, key=lambda one: (one.passing, one.mean), reverse=True)


def everywhere(subject: Subject, texts: Iterable[str], before: str = "") -> Replies:
    """Each of the texts in each case of the sample."""
    blank = {"": "An empty reply", " ": "A reply of spaces"}
    named = [(blank.get(text[:1] if text.isspace() else text, quoted(text, 80)), text) for text in texts]
    return [(what, case, Constant(before + text)) for what, text in named for case in subject.sample]


# -- replies without the right answer


def floor(subject: Subject) -> Iterator[EnvFinding]:
    """Replies without content."""
    asked = [(ECHO, case, Constant(subject.asked(case)[:2000])) for case in subject.sample]
    replies: list[tuple[str, Case, Policy]] = [*everywhere(subject, CONTENTLESS), *asked]
    for case, script in subject.referenced:
        if len(script.replies) > 1:
            replies.append(("The reference's last reply alone", case, Script(script.replies[-1:])))
    if subject.kind != "score_episode":
        for case in subject.sample:
            replies.append(("Repeating what the environment says", case, Parrot()))
            replies.append(("Repeating an answer that the environment gives away", case, Parrot(only_answer=True)))
    shows_format = any(scaffolds(policy.text) for _, _, policy in asked)
    paid = [
        one
        for one in earned(subject, replies)
        # some cases may pay much more than others
        if one.passes
        or max(one.mean, max(one.shares) - NOTHING) > (FORMAT_BONUS if shows_format and one.what == ECHO else NOTHING)
    ]
    if not paid:
        return
    worst, *others = paid
    most = max(worst.shares)
    is_graded = len({round(share, 3) for one in paid for share in one.shares}) > GRADES
    if worst.passing >= 0.5 or worst.mean >= MOST:
        level: Level = "fail"
    else:
        level = "info" if not worst.passes and (is_graded or worst.mean < LITTLE) else "warning"
    yield worst.finding(
        level,
        f"{worst.what} earns {subject.shown(worst.mean)}"
        f"{f', up to {most:.0%} in a case' if most - NOTHING > worst.mean else ''}"
        f"{f' and full score in {worst.count} cases' if worst.passes else ''}."
        f"{f' So do {len(others)} other replies without content.' if others else ''}",
        "The policy is paid for saying nothing, and learns that first.",
        "Return 0 for a reply without an answer; a partial score should need a part of the answer.",
    )


# -- probes: replies, thresholds, text and remedy


@dataclass(frozen=True)
class ReplyProbe:
    """Replies that should earn little, and what is said if they do not."""

    replies: Callable[[Subject], Replies]
    limits: Mapping[Level, float]
    """From which amount on it is found at which level; the highest level first."""
    what: str
    """What was found: a format of `what`, `mean`, `shown`, `count`, `reply` and `plain`."""
    why: str
    fix: str
    cases: Callable[[Subject], Sequence[object]] = lambda _: ()
    """The cases that count also if a reply cannot be made in them."""
    is_mild: Callable[[Subject], bool] = lambda _: False
    """Whether it is only worth knowing."""
    by_mean: bool = False
    """Whether the amount is the mean share, and not the fraction of the cases in which the reply passes."""
    plain: Callable[[Subject], Replies] = lambda _: ()
    """Replies whose mean share is taken off that of the others."""

    def __call__(self, subject: Subject) -> Iterator[EnvFinding]:
        """The finding about the worst kind."""
        before = max((one.mean for one in earned(subject, self.plain(subject))), default=0.0)
        for worst in earned(subject, self.replies(subject), len(self.cases(subject)))[:1]:
            amount = worst.mean - before if self.by_mean else worst.passing
            level = next((level for level, limit in self.limits.items() if amount >= limit), None)
            if level is not None:
                said = {"what": worst.what, "count": worst.count, "reply": worst.reply, "plain": f"{before:.0%}"}
                what = self.what.format(mean=f"{worst.mean:.0%}", shown=subject.shown(worst.mean), **said)
                yield worst.finding("info" if self.is_mild(subject) else level, what, self.why, self.fix)


def _other_answers(subject: Subject) -> Replies:
    """Right answers of other cases."""
    for place, (case, own) in enumerate(subject.referenced):
        tried = 0
        for other, theirs in [*subject.referenced[place + 1 :], *subject.referenced[:place]]:
            if text_of(case.prompt or "") == text_of(other.prompt or ""):
                is_other = subject.kind != "score_episode"
            else:
                is_other = len(own.replies) > 1 or not same_answer(
                    core_of(own.replies[-1]), core_of(theirs.replies[-1])
                )
            if is_other and own != theirs and tried < OTHERS:
                tried += 1
                yield "", case, theirs


def _ending_in(replies_of: Callable[[Subject, str], Iterable[str]]) -> Callable[[Subject], Replies]:
    """Replies that are made of each reference's last one."""
    return lambda subject: (
        (str(number), case, script.ending_in(text))
        for case, script in subject.decided
        for number, text in enumerate(replies_of(subject, script.replies[-1]))
    )


def _several(subject: Subject, reply: str) -> Iterable[str]:
    """Replies with the answers of several cases."""
    cores = list(dict.fromkeys(core_of(script.replies[-1]) for _, script in subject.decided))
    others = [core for core in cores if not same_answer(core, core_of(reply))]
    return shotguns(reply, others[:4]) if others and max(map(len, cores)) <= 300 else ()


def _scaffolds(subject: Subject) -> Replies:
    """The format that the prompt asks for, without an answer in it."""
    asked = [(case, text) for case in subject.sample for text in scaffolds(subject.asked(case))]
    return [(quoted(text, 40), case, Constant(text)) for case, text in asked]


def _strategies(subject: Subject, answers_of: Callable[[Case], Mapping[str, str]]) -> Replies:
    """One strategy for all cases, in the form of a reference; of few cases, nothing is known."""
    form = subject.answered[0][1] if subject.answered else ""
    for case in subject.sample if len(subject.sample) >= 4 else ():
        for what, answer in answers_of(case).items():
            yield what, case, Constant(rewrapped(form, answer) if form else answer)


def _constants(subject: Subject) -> Replies:
    cores = [core for case in subject.sample if (core := subject.core(case)) and len(core) <= 200]
    answers = list(dict.fromkeys(chain([NOT_A_NUMBER], cores, LABELS)))[:24]
    constants = {f"the answer {quoted(answer, 40)} in every case": answer for answer in answers}
    return _strategies(subject, lambda _: constants)


def _wrong(subject: Subject, before: str) -> Replies:
    """Wrong answers behind a sentence."""
    for case, reply in subject.answered:
        yield "", case, Script((before + rewrapped(reply, wrong_answers(core_of(reply))[0]),))


def _is_blind(subject: Subject) -> bool:
    return not subject.sees_the_case


def _is_graded(subject: Subject) -> bool:
    """Whether a part of the reference earns a part of the score, as with sub-goals or similarity."""
    halves = _ending_in(lambda _, reply: [reply[: (len(reply) + 1) // 2]] if len(reply) > 5 else [])
    half = earned(subject, halves(subject), len(subject.decided))
    return _is_blind(subject) or (bool(half) and 0.2 < half[0].mean < 0.95)


other_answer = ReplyProbe(
    _other_answers,
    {"fail": MOST, "warning": 0.51, "info": ANY},
    "The right answer of another case gets full score in {count} tries: {reply}.",
    "The score hardly depends on the case: one answer for all of them is enough.",
    "Compare with what this case asks for. If several answers are right, this is no mistake.",
    is_mild=_is_blind,
)
wrong_answer = ReplyProbe(
    _ending_in(lambda _, reply: (rewrapped(reply, wrong) for wrong in wrong_answers(core_of(reply)))),
    {"warning": 0.5, "info": 0.1},
    "A wrong answer in the right format gets full score in {count} cases: {reply}.",
    "The policy learns the format and nothing else.",
    "Compare the answer itself, not only that there is one.",
    cases=lambda subject: subject.decided,
    is_mild=_is_blind,
)
shotgun = ReplyProbe(
    _ending_in(_several),
    {"fail": 0.5, "warning": ANY},
    "A reply that lists several answers gets full score in {count} cases if the right one is among them: {reply}.",
    "The policy learns to list candidates instead of deciding.",
    "Extract one answer, such as the last one after a mark, and compare it as a whole.",
    cases=lambda subject: subject.decided,
    is_mild=_is_graded,
)
denied_in_format = ReplyProbe(
    _ending_in(lambda _, reply: denials_in_format(reply)),
    {"warning": 0.25},
    "A reply that rejects the right answer gets full score in {count} cases: {reply}.",
    "The scorer looks for the answer anywhere in its place: what is said about it does not count.",
    "Ask for the answer in a format, such as <answer>...</answer>, and compare all that is in it.",
    cases=lambda subject: subject.decided,
    is_mild=_is_graded,
)
# a policy gains nothing by a sentence that rejects the answer, as it must know it: the reader is only loose
denied = replace(
    denied_in_format,
    replies=_ending_in(lambda _, reply: denials(reply)),
    limits={"info": 0.25},
    why="The scorer takes the answer out of any sentence.",
)
template = ReplyProbe(
    _scaffolds,
    {"fail": 0.5, "warning": FORMAT_BONUS + ANY},
    "The empty format {what} earns {shown}.",
    "The policy copies the format from the prompt and stops there.",
    f"Give at most {FORMAT_BONUS:.0%} of the score for the format.",
    by_mean=True,
)
constant_answer = ReplyProbe(
    _constants,
    {"fail": PASS, "warning": MOST},
    "A fixed strategy, {what}, earns {shown}: {reply}.",
    "The policy finds it within a few steps, and then all scores of a group are equal: nothing is left to learn.",
    "Balance the answers of the cases, or ask for more than this strategy gives.",
    cases=lambda subject: subject.sample,
    is_mild=_is_blind,
)
copied_answer = replace(
    constant_answer,
    replies=lambda subject: _strategies(subject, lambda case: lazy_answers(subject.asked(case))),
    limits={"warning": MOST},
)


def denied_answer(subject: Subject) -> Iterator[EnvFinding]:
    """Replies that name the right answer and reject it."""
    yield from list(denied_in_format(subject)) or denied(subject)


def lazy_policy(subject: Subject) -> Iterator[EnvFinding]:
    """One fixed strategy for all cases."""
    yield from list(constant_answer(subject)) or copied_answer(subject)


injection = ReplyProbe(
    lambda subject: everywhere(subject, INJECTIONS, f"{JUNK_TEXT}\n"),
    {"fail": MARGIN},
    "A reply that addresses the judge earns {mean} instead of {plain}: {what}",
    "The policy learns to command the judge, which is easier than the task.",
    "Quote the reply as data in the judge's prompt, and read the verdict only from the judge's own words.",
    by_mean=True,
    plain=lambda subject: everywhere(subject, [JUNK_TEXT]),
)
tone = ReplyProbe(
    lambda subject: _wrong(subject, f"{CONFIDENT} "),
    {"warning": MARGIN},
    "A wrong answer earns {mean} after a confident sentence, {plain} without: {reply}.",
    "The policy learns to sound sure.",
    "Tell the judge to score the answer only, or give it the answer without the rest.",
    by_mean=True,
    plain=lambda subject: _wrong(subject, ""),
)


# -- right answers


def reference(subject: Subject) -> Iterator[EnvFinding]:
    """The reference earns the highest score."""
    played = subject.play(subject.referenced)
    for number, error in list(subject.reference_errors.items())[:1]:
        case = next(case for case in subject.cases if case.number == number)
        fix = "Return the right answer for each case_idx; check which case a row's case_idx means."
        yield EnvFinding("fail", f"reference raised: {error}", "", fix, case.case_idx)
    unknown = len(subject.sample) - len(played) - len(subject.reference_errors)
    if unknown:
        yield EnvFinding(
            "info",
            f"What is right is not known in {unknown} of {len(subject.sample)} cases.",
            "Checks that derive replies from a right answer leave them out.",
            "Add `def reference(self, case_idx)`, which returns a right answer.",
        )
    played = [episode for episode in played if episode.failure is None]
    played = [episode for episode in played if episode.score is not None] or played
    low, high = subject.config.score_bounds
    zero = 0.0 if low <= 0.0 else low
    nothing = [episode for episode in played if (episode.score is None or episode.score <= zero) and high > zero]
    partly = [episode for episode in played if episode.score is not None and episode.score < high - 0.001 < math.inf]
    if nothing:
        first = nothing[0]
        unscored = "no score" if first.score is None else f"a score of {first.score:g}"
        early = "" if first.stop == "done" else f"; the episode ended by {first.stop}"
        yield EnvFinding(
            "fail",
            f"The reference earns {unscored} in {len(nothing)} of {len(played)} cases:"
            f" {quoted(' | '.join(first.replies))}{early}.",
            "Right answers are not rewarded, so that nothing can be learned in these cases.",
            "Compare the scorer with the reference: format, type and case must fit.",
            first.play.case.case_idx,
        )
    elif partly:
        scores = Counter(f"{episode.score:g}" for episode in partly).most_common(3)
        yield EnvFinding(
            "info",
            f"The reference earns less than {high:g} in {len(partly)} of {len(played)} cases:"
            f" {', '.join(score for score, _ in scores)}.",
            "Shares are measured against what it earns.",
            "",
            partly[0].play.case.case_idx,
        )


def equivalent(subject: Subject) -> Iterator[EnvFinding]:
    """The reference in other forms."""
    forms = [(case, name, form) for case, reply in subject.answered for name, form in equivalent_forms(reply).items()]
    played = subject.play((case, Script((form,))) for case, _, form in forms)
    refused: dict[str, PlayedEpisode] = {}
    for (_, name, _), episode in zip(forms, played, strict=True):
        share = subject.share(episode)
        if share is not None and share < PASS:
            refused.setdefault(name, episode)
    for name in [name for name in SPACES if name in refused][:1]:
        yield EnvFinding(
            "warning",
            f"The reference {name} loses score: {refused[name].replies[-1]!r:.60}.",
            "Models often begin or end with a space or a line end: right answers are punished by chance.",
            "Compare reply.strip().",
            refused[name].play.case.case_idx,
        )
    for first in [episode for name, episode in refused.items() if name not in SPACES][:1]:
        names = ", ".join(name for name in refused if name not in SPACES)
        yield EnvFinding(
            "info",
            f"The reference loses score {names}: {quoted(first.replies[-1])}.",
            "A right answer in this form earns too little; if the model always writes so, all of its answers do.",
            "Say in the prompt which form counts, or read the answer out of the reply.",
            first.play.case.case_idx,
        )


def message_forms(subject: Subject) -> Iterator[EnvFinding]:
    """The completion as a string and as messages."""
    if subject.kind != "score_episode":
        return
    for case, script in subject.referenced[:3]:
        assert case.prompt is not None  # a row is asked
        own = subject.play_one(case, script)
        if own.reset.tools:
            return  # prompts that are strings have none
        turned = text_of(case.prompt) if case.is_chat else as_messages(case.prompt)
        other = subject.play_one(replace(case, prompt=turned), script, again=True)
        if not own.is_unknown and other.score is not None and other.score > (own.score or 0.0) + 0.001:
            given, wanted = ("messages", "text") if case.is_chat else ("text", "messages")
            yield EnvFinding(
                "fail",
                f"The reference earns {own.score or 0:g} as {given}, which is what prompts of this kind get,"
                f" and {other.score:g} as {wanted}.",
                "score_episode compares `completion` in the wrong form, so that right answers earn less.",
                "Name the parameter `text` instead of `completion`: it is always the reply as a string.",
                case.case_idx,
            )
            return


# -- what the calls return or raise, over all episodes that were played


def score_range(subject: Subject) -> Iterator[EnvFinding]:
    """Scores are finite numbers in the range."""
    stopped = _play_hostile(subject)
    lost = "Such an episode is missing data: it trains nothing, and many of them end the run."
    yield from _failures(
        subject.episodes, "out_of_range", lost, "Declare the range with --rl-score-range, or scale it."
    )
    for kind in ("wrong_type", "not_finite"):
        yield from _failures(subject.episodes, kind, lost, "Return a number.")
    unscored = [episode for episode in subject.episodes if episode.score is None and episode.failure is None]
    if unscored and 2 * len(unscored) > len(subject.episodes):
        yield EnvFinding(
            "warning",
            f"{len(unscored)} of {len(subject.episodes)} episodes are unscored (None), such as"
            f" {_replied(unscored[0])}.",
            "Unscored episodes are left out of training: a wrong reply that is not scored is not punished.",
            "Return 0 for a wrong reply, and None only if the score is unknown.",
            unscored[0].play.case.case_idx,
        )
    if stopped:
        raise stopped


def exceptions(subject: Subject) -> Iterator[EnvFinding]:
    """No reply makes the environment raise or hang, and no service fails that it asks."""
    stopped = _play_hostile(subject)
    of_service = [episode for episode in subject.episodes if is_of_service(episode.failure)]
    if of_service and (first := of_service[0].failure):
        share = len(of_service) / len(subject.episodes)
        yield EnvFinding(
            "fail" if share > subject.config.rl_max_failed else "warning",
            f"A service failed in {len(of_service)} of {len(subject.episodes)} episodes: {first.place} {first.message}",
            "The score of the reply is unknown, so that the episode is missing data; if most are, the run ends.",
            "Let it raise, or return None: a 0 would punish a reply that may be right. --rl-env-retries tries again.",
            of_service[0].play.case.case_idx,
        )
    others = [episode for episode in subject.episodes if not is_of_service(episode.failure)]
    lost = "The policy is not punished for such a reply: the episode counts as missing, and many of them end the run."
    late = "Limit the time in the scorer: 0 if the reply is what takes long, None if something else is."
    yield from _failures(others, "timed_out", lost, late)
    for kind in ("raised", "crashed"):
        fix = "Catch it where the reply is parsed, and return 0 (or an error message in a conversation)."
        yield from _failures(others, kind, lost, fix)
    if stopped:
        raise stopped


def _play_hostile(subject: Subject) -> NotCheckedError | None:
    """Play them as far as there is time; what the first ones did is worth knowing if it is over, perhaps because of
    them."""
    try:
        count = 2 if subject.limit > len(subject.sample[:4]) else 1
        subject.play((case, Constant(text)) for text in HOSTILE.values() for case in subject.sample[:count])
        for case, reply in subject.answered[:count]:
            texts = [rewrapped(reply, text) for text in HOSTILE_ANSWERS]
            subject.play((case, Script((text,))) for text in [*texts, core_of(reply), reply.split()[-1]])
    except NotCheckedError as stopped:
        return stopped
    return None


def _failures(episodes: Iterable[PlayedEpisode], kind: str, why: str, fix: str) -> Iterator[EnvFinding]:
    """The first failure of a kind at each place of the user's code, at most MOST_FINDINGS."""
    found: dict[str, EnvFinding] = {}
    for episode in episodes:
        failure = episode.failure
        if failure is not None and failure.kind == kind and NO_MODEL not in failure.message:
            first, *more = f"{failure.place} {failure.message}".split("\n")
            what = "\n".join([f"{first}, for {_replied(episode)}.", *more])
            found.setdefault(
                "".join(more) or failure.place, EnvFinding("fail", what, why, fix, episode.play.case.case_idx)
            )
    yield from list(found.values())[:MOST_FINDINGS]


def _replied(episode: PlayedEpisode) -> str:
    """The reply of an episode in a few words."""
    policy = episode.play.policy
    text = policy.text if isinstance(policy, Constant) else " | ".join(episode.replies)
    kind = next((name for name, hostile in HOSTILE.items() if hostile == text), None)
    return kind or (f"the reply {quoted(text)}" if text.split() else "an empty reply")


def repeatable_score(subject: Subject) -> Iterator[EnvFinding]:
    """The same reply gets the same score, whatever was scored before."""
    pairs = [*subject.referenced[:6], *((case, THE_ANSWER) for case in subject.sample[:6])]
    first = subject.play(pairs)
    for _ in range(REPEATS):
        pairs, first = pairs[::-1], first[::-1]
        for before, after in zip(first, subject.play(pairs, again=True), strict=True):
            if before.score is None or after.score is None or abs(before.score - after.score) < 1e-6:
                continue
            share = abs((subject.share(after) or after.score) - (subject.share(before) or before.score))
            yield EnvFinding(
                "fail" if share >= NOISE else "warning",
                f"The same reply got {before.score:g} and then {after.score:g}: {_replied(before)}.",
                "The difference between scores of a group is noise instead of the policy's merit.",
                "Use random.Random(seed) instead of global random numbers, and keep nothing from call to call.",
                before.play.case.case_idx,
            )
            return


def group_score(subject: Subject) -> Iterator[EnvFinding]:
    """score_group returns a score for each episode, and the reference's is not below that of a meaningless reply."""
    for case in subject.sample[:2]:
        script = subject.reference(case)
        right = script or THE_ANSWER
        played = subject.play([(case, right), (case, JUNK), (case, EMPTY), (case, right)])
        (results,) = subject.player.score_groups([played])
        failure = next((one.failure for one in results if one.failure and not is_of_service(one.failure)), None)
        best, junk = results[0].score, results[1].score
        if failure is not None and failure.place == "score_group":
            what, fix = f"score_group {failure.message}", "Return a list with one score, or None, for each episode."
        elif script and best is not None and junk is not None and best < junk:
            what = f"score_group gives the reference {best:g}, and a meaningless reply of the same group {junk:g}"
            fix = "Rank the episodes the other way round."
        else:
            continue
        why = "The scores of score_group are those that are trained on."
        yield EnvFinding("fail", f"{what}.", why, fix, case.case_idx)
        return


def model_use(subject: Subject) -> Iterator[EnvFinding]:
    """score_episode does not generate with the model by itself."""
    subject.play_one(subject.sample[0], THE_ANSWER)
    if subject.model.used:
        yield EnvFinding(
            "warning",
            f"score_episode uses model.{subject.model.used[0]}. Scores that need the model were not checked.",
            "What the model says inside the scorer is not trained: only the first reply of a conversation learns.",
            "For a conversation write `episode` or `start`, in which every turn is trained.",
        )
