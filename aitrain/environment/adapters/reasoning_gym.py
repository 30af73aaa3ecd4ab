"""Tasks of reasoning-gym: `--rl-env reasoning-gym:chain_sum`.

Settings: those of `settings.py`, `few_shot` (number of solved cases in each prompt) and `answer_tag`. The arguments are
the fields of the task's own configuration, such as `max_terms`.
"""

from dataclasses import dataclass
from typing import Any

from aitrain.environment.adapters.settings import JsonObject, PackageEnvironment, prompted
from aitrain.errors import EnvironmentFailed


@dataclass(eq=False, kw_only=True)
class ReasoningGym(PackageEnvironment):
    """Asks each of a task's questions once, however often the task draws it.

    The entry that scores an answer is in its row: generated again, it may be another.
    """

    size: int = 500
    seed: int = 42
    score_range: Any = "0,1"
    answer_tag: str | None = None
    few_shot: int = 0

    def __post_init__(self) -> None:
        import reasoning_gym

        super().__post_init__()
        dataset = reasoning_gym.create_dataset(
            self.id, size=self.size + self.few_shot, seed=self.seed, **self.arguments
        )
        self.entry_at, self.score_answer = dataset.__getitem__, dataset.score_answer

    def build_dataset(self) -> list[dict[str, Any]]:
        """One row for each question, with its entry in it; the last questions are the solved ones of the prompts."""
        from reasoning_gym.utils import SYSTEM_PROMPTS

        system = SYSTEM_PROMPTS.get(self.system, self.system)
        drawn = map(self.entry_at, range(self.size + self.few_shot))
        entries = list({(entry["question"], str(entry["answer"])): entry for entry in drawn}.values())
        asked = len(entries) - self.few_shot
        solved: list[JsonObject] = []
        for entry in entries[asked:]:
            answer = self.reference(entry)
            if answer is None:
                raise EnvironmentFailed("few_shot needs right answers, which this task does not have")
            solved += [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": answer}]
        return [
            {
                "prompt": prompted([*solved, {"role": "user", "content": entry["question"]}], system),
                "answer": self.reference(entry),
                "entry": entry,
            }
            for entry in entries[:asked]
        ]

    def score_episode(self, text: str, entry: dict[str, Any]) -> float:
        """The task's own score for the answer."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(text, self.answer_tag) if self.answer_tag else text
        return float(self.score_answer(answer, entry))

    def reference(self, entry: dict[str, Any]) -> str | None:
        """The task's answer; some tasks have none."""
        answer = entry["answer"]
        return f"<{self.answer_tag}>{answer}</{self.answer_tag}>" if answer is not None and self.answer_tag else answer
