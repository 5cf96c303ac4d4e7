"""The image: locked, built without a daemon, started, asked, scraped and stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from infra_parts import ROOT, ran
from service_parts import soon

IMAGE = ROOT / "infra/image"
DOCKERFILE = (ROOT / "infra/Dockerfile").read_text()
BASE = "localhost/base"
QUESTION = "When does the old mill of Kirby open?"
MOST_MB = 2_400


def locked(device: str) -> dict[str, str]:
    """The version of each package by its normal name. Raises: AssertionError for a package without a version or hash."""
    text = (IMAGE / f"{device}.txt").read_text() + (IMAGE / "weights.txt").read_text()
    logical = text.replace("\\\n", " ").splitlines()
    packages = [line.strip() for line in logical if line.strip() and not line.startswith("#")]
    found = [re.fullmatch(r"([\w.-]+)==(\S+)( ;.*?)?(\s+--hash=sha256:[0-9a-f]{64})+", line) for line in packages]
    assert all(found), packages
    return {normal(each[1]): each[2] for each in found if each}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_package_is_pinned_with_its_hash(device: str) -> None:
    """Bug guarded: an image that is another one tomorrow, or a dependency that was added and not locked."""
    packages = locked(device)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, extras = settings["project"], settings["project"]["optional-dependencies"]
    of_extras = [each for name in (device, "otlp", "mcp") for each in extras[name]]
    wanted = [*project["dependencies"], *of_extras, *settings["build-system"]["requires"]]
    names = {normal(re.match(r"[\w.-]+", each)[0]) for each in wanted}  # type: ignore[index]
    assert names <= packages.keys()
    assert ("nvidia-cublas" in packages) is (device == "gpu")


@pytest.mark.slow
def test_the_bill_of_materials_names_every_package(tmp_path: Path) -> None:
    """Bug guarded: a documented command that its tool does not know, or weights that nobody accounts for."""
    venv.create(tmp_path / "venv", with_pip=True)
    install = [tmp_path / "venv/bin/pip", "install", "--quiet", "cyclonedx-bom"]
    if (done := subprocess.run(install, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    (command,) = re.findall("^cat .*cyclonedx-py.*$", (ROOT / "infra/README.md").read_text(), re.MULTILINE)
    path = os.environ["PATH"] + f":{tmp_path}/venv/bin"
    for device in ("cpu", "gpu"):
        named = command.replace("DEVICE", device).replace("sbom.json", "/dev/stdout")
        made = ran("bash", "-c", named, cwd=ROOT, env={"PATH": path})
        assert {normal(each["name"]): each["version"] for each in json.loads(made)["components"]} == locked(device)


def test_the_image_is_not_root_and_checks_its_health() -> None:
    """Bug guarded: a container that runs as root, or that is restarted because nobody knows whether it lives."""
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER 10001$", last, re.MULTILINE) and "pip install" not in last
    assert "/health/ready" in last and "--require-hashes" in DOCKERFILE
    copied = re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", DOCKERFILE, re.MULTILINE)
    assert not [
        name for names in copied for name in names.split() if not name.startswith("/") and not (ROOT / name).exists()
    ]


class Builder:
    """Buildah with a storage of its own; images are as its user may make them."""

    def __init__(self, folder: Path, *around: str) -> None:
        """`around`: a command that runs the builder."""
        self.folder = folder
        self._command = [*around, "buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self.environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}

    def run(self, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [*self._command, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=self.environment, **options)

    def must(self, *arguments: str | Path) -> str:
        for _ in range(3):
            done = self.run(*arguments)
            if "sealing memfd copy" not in done.stderr:  # the builder's copy of itself was busy
                break
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout.strip()

    def started(self, container: str, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, "run", container, "--", *map(str, command)], text=True, env=self.environment, **options
        )

    def base(self) -> str:
        """An image of Debian with Python. Skips, with the builder's own words, where none can be made or run."""
        for program in ("buildah", "mmdebstrap"):
            if not shutil.which(program):
                pytest.skip(f"{program} is not installed")
        if self.run("inspect", "--type=image", BASE).returncode == 0:
            return BASE
        archive = self.folder / "base.tar"
        packages = "--include=python3,python3-venv,ca-certificates"
        command = ["mmdebstrap", "--variant=minbase", packages, "bookworm", str(archive)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"mmdebstrap: {made.stderr.strip().splitlines()[-1]}")
        steps = (
            ("from", "--name", "base", "scratch"),
            ("add", "-q", "base", archive, "/"),
            ("commit", "-q", "base", BASE),
        )
        for step in (*steps, ("run", "base", "--", "python3", "-c", "import venv")):
            if (done := self.run(*step)).returncode:
                pytest.skip(f"buildah {step[0]}: {done.stderr.strip().splitlines()[-1]}")
        return BASE

    def build(self, base: str) -> str:
        """The id of the image. Packages come from where this machine's pip gets them."""
        options = {
            name[4:].lower().replace("_", "-"): value for name, value in os.environ.items() if name[:4] == "PIP_"
        }
        settings = self.folder / "pip.conf"
        settings.write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in options.items())]) + "\n")
        lent = {word for value in options.values() for word in value.split() if Path(word).is_absolute()}
        volumes = [f"--volume={path}:{path}:ro" for path in sorted(lent)] + [f"--volume={settings}:/etc/pip.conf:ro"]
        reachable = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", self.folder, "h11"]
        if (done := subprocess.run(reachable, capture_output=True, text=True, check=False)).returncode:
            pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
        how = ["--format=docker", "--layers", "--pull-never", f"--build-arg=BASE={base}", "--tag=ragspec", *volumes]
        self.must("bud", *how, "-f", ROOT / "infra/Dockerfile", ROOT)
        return "ragspec"


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Builder, str]]:
    """A container of the built image, without the address of any package index."""
    folder = os.environ.get("RAGSPEC_IMAGE_CACHE")  # layers of an earlier run: a build from nothing takes many minutes
    builder = Builder(Path(folder) if folder else tmp_path_factory.mktemp("image"))
    image = builder.build(builder.base())
    settings = json.loads(builder.must("inspect", "--type=image", image))["Docker"]["config"]
    assert settings["User"] == "10001" and settings["Healthcheck"]["Test"][0] == "CMD"
    assert not [each for each in settings["Env"] if each.startswith("PIP_")]
    yield builder, builder.must("from", "--pull-never", image)
    builder.run("rm", "--all")


@pytest.mark.slow
def test_the_image_starts_answers_is_scraped_and_stops_in_time(container: tuple[Builder, str], tmp_path: Path) -> None:
    """Bug guarded: an image that was never built, lacks a file, or is killed in the middle of its answers."""
    builder, name = container

    def inside(*command: str) -> str:
        return builder.must("run", name, "--", *command)

    inside("sh", "-c", "echo 'The old mill of Kirby opens at nine in the morning.' > mill.txt")
    inside("ragspec", "index", "add", "mill.txt", "--index", "/data/index")
    key = json.loads(inside("ragspec", "keys", "add", "--trusted", "--tenant", "a", "--json"))["key"]
    assert inside("id", "-u") == "10001"
    (used,) = re.findall(r"\d+", inside("du", "-sxm", "--exclude=/proc", "--exclude=/sys", "/opt"))
    assert int(used) < MOST_MB
    alone = Builder(builder.folder, "unshare", "--net")  # no network, and no loopback either
    asked = json.loads(alone.must("run", name, "--", "ragspec", "ask", QUESTION, "--index", "/data/index", "--json"))
    assert "nine" in asked["text"]
    serve = "ragspec serve --host 0.0.0.0 --keys /data/keys.json --index /data/index --port 0".split()
    with (tmp_path / "log").open("w+") as log:
        process = builder.started(name, *serve, stdout=subprocess.PIPE, stderr=log)
        try:
            assert process.stdout is not None
            said = "".join(iter(process.stdout.readline, "Ctrl-C stops it.\n"))
            url = re.search(r"http://\S+?:(\d+)/v1", said)
            assert url, (tmp_path / "log").read_text()
            with httpx.Client(base_url=f"http://127.0.0.1:{url[1]}", timeout=600.0) as client:
                client.headers["Authorization"] = f"Bearer {key}"
                assert client.get("/health/ready").status_code == 200
                model = client.get("/v1/models").json()["data"][0]["id"]
                body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
                reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
                assert "nine" in reply["choices"][0]["message"]["content"]
                assert "vllm:generation_tokens_total" in client.get("/metrics").text
            inside = [int(each) for each in ran("pgrep", "-f", " ".join(serve[1:])).split()]
            served = max(inside)  # the last child of the builder's own processes
            os.kill(served, signal.SIGTERM)
            assert soon(lambda: process.poll() is not None, 130.0), "longer than service.drain_s and its grace"
            assert process.returncode == 0
        finally:
            process.kill()
            process.communicate()
