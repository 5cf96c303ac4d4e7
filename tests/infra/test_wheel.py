"""The wheel: it holds all that the packages need, and works where there is no checkout."""

import contextlib
import json
import os
import re
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from infra_parts import ROOT, ran

pytestmark = pytest.mark.slow

PACKAGES = ("ragspec", "services", "pipelines")
QUESTION = "When does the old mill of Kirby open?"


def test_it_holds_every_file_of_the_packages(wheel: Path) -> None:
    """Bug guarded: a page, a style or an adapter that only a checkout has."""
    held = set(zipfile.ZipFile(wheel).namelist())
    tracked = ran("git", "ls-files", *PACKAGES, cwd=ROOT).split()
    pages = [name for name in tracked if name.endswith(".md")]
    assert not [name for name in tracked if name not in held and name not in pages]
    assert not [name for name in held if name.startswith(("tests", "infra"))]
    kept = {re.sub(r".*\.data/data/share/ragspec/", "", name) for name in held if ".data/" in name}
    assert kept >= {f"serve/{path.name}" for path in (ROOT / "infra/serve").glob("*.yaml")}


@contextlib.contextmanager
def served(
    installed: Path, folder: Path, index: Path, env: dict[str, str]
) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """`ragspec serve` of the wheel, with the default target."""
    command = [installed / "bin/ragspec", "serve", "--index", index, "--port", "0"]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=folder)
        try:
            assert process.stdout is not None
            said = "".join(iter(process.stdout.readline, "Ctrl-C stops it.\n"))
            url, key = re.search(r"OPENAI_BASE_URL=(\S+)/v1", said), re.search(r"\$\(cat (.+)\)", said)
            assert url and key, (folder / "log").read_text()
            headers = {"Authorization": f"Bearer {Path(key[1]).read_text().strip()}"}
            with httpx.Client(base_url=url[1], headers=headers, timeout=300.0) as client:
                yield client, process
        finally:
            process.kill()
            process.communicate()


def test_an_empty_environment_indexes_answers_and_serves_with_it(installed: Path, tmp_path: Path) -> None:
    """Bug guarded: a path into the checkout, or a file that was left out, found by the first user who installs it."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": str(tmp_path)}
    options = {"env": env, "cwd": tmp_path}
    where = "import json, pipelines, ragspec, services; print(json.dumps([m.__file__ for m in (pipelines, ragspec, services)]))"
    files = json.loads(ran(installed / "bin/python", "-c", where, **options))
    assert all(Path(file).is_relative_to(installed) for file in files), files
    (tmp_path / "mill.md").write_text("# The mill\n\nThe old mill of Kirby opens at nine o'clock in the morning.\n")
    index = tmp_path / "index"
    ran(installed / "bin/ragspec", "index", "add", tmp_path / "mill.md", "--index", index, **options)
    asked = json.loads(ran(installed / "bin/ragspec", "ask", QUESTION, "--index", index, "--json", **options))
    shown = json.loads(ran(installed / "bin/ragspec", "demo", "--questions", "1", "--json", **options))
    assert shown["num_identical"] == shown["num_questions"] == 1, shown
    with served(installed, tmp_path, index, env) as (client, process):
        assert client.get("/health/ready").status_code == 200
        page = client.get("/")
        assert page.status_code == 200
        for name in re.findall(r'(?:src|href)="(/web/[^"]+)"', page.text):
            assert client.get(name).status_code == 200, name
        body = {"model": "", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        body["model"] = client.get("/v1/models").json()["data"][0]["id"]
        reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        text, cited = reply["choices"][0]["message"]["content"], reply["choices"][0]["message"]["annotations"]
        assert "nine o'clock" in text and "nine o'clock" in asked["text"], (text, asked)
        assert cited
        uploaded = client.post(
            "/v1/files", data={"purpose": "assistants"}, files={"file": ("a.html", b"<p>A zebra.</p>")}
        )
        assert uploaded.status_code == 200, uploaded.text
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
