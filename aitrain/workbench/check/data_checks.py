"""Checks of the dataset's rows, which play nothing."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from aitrain.environment.contract import Case, Prompt
from aitrain.environment.tool_call_parser import short
from aitrain.workbench.check.finding import EnvFinding
from aitrain.workbench.check.replies import same_answer, text_of
from aitrain.workbench.check.subject import Subject

ROLES = ("system", "user", "assistant", "tool")
TEMPLATE_MARKS = re.compile(r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]")
FEW_PROMPTS = 0.5


def dataset(subject: Subject) -> Iterator[EnvFinding]:
    """Prompts, roles, case_idx and values of the rows."""
    for case in (*subject.cases, *subject.opened.held_out):
        problem = _problem_with(case.prompt) if case.prompt else ""
        if problem:
            yield EnvFinding(
                "dataset",
                "warning",
                f"Row {case.number}: {problem}",
                "Chat templates refuse such a prompt, or render it in a way the model has never seen.",
                "Begin with one system message at most, take turns, and end with the user's message.",
                case.case_idx,
            )
            break
    yield from _case_numbers(subject.cases)
    yield from _values(subject.cases)


def _problem_with(prompt: Prompt) -> str:
    """What is wrong with a prompt; empty if nothing."""
    if isinstance(prompt, str):
        return "" if prompt.strip() else "the prompt is only spaces"
    roles = [str(message.get("role")) for message in prompt]
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        return f"a message has the role {unknown[0]!r}; there are {', '.join(ROLES)}"
    if "system" in roles[1:]:
        return "there is a system message after the first message"
    if roles[-1] == "assistant":
        return "the last message is the assistant's, so that there is nothing to answer"
    if any(one == other == "user" for one, other in pairwise(roles)):
        return "two messages of the user follow each other"
    text = text_of(prompt)
    if not text.strip():
        return "the messages are empty"
    mark = TEMPLATE_MARKS.search(text)
    return f"a message contains {mark[0]}: the chat template is applied a second time" if mark else ""


def _case_numbers(cases: Sequence[Case]) -> Iterator[EnvFinding]:
    if not any("case_idx" in case.row for case in cases):
        return
    prompts = defaultdict(set)
    for case in cases:
        prompts[str(case.case_idx)].add(text_of(case.prompt or ""))
    doubled = [name for name, texts in prompts.items() if len(texts) > 1]
    if doubled:
        yield EnvFinding(
            "dataset",
            "fail",
            f"{len(doubled)} values of case_idx stand for several prompts, such as {doubled[0]}.",
            "An episode is scored against another row than the one that was asked.",
            "Give each row its own case_idx, or leave the column out: it is then the row's number.",
            doubled[0],
        )


def _values(cases: Sequence[Case]) -> Iterator[EnvFinding]:
    for case in cases[:200]:
        for name, value in case.row.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError):
                yield EnvFinding(
                    "dataset",
                    "info",
                    f"Column {name} holds a {type(value).__name__}, which JSON cannot hold.",
                    "Rollout records show it as text only, and `aitrain env rescore` cannot use it.",
                    "Keep text, numbers, lists and dicts in rows, and look larger things up by case_idx.",
                    case.case_idx,
                )
                return


def duplicates(subject: Subject) -> Iterator[EnvFinding]:
    """Prompts that repeat, and held-out prompts that are trained on."""
    yield from _contradictions(subject)
    counts = Counter(text_of(case.prompt or "") for case in subject.cases)
    share = len(counts) / len(subject.cases)
    text, times = counts.most_common(1)[0]
    if subject.kind == "score_episode" and times > 1 and share < FEW_PROMPTS:
        yield EnvFinding(
            "duplicates",
            "warning",
            f"{len(subject.cases)} rows have {len(counts)} different prompts; one occurs {times} times: "
            f"{short(text, 60)}",
            "The policy learns these few prompts by heart, and the held-out score says nothing.",
            "Vary the prompts, or return each one once: an epoch repeats them anyway.",
        )
    overlap = [case for case in subject.opened.held_out if case.prompt and counts[text_of(case.prompt)]]
    if overlap and subject.kind == "score_episode":
        yield EnvFinding(
            "duplicates",
            "warning",
            f"{len(overlap)} of {len(subject.opened.held_out)} held-out prompts are training prompts too.",
            "The held-out score measures what was learned by heart.",
            "Take the rows of build_eval_dataset out of build_dataset.",
            overlap[0].case_idx,
        )


def _contradictions(subject: Subject) -> Iterator[EnvFinding]:
    """Equal prompts whose right answers differ."""
    if subject.kind != "score_episode":
        return  # what the environment says later may differ
    first: dict[str, Case] = {}
    for case in subject.cases:
        other = first.setdefault(text_of(case.prompt), case)
        if other is case:
            continue
        answers = [subject.core(one) for one in (other, case)]
        if None not in answers and not same_answer(str(answers[0]), str(answers[1])):
            yield EnvFinding(
                "duplicates",
                "fail",
                f"Rows {other.number} and {case.number} have the same prompt, and the references "
                f"{short(str(answers[0]), 30)} and {short(str(answers[1]), 30)}.",
                "No policy can be right in both: the score is noise.",
                "Put what decides the answer into the prompt.",
                case.case_idx,
            )
            return


LABELS = 5
"""Number of different answers up to which they are taken for labels, which a prompt may list."""
LEAD = r"(?:answer|solution|result|ground truth|label|expected|correct)\W{0,3}(?:is|are|:|=)*\W{0,4}"
NAMED = r"\b(?:gold|target|key|reference|truth)\w*['\"]?\s*(?:[-=]?>|[:=]|is\s)\s*['\"]?"
"""What leads to an answer in a row that was put into the prompt."""
IN_A_KEY = 4
"""Cases whose answers, one after another in a prompt, are an answer key."""


def leaked_answer(subject: Subject) -> Iterator[EnvFinding]:
    """The reference's answer is named as the answer in the prompt, or all answers are."""
    found, looked = [], 0
    yield from _answer_key(subject)
    cores = {case.number: core for case in subject.chosen if (core := subject.core(case))}
    labels = set(cores.values()) if len(set(cores.values())) <= LABELS else set()
    for case in subject.chosen:
        core, text = cores.get(case.number), text_of(case.prompt or "")
        if not core:
            continue
        looked += 1
        if re.search(rf"(?i){NAMED}{re.escape(core)}(?!\w)", text):
            found.append(case)
        elif any(label in text for label in labels - {core}):  # "answer yes or no" names all of them
            continue
        elif re.search(rf"(?i){LEAD}{re.escape(core)}(?!\w)", text) or (len(core) > 40 and core in text):
            found.append(case)
    if found and 2 * len(found) >= looked:
        yield EnvFinding(
            "leaked-answer",
            "warning",
            f"The prompt names the right answer in {len(found)} of {looked} cases.",
            "The policy learns to copy, and scores are high from the start.",
            "Remove the answer from the prompt; the scorer gets it as a column of the row.",
            found[0].case_idx,
        )


