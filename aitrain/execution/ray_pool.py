"""The environment's processes on the machines of a Ray cluster: one actor on each machine, which forks them there.

Deadlines, failures and the replacement of processes are those of `processes.py`, which runs inside of the actors. An
actor that is lost fails its calls and is replaced as soon as its machine, or another one, is there.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from traceback import FrameSummary, StackSummary
from typing import Any

from aitrain.errors import EnvironmentFailed
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.fork_server import EnvCommand
from aitrain.execution.processes import Lease
from aitrain.execution.ray_connection import ClusterMachine, connected, machines
from aitrain.execution.ray_host import EnvHost
from aitrain.execution.task import on_cancel, paused

RESOURCE = "environment"
"""Name of a resource of Ray: where machines have it, environments run only there."""
START_SECONDS = 120.0
LOOK = 10.0
"""Seconds between two looks for machines without an actor."""
WAIT = 1.0
"""Seconds between two looks whether a call has reached its deadline."""
NO_HOST = Failure("crashed", "crashed: no machine of the Ray cluster runs the environment")


@dataclass(eq=False)
class HostHandle:
    """The actor on one machine."""

    actor: Any
    machine: ClusterMachine
    leases: int = 0
    is_lost: bool = False

    def ask(self, method: str, *arguments: object, seconds: float | None = None) -> Any:
        """The return value of a method of EnvHost.

        Raises:
            CallFailed: the actor is gone, or did not answer in time.
        """
        return self.result(self.send(method, *arguments), seconds)

    def send(self, method: str, *arguments: object) -> Any:
        """Start a call; its reference."""
        return getattr(self.actor, method).remote(*arguments)

    def wait(self, reference: Any, seconds: float) -> bool:
        """Whether a call ends within these seconds."""
        import ray

        return bool(ray.wait([reference], timeout=seconds)[0])

    def kill(self) -> None:
        """End the actor."""
        import ray

        ray.kill(self.actor)

    def result(self, reference: Any, seconds: float | None = None) -> Any:
        """The result of a call that was started."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return ray.get(reference, timeout=seconds)
        except RayActorError:
            self.is_lost = True
            why = f"crashed: the Ray actor of the environment on {self.machine.host} is gone"
            raise CallFailed(Failure("crashed", why)) from None
        except GetTimeoutError:
            why = f"crashed: {self.machine.host} did not answer within {seconds:g} s"
            raise CallFailed(Failure("crashed", why)) from None
        except RayTaskError as error:
            if isinstance(error.cause, CallFailed):
                raise error.cause from None
            raise


