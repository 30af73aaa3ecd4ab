"""`make gpu`: all that needs a GPU, run on this machine, and docs/gpu-results.md written with what was found.

`python -m benchmarks.gpu_results [--parts PART ...] [--only WORDS] [--rehearse]`; exits 1 when something fails, and 2
without a CUDA GPU. Parts: `overhead` is that of overhead.py in the shapes of real models, with transformers and with
vLLM on both sides; `checks` are the trainings of tests/gpu. Each row is kept in gpu-results.json when it is done, by
GPU; what has passed at the same commit is not run again. The page is made of that file. `--rehearse` runs the smallest
form of everything on the CPU, where it needs no CUDA, and prints the page.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aitrain.launch.hardware import ask_driver, visible_gpus
from aitrain.packages import version_of
from benchmarks.measuring import ROOT, Figure, in_new_process, spread
from benchmarks.models import make_model
from benchmarks.overhead import MEMORY, SECONDS, Training, compare

NO_GPU = "No CUDA GPU is visible. With --rehearse, what needs none runs on the CPU in its smallest form."
ASK = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "vllm", "bitsandbytes")
PAGE = ROOT / "docs" / "gpu-results.md"
KEPT = PAGE.with_suffix(".json")
WEIGHTS: dict[str, dict[str, Any]] = {"lora": {"peft": True, "merge_adapter": False}, "full": {}}
BATCH = {"rl_prompts_per_step": 8, "rl_num_generations": 8, "batch_size": 16}
ENGINES: dict[str, dict[str, Any]] = {"transformers": {}, "vLLM": {"use_vllm": True}}
TRAININGS = [
    ("1.5B", "full", "vLLM"),
    ("0.5B", "full", "transformers"),
    ("1.5B", "lora", "vLLM"),
    ("0.5B", "lora", "transformers"),
    ("3B", "lora", "vLLM"),
    ("4B", "lora", "vLLM"),
    ("4B", "full", "vLLM"),
]
"""What is compared with plain TRL: shape, what is trained, and what generates on both sides, in the same process."""

Rows = Iterator[tuple[str, str, float, str]]
"""What was done, `passed`, `skipped` or `failed`, seconds, and figures or the reason."""


def main() -> int:
    """Run, keep, write."""
    parser = argparse.ArgumentParser(description="Run all that needs a GPU, and write docs/gpu-results.md.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--only", default="", help="of the checks those with these words, as pytest's -k takes them")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in the smallest form")
    asked = parser.parse_args()
    gpu = "CPU, a rehearsal" if asked.rehearse else gpu_name() if visible_gpus() else ""
    if not gpu:
        print(NO_GPU, file=sys.stderr)
        return 2
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # so that aitrain need not be installed
    if asked.rehearse:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    results = {} if asked.rehearse or not KEPT.exists() else json.loads(KEPT.read_text(encoding="utf-8"))
    found, here = results.setdefault(gpu, {}), machine()
    if found.get("machine", {}).get("commit") != here["commit"]:
        found.clear()
    found["machine"] = here
    for part in asked.parts:
        print(f"{part} ...", flush=True)
        rows = found.setdefault(part, {})
        for name, *rest in PARTS[part](asked, rows):
            rows[name] = rest
            if not asked.rehearse:
                KEPT.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
                PAGE.write_text(page(results), encoding="utf-8")
    print(page(results) if asked.rehearse else f"written: {PAGE}")
    return 1 if any(state == "failed" for part in asked.parts for state, *_ in found[part].values()) else 0


def gpu_name() -> str:
    """What torch sees, in a process of its own; nothing where it sees none."""
    done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """What the results hold for; nothing that names this very machine."""
    driver = ask_driver(versions=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or "unknown",
        "GPUs": len(visible_gpus()),
        "driver": driver.version if driver else "none",
        "CUDA of the driver": driver.cuda if driver else "none",
        "CPU cores": os.cpu_count(),
        "Python": sys.version.split()[0],
        **{package: version for package in PACKAGES if (version := version_of(package))},
    }


# -- parts


def run_checks(asked: argparse.Namespace, kept: Mapping[str, Any]) -> Rows:
    """The tests of tests/gpu, with the figures that they record; none if all have passed."""
    if kept and not asked.only and all(state != "failed" for state, *_ in kept.values()):
        return
    with tempfile.TemporaryDirectory(prefix="aitrain-gpu-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1"]  # with properties
        command += [f"--basetemp={folder}/tmp", *(["-k", asked.only] if asked.only else [])]
        variables = {**os.environ, "AITRAIN_GPU": "rehearse" if asked.rehearse else "1"}
        subprocess.run(command, cwd=ROOT, env=variables, check=False)
        for case in ET.parse(report).iter("testcase"):
            bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            state = "passed" if bad is None else "skipped" if bad.tag == "skipped" else "failed"
            name = case.get("name", "").removeprefix("test_").replace("_", " ").replace("[", ": ").removesuffix("]")
            said = [f"{one.get('name')} {_shown(one.get('value', ''))}" for one in case.iter("property")]
            said += [] if bad is None else [_first_line(bad.get("message", ""))]
            yield name, state, float(case.get("time", 0)), "; ".join(said)


def _shown(text: str) -> str:
    try:
        return f"{float(text):,.0f}" if abs(float(text)) >= 100 else f"{float(text):.3g}"
    except ValueError:
        return text


def _first_line(message: str) -> str:
    """The first line of a failure, without paths of this machine."""
    line = next(iter(message.removeprefix("Skipped: ").strip().splitlines()), "")
    return re.sub(r"(?<![\w.])/[\w./-]+/", "", line)[:200]


def run_overhead(asked: argparse.Namespace, kept: Mapping[str, Any]) -> Rows:
    """Plain TRL and aitrain on one GPU, where all answers have the same length; what is kept is not measured again."""
    trainings, pairs, steps, answer, *bounds = TRAININGS, 3, 4, 128, SECONDS, MEMORY, 0.0
    if asked.rehearse:
        trainings, pairs, steps, answer = [("tiny", "lora", "transformers"), ("tiny", "full", "vLLM")], 1, 1, 8
        bounds = [math.inf, math.inf, 1.0]
    os.environ["CUDA_VISIBLE_DEVICES"] = "".join(visible_gpus()[:1])  # TRL alone refuses several
    for shape, weights, engine in trainings:
        name = f"{shape} {weights} {engine}"
        if any(row.startswith(f"{name}:") for row in kept):
            continue
        if engine == "vLLM" and version_of("vllm") is None:
            yield name, "skipped", 0.0, 'vLLM is not installed: pip install "aitrain[vllm]"'
            continue
        with tempfile.TemporaryDirectory(prefix="aitrain-gpu-") as folder:
            in_new_process(make_model, shape, Path(folder) / "model")
            settings = BATCH | WEIGHTS[weights] | ENGINES[engine] | {"rl_max_new_tokens": answer}
            training = Training(Path(folder) / "training", str(Path(folder) / "model"), steps, settings)
            for figure in compare(name, training, pairs, *bounds):
                yield figure.name, "passed" if figure.is_met else "failed", 0.0, _of_pairs(figure)


def _of_pairs(figure: Figure) -> str:
    return "; ".join(filter(None, (spread(figure.values), figure.sides, figure.bound)))


PARTS = {"overhead": run_overhead, "checks": run_checks}


# -- the page

HEAD = """\
# Results on GPUs

