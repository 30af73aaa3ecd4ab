"""What `aitrain doctor` finds on machines that are well and on machines that are not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import packaging.requirements
import packaging.version  # noqa: F401  # the machines below have none of their own
import pytest

from aitrain.cli.doctor import Finding, examine
from aitrain.launch import hardware
from tests.conftest import install_package, run_in_process, write, write_nvidia_smi

AITRAIN = [
    "torch>=2.13,<2.14", "transformers>=5.17,<5.18", "trl>=1.16,<1.17", "peft>=0.21,<0.22",
    "accelerate>=1.15,<1.16", "datasets>=5.2,<6", 'vllm>=0.31,<0.32; extra == "vllm"', 'pytest>=9; extra == "test"',
]  # fmt: skip
H200 = "0, NVIDIA H200, 143771, 143164"


class Machine:
    """A site-packages folder of metadata, and a bin folder that may have an nvidia-smi."""

    def __init__(self, folder: Path) -> None:
        self.site, self.bin = folder / "site", folder / "bin"
        self.bin.mkdir()
        self.install("aitrain", "0.1.0", *AITRAIN)
        versions = {"transformers": "5.17.0", "trl": "1.16.0", "peft": "0.21.2", "accelerate": "1.15.0"}
        for name, version in {**versions, "datasets": "5.2.0"}.items():
            self.install(name, version)
        self.install_torch("2.13.0+cpu", None)

    def install(self, name: str, version: str, *needs: str) -> None:
        """In place of an older version."""
        self.uninstall(name)
        install_package(self.site, name, version, "".join(f"Requires-Dist: {need}\n" for need in needs))

    def uninstall(self, name: str) -> None:
        for folder in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(folder)

    def install_torch(self, version: str, cuda: str | None) -> None:
        self.install("torch", version)
        text = f"from typing import Optional\n\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
        write(self.site, {"torch/__init__.py": "raise SystemExit('imported')\n", "torch/version.py": text})

    def gpus(self, *lines: str, cuda: str = "13.0") -> None:
        version = f"NVIDIA-SMI version  : 580.1\nDRIVER version      : 580.95.05\nCUDA Version        : {cuda}"
        listed = "\n".join(lines)
        write_nvidia_smi(self.bin, f"case $1 in --version) echo '{version}';; --query*) echo '{listed}';; esac\n")


@pytest.fixture
def machine(tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One on which all is well, without a GPU and without vLLM."""
    made = Machine(tmp_path)
    standard = [sysconfig.get_path("stdlib"), str(Path(sysconfig.get_path("stdlib")) / "lib-dynload")]
    monkeypatch.setattr(sys, "path", [str(made.site), *standard])
    monkeypatch.setenv("PATH", str(made.bin))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def findings() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine()}


def told(name: str) -> tuple[str, str, str]:
    finding = findings()[name]
    return finding.state, finding.found, finding.advice


def test_of_several_gpus_each_is_shown_with_its_memory_and_those_that_are_not_hidden(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install_torch("2.13.0+cu130", "13.0")
    machine.gpus(H200, "1, NVIDIA H200, 143771, 900", "2, Odd Name, 143771, 10")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = findings()

    assert found["GPU 0"].found == "NVIDIA H200, 139.8 of 140.4 GiB free"
    assert found["GPU 1"].found == "NVIDIA H200, 0.9 of 140.4 GiB free"
    assert found["training on"].found == "GPU 0, 1"
    assert (found["NVIDIA driver"].state, found["torch"].state) == ("ok", "ok")


def test_a_torch_that_does_not_fit_the_gpu_or_its_driver_is_a_problem(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpus(H200, cuda="12.8")
    for version, cuda, state in (("cpu", None, "problem"), ("cu130", "13.0", "problem"), ("cu126", "12.6", "ok")):
        machine.install_torch(f"2.13.0+{version}", cuda)
        assert told("torch")[0] == state
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine.install_torch("2.13.0+cpu", None)
    assert told("torch")[0] == "ok"


def test_a_driver_that_hangs_is_a_problem_and_keeps_nobody_waiting(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "PATIENCE", 0.2)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)  # it hangs in the kernel
    write_nvidia_smi(machine.bin, "exec /bin/sleep 8\n")

    start = time.monotonic()
    assert "no answer within" in told("NVIDIA driver")[1]
    assert time.monotonic() - start < 6


@pytest.mark.parametrize(
    ("installed", "name", "state", "advice"),
    [
        (["transformers", "5.10.0"], "transformers", "problem", 'pip install "transformers<5.18,>=5.17"'),
        (["trl"], "trl", "problem", 'pip install "trl<1.17,>=1.16"'),
        (["vllm", "0.30.0"], "vllm", "problem", 'pip install "aitrain[vllm]"'),
        (["vllm", "0.31.0+cu130", "torch==2.13.0"], "vllm", "ok", ""),
    ],
)
def test_a_library_that_does_not_fit_or_is_missing_is_told_with_its_command(
    machine: Machine, installed: list[str], name: str, state: str, advice: str
) -> None:
    machine.install_torch("2.13.0+cu130", "13.0")
    if installed[1:]:
        machine.install(*installed)
    else:
        machine.uninstall(*installed)
    found, _, said = told(name)
    assert found == state
    assert advice in said


# -- the command


def test_a_problem_is_exit_code_1_and_json_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    write_nvidia_smi(tmp_path, "exit 3\n")
    code, out, _ = run_in_process("doctor --json")

    assert code == 1
    assert {each["name"]: each["state"] for each in json.loads(out)["findings"]}["NVIDIA driver"] == "problem"


def test_no_problem_is_found_here(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    code, out, err = run_in_process("doctor")

    assert code == 0, out + err


@pytest.mark.parametrize("command", ["doctor", "env check envs.arithmetic --only floor"])
def test_no_color_takes_away_the_colours_of_a_terminal(command: str) -> None:
    code = (
        f"import sys; sys.argv[1:] = {command.split()}; sys.stdout.isatty = lambda: True\n"
        "from aitrain.cli.main import _run; _run()"
    )
    for value, has_colours in (("", True), ("1", False)):
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, "NO_COLOR": value})
        assert (b"\x1b" in told.stdout) == has_colours
