"""Machines on one: namespaces with networks, hostnames, mounts and process ids of their own, and cables to a switch.

A machine lives as long as its first process; when that is killed, all of its processes are, and nothing is left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

NAMESPACES = ["--net", "--uts", "--pid", "--mount"]
ADDRESSES = {f"node{number}": f"10.77.0.{number}" for number in (1, 2, 3)}
HOSTS = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
ENDS_WITH_US = ["setpriv", "--pdeathsig=KILL"]
"""Kills the command when the process that started it is killed."""
INIT = 'hostname "$0"; mount --make-rprivate /; ip link set lo up; echo up; sleep infinity & wait'
"""Bash as the first process, which also waits for processes that lost their parent."""


def cannot_make_machines() -> str:
    """Why this computer cannot make namespaces; empty if it can."""
    if missing := [name for name in ("setpriv", "unshare", "nsenter", "ip") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    try:
        subprocess.run(["unshare", *NAMESPACES, "--fork", "ip", "link"], check=True, capture_output=True, timeout=20)
    except subprocess.CalledProcessError as error:
        return str(error.stderr.decode(errors="replace").strip())
    return ""


@dataclass
class NamespaceMachine:
    """One machine, without a network yet, and the folder in which its commands start."""

    name: str
    folder: Path

    def __post_init__(self) -> None:
        namespaces = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "--kill-child"]
        command = [*ENDS_WITH_US, *namespaces, "bash", "-c", INIT, self.name]
        self.outer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.outer.stdout is not None
        assert self.outer.stdout.readline() == "up\n"
        (self.init,) = psutil.Process(self.outer.pid).children()

    def inside(self, *command: str, **variables: str) -> list[str]:
        """The command line that runs a command on this machine."""
        settings = [f"{name}={value}" for name, value in variables.items()]
        there = ["nsenter", f"--target={self.init.pid}", *NAMESPACES, "--"]
        return [*there, "env", f"--chdir={self.folder}", *settings, *command]

    def run(self, *command: str, **variables: str) -> None:
        """Run a command of the system to its end."""
        subprocess.run(self.inside(*command, **variables), check=True, capture_output=True, text=True)

    def aitrain(self, *flags: str, **variables: str) -> subprocess.Popen[str]:
        """Start `aitrain` on the machine."""
        given = {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}
        command = self.inside(sys.executable, "-m", "aitrain", *flags, **given)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(command, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]

    def processes(self) -> list[str]:
        """What runs on the machine, beside its first processes."""
        namespace = os.stat(f"/proc/{self.init.pid}/ns/pid").st_ino
        found = []
        for process in psutil.process_iter():
            try:
                is_here = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == namespace
                if is_here and process.status() != psutil.STATUS_ZOMBIE and process.name() not in ("bash", "sleep"):
                    found.append(" ".join(process.cmdline()))
            except (OSError, psutil.Error):
                continue
        return found

    def kill(self) -> None:
        """End the machine with all of its processes, as if it was switched off; its network closes connections."""
        with suppress(psutil.NoSuchProcess):
            self.init.kill()
        self.outer.wait()


def end_of(process: subprocess.Popen[str], seconds: float = 120.0) -> tuple[int, str]:
    """Exit code and all that a command printed, errors first."""
    try:
        printed, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it does not end:\n{process.communicate()}") from None
    return process.returncode, error + printed


@dataclass
class Network:
    """Machines with cables to a switch."""

    switch: NamespaceMachine
    machines: list[NamespaceMachine] = field(default_factory=list)

    def add(self) -> NamespaceMachine:
        """Switch on one more machine."""
        name = f"node{len(self.machines) + 1}"
        machine = NamespaceMachine(name, self.switch.folder)
        self.machines.append(machine)
        hosts = machine.folder / "hosts"
        hosts.write_text(HOSTS)
        machine.run("mount", "--bind", str(hosts), "/etc/hosts")
        veth = ["ip", "link", "add", name, "type", "veth", "peer", "name", "cable", "netns", str(machine.init.pid)]
        subprocess.run(["nsenter", f"--target={self.switch.init.pid}", "--net", *veth], check=True, capture_output=True)
        self.switch.run("ip", "link", "set", name, "master", "switch", "up")
        machine.run("ip", "address", "add", f"{ADDRESSES[name]}/24", "dev", "cable")
        machine.run("ip", "link", "set", "cable", "up")
        return machine

    def cut(self) -> None:
        """Cut the first cable: nothing arrives any more, and no connection is closed."""
        self.machines[0].run("ip", "link", "set", "cable", "down")

    def left(self) -> list[str]:
        """The processes of machines that are up, when all have had time to end."""
        deadline, up = time.monotonic() + 30, [machine for machine in self.machines if machine.init.is_running()]
        while (found := [process for machine in up for process in machine.processes()]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


@contextmanager
def network(folder: Path, count: int = 2) -> Iterator[Network]:
    """Some machines with a network between them, which are switched off at the end."""
    made = Network(NamespaceMachine("switch", folder))
    try:
        made.switch.run("ip", "link", "add", "switch", "type", "bridge")
        made.switch.run("ip", "link", "set", "switch", "up")
        for _ in range(count):
            made.add()
        yield made
    finally:
        for machine in (made.switch, *made.machines):
            machine.kill()
