"""Checks of the dataset's rows, which play nothing."""

import pickle
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from aitrain.environment.completion_parser import short
from aitrain.environment.contract import Case, Prompt, as_messages
from aitrain.environment.dataset import canonical_text, fingerprint
from aitrain.environment.rollout_session import is_served
from aitrain.ui.overview import evenly
from aitrain.workbench.check.process import messages_of
from aitrain.workbench.check.replies import same_answer, text_of
from aitrain.workbench.check.subject import EnvFinding, NotCheckedError, Subject
from aitrain.workbench.player import reference_of

REFERENCES = 64
HASH_SEED = "1"
ELSEWHERE = "seen only where the environment runs: check it there"
ROLES = {"system", "user", "assistant", "tool"}
FEW_PROMPTS = 0.5
LABELS = 5
"""Number of different answers up to which they are taken for labels, which a prompt may list."""
LEAD = (
    r"(?:answer|solution|result|ground truth|label|expected|correct(?: one)?|right one|hint)"
    r"\W{0,3}(?:is|are|:|=)*\W{0,4}"
)
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
                "Begin with a system message or none, let user, assistant and tool take turns, and end with the user.",
                case.case_idx,
            )
            break
    asked = {(str(case.case_idx), text_of(case.prompt)) for case in subject.cases if "case_idx" in case.row}
    doubled = [name for name, times in Counter(name for name, _ in asked).items() if times > 1]
    if doubled:
        yield EnvFinding(
            "fail",
            f"{len(doubled)} values of case_idx stand for several prompts, such as {doubled[0]}.",
            "An episode is scored against another row than the one that was asked.",
            "Give each row its own case_idx, or leave the column out: it is then the row's number.",
        )


def _problem_with(prompt: Prompt) -> str:
    """What is wrong with a prompt; empty if nothing."""
    if not text_of(prompt).strip():
        return "the prompt has no text."
    roles = [str(message.get("role")) for message in as_messages(prompt)]
    is_right = {*roles} <= ROLES and "system" not in roles[1:] and roles[-1] != "assistant"
    return "" if is_right and ("user", "user") not in pairwise(roles) else f"the roles are {', '.join(roles)}."


def repeatable(subject: Subject) -> Iterator[EnvFinding]:
    """A fresh process with another PYTHONHASHSEED builds the same rows and references.

    Raises:
        NotCheckedError: it failed, or a server has the environment, and sends the same rows again.
    """
    if is_served(subject.environment):
        raise NotCheckedError(ELSEWHERE)
    request = {"options": subject.config.model_dump(mode="json", exclude_unset=True), "digest": True}
    *_, message = messages_of(request, {"PYTHONHASHSEED": HASH_SEED})
    if "error" in message:
        raise NotCheckedError(short(f"a fresh process failed: {message['error']}", 200))
    if digest(subject.environment, subject.cases) != message["digest"]:
        yield EnvFinding(
            "warning",
            "Rows or references differ in a fresh process with another PYTHONHASHSEED.",
            "A resumed run continues with other cases, processes of a run score other answers, and scores of two runs"
            " cannot be compared. (Training sets PYTHONHASHSEED=0.)",
            "Use random.Random(seed) with a fixed seed, and sorted(...) where a set or a dict of sets is listed.",
        )


def digest(environment: object, cases: Sequence[Case]) -> str:
    """What tells the rows apart, and references that are spread over the dataset."""
    references = [reference_of(environment, case) for case in evenly(cases, REFERENCES)]
    return fingerprint(cases) + canonical_text([script and script.replies for script in references])


def duplicates(subject: Subject) -> Iterator[EnvFinding]:
    """Prompts that repeat, with other answers or not, and held-out prompts that are trained on; of conversations, in
    which the environment may say more later, whole rows that are held out."""
    is_whole = subject.kind == "score_episode"

    def asked(case: Case) -> str:
        return text_of(case.prompt).strip() if is_whole else canonical_text(case.row)

    first_of = {asked(case): case for case in reversed(subject.cases)}
    repeated = [(first, case) for case in subject.cases if (first := first_of[asked(case)]) is not case]
    for first, case in repeated if is_whole else ():
        one, other = subject.core(first), subject.core(case)
        if one is not None and other is not None and not same_answer(one, other):
            yield EnvFinding(
                "fail",
                f"Rows {first.number} and {case.number} have the same prompt, and the references {short(one, 30)} and"
                f" {short(other, 30)}.",
                "No policy can be right in both: the score is noise.",
                "Put what decides the answer into the prompt.",
                case.case_idx,
            )
            break
    are_few = len(first_of) == 1 or len(first_of) < FEW_PROMPTS * len(subject.cases)
    if are_few and is_whole:
        yield EnvFinding(
            "warning",
            f"There are {len(first_of)} different prompts in {len(subject.cases)} rows.",
            "The policy learns these few prompts by heart, and the held-out score says nothing.",
            "Vary the prompts, or return each one once: an epoch repeats them anyway.",
        )
    overlap = [case for case in subject.opened.held_out if asked(case) in first_of]
    if overlap and (is_whole or not are_few):
        yield EnvFinding(
            "warning",
            f"{len(overlap)} of {len(subject.opened.held_out)} held-out {'prompts' if is_whole else 'rows'} are"
            " trained on too.",
            "The held-out score measures what was learned by heart.",
            "Take the rows of build_eval_dataset out of build_dataset.",
            overlap[0].case_idx,
        )


def leaked_answer(subject: Subject) -> Iterator[EnvFinding]:
    """Prompts that name their right answer, with what the environment says first.

    Raises:
        NotCheckedError: no right answer is known.
    """
    cores = [(case, core) for case in subject.sample if (core := subject.core(case))]
    if not cores:
        raise NotCheckedError("there is no reference")
    labels = {core for _, core in cores}
    found = []
    for case, core in cores:
        text = subject.asked(case)
        # "answer yes or no" names all of them
        lists_labels = len(labels) <= LABELS and any(label in text for label in labels - {core})
        lead = NAMED if lists_labels else rf"(?:{NAMED}|{LEAD})"
        is_copied = len(core) > 40 and core in text and not lists_labels
        if is_copied or re.search(rf"(?i){lead}{re.escape(core)}(?!\w)", text):
            found.append(case)
    if found and 2 * len(found) >= len(cores):
        yield EnvFinding(
            "warning",
            f"The prompt names the right answer in {len(found)} of {len(cores)} cases.",
            "The policy learns to copy, and scores are high from the start.",
            "Remove the answer from the prompt; the scorer gets it as a column of the row.",
            found[0].case_idx,
        )


def pickling(subject: Subject) -> Iterator[EnvFinding]:
    """Rows, and what build_dataset sets on the environment, can be sent to other processes.

    Raises:
        NotCheckedError: a server has the environment.
    """
    if is_served(subject.environment):
        raise NotCheckedError(ELSEWHERE)
    attributes = getattr(subject.environment, "__dict__", {})
    sent = {f"self.{name}": value for name, value in attributes.items() if name not in subject.opened.set_by_init}
    sent |= {f"row {case.number}": dict(case.row) for case in subject.opened.all_cases}
    for name, value in sent.items():
        try:
            pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as problem:
            yield EnvFinding(
                "warning",
                f"build_dataset makes {name}, which cannot be pickled: {problem}.",
                "Training on several GPUs is refused, and attributes also with --rl-env-isolation process.",
                "Keep plain data in rows (texts, numbers, lists, dicts), and set other attributes in __init__, which"
                " runs in every process.",
            )
            return
