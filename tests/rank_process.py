"""A process that follows one group of ranks after another: one JSON order a line in, one outcome a line out.

>>> with Followers(1) as followers, followers.group(2, target_config, engine_config) as ranks:
...     target = load_rank(target_config, engine_config, ranks)
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from ragspec.config import EngineConfig, TargetConfig
from ragspec.engine.parallel import load_follower, load_rank
from ragspec.engine.target import Target
from ragspec.errors import RagspecError
from ragspec.numerics.ranks import DistributedRanks, Ranks, Rendezvous

PATIENCE_S = 60.0
"""Of groups that nothing is to happen to: test machines are busy."""


class Rank(Ranks):
    """One of several, for what needs no others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Followers:
    """Processes that outlive their groups, because importing torch takes longer than any of these tests."""

    def __init__(self, count: int) -> None:
        self.processes = [_start() for _ in range(count)]

    @contextmanager
    def group(
        self, size: int, target: TargetConfig, engine: EngineConfig, timeout_s: float = PATIENCE_S, **others: Any
    ) -> Iterator[DistributedRanks]:
        """Rank 0 of a new group, whose other ranks load the target and run. `others`: how their target's settings differ."""
        meeting = Rendezvous("127.0.0.1")
        for rank in range(1, size):
            order = {"rank": rank, "size": size, "address": meeting.address, "timeout_s": timeout_s}
            order |= {"target": target.model_dump() | others, "engine": engine.model_dump()}
            self._tell(rank, order)
        ranks = DistributedRanks(meeting, 0, size, target.collectives, timeout_s, adds=target.adds_parts)
        try:
            yield ranks
        finally:
            ranks.close()

    @contextmanager
    def target(self, size: int, config: TargetConfig, engine: EngineConfig) -> Iterator[Target]:
        """Rank 0's target; its engines may be closed, and the group goes on."""
        with self.group(size, config, engine) as ranks:
            target = load_rank(config, engine, ranks)
            close, target.close = target.close, lambda: None  # type: ignore[method-assign]
            yield target
            close()
        assert self.outcomes(size) == ["stopped"] * (size - 1)

    def outcomes(self, size: int) -> list[str]:
        """How the last group ended for each rank but 0; waits for it."""
        return [_line(self.processes[rank - 1])["outcome"] for rank in range(1, size)]

    def replace(self, rank: int) -> None:
        """In the place of a process that was killed or stopped."""
        self.processes[rank - 1].kill()
        self.processes[rank - 1].communicate()
        self.processes[rank - 1] = _start()

    def _tell(self, rank: int, order: dict[str, Any]) -> None:
        stdin = self.processes[rank - 1].stdin
        assert stdin is not None
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def _start() -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[1]
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else {"outcome": "gone"}


def _follow(order: dict[str, Any]) -> str:
    """Rank 0 only loads and holds its part: what dies in a test is then another rank than the test's own."""
    target, engine = TargetConfig(**order["target"]), EngineConfig(**order["engine"])
    try:
        place = order["address"], order["rank"], order["size"]
        ranks = DistributedRanks(*place, target.collectives, order["timeout_s"], adds=target.adds_parts)
        load_follower(target, engine, ranks).run()
    except RagspecError as error:
        return f"{type(error).__name__}: {error}"
    return "stopped"


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps({"outcome": _follow(json.loads(line))}), flush=True)
