"""API keys, and the file that holds their hashes.

Owns the keys file; never stores or logs a key.

    >>> key, record = add_key(Path("keys.json"), "ann")       # the key is shown once
    >>> KeyFile(Path("keys.json")).caller(key).tenant
    'ann'

Why SHA-256 is enough: a key is 256 random bits, so nobody can try out all keys. Slow hashes with salt protect passwords that
people choose.
"""

import hashlib
import hmac
import json
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragspec.disk import atomic_writer
from ragspec.errors import ConfigError, InputError, SaveError
from services.settings import KeyLimits

log = logging.getLogger(__name__)

_PREFIX = "rs-"
_KEY_BYTES = 32
_LONGEST_KEY = 512
_REREAD_S = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a key. `trusted`: may see per-request metrics and counters. `limits`: over the service's defaults."""

    key_id: str
    tenant: str
    trusted: bool = False
    limits: KeyLimits | None = None


class KeyRecord(BaseModel):
    """A key in the file. `id` names the key in logs and for `revoke`, and reveals nothing of it.

    Why every key has a tenant: documents and conversations without a tenant belong to everybody. Names that begin with `~` are
    the service's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field(pattern=r"^[A-Za-z0-9][^\x00-\x1f\x7f]{0,255}$")
    trusted: bool = False
    created: str = ""
    limits: KeyLimits | None = None


class _KeyFileContent(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: int = Field(1, ge=1, le=1)
    keys: list[KeyRecord] = []


def new_key() -> str:
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class SingleKey:
    """One trusted key, made at the start of a service that only this machine reaches."""

    def __init__(self) -> None:
        self.key = new_key()
        self._record = KeyRecord(id="local", sha256=digest(self.key), tenant="local", trusted=True)

    def caller(self, key: str) -> Caller | None:
        return _caller([self._record], key)


class KeyFile:
    """A keys file, reread when it changes. If it becomes unreadable, the last keys stay valid and the log has an error.

    Safe to call from several threads. Raises: ConfigError if the file is missing or invalid at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._content = _read(path)
        self._records = _parse(path, self._content)
        self._checked_s = time.monotonic()

    def caller(self, key: str) -> Caller | None:
        with self._lock:
            if time.monotonic() - self._checked_s >= _REREAD_S:
                self._checked_s = time.monotonic()
                self._refresh()
        return _caller(self._records, key)

    def _refresh(self) -> None:
        try:
            content = _read(self._path)
            if content != self._content:
                self._records = _parse(self._path, content)
                self._content = content
                log.info("keys reread", extra={"keys": len(self._records)})
        except ConfigError as error:
            log.error("the keys file cannot be read; the keys read before stay valid", extra={"reason": str(error)})


KeyStore: TypeAlias = KeyFile | SingleKey


def _caller(records: Sequence[KeyRecord], key: str) -> Caller | None:
    """The owner of `key`; None for an unknown key.

    Compares with every record in constant time, so that the time tells neither how similar a key is nor its place."""
    if not 0 < len(key) <= _LONGEST_KEY:
        return None
    key_digest, found = digest(key), None
    for record in records:
        if hmac.compare_digest(record.sha256, key_digest):
            found = record
    return Caller(found.id, found.tenant, found.trusted, found.limits) if found else None


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """Raises: ConfigError."""
    return _parse(path, _read(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise ConfigError(f"the keys file {path} cannot be read: {cause.strerror}") from cause


def _parse(path: Path, content: bytes) -> tuple[KeyRecord, ...]:
    try:
        keys = _KeyFileContent.model_validate_json(content).keys
    except ValidationError as cause:
        fault = cause.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, fault["loc"])) or "the file"
        raise ConfigError(f"{path} is no keys file: {place}: {fault['msg']}") from cause
    if len({record.id for record in keys}) < len(keys):
        raise ConfigError(f"{path} holds two keys of one id")
    return tuple(keys)


def add_key(
    path: Path, tenant: str, *, key_id: str = "", trusted: bool = False, limits: KeyLimits | None = None
) -> tuple[str, KeyRecord]:
    """Makes a key, which cannot be read again, and its record; creates the file if needed. Default tenant: `key_id`.

    Raises: ConfigError, InputError if the id is taken, SaveError.
    """
    records = read_keys(path) if path.exists() else ()
    key, key_id = new_key(), key_id or f"key-{secrets.token_hex(4)}"
    if any(record.id == key_id for record in records):
        raise InputError(f"there is a key {key_id!r} already")
    created = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        record = KeyRecord(
            id=key_id, sha256=digest(key), tenant=tenant or key_id, trusted=trusted, created=created, limits=limits
        )
    except ValidationError as cause:
        raise InputError(f"{cause.errors()[0]['loc'][0]}: {cause.errors()[0]['msg']}") from cause
    _write(path, (*records, record))
    return key, record


def rotate_key(path: Path, key_id: str) -> tuple[str, KeyRecord]:
    """Makes a second key with the tenant, trust and limits of a key, which stays valid until it is revoked.

    Raises: ConfigError, InputError if there is none of that id, SaveError.
    """
    for record in read_keys(path):
        if record.id == key_id:
            return add_key(path, record.tenant, trusted=record.trusted, limits=record.limits)
    raise InputError(f"there is no key {key_id!r} in {path}")


def revoke_key(path: Path, key_id: str) -> None:
    """Raises: ConfigError, InputError if there is none of that id, SaveError."""
    records = read_keys(path)
    left = tuple(record for record in records if record.id != key_id)
    if len(left) == len(records):
        raise InputError(f"there is no key {key_id!r} in {path}")
    _write(path, left)


def _write(path: Path, records: Sequence[KeyRecord]) -> None:
    """Replaces the file in one step, readable by its owner only."""
    tree = {"version": 1, "keys": [record.model_dump(exclude_unset=True) for record in records]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(path, mode=0o600) as file:
            file.write(f"{json.dumps(tree, indent=1)}\n".encode())
    except OSError as cause:
        raise SaveError(f"the keys file {path} cannot be written: {cause.strerror}") from cause
