"""Machines on this one: network namespaces on a common bridge, each with its own hostname and process ids, and Ray on
them. Needs root; nothing listens outside of the namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

BIN = Path(sys.executable).parent
SECONDS = 900.0
"""How long a test waits for what must happen; Ray starts slowly on a busy machine."""


@dataclass
class Machine:
    """One machine; `kill` is a power cut."""

    name: str
    address: str
    namespace: str
    inits: subprocess.Popen[bytes]
    home: Path

    @property
    def init(self) -> int:
        """The first process of the machine, as it is numbered here."""
        children = Path(f"/proc/{self.inits.pid}/task/{self.inits.pid}/children").read_text().split()
        return int(children[0])

    def command(self, *arguments: str, cwd: Path) -> list[str]:
        """The command that runs this there; entering a mount namespace leaves the working directory."""
        there = ["nsenter", "-t", str(self.init), "--net", "--uts", "--pid", "--mount"]
        return [*there, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *arguments]

    def start(self, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
        """Start a command there."""
        return subprocess.Popen(
            self.command(*arguments, cwd=cwd),
            env={**os.environ, **self.variables()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, cwd: Path) -> str:
        """Run a command there; what it printed."""
        process = self.start(*arguments, cwd=cwd)
        text, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, text
        return text

    def variables(self) -> dict[str, str]:
        quick = {"period_ms": 1000, "initial_delay_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
        return {
            "HOME": str(self.home),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # Ray's is 15, by which other programs of this machine go first
            "RAY_enable_metrics_collection": "0",
            **{f"RAY_health_check_{name}": str(value) for name, value in quick.items()},
        }

    def start_ray(self, head: str | None = None) -> None:
        """Start Ray there, as the head or as another machine of a cluster."""
        place = ["--head", "--port=6379", "--include-dashboard=false"] if head is None else [f"--address={head}:6379"]
        command = [
            str(BIN / "ray"), "start", *place, f"--node-ip-address={self.address}", "--num-cpus=1",
            "--object-store-memory=80000000", "--disable-usage-stats",
        ]  # fmt: skip
        for _ in range(3):  # Ray gives up after 30 seconds, which a busy machine needs
            with suppress(AssertionError):
                self.run(*command, cwd=self.home)
                return
            self.run(str(BIN / "ray"), "stop", "--force", cwd=self.home)
        self.run(*command, cwd=self.home)

    def kill(self) -> None:
        """End all processes of the machine at once."""
        with suppress(OSError, IndexError):
            os.kill(self.init, signal.SIGKILL)
        self.inits.wait()


@dataclass
class Machines:
    """Some machines with a network between them."""

    home: Path
    prefix: str = f"air{os.getpid() % 100000}"
    made: list[Machine] = field(default_factory=list)

    def add(self) -> Machine:
        """Switch on one more machine."""
        number = len(self.made) + 1
        name, namespace, address = f"node{number}", f"{self.prefix}n{number}", f"10.88.0.{number}"
        ip("netns", "add", namespace)
        ip("-n", namespace, "link", "set", "lo", "up")
        outer, inner = f"{self.prefix}v{number}", f"{self.prefix}w{number}"
        ip("link", "add", outer, "netns", f"{self.prefix}b", "type", "veth", "peer", "name", inner, "netns", namespace)
        ip("-n", f"{self.prefix}b", "link", "set", outer, "master", "bridge", "up")
        ip("-n", namespace, "addr", "add", f"{address}/24", "dev", inner)
        ip("-n", namespace, "link", "set", inner, "up")
        hosts = self.home / f"hosts{number}"
        hosts.write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        own = self.home / f"ray{number}"  # Ray's folder is another one on each machine
        own.mkdir()
        Path("/tmp/ray").mkdir(exist_ok=True)
        mounts = f"mount --bind {hosts} /etc/hosts && mount --bind {own} /tmp/ray"
        script = f"hostname {name} && {mounts} && exec sleep infinity"
        isolated = ["unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        inits = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *isolated, "sh", "-c", script], stderr=subprocess.DEVNULL
        )
        machine = Machine(name, address, namespace, inits, self.home)
        self.made.append(machine)
        wait_until(lambda: "sleep" in Path(f"/proc/{machine.init}/cmdline").read_text())
        return machine


@contextmanager
def machines(home: Path) -> Iterator[Machines]:
    """A network for machines, which are switched off at the end."""
    home.mkdir(exist_ok=True)
    all_of_them = Machines(home)
    bridge = f"{all_of_them.prefix}b"
    ip("netns", "add", bridge)
    try:
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        yield all_of_them
    finally:
        for machine in all_of_them.made:
            machine.kill()
        for name in (bridge, *(machine.namespace for machine in all_of_them.made)):
            ip("netns", "del", name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def wait_until(is_so: object, seconds: float = SECONDS) -> None:
    """Wait until a function returns something true; an error of it means no."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(Exception):
            if is_so():  # type: ignore[operator]
                return
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def can_make_machines() -> bool:
    """Whether this system lets us make network namespaces."""
    name = f"airprobe{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True
