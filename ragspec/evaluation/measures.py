"""What every measurement notes beside its figures: commit, versions, peak memory, progress, rounding."""

import math
import platform
import resource
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_SMAPS = Path("/proc/self/smaps_rollup")
_PACKAGES = ("torch", "transformers", "numba", "numpy")


class PeakMemory:
    """The peak proportional set size of this process. `look` takes milliseconds: call it between timed parts."""

    def __init__(self) -> None:
        self.peak_mb = 0.0

    def look(self) -> float:
        """Note the present size. Returns the peak so far, in MB (10^6 bytes)."""
        self.peak_mb = max(self.peak_mb, _proportional_mb())
        return self.peak_mb


def _proportional_mb() -> float:
    try:
        lines = _SMAPS.read_text().splitlines()
    except OSError:  # without Linux's file the peak resident size stands in
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def commit() -> str:
    """The commit of this checkout, with "-dirty" if files differ from the commit; "unknown" outside a checkout."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> str:
    """Python and the packages that decide speed, as one line."""
    found = [f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in _PACKAGES)]
    return ", ".join(found)


def rounded(value: Any) -> Any:
    """Floats with four significant digits, NaN as None. Values under 1 stay under 1: 20,999 of 21,000 are not all."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        short = float(f"{value:.4g}")
        return 0.9999 if value < 1.0 <= short else short
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return value
