"""Fetch the documents of this evaluation set: python fetch.py documents.json OUT.

Needs apt-get and dpkg-deb. Each package is fetched at its recorded version or, if the archive
no longer has that, at its current one; every file is compared with its recorded hash.
"""

import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def target(package: str, path: str, unzip: bool) -> str:
    """Return where the file at path in the package goes, relative to OUT."""
    for prefix in (f"usr/share/doc/{package}/", "usr/share/"):
        if path.startswith(prefix):
            path = path.removeprefix(prefix)
            break
    return f"{package}/{path.removesuffix('.gz') if unzip else path}"


def download(package: str, version: str, folder: str) -> Path | None:
    """Download the package into folder, at the given version if the archive still has it."""
    for name in (f"{package}={version}", package):
        subprocess.run(["apt-get", "download", name], cwd=folder, capture_output=True)
        if found := sorted(Path(folder).glob("*.deb")):
            return found[0]
    return None


def fetch(entry: dict[str, Any], out: Path) -> list[str]:
    """Copy the listed files of one package to out and return what differs from the record."""
    package: str = entry["package"]
    with tempfile.TemporaryDirectory() as folder:
        deb = download(package, entry["version"], folder)
        if deb is None:
            return [f"{package}: cannot be downloaded"]
        same = hashlib.sha256(deb.read_bytes()).hexdigest() == entry["sha256"]
        notes = [] if same else [f"{package}: another build, {deb.name}"]
        root = Path(folder, "root")
        subprocess.run(["dpkg-deb", "-x", str(deb), str(root)], check=True)
        for item in entry["files"]:
            path, unzip = item["path"], item.get("gz", False)
            if not (root / path).is_file():
                notes.append(f"{package}: {path} is missing")
                continue
            data = (root / path).read_bytes()
            if hashlib.sha256(data).hexdigest() != item["sha256"]:
                notes.append(f"{package}: {path} differs")
            copy = out / item.get("name", target(package, path, unzip))
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(gzip.decompress(data) if unzip else data)
    print(f"{package} {entry['version']}: {len(entry['files'])} files, {len(notes)} notes")
    return notes


if __name__ == "__main__":
    entries = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    differences = [note for entry in entries for note in fetch(entry, Path(sys.argv[2]))]
    print("\n".join(differences) or "All files are as recorded.")
    sys.exit(1 if differences else 0)
