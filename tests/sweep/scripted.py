"""In the place of `aitrain grpo --config FILE --json`: a trial whose score follows from its learning rate.

`AITRAIN_TEST_TRIAL` is a JSON object: `killed` is the trial at whose second scoring the sweep is killed, `failing` are
the learning rates that fail, `silent` those that end without a word, `waits` those that train until they are stopped.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import yaml

GOOD, BAD = 3e-4, 1e-7


def main() -> int:
    asked = json.loads(os.environ.get("AITRAIN_TEST_TRIAL", "{}"))
    options = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    folder = Path(options["output_dir"]) / options["project_name"]
    folder.mkdir(exist_ok="--resume" in sys.argv)
    lr, rank = float(options["lr"]), options["lora_r"]
    best = (0.8 if lr == GOOD else 0.3) + rank / 1000
    print("text of a library")
    if lr in asked.get("silent", []):
        return 7
    if lr in asked.get("failing", []):
        return send("Failed", message="no \x1b[31mspace left\nmore", exit_code=1)
    send("RunStarted", folder=str(folder))
    send("Note", text="the same for all", level="info")
    (folder / "starts").open("a").write(f"{' '.join(sys.argv[-1:])}\n")
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    for step in (5, 10, 15):
        score = 0.2 + (best - 0.2) * step / 20
        send("Evaluated", when=f"step {step}", sampled=score, greedy=1 - score)
        if (asked.get("killed"), step) == (options["project_name"], 10):
            os.kill(os.getppid(), signal.SIGKILL)
            return 1
        while lr in asked.get("waits", []) and not stopped:
            time.sleep(0.01)
        time.sleep(0.05)  # the sweep may ask it to stop
        if stopped:
            return send("RunResult", folder=str(folder), result={"status": "stopped", "scores": {}})
    sampled, greedy = ({"before": interval(0.2), "after": interval(after)} for after in (best, 1 - best))
    result = {"status": "finished", "seconds": 3.0, "scores": {"sampled": sampled, "greedy": greedy}}
    return send("RunResult", folder=str(folder), result=result)


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "count": 8}


def send(event: str, **fields: object) -> int:
    print(json.dumps({"event": event, **fields}), flush=True)
    return int(event == "Failed")


if __name__ == "__main__":
    sys.exit(main())
