"""Checks that right answers earn the full score, in any form."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from aitrain.environment.contract import Case, Prompt
from aitrain.environment.tool_call_parser import short
from aitrain.workbench.check.finding import PASS, EnvFinding
from aitrain.workbench.check.replies import equivalent_forms, quoted, spaced_forms, text_of
from aitrain.workbench.check.subject import Subject
from aitrain.workbench.player import PlayedEpisode, Script, is_unknown

REFERENCE = "Return the right answer for each case_idx; check which case a row's case_idx means."


def reference(subject: Subject) -> Iterator[EnvFinding]:
    """The reference earns the highest score."""
    if not callable(getattr(subject.environment, "reference", None)):
        yield EnvFinding(
            "reference",
            "info",
            "There is no method `reference`, so that it is unknown what a right answer earns.",
            "Checks that derive replies from a right answer were left out.",
            "Add `def reference(self, case_idx)`, which returns a right answer.",
        )
        return
    episodes = [subject.play_one(case, script) for case in subject.sample if (script := subject.reference(case))]
    for number, error in list(subject.reference_errors.items())[:1]:
        case = next(case for case in subject.cases if case.number == number)
        yield EnvFinding("reference", "fail", f"reference raised: {error}", "", REFERENCE, case.case_idx)
    unknown = len(subject.sample) - len(episodes) - len(subject.reference_errors)
    if unknown:
        yield EnvFinding(
            "reference", "info", f"`reference` returned None for {unknown} of {len(subject.sample)} cases."
        )
    played = [episode for episode in episodes if episode.failure is None]
    yield from _too_low(subject, [episode for episode in played if episode.score is not None] or played)


def _too_low(subject: Subject, episodes: list[PlayedEpisode]) -> Iterator[EnvFinding]:
    low, high = subject.config.score_bounds
    zero = 0.0 if low <= 0.0 else low
    nothing = [episode for episode in episodes if (episode.score is None or episode.score <= zero) and high > zero]
    if nothing:
        first = nothing[0]
        said = short(" | ".join(turn.text for turn in first.turns), 60)
        unscored = "no score" if first.score is None else f"a score of {first.score:g}"
        early = "" if first.stop == "done" else f"; the episode ended by {first.stop}"
        yield EnvFinding(
            "reference",
            "fail",
            f'The reference earns {unscored} in {len(nothing)} of {len(episodes)} cases: "{said}"{early}.',
            "Right answers are not rewarded, so that nothing can be learned in these cases.",
            "Compare the scorer with the reference: format, type and case must fit.",
            first.play.case.case_idx,
        )
        return
    partly = [episode for episode in episodes if math.isfinite(high) and (episode.score or 0) < high - 0.001]
    if partly:
        scores = Counter(f"{episode.score:g}" for episode in partly).most_common(3)
        yield EnvFinding(
            "reference",
            "info",
            f"The reference earns less than {high:g} in {len(partly)} of {len(episodes)} cases:"
            f" {', '.join(score for score, _ in scores)}.",
            "Shares are measured against what it earns.",
            "",
            partly[0].play.case.case_idx,
        )


def equivalent(subject: Subject) -> Iterator[EnvFinding]:
    """The reference in other forms."""
    answered = [(case, reply) for case, reply in subject.answered]
    spaced = [(case, Script((form,))) for case, reply in answered for form in spaced_forms(reply)]
    shares = [(share, episode) for episode in subject.play(spaced) if (share := subject.share(episode)) is not None]
    lost = [episode for share, episode in shares if share < PASS]
    if lost:
        yield EnvFinding(
            "equivalent-forms",
            "warning",
            f"The reference with space around it loses score in {len(lost)} of {len(shares)} tries:"
            f" {lost[0].turns[-1].text!r:.60}.",
            "Models often begin or end with a space or a line end: right answers are punished by chance.",
            "Compare reply.strip().",
            lost[0].play.case.case_idx,
        )
    forms = [(name, case, form) for case, reply in answered[:4] for name, form in equivalent_forms(reply).items()]
    episodes = subject.play((case, Script((form,))) for _, case, form in forms)
    refused: dict[str, tuple[Case, str]] = {}
    for (name, case, form), episode in zip(forms, episodes, strict=True):
        share = subject.share(episode)
        if share is not None and share < PASS:
            refused.setdefault(name, (case, form))
    if refused:
        case, form = next(iter(refused.values()))
        yield EnvFinding(
            "equivalent-forms",
            "info",
            f"The reference loses score {', '.join(refused)}: {quoted(form)}.",
            "A right answer in this form earns too little; if the model always writes so, all of its answers do.",
            "Say in the prompt which form counts, or read the answer out of the reply.",
            case.case_idx,
        )


def message_forms(subject: Subject) -> Iterator[EnvFinding]:
    """The completion as a string and as messages."""
    if subject.kind != "score_episode":
        return
    for case in subject.sample[:3]:
        script = subject.reference(case)
        if script is None or case.prompt is None:
            continue
        own = subject.play_one(case, script)
        other = subject.play_one(replace(case, prompt=_other_form(case.prompt)), script, again=True)
        if is_unknown(own):
            continue
        if other.score is not None and other.score > (own.score or 0.0) + 0.001:
            given, wanted = ("messages", "text") if case.is_chat else ("text", "messages")
            yield EnvFinding(
                "message-forms",
                "fail",
                f"The reference earns {own.score or 0:g} as {given}, which is what prompts of this kind get,"
                f" and {other.score:g} as {wanted}.",
                "score_episode compares `completion` in the wrong form, so that right answers earn less.",
                "Name the parameter `text` instead of `completion`: it is always the reply as a string.",
                case.case_idx,
            )
            return


def _other_form(prompt: Prompt) -> Prompt:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else text_of(prompt)
