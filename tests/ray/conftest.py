"""One cluster for all tests that run the real Ray, as a machine with Ray takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.cluster import Machine, Machines, machines


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("ray") / "home") as network:
        yield network


@pytest.fixture(scope="session")
def cluster(network: Machines) -> list[Machine]:
    """Two machines with Ray, one CPU each, so that each has one rank."""
    first, second = network.add(), network.add()
    first.start_ray()
    second.start_ray(first.address)
    return [first, second]
