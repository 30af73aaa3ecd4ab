"""What `aitrain env check` finds in the tasks of reasoning-gym, and in the zoo of rl-envdoctor, against what is known.

    python -m benchmarks.env_check reasoning-gym [TASK ...]
    python -m benchmarks.env_check zoo
    python -m benchmarks.env_check falsepass

Each runs in a virtual environment that has the package.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = {"list_functions": 64}
"""Entries of a task; 16 of the others. Few functions of `list_functions` draw without a seed."""

KNOWN: dict[str, tuple[str, ...]] = {
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
"""Defects of reasoning-gym 0.1.25 that a sweep by hand found, with the checks of which one must find each."""


class Gym:
    """One task of reasoning-gym; the reply is the answer, without space around it, as its `extract_answer` gives it."""

    def __init__(self, task: str) -> None:
        import reasoning_gym

        size = CASES.get(task, 16)
        self.dataset = reasoning_gym.create_dataset(task, size=size, seed=42)
        self.entries = [self.dataset[number] for number in range(size)]

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": entry["question"]}], "entry": entry} for entry in self.entries]

    def score_episode(self, text: str, entry: dict[str, Any]) -> float:
        return float(self.dataset.score_answer(text.strip(), entry))

    def reference(self, case_idx: int) -> str | None:
        answer = self.entries[case_idx]["answer"]
        return None if answer is None else str(answer)


class Zoo:
    """One specimen of rl-envdoctor; the reference is the first form of the right answer that earns most."""

    def __init__(self, name: str) -> None:
        from envdoctor.zoo import SPECIMENS

        self.specimen = next(specimen for specimen in SPECIMENS if specimen.name == name)

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": case.prompt, "answer": case.answer} for case in self.specimen.cases]

    def score_episode(self, text: str, answer: str) -> float:
        names = self.specimen.reward.__code__.co_varnames[: self.specimen.reward.__code__.co_argcount]
        return float(
            self.specimen.reward(
                **{"completion": text, "answer": answer} if "answer" in names else {"completion": text}
            )
        )

    def reference(self, case_idx: int) -> str:
        answer = str(self.specimen.cases[case_idx].answer)
        forms = [answer, f"<answer>{answer}</answer>", f"\\boxed{{{answer}}}"]
        return max(forms, key=lambda form: self.score_episode(form, answer))


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


FALSEPASS: dict[str, tuple[Callable[[str, str], float], str, tuple[str, ...]]] = {
    "strict": (_strict, "#### {}", ()),
    "leaky": (_leaky, "#### {}", ("shotgun", "denied-answer", "floor")),
    "raises": (_raises, "#### {}", ("exceptions",)),
    "alternating": (_alternating, "#### {}", ("repeatable-score", "concurrency")),
    "rejecting": (_rejecting, "#### {}", ("wrong-answer",)),
    "truncating": (_truncating, "#### {}", ("wrong-answer",)),
    "hedged": (_hedged, "#### {}", ("denied-answer",)),
    "first_tag": (_first_tag, "<answer>{}</answer>", ("equivalent-forms",)),
    "last_tag": (_last_tag, "<answer>{}</answer>", ("equivalent-forms",)),
    "last_nonempty_tag": (_last_nonempty_tag, "<answer>{}</answer>", ()),
    "conflicting_labels": (_strict, "#### {}", ("duplicates",)),
    "state_of_episodes": (_strict, "{}", ("repeatable-episode", "isolation")),
    "endless": (_strict, "{}", ("episode-end",)),
    "reveals": (_strict, "{}", ("floor",)),
    "reveals_and_knows": (_strict, "{}", ()),
}
"""The graders and conversations of falsepass's own tests, with the checks of which one must find each defect."""


class Grader:
    """One grader of falsepass's tests, on sums."""

    def __new__(cls, name: str) -> Any:
        """Those of conversations are played, the others scored."""
        is_talk = name in ("state_of_episodes", "endless", "reveals", "reveals_and_knows")
        return object.__new__(Conversing if is_talk and cls is Grader else cls)

    def __init__(self, name: str) -> None:
        self.name = name
        self.grade, self.form, _ = FALSEPASS[name]

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