`make gpu` runs everything that needs a CUDA GPU, and writes this page:

* the demo's task in bfloat16, and a run that is resumed;
* random models in the shapes of Qwen2.5-0.5B, -1.5B and -3B, with all weights, with LoRA, and with LoRA on a base of 4
  or 8 bits: seconds, tokens per second, and the memory that `aitrain plan` says against the real peak;
* vLLM inside the training process, asleep while the model trains, and as a server that gets the weights as an adapter
  and as files;
* steps [against plain TRL](benchmarks.md) of 0.5B to 4B, all weights and LoRA, where transformers or vLLM generates on
  both sides: seconds and memory.

```
make gpu                                              # all of it
python -m benchmarks.gpu_results --only vllm          # some of the checks
python -m benchmarks.gpu_results --parts overhead     # checks or overhead
python -m benchmarks.gpu_results --rehearse           # on the CPU, without what needs CUDA
```

Each row is kept when it is done, and not run again at the same commit. What is not installed, needs a second GPU or
more memory is skipped, with the reason. Memory is what tensors took at most; a plan may be off by a quarter.
"""
NOBODY = """
**Nobody has run it yet**: we had no GPU. The tests run the rehearsal on the CPU.
"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of these results."""
    return HEAD + ("\n".join(_section(gpu, found) for gpu, found in sorted(results.items())) or NOBODY)


def _section(gpu: str, found: Mapping[str, Any]) -> str:
    about = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    lines = [f"\n## {gpu}", "", about]
    for part in (part for part in PARTS if part in found):
        lines += ["", f"| {part} | result | seconds | figures |", "|---|---|---|---|"]
        for name, (state, seconds, said) in found[part].items():
            cells = name, state, f"{seconds:.0f}", said
            lines.append(f"| {' | '.join(cell.replace('|', ' ').replace('<', '&lt;') for cell in cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
