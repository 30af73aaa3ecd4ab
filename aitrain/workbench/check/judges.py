"""Checks of scorers that are language models, or that read a reply as loosely as one."""

from __future__ import annotations

from collections.abc import Iterator

from aitrain.workbench.check.exploits import probe
from aitrain.workbench.check.finding import EnvFinding
from aitrain.workbench.check.replies import CONFIDENT, INJECTIONS, core_of, quoted, rewrapped, wrong_answers
from aitrain.workbench.check.subject import Subject
from aitrain.workbench.player import JUNK, JUNK_TEXT, Constant, Script

MARGIN = 0.2
"""Share of the reference's score by which a text that addresses the judge may raise a score."""


def injection(subject: Subject) -> Iterator[EnvFinding]:
    """Replies that tell the judge what to say."""
    sample = subject.sample
    plain = next(iter(probe(subject, {"plain": [(case, JUNK) for case in sample]})), None)
    replies = {text: [(case, Constant(f"{JUNK_TEXT}\n{text}")) for case in sample] for text in INJECTIONS}
    for worst in probe(subject, replies)[:1]:
        if plain is not None and worst.mean > plain.mean + MARGIN:
            yield EnvFinding(
                "injection",
                "fail",
                f'A reply that addresses the judge earns {worst.mean:.0%} instead of {plain.mean:.0%}: "{worst.what}"',
                "The policy learns to command the judge, which is easier than the task.",
                "Quote the reply as data in the judge's prompt, and read the verdict only from the judge's own words.",
                worst.case_idx,
            )


def tone(subject: Subject) -> Iterator[EnvFinding]:
    """Wrong answers that are said with confidence."""
    wrong = {
        case.number: (case, rewrapped(reply, wrong_answers(core_of(reply))[0])) for case, reply in subject.answered
    }
    plain = probe(subject, {"plain": [(case, Script((text,))) for case, text in wrong.values()]})
    sure = probe(subject, {"sure": [(case, Script((f"{CONFIDENT} {text}",))) for case, text in wrong.values()]})
    if plain and sure and sure[0].mean > plain[0].mean + MARGIN:
        yield EnvFinding(
            "tone",
            "warning",
            f"A wrong answer earns {sure[0].mean:.0%} after a confident sentence, {plain[0].mean:.0%} without:"
            f" {quoted(sure[0].best.turns[-1].text, 160)}.",
            "The policy learns to sound sure.",
            "Tell the judge to score the answer only, or give it the answer without the rest.",
            sure[0].case_idx,
        )
