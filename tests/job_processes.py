"""Processes of jobs that tests start, watch and kill, always by their id."""

from pathlib import Path


def children(pid: int) -> list[int]:
    """Every living descendant."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        todo.extend(parents.get(todo[0], ()))
        found.append(todo.pop(0))
    return found[1:]


def alive(pids: list[int]) -> list[int]:
    states = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [pid for pid, stat in states.items() if stat.exists() and ") Z " not in stat.read_text()]
