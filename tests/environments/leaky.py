"""An environment that lets secrets out wherever it can: those of its variables, and others that only have the form."""

import logging
import os
import sys

SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "MY_OWN_SECRET")


class Leaky:
    """Raises, prints, logs and returns them."""

    def build_dataset(self):
        note = {"note": os.environ["LEAKED_TEXT"]}
        return [{"prompt": f"say {number} {os.environ['MY_OWN_SECRET']}:", **note} for number in range(24)]

    def build_eval_dataset(self):
        return [{"prompt": "say:", "case_idx": 24}]

    def score_episode(self, completion, case_idx):
        said = " ".join(os.environ[name] for name in (*SECRETS, "LEAKED_TEXT"))
        print(f"printed {said}")
        print(f"to stderr {said!r}", file=sys.stderr)
        logging.getLogger("leaky").warning("logged %s", said)
        os.system("printf 'from a program '; printenv HF_TOKEN LEAKED_TEXT")
        if case_idx % 3 == 1:
            raise ConnectionError(f"GET https://board/?key={said}")
        return {"score": len(completion) % 5 / 5, "metric": 1.0}
