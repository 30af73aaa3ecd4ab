"""Environments whose episodes are compared in groups, begin with what the environment says, or have no room."""

from aitrain import EnvRequirements, Score


class Ranked:
    """Speaks first, without any prompts; compares the answers of a group. Case 2 has no room."""

    requirements = EnvRequirements(max_new_tokens=4, max_turns=2)

    def build_dataset(self):
        return [{"word": f"word {number}", "length": 100_000 if number == 2 else 1} for number in range(6)]

    def build_eval_dataset(self):
        return [{"word": f"held {number}", "length": 100_000 if number == 2 else 1} for number in range(3)]

    def episode(self, word, length):
        reply = yield f"Say {word}{'!' * length}"
        return len(reply) % 5 / 5

    def score_group(self, texts, scores, word):
        order = sorted(scores)
        return [Score(order.index(own) / len(scores), {"size": len(texts)}) for own in scores]
