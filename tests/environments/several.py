"""Environments of several kinds, for runs that have more than one."""

import aitrain


def share_of_early(text):
    """The share of letters below n."""
    return sum(letter < "n" for letter in text) / max(1, len(text))


class Early:
    """One answer, scored by its early letters; it writes to itself, as people's classes do."""

    def __init__(self, word="say", count=20):
        self.word, self.count = word, count

    def build_dataset(self):
        return [{"prompt": f"{self.word} {number}:"} for number in range(self.count)]

    def score_episode(self, completion):
        self.last = completion
        return aitrain.Score(share_of_early(self.last), {"letters": float(len(completion))})


class Talk:
    """Two turns with scores from -1 to 1, in processes of its own."""

    requirements = aitrain.EnvRequirements(
        max_turns=2, max_new_tokens=4, score_range=(-1.0, 1.0), isolation="process", episodes_at_once=5
    )

    def build_dataset(self):
        return [{"prompt": f"talk {number}:", "odd": number % 2} for number in range(12)]

    def episode(self, odd, seed):
        said = yield None
        said += yield f" more {seed % 10}:"
        return 2 * share_of_early(said) - 1 if odd else -1.0


class Ranked:
    """Scored by the order within a group."""

    def build_dataset(self):
        return [{"prompt": f"rank {number}:"} for number in range(12)]

    def build_eval_dataset(self):
        return [{"prompt": f"ranked {number}:"} for number in range(3)]

    def score_episode(self):
        return 0.0

    def score_group(self, texts):
        order = sorted(texts, key=share_of_early)
        return [order.index(text) / len(order) for text in texts]
