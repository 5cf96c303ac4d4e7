"""Commands that must succeed, and where the checkout is.

>>> ran("promtool", "check", "rules", ROOT / "infra/prometheus/alerts.yaml")
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def ran(*command: str | Path, **options: Any) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
