"""Commands that must succeed, and where the checkout is.

>>> ran("promtool", "check", "rules", ROOT / "infra/prometheus/alerts.yaml")
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


def ran(*command: str | Path, **options: Any) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


FOLDER = ROOT / "infra/prometheus"


DASHBOARD = json.loads((ROOT / "infra/grafana/dashboards/ragspec.json").read_text())


ALERTS = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def queries() -> dict[str, str]:
    """The dashboard's, by panel and letter."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "1m")
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }
