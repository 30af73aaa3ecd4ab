"""Converts an export to GGUF with llama.cpp's converter, a script of its repository that no package contains."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from aitrain.errors import ConfigError, RunFailed
from aitrain.runs.run_folder import read_object

SCRIPT = "convert_hf_to_gguf.py"
VARIABLE = "LLAMA_CPP"
"""Environment variable with the folder of llama.cpp."""
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Types of GGUF that keep every bit."""


def gguf_file(folder: Path) -> Path:
    """The GGUF file of an export, beside its folder."""
    return folder.with_name(f"{folder.name}.gguf")


def refuse_existing_gguf(folder: Path) -> None:
    """Raise ConfigError if the export has been converted before."""
    if gguf_file(folder).exists():
        raise ConfigError(f"--gguf: {gguf_file(folder)} exists, and is not overwritten\nDelete it first.")


def convert_to_gguf(folder: Path) -> Path:
    """Convert a folder; returns the file.

    Raises:
        RunFailed: the converter is not installed, with the commands that do it, or it failed.
    """
    script, file = find_converter(), gguf_file(folder)
    if script is None:
        raise RunFailed(
            "\n".join(["GGUF needs llama.cpp's converter, which is not installed here:", *commands(folder)])
        )
    partial = file.with_name(f".{file.name}.partial")
    command = [sys.executable, str(script), *_arguments(folder, partial)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode or not partial.exists():
            lines = [line.strip()[:200] for line in done.stdout.splitlines() if line.strip()]
            last = lines[-1] if lines else f"exit code {done.returncode}"
            ran = f"The export is in {folder}. The command was:\n{shlex.join(command)}"
            raise RunFailed(f"llama.cpp's converter failed: {last}\n{ran}")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def find_converter() -> Path | None:
    """The converter's script: in the folder that LLAMA_CPP names, on the PATH, or beside a `gguf` package that is part
    of a checkout of llama.cpp."""
    return next((place for place in _places() if place.is_file()), None)


def _places() -> Iterator[Path]:
    if given := os.environ.get(VARIABLE):
        yield from (Path(given).expanduser() / SCRIPT, Path(given).expanduser())
    if on_path := shutil.which(SCRIPT) or shutil.which(SCRIPT.removesuffix(".py")):
        yield Path(on_path)
    package = importlib.util.find_spec("gguf")
    if package is not None and package.origin is not None:
        yield from (parent / SCRIPT for parent in Path(package.origin).resolve().parents[1:3])


def commands(folder: Path) -> list[str]:
    """The commands that install the converter and convert a folder."""
    script = f"llama.cpp/{SCRIPT}"
    return [
        "  git clone --depth 1 https://github.com/ggml-org/llama.cpp",
        f"  python -m pip install -r llama.cpp/requirements/requirements-{SCRIPT.removesuffix('.py')}.txt",
        f"  python {script} {shlex.join(_arguments(folder, gguf_file(folder)))}",
    ]


def _arguments(folder: Path, file: Path) -> list[str]:
    saved = read_object(folder / "config.json")
    return [str(folder), "--outfile", str(file), "--outtype", TYPES.get(str(saved.get("dtype")), "auto")]
