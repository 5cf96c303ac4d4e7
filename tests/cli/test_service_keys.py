"""`ragspec keys`, and how `ragspec serve` refuses a call that cannot be meant."""

import json
from pathlib import Path

import pytest
from commands import exit_code

from ragspec.rag.chat.conversations import ConversationStore, QaPair
from services.keys import KeyFile, add_key
from services.settings import KeyLimits
from services.stores.records import FileRecord, Records


def test_a_key_is_shown_once_and_listed_without_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list that is pasted into a ticket opens the service."""
    file = str(tmp_path / "keys.json")
    assert exit_code("keys", "add", "--file", file, "--tenant", "ann", "--id", "a", "--concurrency", "2", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["tenant"] == "ann"
    assert exit_code("keys", "add", "--file", file, "--id", "own", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tenant"] == "own"  # not nobody, which is everybody
    found = KeyFile(Path(file)).caller(made["key"])
    assert found is not None and found.tenant == "ann" and found.limits is not None and found.limits.concurrency == 2
    for options in ([], ["--json"]):
        assert exit_code("keys", "list", "--file", file, *options) == 0
        shown = capsys.readouterr().out
        assert "ann" in shown and "concurrency" in shown and made["key"] not in shown
        assert json.loads(Path(file).read_text())["keys"][0]["sha256"] not in shown
    assert exit_code("keys", "revoke", "a", "--file", file) == 0
    assert KeyFile(Path(file)).caller(made["key"]) is None


def test_a_rotated_key_has_the_rights_of_the_old_one_until_that_is_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new key that sees other documents or has no limits; or an outage between the old key and the new one."""
    file = tmp_path / "keys.json"
    options = ["--tenant", "ann", "--id", "a", "--trusted", "--concurrency", "2"]
    assert exit_code("keys", "add", "--file", str(file), *options, "--json") == 0
    old = json.loads(capsys.readouterr().out)["key"]
    assert exit_code("keys", "rotate", "a", "--file", str(file), "--json") == 0
    new = json.loads(capsys.readouterr().out)
    before, after = KeyFile(file).caller(old), KeyFile(file).caller(new["key"])
    assert before and after and (before.tenant, before.trusted, before.limits) == ("ann", True, after.limits)
    assert (after.tenant, after.trusted, after.key_id) == ("ann", True, new["id"]) and new["id"] != "a"
    assert exit_code("keys", "revoke", "a", "--file", str(file)) == 0
    assert KeyFile(file).caller(old) is None and KeyFile(file).caller(new["key"])
    assert exit_code("keys", "rotate", "a", "--file", str(file)) == 1


def test_the_report_counts_what_quotas_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tenant that fills the disk is not the one that the report names; or nobody sees how much room a tenant has left."""
    records = Records(tmp_path / "libraries/a/library.sqlite")
    records.add_file(FileRecord("ann", "file-1", "a.txt", "assistants", 3_000_000, 0.0))
    store = records.add_store("ann", "notes", {"a": "b"})
    records.add_members("ann", store.id, {"file-1": {}})
    records.add_file(FileRecord("bob", "file-2", "b.txt", "assistants", 10, 0.0))
    talks = ConversationStore(tmp_path / "conversations.sqlite")
    talks.create("bob", turns=[QaPair("When?", "At noon.")])
    assert exit_code("keys", "usage", "--data", str(tmp_path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["ann", "bob"]
    assert {name: row["file_bytes"] for name, row in report.items()} == {
        name: records.used_bytes(name) for name in ("ann", "bob")
    }
    assert report["bob"]["num_conversations"] == 1 and report["bob"]["conversation_bytes"] > len("When?At noon.")
    assert report["ann"]["max_file_bytes"] == 2**30 and report["ann"]["file_share"] == records.used_bytes("ann") / 2**30
    file, config = tmp_path / "keys.json", tmp_path / "ragspec.yaml"
    config.write_text(f"service: {{keys_file: {file}, limits: {{key: {{concurrency: 4}}}}}}")
    add_key(file, "bob", key_id="b1", limits=KeyLimits(requests_per_minute=60))
    add_key(file, "eve")
    assert exit_code("keys", "usage", "--data", str(tmp_path), "--config", str(config), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bob"]["conversation_share"] == report["bob"]["conversation_bytes"] / 2**26 > 0
    assert report["bob"]["keys"] == {"b1": {"requests_per_minute": 60, "concurrency": 4}}
    assert (report["eve"]["file_share"], list(report["eve"]["keys"].values())) == (0.0, [{"concurrency": 4}])
    assert exit_code("keys", "usage", "--data", str(tmp_path), "--file", str(file)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ann" in shown and "0.3%" in shown and "requests per" in shown
    assert exit_code("keys", "usage", "--data", str(tmp_path / "none"), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {}
    talks.close()
    records.close()


def test_what_cannot_be_done_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback, or success where nothing happened."""
    file = str(tmp_path / "keys.json")
    assert exit_code("keys", "list", "--file", file) == 1
    assert exit_code("keys", "revoke", "a", "--file", file) == 1
    assert exit_code("serve", "--host", "0.0.0.0", "--index", str(tmp_path)) == 1
    assert exit_code("serve", "--port", "70000") == 2
    told = capsys.readouterr().err
    assert told.count("error: ") == 3 and "ragspec keys add" in told and "Traceback" not in told
