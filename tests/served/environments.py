"""Environments of each kind; all of them draw random numbers from the episode's seed."""

import random
import threading

from aitrain import EnvRequirements, Score, ToolResult


class Single:
    """One answer; its rows hold what JSON does not have, and some rows repeat."""

    def build_dataset(self):
        odd = {"tags": set("asdfgh"), "pair": (1, 2.5), "bad": float("nan")}
        return [{"prompt": f"{number // 2}?", "case_idx": ("row", number // 2), **odd} for number in range(6)]

    def build_eval_dataset(self):
        return [{"prompt": "held?", "case_idx": ("held", 0), "tags": {"b"}, "pair": (), "bad": 0.0}]

    def score_episode(self, text, case_idx, tags, pair, bad, case, prompt):
        assert isinstance(case_idx, tuple)
        assert isinstance(tags, set)
        assert isinstance(pair, tuple)
        assert case["prompt"] == prompt
        return {"score": len(text) % 3 / 3, "metrics": {"third": 1 / 3, "unequal": bad != bad}}


class WithTools:
    """Tools before the answer, and scores of whole groups."""

    def build_dataset(self):
        return [{"prompt": [{"role": "user", "content": f"{number}?"}]} for number in range(4)]

    def get_tools(self):
        return [self.add, self.stop]

    def add(self, a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    def stop(self) -> ToolResult:
        """Stop."""
        return ToolResult("stopped", done=True)

    def score_episode(self, messages):
        return len(str(messages)) % 7 / 7

    def score_group(self, scores, texts, case):
        assert case["prompt"]
        return [None if score is None else Score(score / 2, {"texts": len(texts)}) for score in scores]


class Generator:
    """Two turns and a random hint."""

    requirements = EnvRequirements(max_turns=3, isolation="thread")

    def build_dataset(self):
        return [{"prompt": f"{number}?"} for number in range(4)]

    def episode(self, seed, case_idx):
        said = yield None
        said += yield f"hint {random.Random(seed).random()}"
        return len(said) % 5 / 5


class Loop:
    """Its own loop, with a conversation that is not trained."""

    def build_dataset(self):
        return [{"prompt": f"{number}?"} for number in range(3)]

    async def rollout(self, case, endpoint):
        aside = await endpoint.chat([{"role": "user", "content": "aside"}], trained=False)
        asked = [{"role": "user", "content": case["prompt"] + aside["content"]}]
        answer = await endpoint.chat(asked)
        await endpoint.chat([*asked, answer, {"role": "user", "content": "and?"}])
        return 0.25


class Counts:
    """Its scores are the numbers of the calls."""

    def __init__(self):
        self.count = 0

    def build_dataset(self):
        return [{"prompt": f"{number}?"} for number in range(8)]

    def score_episode(self, text):
        self.count = self.count + 1
        return self.count / 100


class Objects:
    """An object for each episode; `closed` counts those that were closed."""

    concurrent = True

    def __init__(self, rows=8):
        self.rows, self.closed = rows, threading.Semaphore(0)

    def build_dataset(self):
        return [{"prompt": f"{number}?"} for number in range(self.rows)]

    def start(self, case_idx):
        return OneObject(self)


class OneObject:
    def __init__(self, of):
        self.of = of

    def step(self, reply):
        return None

    def score(self):
        return 1.0

    def close(self):
        self.of.closed.release()


class Fails:
    """Each row fails in its own way."""

    def build_dataset(self):
        return [{"prompt": what} for what in ("raise", "hang", "range", "model", "fine")]

    def score_episode(self, prompt, model):
        if prompt == "raise":
            raise KeyError("no such city")
        if prompt == "hang":
            threading.Event().wait()
        if prompt == "model":
            model.generate([1])
        return {"range": 2.0, "fine": 1.0}[prompt]
