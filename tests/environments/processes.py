"""Environments that tell on which process they run, for the tests of processes and signals."""

import os
import random
import time
from pathlib import Path


class Shared:
    """Random rows and a table of answers set while building: both must be the first process's everywhere."""

    def __init__(self, notes):
        self.notes = Path(notes)

    def build_dataset(self, tokenizer):
        (self.notes / f"built-by-{os.getpid()}").touch()
        luck = random.SystemRandom()
        self.answers = [luck.randrange(10**9) for _ in range(16)]
        return [{"prompt": f"say {answer}", "answer": answer} for answer in self.answers]

    def score_episode(self, completion, case_idx, answer):
        some = {"some": float(len(completion))} if os.environ["RANK"] == "0" or len(completion) % 3 == 0 else {}
        return {"score": len(completion) % 7 / 7, "same": float(self.answers[case_idx] == answer), **some}


class Slow:
    """Takes its time with every score, so that a signal finds the run busy."""

    def build_dataset(self, tokenizer):
        return [{"prompt": f"say {number}"} for number in range(64)]

    def build_eval_dataset(self, tokenizer):
        return [{"prompt": "say it"}]

    def score_episode(self, completion):
        time.sleep(0.02)
        return sum(letter < "n" for letter in completion) / max(1, len(completion))


class Wrong(Slow):
    """Cannot be made; says how many files of its process lead to the log."""

    def __init__(self):
        files = [os.path.realpath(f"/proc/self/fd/{number}") for number in range(99)]
        raise ValueError(f"the log is open as {files.count(files[2])} files")


def stops_on_one():
    """A callback that saves after two steps, and ends the run after the third, on the second process only."""
    from transformers import TrainerCallback

    is_second = os.environ["RANK"] == "1"

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):
            control.should_save |= state.global_step == 1 and is_second
            control.should_training_stop = state.global_step == 3 and is_second

        def on_log(self, args, state, control, **rest):
            control.should_save |= state.global_step == 2 and is_second

    return Stops()


class Unkind(Slow):
    """Ends its own process in the middle, as the system does when memory is out."""

    def score_episode(self, completion, case_idx):
        if case_idx == 5:
            os.kill(os.getpid(), 9)
        return 0.5


class OddGradient(Slow):
    """The second process, and no other, comes to a gradient that is not a number in the second step."""

    def __init__(self):
        from aitrain.training.trainer import EpisodeTrainer

        first = EpisodeTrainer.training_step

        def training_step(self, *arguments, **keywords):
            loss = first(self, *arguments, **keywords)
            if os.environ.get("RANK") == "1" and self.state.global_step == 1:
                next(self.model.parameters()).grad.mul_(float("nan"))
            return loss

        EpisodeTrainer.training_step = training_step  # type: ignore[method-assign]