class Conversing(Grader):
    """The conversations of falsepass's tests."""

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


def falsepass() -> None:
    """The graders and conversations of falsepass's own tests."""
    found = alarms = 0
    for name, report in reports("Grader", "name", list(FALSEPASS)):
        expected = FALSEPASS[name][2]
        said = {finding["check"] for finding in serious(report, with_info="equivalent-forms" in expected)}
        found += bool(said & {*expected})
        alarms += not expected and bool(said)
        print(f"{name:20} {' or '.join(expected) or 'healthy':36} {', '.join(sorted(said)) or '-'}", flush=True)
    defects = sum(bool(expected) for _, _, expected in FALSEPASS.values())
    print(f"{found} of {defects} defects found, {alarms} of {len(FALSEPASS) - defects} healthy ones with a finding")


def findings(class_name: str, key: str, value: str) -> dict[str, Any]:
    """The report of `aitrain env check` for one task."""
    command = [
        sys.executable,
        "-m",
        "aitrain",
        "env",
        "check",
        f"{__file__}:{class_name}",
        "-E",
        f"{key}={value}",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        report = {"checks": [], "error": done.stderr[-300:]}
    return report


def serious(report: dict[str, Any], with_info: bool = False) -> list[dict[str, Any]]:
    """The findings of a report; those of level info only if asked for."""
    levels = {"fail", "warning", *(["info"] if with_info else [])}
    checks = [check for check in report["checks"] if check["name"] != "latency"]  # of the machine, which is busy here
    return [finding for check in checks for finding in check["findings"] if finding["level"] in levels]


def reports(class_name: str, key: str, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The reports of several tasks, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield from zip(names, pool.map(lambda name: findings(class_name, key, name), names), strict=True)


def reasoning_gym(names: list[str]) -> None:
    """All tasks but composites: what was found, what was missed, what else was said."""
    from reasoning_gym.factory import DATASETS

    missed, others = [], []
    tasks = names or sorted(name for name in DATASETS if name != "composite")
    for name, report in reports("Gym", "task", tasks):
        found = serious(report)
        known = KNOWN.get(name, ())
        checks = {finding["check"] for finding in serious(report, with_info=True)}
        if known and not checks & {*known}:
            missed.append(name)
        others += [(name, finding) for finding in found if finding["check"] not in known]
        seconds = sum(check["seconds"] for check in report["checks"])
        said = "; ".join(f"{finding['level']} {finding['check']}: {finding['what']}" for finding in found)
        print(f"{name:28} {seconds:5.1f}s {report.get('error', '')[:200]}{said or '-'}", flush=True)
    present = KNOWN.keys() & {*tasks}
    print(f"\n{len(tasks)} tasks; {len(present) - len(missed)} of {len(present)} known defects found; missed: {missed}")
    print(f"{len(others)} other findings:", *(f"{name} {finding['check']}" for name, finding in others), sep="\n  ")


def zoo() -> None:
    """The specimens of rl-envdoctor."""
    from envdoctor.zoo import SPECIMENS

    by_name = {specimen.name: specimen for specimen in SPECIMENS}
    caught = alarms = 0
    for name, report in reports("Zoo", "name", list(by_name)):
        found = sorted({f"{finding['level']} {finding['check']}" for finding in serious(report)})
        is_healthy = by_name[name].healthy
        caught += not is_healthy and bool(found)
        alarms += is_healthy and bool(found)
        expected = "healthy" if is_healthy else by_name[name].expects
        print(f"{name:26} {expected:30} {', '.join(found) or '-'} {report.get('error', '')}", flush=True)
    defects = sum(not specimen.healthy for specimen in SPECIMENS)
    healthy = len(SPECIMENS) - defects
    print(f"{caught} of {defects} defects found, {alarms} of {healthy} healthy ones with a finding")


if __name__ == "__main__":
    if sys.argv[1:2] == ["zoo"]:
        zoo()
    elif sys.argv[1:2] == ["falsepass"]:
        falsepass()
    else:
        reasoning_gym(sys.argv[2:])
