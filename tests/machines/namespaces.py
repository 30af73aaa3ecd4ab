"""Two machines on one: namespaces with networks, hostnames, mounts and process ids of their own, and a cable between.

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
from dataclasses import dataclass
from pathlib import Path

import psutil

NAMESPACES = ["--net", "--uts", "--pid", "--mount"]
ADDRESSES = {"nodeA": "10.77.0.1", "nodeB": "10.77.0.2"}
ENDS_WITH_US = ["setpriv", "--pdeathsig=KILL"]
"""Kills the command when the process that started it is killed."""
INIT = 'hostname "$0"; mount --make-rprivate /; ip link set lo up; echo up; sleep infinity & wait'
"""Bash as the first process, which also waits for processes that lost their parent."""
PATIENCE = 120.0
"""Seconds in which a command has to end."""


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
    """One machine."""

    name: str

    def start(self, hosts: Path) -> None:
        """Start the machine, without a network yet."""
        namespaces = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "--kill-child"]
        command = [*ENDS_WITH_US, *namespaces, "bash", "-c", INIT, self.name]
        self.outer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.outer.stdout is not None
        assert self.outer.stdout.readline() == "up\n"
        (self.init,) = psutil.Process(self.outer.pid).children()
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items()))
        self.run("mount", "--bind", str(hosts), "/etc/hosts")

    def inside(self, *command: str) -> list[str]:
        """The command line that runs a command on this machine."""
        return ["nsenter", f"--target={self.init.pid}", *NAMESPACES, "--", *command]

    def run(self, *command: str) -> None:
        """Run a command of the system to its end."""
        subprocess.run(self.inside(*command), check=True, capture_output=True, text=True)

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


@dataclass
class Command:
    """`aitrain` on a machine."""

    process: subprocess.Popen[str]

    def end(self) -> tuple[int, str]:
        """Exit code and standard error."""
        try:
            _, error = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, error = self.process.communicate()
            raise AssertionError(f"it does not end:\n{error}") from None
        return self.process.returncode, error


@dataclass
class Pair:
    """Two machines, and the folder in which all commands start."""

    machines: tuple[NamespaceMachine, NamespaceMachine]
    folder: Path

    def start(self, node: int, *flags: str, **variables: str) -> Command:
        """Start `aitrain` on a machine."""
        given = {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}
        settings = [f"{name}={value}" for name, value in given.items()]
        aitrain = ["env", f"--chdir={self.folder}", *settings, sys.executable, "-m", "aitrain"]
        command = self.machines[node].inside(*aitrain, *flags)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return Command(subprocess.Popen(command, text=True, start_new_session=True, **pipes))  # type: ignore[call-overload]

    def cut(self) -> None:
        """Cut the cable: nothing arrives any more, and no connection is closed."""
        self.machines[0].run("ip", "link", "set", "cable", "down")

    def left(self) -> list[str]:
        """The processes of machines that are up, when all have had time to end."""
        deadline, up = time.monotonic() + 30, [machine for machine in self.machines if machine.init.is_running()]
        while (found := [process for machine in up for process in machine.processes()]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


@contextmanager
def two_machines(folder: Path, first: NamespaceMachine, second: NamespaceMachine) -> Iterator[Pair]:
    """Start two machines with a cable between them, and end them."""
    pair = Pair((first, second), folder)
    try:
        for machine in pair.machines:
            machine.start(folder / f"hosts-{machine.name}")
        veth = ["ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(second.init.pid)]
        subprocess.run(["nsenter", f"--target={first.init.pid}", "--net", *veth], check=True, capture_output=True)
        for machine in pair.machines:
            machine.run("ip", "address", "add", f"{ADDRESSES[machine.name]}/24", "dev", "cable")
            machine.run("ip", "link", "set", "cable", "up")
        yield pair
    finally:
        for machine in pair.machines:
            machine.kill()
