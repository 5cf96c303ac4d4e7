"""What actors beside each other may reserve of a cluster's processors."""

from __future__ import annotations

import ray

_MAX_CPUS_PER_WORKER = 0.5
_WORKER_SHARE = 0.9
"""Of all processors that the workers together may reserve: a pool that wants more would wait for ever."""


def cpus_per_worker(num_workers: int) -> float:
    """What one worker reserves of the cluster's processors: half of one, or less where there are few."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    share = _WORKER_SHARE * float(resources.get("CPU", 1.0)) / num_workers
    return min(_MAX_CPUS_PER_WORKER, round(share, 4))
