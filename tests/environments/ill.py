"""Environments that fail, for the tests of failures."""

import itertools


class Gone:
    """Works for the held-out cases, if at all, and in training for a number of calls."""

    def __init__(self, calls=0, held_out=True):
        self.calls, self.held_out = calls, held_out
        self.numbers = itertools.count()

    def build_dataset(self):
        return [{"prompt": f"say {number}"} for number in range(24)]

    def build_eval_dataset(self):
        return [{"prompt": "say it", "case_idx": -1}]

    def score_episode(self, completion, case_idx):
        works = next(self.numbers) < self.calls if case_idx >= 0 else self.held_out
        if not works:
            raise RuntimeError("the board is gone")
        return len(completion) % 5 / 5