def _answer_key(subject: Subject) -> Iterator[EnvFinding]:
    """A prompt that holds the answers of other cases: after their questions, or those of the first cases in a row."""
    chosen = [(case, core) for case in subject.chosen if (core := subject.core(case))]
    if len(chosen) < IN_A_KEY or subject.cases[0].prompt is None:
        return
    text, first = text_of(subject.cases[0].prompt), subject.cases[:IN_A_KEY]
    cores = [str(subject.core(case)) for case in first]
    in_a_row = len(set(cores)) == IN_A_KEY and re.search(".{1,12}?".join(map(_whole, cores)), text, re.DOTALL)
    asked = [(case, _question(case), core) for case, core in chosen if case is not subject.cases[0]]
    after = [case for case, question, core in asked
             if question and re.search(rf"{re.escape(question)}.{{0,40}}?{_whole(core)}", text, re.DOTALL)]  # fmt: skip
    if in_a_row or 2 * len(after) >= len(asked):
        yield EnvFinding(
            "leaked-answer",
            "warning",
            "The prompt holds an answer key: the right answers of other cases"
            + (" after their questions." if after else f", such as {', '.join(cores)}."),
            "The policy learns to look the answer up, and fails where there is no key.",
            "Remove the key from the prompt; the scorer gets the answer as a column of the row.",
            subject.cases[0].case_idx,
        )


def _whole(core: str) -> str:
    return rf"(?<!\w){re.escape(core)}(?!\w)"


def _question(case: Case) -> str:
    """What the user asks last; empty for a prompt that is text, of which the question is only a part."""
    return "" if case.prompt is None or isinstance(case.prompt, str) else text_of(case.prompt[-1:]).strip()
