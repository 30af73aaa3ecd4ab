"""Two machines made of this one: network namespaces with a cable between them, each with its own host name and process
ids. Needs Linux and root."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import PATIENCE, ROOT

HOSTS = Path("/etc/netns")
"""Folder of the host files of network namespaces."""


@dataclass(frozen=True)
class Machine:
    """One of them."""

    rank: int
    namespace: str
    address: str

    @property
    def interface(self) -> str:
        """Its end of the cable."""
        return f"cable{self.rank}"

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, so that it runs there; killing its first process kills all of the machine's."""
        name = f'hostname node{self.rank}; exec "$@"'
        apart = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", name, "--"]
        return ["ip", "netns", "exec", self.namespace, *apart, *command]

    def bytes_moved(self) -> int:
        """Bytes over the cable since it was laid, in both directions."""
        shown = _ip("-s", "-j", "-n", self.namespace, "link", "show", "dev", self.interface)
        statistics = json.loads(shown)[0]["stats64"]
        return int(statistics["rx"]["bytes"] + statistics["tx"]["bytes"])


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Make them, and remove them at the end.

    Raises:
        OSError: namespaces cannot be made here.
    """
    number, machines = os.getpid() % 250 + 1, []
    hosts = "127.0.0.1 localhost\n" + "".join(f"10.78.{number}.{rank + 1} node{rank}\n" for rank in range(2))
    with ExitStack() as stack:
        for rank in range(2):
            machine = Machine(rank, f"aitrain-{os.getpid()}-{rank}", f"10.78.{number}.{rank + 1}")
            _ip("netns", "add", machine.namespace)
            stack.callback(_ip, "netns", "del", machine.namespace)
            folder = HOSTS / machine.namespace
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            (folder / "hosts").write_text(hosts)
            machines.append(machine)
        first, second = machines
        ends = [*("netns", first.namespace, "type", "veth", "peer", "name"), second.interface]
        _ip("link", "add", first.interface, *ends, "netns", second.namespace)
        for machine in machines:
            _ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
            for interface in ("lo", machine.interface):
                _ip("-n", machine.namespace, "link", "set", interface, "up")
        yield first, second


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def run_on_both(machines: Sequence[Machine], command: Callable[[Machine], list[str]], output: Path) -> None:
    """Run a command on each machine, until all have ended.

    Raises:
        RuntimeError: one ended with another exit code than 0.
    """
    children: list[tuple[Machine, subprocess.Popen[bytes]]] = []
    try:
        for machine in machines:
            with output.with_suffix(f".{machine.rank}").open("wb") as file:
                started = subprocess.Popen(
                    machine.command(command(machine)), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file
                )
            children.append((machine, started))
        codes = {machine.rank: child.wait() for machine, child in children}
    finally:
        for _, child in children:
            _end(child)
    if any(codes.values()):
        said = "".join(output.with_suffix(f".{rank}").read_text(errors="replace")[-4000:] for rank in codes)
        raise RuntimeError(f"exit codes by machine: {codes}\n{said}")


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGKILL)  # of unshare, with --kill-child: the kernel ends the machine's processes
        child.wait(PATIENCE)
