"""A loss, and a callback, as a user would name them."""

from transformers import TrainerCallback


def likelihood(logprobs, advantages):
    """REINFORCE."""
    return -logprobs * advantages


class Counting(TrainerCallback):  # type: ignore[misc]
    """Counts steps."""

    steps = 0

    def on_step_end(self, *_, **__):
        """One more."""
        self.steps += 1