class RayPool:
    """Processes for the user's code on the machines of a Ray cluster."""

    def __init__(self, command: EnvCommand, calls: int, connection: ExitStack) -> None:
        self._command, self._calls, self._connection = command, calls, connection
        self._hosts: dict[str, HostHandle] = {}
        self._attributes: dict[str, bytes] = {}
        self._files: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._looked = 0.0
        self.problems: dict[str, str] = {}
        """Why a machine does not run the environment, by the id of its node; it is not tried again."""

    @classmethod
    def start(cls, command: EnvCommand, calls: int, address: str | None) -> RayPool:
        """Connect to the cluster, and start an actor on each machine.

        Raises:
            ConfigError: there is no cluster.
            EnvironmentFailed: no machine can load the environment.
        """
        connection = ExitStack()
        connection.enter_context(connected(address))
        pool = cls(command, calls, connection)
        pool._start_missing()
        if not pool._hosts:
            connection.close()
            raise EnvironmentFailed("\n".join([*pool.problems.values()][:2]) or NO_HOST.message)
        return pool

    def share(self, file: str) -> None:
        """Make a file of this machine readable by the processes on all machines."""
        with open(file, "rb") as opened:
            self._files[file] = opened.read()
        for host in self._living():
            with suppress(CallFailed):  # gone: it is replaced, and the other one gets the file
                host.ask("store", self._files)

    def update(self, attributes: dict[str, bytes]) -> None:
        """Set pickled attributes on the environment, for the processes that are leased from now on.

        Raises:
            CallFailed: an attribute cannot be unpickled there.
        """
        self._attributes |= attributes
        for host in self._living():
            host.ask("update", attributes)

    def lease(self, make: Callable[[object], object]) -> RayLease:
        """Lease a process on the machine with the fewest leases.

        Raises:
            CallFailed: there is no machine.
        """
        with paused(), self._lock:
            if time.monotonic() - self._looked > LOOK:
                self._start_missing()
            living = self._living()
            if not living:
                raise CallFailed(NO_HOST)
            host = min(living, key=lambda host: host.leases)
            host.leases += 1
            return RayLease(host, next(self._numbers), make)

    def lease_idle(self, make: Callable[[object], object]) -> list[RayLease]:
        """Lease every process that runs and is not leased; none is started."""
        leases = []
        for host in self._living():
            numbers = [next(self._numbers) for _ in range(self._calls)]
            with suppress(CallFailed):
                count = host.ask("lease_idle", numbers, seconds=LOOK)
                leases += [RayLease(host, number, make) for number in numbers[:count]]
        return leases

    def close(self) -> None:
        """End all processes and actors, and leave the cluster."""
        for host in self._living():
            with suppress(CallFailed):
                host.ask("close", seconds=LOOK)
            host.kill()
        self._hosts.clear()
        self._connection.close()

    def _living(self) -> list[HostHandle]:
        return [host for host in list(self._hosts.values()) if not host.is_lost]

    def _start_missing(self) -> None:
        """Start an actor on each machine that has none."""
        self._hosts = {node: host for node, host in self._hosts.items() if not host.is_lost}
        known = {*self._hosts, *self.problems}
        missing = [machine for machine in _for_environments(machines()) if machine.node_id not in known]
        for host in [self._start_host(machine) for machine in missing]:
            node = host.machine.node_id
            try:
                host.ask("place", seconds=START_SECONDS)
                self._hosts[node] = host
            except CallFailed as error:
                self.problems[node] = error.failure.message
            except Exception as error:  # of Ray, or of the actor's constructor
                self.problems[node] = f"{host.machine.host}: {error}"[:300]
            if node in self.problems:
                print(f"The environment does not run there: {self.problems[node]}", flush=True)  # in train.log
        self._looked = time.monotonic()

    def _start_host(self, machine: ClusterMachine) -> HostHandle:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(machine.node_id, soft=False)
        # each call takes a thread, and needs another one to be ended
        remote = ray.remote(num_cpus=0, max_concurrency=2 * self._calls + 4, scheduling_strategy=there)
        actor = remote(EnvHost).remote(self._command, self._files, self._attributes)
        return HostHandle(actor, machine)


def _for_environments(cluster: list[ClusterMachine]) -> list[ClusterMachine]:
    """The machines where environments run."""
    return [machine for machine in cluster if machine.total.get(RESOURCE)] or cluster


@dataclass(eq=False)
class RayLease(Lease):
    """Use of a worker process on a machine of the cluster."""

    host: HostHandle
    number: int
    make: Callable[[object], object]
    failure: Failure | None = None

    def __post_init__(self) -> None:
        super().__init__(self.make)

    def exchange(self, message: bytes) -> bytes:
        """See Lease.exchange. At its deadline, a call on a machine that does not answer fails without it."""
        if self.failure is not None:
            raise CallFailed(self.failure)
        reference = self.host.send("exchange", self.number, message)
        with on_cancel(self._end, self._stack):
            while not self.host.wait(reference, WAIT):
                if self.failure is not None:
                    raise CallFailed(self.failure)
            try:
                answer = self.host.result(reference)
            except CallFailed as error:
                answer = error.failure
        if isinstance(answer, Failure):
            self.failure = self.failure or answer
            raise CallFailed(self.failure)
        reply: bytes = answer
        return reply

    def release(self, is_spent: bool = False) -> None:
        if not self._is_released:
            self._is_released = True
            self.host.leases -= 1
            self.host.send("release", self.number, is_spent)

    def _end(self, failure: Failure) -> None:
        self.host.send("end", self.number, failure)
        self.failure = failure

    def _stack(self) -> StackSummary:
        with suppress(CallFailed):
            frames = self.host.ask("stack", self.number, seconds=3.0)
            return StackSummary.from_list([FrameSummary(*frame) for frame in frames])
        return StackSummary()
