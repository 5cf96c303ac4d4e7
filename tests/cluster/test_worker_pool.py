"""What workers reserve."""

from __future__ import annotations

from typing import Any

import pytest

from ragspec.cluster import actors


@pytest.mark.parametrize("num_workers", [1, 2, 7, 100])
@pytest.mark.parametrize("resources", [{"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 64.0}, {"GPU": 1.0}])
def test_workers_leave_room_for_each_other(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, resources: dict[str, Any]
) -> None:
    """More workers than processors wait for each other for ever."""
    monkeypatch.setattr(actors.ray, "cluster_resources", lambda: resources)
    assert 0 < actors.cpus_per_worker(num_workers) <= 0.5
    assert num_workers * actors.cpus_per_worker(num_workers) <= resources.get("CPU", 1.0)
