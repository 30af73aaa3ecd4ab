"""Checks of the dataset's rows, which play nothing."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from aitrain.environment.contract import Case, Prompt
from aitrain.environment.tool_call_parser import short
from aitrain.workbench.check.replies import same_answer, text_of
from aitrain.workbench.check.subject import EnvFinding, Subject

ROLES = ("system", "user", "assistant", "tool")
TEMPLATE_MARKS = re.compile(r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]")
FEW_PROMPTS = 0.5
IN_A_KEY = 4
"""Answers in a row from which a prompt is taken to hold an answer key."""
LABELS = 5
"""Number of different answers up to which they are taken for labels, which a prompt may list."""
LEAD = r"(?:answer|solution|result|ground truth|label|expected|correct)\W{0,3}(?:is|are|:|=)*\W{0,4}"
NAMED = r"\b(?:gold|target|key|reference|truth)\w*['\"]?\s*(?:[-=]?>|[:=]|is\s)\s*['\"]?"
"""What leads to an answer in a row that was put into the prompt."""


def dataset(subject: Subject) -> Iterator[EnvFinding]:
    """Prompts, roles, case_idx and values of the rows."""
    for case in subject.opened.all_cases:
        if case.prompt and (problem := _problem_with(case.prompt)):
            yield EnvFinding(
                "warning",
                f"Row {case.number}: {problem}",
                "Chat templates refuse such a prompt, or render it in a way the model has never seen.",
                "Begin with one system message at most, take turns, and end with the user's message.",
                case.case_idx,
            )
            break
    prompts = defaultdict(set)
    for case in subject.cases:
        if "case_idx" in case.row:
            prompts[str(case.case_idx)].add(text_of(case.prompt or ""))
    doubled = [name for name, texts in prompts.items() if len(texts) > 1]
    if doubled:
        yield EnvFinding(
            "fail",
            f"{len(doubled)} values of case_idx stand for several prompts, such as {doubled[0]}.",
            "An episode is scored against another row than the one that was asked.",
            "Give each row its own case_idx, or leave the column out: it is then the row's number.",
            doubled[0],
        )
    for case in subject.cases[:200]:
        for name, value in case.row.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError):
                yield EnvFinding(
                    "info",
                    f"Column {name} holds a {type(value).__name__}, which JSON cannot hold.",
                    "Rollout records show it as text only, and `aitrain env rescore` cannot use it.",
                    "Keep text, numbers, lists and dicts in rows, and look larger things up by case_idx.",
                    case.case_idx,
                )
                return


def _problem_with(prompt: Prompt) -> str:
    """What is wrong with a prompt; empty if nothing."""
    text = text_of(prompt)
    if not text.strip():
        return "the prompt has no text"
    if isinstance(prompt, str):
        return ""
    roles = [str(message.get("role")) for message in prompt]
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        return f"a message has the role {unknown[0]!r}; there are {', '.join(ROLES)}"
    if "system" in roles[1:]:
        return "there is a system message after the first message"
    if roles[-1] == "assistant":
        return "the last message is the assistant's, so that there is nothing to answer"
    if ("user", "user") in pairwise(roles):
        return "two messages of the user follow each other"
    mark = TEMPLATE_MARKS.search(text)
    return f"a message contains {mark[0]}: the chat template is applied a second time" if mark else ""


def duplicates(subject: Subject) -> Iterator[EnvFinding]:
    """Prompts that repeat, with other answers or not, and held-out prompts that are trained on."""
    if subject.kind != "score_episode":
        return  # what the environment says later may differ
    first: dict[str, Case] = {}
    for case in subject.cases:
        other = first.setdefault(text_of(case.prompt or ""), case)
        answers = [subject.core(one) for one in (other, case)] if other is not case else [None]
        if None not in answers and not same_answer(str(answers[0]), str(answers[1])):
            shown = " and ".join(short(str(answer), 30) for answer in answers)
            yield EnvFinding(
                "fail",
                f"Rows {other.number} and {case.number} have the same prompt, and the references {shown}.",
                "No policy can be right in both: the score is noise.",
                "Put what decides the answer into the prompt.",
                case.case_idx,
            )
            break
    counts = Counter(text_of(case.prompt or "") for case in subject.cases)
    text, times = counts.most_common(1)[0]
    if times > 1 and len(counts) < FEW_PROMPTS * len(subject.cases):
        yield EnvFinding(
            "warning",
            f"{len(subject.cases)} rows have {len(counts)} different prompts; one occurs {times} times: "
            f"{short(text, 60)}",
            "The policy learns these few prompts by heart, and the held-out score says nothing.",
            "Vary the prompts, or return each one once: an epoch repeats them anyway.",
        )
    overlap = [case for case in subject.opened.held_out if counts[text_of(case.prompt or "")]]
    if overlap:
        yield EnvFinding(
            "warning",
            f"{len(overlap)} of {len(subject.opened.held_out)} held-out prompts are training prompts too.",
            "The held-out score measures what was learned by heart.",
            "Take the rows of build_eval_dataset out of build_dataset.",
            overlap[0].case_idx,
        )


def leaked_answer(subject: Subject) -> Iterator[EnvFinding]:
    """Prompts that name their right answer, or hold those of other cases: after their questions, or in a row."""
    cores = [(case, core) for case in subject.chosen if (core := subject.core(case))]
    labels = {core for _, core in cores}
    labels = labels if len(labels) <= LABELS else set()
    found = []
    for case, core in cores:
        text = text_of(case.prompt or "")
        lists_labels = any(label in text for label in labels - {core})  # "answer yes or no" names all of them
        is_led_to = re.search(rf"(?i){LEAD}{re.escape(core)}(?!\w)", text) or (len(core) > 40 and core in text)
        if re.search(rf"(?i){NAMED}{re.escape(core)}(?!\w)", text) or (is_led_to and not lists_labels):
            found.append(case)
    if found and 2 * len(found) >= len(cores):
        yield EnvFinding(
            "warning",
            f"The prompt names the right answer in {len(found)} of {len(cores)} cases.",
            "The policy learns to copy, and scores are high from the start.",
            "Remove the answer from the prompt; the scorer gets it as a column of the row.",
            found[0].case_idx,
        )
    key, prompt = subject.cases[:IN_A_KEY], subject.cases[0].prompt
    if len(cores) < IN_A_KEY or prompt is None:
        return
    text, first = text_of(prompt), [str(subject.core(case)) for case in key]
    in_a_row = (
        not labels and len(set(first)) == IN_A_KEY and re.search(".{1,12}?".join(map(_whole, first)), text, re.DOTALL)
    )
    others = [(case, core) for case, core in cores if case is not key[0]]
    after = [
        case
        for case, core in others
        # of a prompt that is text, the question is only a part
        if isinstance(case.prompt, list)
        and (question := text_of(case.prompt[-1:]).strip())
        and re.search(rf"{re.escape(question)}.{{0,40}}?{_whole(core)}", text, re.DOTALL)
    ]
    if in_a_row or 2 * len(after) >= len(others):
        yield EnvFinding(
            "warning",
            "The prompt holds an answer key: the right answers of other cases"
            + (" after their questions." if after else f", such as {', '.join(first)}."),
            "The policy learns to look the answer up, and fails where there is no key.",
            "Remove the key from the prompt; the scorer gets the answer as a column of the row.",
            key[0].case_idx,
        )


def _whole(core: str) -> str:
    return rf"(?<!\w){re.escape(core)}(?!\w)"


def pickling(subject: Subject) -> Iterator[EnvFinding]:
    """Rows, and what build_dataset sets on the environment, can be sent to other processes."""
    for case in subject.opened.all_cases:
        for column, value in case.row.items():
            if not _can_be_sent(value):
                yield EnvFinding(
                    "warning",
                    f"Column {column} holds a {type(value).__name__}, which cannot be pickled.",
                    "Training on several GPUs is refused: rows are sent to the other processes.",
                    "Keep plain data in rows: texts, numbers, lists, dicts.",
                    case.case_idx,
                )
                return
    for name in set(getattr(subject.environment, "__dict__", {})) - subject.opened.set_by_init:
        if not _can_be_sent(vars(subject.environment)[name]):
            yield EnvFinding(
                "warning",
                f"build_dataset sets self.{name}, which cannot be pickled.",
                "Training on several GPUs, or with --rl-env-isolation process, is refused.",
                "Set it in __init__, which runs in every process.",
            )


def _can_be_sent(value: Any) -> bool:
    try:
        return bool(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    except Exception:
        return False
