"""One cluster for all tests that run the real Ray, as a machine with Ray takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.machines.namespaces import Network, network
from tests.ray.cluster import add_machine


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two machines with Ray, one CPU each, so that each has one rank."""
    with network(tmp_path_factory.mktemp("ray"), count=0) as machines:
        add_machine(machines)
        add_machine(machines)
        yield machines
