from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Make clusters whose processes are gone when the test ends; their logs are shown if it fails."""
    made: list[Cluster] = []

    def make(**options: object) -> Cluster:
        cluster = Cluster(tmp_path / f"cluster{len(made)}", **options)  # type: ignore[arg-type]
        made.append(cluster)
        cluster.start_lighthouse()
        return cluster

    yield make
    for cluster in made:
        cluster.close()
        print(cluster.logs())  # pytest shows it with a failure only
