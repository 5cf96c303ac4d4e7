"""Keys: made once, kept as hashes, known and unknown again at once."""

import json
import stat
from pathlib import Path

import httpx2 as httpx
import pytest
from service_parts import Service

from ragspec.errors import ConfigError, InputError
from services.keys import KeyFile, SingleKey, add_key, digest, read_keys, revoke_key
from services.settings import KeyLimits


def test_the_file_never_holds_a_key(tmp_path: Path) -> None:
    """Whoever reads a backup of the file can use every key in it."""
    path = tmp_path / "keys.json"
    key, record = add_key(path, "ann", trusted=True, limits=KeyLimits(concurrency=2))
    held = path.read_text()
    assert key not in held and key.removeprefix("rs-") not in held
    assert json.loads(held)["keys"][0]["sha256"] == digest(key) == record.sha256
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(key) >= 43, "a plain hash is enough for 256 random bits only"


def test_a_caller_is_who_the_file_says(tmp_path: Path) -> None:
    """A key's tenant, trust or limits are another's."""
    path = tmp_path / "keys.json"
    ann, _ = add_key(path, "ann", key_id="a")
    operator, _ = add_key(path, "", trusted=True, limits=KeyLimits(requests_per_minute=5))
    ring = KeyFile(path)
    found = ring.caller(ann)
    assert found is not None and (found.tenant, found.trusted, found.limits) == ("ann", False, None)
    found = ring.caller(operator)
    assert found is not None and found.trusted and found.limits == KeyLimits(requests_per_minute=5)


@pytest.mark.parametrize("wrong", ["", "rs-", "x" * 43, "x" * 100_000, "rs-\udcff", "kéy"])
def test_anything_else_is_nobody_s_key(tmp_path: Path, wrong: str) -> None:
    """An empty, huge or undecodable key is let in, or breaks the comparison."""
    key, _ = add_key(tmp_path / "keys.json", "ann")
    ring = KeyFile(tmp_path / "keys.json")
    assert ring.caller(wrong) is None and ring.caller(key[:-1]) is None and ring.caller(key + "a") is None
    assert SingleKey().caller(wrong) is None


def test_a_changed_file_is_known_within_seconds_and_a_broken_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revoked key works until a restart; an editor's half-written file locks everybody out."""
    monkeypatch.setattr("services.keys._REREAD_S", 0.0)
    path = tmp_path / "keys.json"
    first, _ = add_key(path, "ann", key_id="first")
    ring = KeyFile(path)
    second, _ = add_key(path, "bob")
    assert ring.caller(first) and ring.caller(second)
    revoke_key(path, "first")
    assert ring.caller(first) is None and ring.caller(second)
    path.write_text('{"version": 1, "keys": [')
    assert ring.caller(second)
    path.unlink()
    assert ring.caller(second)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 2, "keys": []}',
        '{"version": 1, "keys": [{"id": "a", "sha256": "00", "tenant": ""}]}',
        '{"version": 1, "keys": [{"id": "a", "sha256": "' + "0" * 64 + '", "tenant": "", "key": "rs-x"}]}',
        '{"version": 1, "keys": [{"id": "a", "sha256": "' + "0" * 64 + '", "tenant": 1}]}',
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """A service starts with nobody let in, or with an entry that means something else than its author thought."""
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.json"):
        KeyFile(path)


def test_an_id_is_taken_once_and_revoked_once(tmp_path: Path) -> None:
    """Revoking one key by its id takes another one out, or none."""
    path = tmp_path / "keys.json"
    add_key(path, "ann", key_id="a")
    with pytest.raises(InputError, match="already"):
        add_key(path, "bob", key_id="a")
    revoke_key(path, "a")
    with pytest.raises(InputError, match="no key"):
        revoke_key(path, "a")
    assert read_keys(path) == ()


def test_a_running_service_forgets_a_revoked_key(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through HTTP, where the file is looked at by requests."""
    monkeypatch.setattr("services.keys._REREAD_S", 0.0)
    key, record = add_key(service.keys.path, "carl")
    with service.client(key) as client:
        assert client.get("/v1/models").status_code == 200
        revoke_key(service.keys.path, record.id)
        refused: httpx.Response = client.get("/v1/models")
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("tenant", "key_id"), [("a\0b", "a"), ("~stranger", "a"), ("ann", "~stranger"), (" ", "a"), ("ann", "a b")]
)
def test_names_that_mean_something_else_are_refused(tmp_path: Path, tenant: str, key_id: str) -> None:
    """A customer shares caches with the service's own, or with a part of another's."""
    with pytest.raises(InputError):
        add_key(tmp_path / "keys.json", tenant, key_id=key_id)


def test_a_key_without_a_tenant_has_one_of_its_own(tmp_path: Path) -> None:
    """Two customers whose operator named no tenant read each other's files, and everybody reads both's."""
    made = [add_key(tmp_path / "keys.json", "")[1] for _ in range(2)]
    assert made[0].tenant and made[0].tenant == made[0].id != made[1].tenant
