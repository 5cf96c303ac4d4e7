"""Writes the results page from one run of all suites on one target and one machine.

    python -m pipelines.results_page [OPTIONS OF THE COMMAND benchmark]      # `make results`

Every suite runs in a process of its own with `--resume`: a row that was measured at this commit is read back and not measured
again. The results lie below the cache folder; the page's part between its two markers, and at most three pictures, are
written to `infra/results` at the end. The suites gpu and serve are left out where there is no CUDA device.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipelines.benchmark import GPU_SUITES, ROOT, SUITES, suite_of
from pipelines.benchmarks.harness import cell
from ragspec.cli.terminal import cache_folder
from ragspec.disk import write_atomically
from ragspec.errors import ConfigError

PAGE = ROOT / "infra/results/README.md"
BEGIN, END = "<!-- measured rows: begin -->", "<!-- measured rows: end -->"
MAX_ROWS, MAX_PICTURES = 60, 3
_SHOWN = ("speculation", "iterative", "load")
"""Suites whose picture the page shows."""


class Figure(NamedTuple):
    """A row of the table. Figures without a goal leave first where there are too many."""

    line: str
    has_goal: bool


def main(options: Sequence[str]) -> int:
    """Run every suite, then write the page. Returns the number of suites that failed."""
    folder, failed = cache_folder() / "benchmark" / "results", 0
    for name in SUITES:
        if name in GPU_SUITES and not torch.cuda.is_available():
            continue
        files = ["--json", str(folder / f"{name}.json")]
        files += (
            ["--plots", str(folder)] if name in _SHOWN else []
        )  # not into the checkout: it would be dirty for the next suite
        command = [sys.executable, "-m", "pipelines.benchmark", "--suite", name, "--resume", *files, *options]
        failed += subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    pictures = [path for path in sorted(folder.glob("*.png")) if path.stem.startswith(_SHOWN)][:MAX_PICTURES]
    write_page({name: folder / f"{name}.json" for name in SUITES if (folder / f"{name}.json").exists()}, pictures)
    return failed


def write_page(files: Mapping[str, Path], pictures: Sequence[Path] = ()) -> None:
    """Replace the part between the markers, and put the pictures beside the page.

    Raises: ConfigError for results of several targets or machines, SaveError.
    """
    for picture in pictures:
        shutil.copy(picture, PAGE.parent)
    results = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items()}
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = re.sub(r"\n!\[.*\n", "", rest.partition(END)[2])  # pictures of older measurements leave
    write_atomically(PAGE, f"{before}{BEGIN}\n{measured_part(results, pictures)}\n{END}{after}")


def measured_part(results: Mapping[str, Mapping[str, Any]], pictures: Sequence[Path] = ()) -> str:
    """The tables of figures, a row each, with the commit that measured it, and the pictures.

    Raises: ConfigError for results of several targets or machines.
    """
    own = [result for name, result in results.items() if name not in GPU_SUITES]  # a GPU is another machine
    for key in ("target", "dtype", "machine"):
        if len({result[key] for result in own}) > 1:
            raise ConfigError(
                f"the results are of several values of {key!r}: measure all suites on one target and machine"
            )
    lines: list[str] = []
    if own:
        is_short = any(each.get("quick") for each in own)
        short = " `--quick` shortened the lists, so small differences are noise." if is_short else ""
        where = f"{own[0]['dtype']}, on {own[0]['machine']}; {own[0]['versions']}"
        lines.append(f"Target {own[0]['target']}, {where}.{short}\n")
    lines += ["| suite | figure | value | meaning | goal | commit |", "|---|---|---|---|---|---|"]
    figures = [figure for name, result in results.items() for figure in _figures(name, result)]
    chosen = sorted(figures, key=lambda figure: not figure.has_goal)[:MAX_ROWS]
    lines += [figure.line for figure in figures if figure in chosen]
    lines += [f"\n![{picture.stem}]({picture.name})" for picture in pictures]
    return "\n".join(lines)


def _figures(name: str, result: Mapping[str, Any]) -> list[Figure]:
    """A line for every metric of the suite that was measured."""
    commit, found = str(result["commit"])[:7], []
    for metric, meaning, goal in suite_of(name).metrics:
        if result.get(metric) is not None:
            aim = goal.text if goal else ""
            line = f"| {name} | `{metric}` | {cell(result[metric])} | {meaning} | {aim} | {commit} |"
            found.append(Figure(line, goal is not None))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
