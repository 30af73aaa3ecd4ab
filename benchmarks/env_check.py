"""What `aitrain env check` finds in environments whose defects are known.

The graders and conversations of falsepass's own tests, rewritten as environments; and, where reasoning-gym is
installed, those of its tasks in which a sweep by hand found a defect.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.measuring import ROOT, Asked, Figure

TASKS: dict[str, tuple[str, ...]] = {
    "game_of_life_halting": ("floor", "other-answer", "wrong-answer", "lazy-policy"),
    "puzzle24": ("other-answer", "lazy-policy"),
    "game_of_life": ("other-answer",),
    "propositional_logic": ("floor",),
    "spell_backward": ("floor",),
    "figlet_font": ("floor",),
    "prime_factorization": ("exceptions",),
    "list_functions": ("repeatable-dataset",),
    "isomorphic_strings": ("repeatable-dataset",),
    "ransom_note": ("repeatable-dataset",),
    "polynomial_multiplication": ("repeatable-dataset",),
    "knight_swap": ("repeatable-dataset",),
    "word_ladder": ("repeatable-dataset",),
    **dict.fromkeys(("boxnet", "graph_color", "rubiks_cube", "rush_hour"), ("reference",)),
}
"""Tasks of reasoning-gym 0.1.25 with a defect, and the checks of which one must find it."""


class Gym:
    """One task of reasoning-gym; the reply is the answer, without space around it, as its `extract_answer` gives it."""

    def __init__(self, name: str) -> None:
        import reasoning_gym

        size = 64 if name == "list_functions" else 16  # few of its functions draw without a seed
        self.dataset = reasoning_gym.create_dataset(name, size=size, seed=42)
        self.entries = [self.dataset[number] for number in range(size)]

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": entry["question"]}], "entry": entry} for entry in self.entries]

    def score_episode(self, text: str, entry: dict[str, Any]) -> float:
        return float(self.dataset.score_answer(text.strip(), entry))

    def reference(self, case_idx: int) -> str | None:
        answer = self.entries[case_idx]["answer"]
        return None if answer is None else str(answer)


def _marks(text: str) -> list[str]:
    return re.findall(r"^#### (.+?)\s*$", text, re.MULTILINE)


def _tags(text: str) -> list[str]:
    return [found.strip() for found in re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)]


def _strict(text: str, answer: str) -> float:
    return float(_marks(text) == [answer])


def _leaky(text: str, answer: str) -> float:
    return 0.8 * (answer in text) + 0.2 * ("####" in text)


def _raises(text: str, answer: str) -> float:
    raise ValueError("boom")


CALLS, EPISODES = itertools.count(), itertools.count()


def _alternating(text: str, answer: str) -> float:
    return float(next(CALLS) % 2)


def _rejecting(text: str, answer: str) -> float:
    try:
        return float(bool(_marks(text)) and not abs(float(_marks(text)[-1]) - float(answer)) > 0.01)
    except ValueError:
        return 0.0


def _truncating(text: str, answer: str) -> float:
    try:
        return float(bool(_marks(text)) and int(float(_marks(text)[-1])) == int(answer))
    except (ValueError, OverflowError):
        return 0.0


def _hedged(text: str, answer: str) -> float:
    value = (_marks(text) or [""])[-1].split("=")[-1].strip()
    value = value.split(" (")[0].split(" is wrong")[0].split(" or ")[-1].removeprefix("not ")
    return float(value.strip() == answer)


def _first_tag(text: str, answer: str) -> float:
    return float(_tags(text)[:1] == [answer])


def _last_tag(text: str, answer: str) -> float:
    return float(_tags(text)[-1:] == [answer])


def _last_nonempty_tag(text: str, answer: str) -> float:
    found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    return float([block.strip() for block in found if block.strip()][-1:] == [answer])


GRADERS: dict[str, tuple[Callable[[str, str], float], str, tuple[str, ...]]] = {
    "strict": (_strict, "#### {}", ()),
    "leaky": (_leaky, "#### {}", ("shotgun", "denied-answer", "floor")),
    "raises": (_raises, "#### {}", ("exceptions",)),
    "alternating": (_alternating, "#### {}", ("repeatable",)),
    "rejecting": (_rejecting, "#### {}", ("wrong-answer",)),
    "truncating": (_truncating, "#### {}", ("wrong-answer",)),
    "hedged": (_hedged, "#### {}", ("denied-answer",)),
    "first_tag": (_first_tag, "<answer>{}</answer>", ("equivalent-forms", "info equivalent-forms")),
    "last_tag": (_last_tag, "<answer>{}</answer>", ("equivalent-forms", "info equivalent-forms")),
    "last_nonempty_tag": (_last_nonempty_tag, "<answer>{}</answer>", ()),
    "conflicting_labels": (_strict, "#### {}", ("duplicates",)),
}
"""Graders with the form of a right answer, and the checks of which one must find its defect."""

TALKS: dict[str, tuple[str, ...]] = {
    "state_of_episodes": ("repeatable",),
    "endless": ("episode-end",),
    "reveals": ("floor",),
    "reveals_and_knows": (),
}
"""Conversations with the checks of which one must find its defect."""


class Grader:
    """One grader of falsepass's tests, on sums."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.grade, self.form, _ = GRADERS.get(name, (_strict, "{}", ()))

    def build_dataset(self) -> list[dict[str, Any]]:
        """Sums with two digits; one of them twice with two answers."""
        rows = [{"prompt": f"What is {n} plus 40?", "answer": str(n + 40)} for n in range(11, 27)]
        return [*rows, {**rows[0], "answer": "50"}] if self.name == "conflicting_labels" else rows

    def score_episode(self, text: str, answer: str) -> float:
        """The grader's score."""
        return self.grade(text, answer)

    def reference(self, case_idx: int) -> str:
        """The answer in the grader's form."""
        return self.form.format(self.build_dataset()[case_idx]["answer"])


class Talk(Grader):
    """One conversation of falsepass's tests."""

    score_episode = None

    def episode(self, answer: str) -> Iterator[Any]:
        """Up to three attempts."""
        said, number = [(yield None)], next(EPISODES)
        while self.name == "endless" or len(said) < 3:
            if said[-1].strip() == answer and self.name != "endless":
                break
            told = f"Wrong. The answer was {answer}. Try again." if self.name.startswith("reveals") else "Once more."
            said.append((yield told + (f" (episode {number})" if self.name == "state_of_episodes" else "")))
        right = said[:1] if self.name == "reveals_and_knows" else said
        return float(any(reply.strip() == answer for reply in right))


def measure(asked: Asked) -> Iterator[Figure]:
    """Once, as the checks draw nothing by chance; in short the first ones."""
    expected = {f"Grader {name}": checks for name, (_, _, checks) in GRADERS.items()}
    expected |= {f"Talk {name}": checks for name, checks in TALKS.items()}
    yield from found("falsepass", expected, asked)
    if importlib.util.find_spec("reasoning_gym") is not None:
        with_info = {f"Gym {name}": (*checks, *map("info {}".format, checks)) for name, checks in TASKS.items()}
        yield from found("reasoning-gym", with_info, asked)


def found(source: str, expected: Mapping[str, tuple[str, ...]], asked: Asked) -> Iterator[Figure]:
    """The share of the defects that are found, and how many environments without one have a finding."""
    names = list(expected)[: 2 if asked.is_short else None]
    with ThreadPoolExecutor(2) as pool:
        said = dict(zip(names, pool.map(findings, names), strict=True))
    healthy = [any(not one.startswith("info ") for one in said[name]) for name in names if not expected[name]]
    missed = [name for name in names if expected[name] and not said[name] & {*expected[name]}]
    print(*(f"missed: {name}\n" for name in missed), sep="", end="", file=sys.__stderr__)
    defects = len(names) - len(healthy)
    yield Figure(f"{source}: share of {defects} defects found", [1 - len(missed) / defects], least=1)
    if healthy:
        yield Figure(f"{source}: of {len(healthy)} healthy ones with a finding", [sum(healthy)], most=0)


def findings(name: str) -> set[str]:
    """The checks of `aitrain env check` that find something; behind `info` those of that level."""
    class_name, own = name.split()
    keywords = ["--rl-env-config", json.dumps({"name": own})]
    command = [sys.executable, "-m", "aitrain", "env", "check", f"{__file__}:{class_name}", *keywords, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    checks = [check for check in json.loads(done.stdout)["checks"] if check["name"] != "latency"]  # the machine is busy
    every = [(check["name"], finding["level"]) for check in checks for finding in check["findings"]]
    return {"info " * (level == "info") + check for check, level in every}
