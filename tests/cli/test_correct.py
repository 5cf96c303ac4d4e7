"""`ragspec correct`: what is printed, what is written, and how it ends. The target is random, its corrections are forced."""

import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import exit_code
from rewriting import rewriting
from tiny_target import save_model

from ragspec.cli import correct
from ragspec.rag.grammar.grammar import Grammar


class Ended(NamedTuple):
    code: int
    out: bytes
    err: str


@pytest.fixture
def grammar(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the command would load, writing "goes" for "go"; and with what settings it was loaded."""
    loaded: list[Any] = []

    def from_config(settings: Any, say: Any) -> Grammar:
        loaded.append(settings)
        return rewriting(lambda sentence: sentence.replace(" go ", " goes ").replace("Teh", "The"))[0]

    monkeypatch.setattr(correct.Grammar, "from_config", from_config)
    yield loaded


@pytest.fixture
def call(grammar: list[Any], capfdbinary: pytest.CaptureFixture[bytes]) -> Any:
    def run(*args: object) -> Ended:
        code = exit_code("correct", *args)
        out, err = capfdbinary.readouterr()
        return Ended(code, out, err.decode())

    return run


BYTES = "\ufeffHe go home.\r\n\r\n\tIt is `go now` \U0001f600 he go on.\r\nLast".encode()
FIXED = BYTES.replace(b"He go ", b"He goes ").replace(b"he go ", b"he goes ")


def test_a_file_is_printed_corrected_and_stays_as_it_is(call: Any, tmp_path: Path) -> None:
    """Line endings or a byte order mark that are lost on the way."""
    path = tmp_path / "a.md"
    path.write_bytes(BYTES)
    assert call(path) == (0, FIXED, call(path).err)
    assert path.read_bytes() == BYTES
    assert "1 files, 1 with corrections, 2 in all" in call(path).err


def test_a_diff_ends_as_a_linter_does(call: Any, tmp_path: Path) -> None:
    """A check in CI that passes whatever it finds; a diff that no patch takes."""
    wrong, right = tmp_path / "wrong.txt", tmp_path / "right.txt"
    wrong.write_bytes(b"He go on.\r\nAll is well.")
    right.write_bytes(b"He goes on.\n")
    ended = call(wrong, right, "--diff")
    assert ended.code == 1
    assert ended.out.splitlines(keepends=True)[2:] == [
        b"@@ -1,2 +1,2 @@\n",
        b"-He go on.\r\n",
        b"+He goes on.\r\n",
        b" All is well.\n",
        b"\\ No newline at end of file\n",
    ]
    assert call(right, "--diff")[:2] == (0, b"")


def test_in_place_replaces_the_whole_file_and_keeps_its_mode(call: Any, tmp_path: Path) -> None:
    """A script that is executable no more; a link that becomes a file; a file that is written though nothing changed."""
    path, link, same = tmp_path / "a.txt", tmp_path / "link.txt", tmp_path / "same.txt"
    path.write_bytes(BYTES)
    path.chmod(0o751)
    link.symlink_to(path)
    same.write_bytes(b"All is well.\n")
    os.utime(same, ns=(1, 1))
    ended = call(link, same, "--in-place")
    assert (ended.code, ended.out) == (0, b"")
    assert path.read_bytes() == FIXED and link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert same.stat().st_mtime_ns == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "link.txt", "same.txt"]


def test_a_write_that_fails_leaves_the_file(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file after a full disk."""
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_bytes(BYTES)
    other.write_bytes(b"He go on.")
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target) == path:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(correct.os, "replace", full)
    ended = call(path, other, "--in-place")
    assert ended.code == 2 and "No space left" in ended.err
    assert path.read_bytes() == BYTES and other.read_bytes() == b"He goes on."
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "b.txt"]


def test_what_was_written_meanwhile_is_not_lost(
    call: Any, grammar: list[Any], tmp_path: Path, monkeypatch: Any
) -> None:
    """A paragraph that was typed while the target was loading."""
    path, load = tmp_path / "a.txt", correct.Grammar.from_config
    path.write_bytes(b"He go on.")

    def slowly(settings: Any, say: Any) -> Grammar:
        path.write_bytes(b"He go on. And on.")
        return load(settings, say)

    monkeypatch.setattr(correct.Grammar, "from_config", slowly)
    ended = call(path, "--in-place")
    assert ended.code == 2 and "changed meanwhile" in ended.err
    assert path.read_bytes() == b"He go on. And on."


def test_what_is_no_text_is_refused_and_the_rest_goes_on(call: Any, grammar: list[Any], tmp_path: Path) -> None:
    """A photograph whose bytes are "corrected"; a folder in the list that ends the job."""
    photo, nul, text = tmp_path / "photo.jpg", tmp_path / "nul.txt", tmp_path / "a.txt"
    photo.write_bytes(b"\xff\xd8\xff\xe0")
    nul.write_bytes(b"He go \0 on.")
    text.write_bytes(b"He go on.")
    ended = call(photo, nul, tmp_path, tmp_path / "none.txt", text, "--in-place")
    assert ended.code == 2 and text.read_bytes() == b"He goes on."
    assert "photo.jpg is not UTF-8: byte 0" in ended.err and "NUL" in ended.err and "none.txt" in ended.err
    assert photo.read_bytes() == b"\xff\xd8\xff\xe0"
    assert call(photo).code == 2
    assert len(grammar) == 1, "a target was loaded for nothing"


def test_standard_input_goes_to_standard_output(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor's filter that adds a line, or writes a file called -."""
    for options in ((), ("--in-place",)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"He go on.\r\n")))
        assert call("-", *options)[:2] == (0, b"He goes on.\r\n")


def test_words_that_are_to_stay_stay(call: Any, tmp_path: Path) -> None:
    """An option that is read and forgotten."""
    path, words = tmp_path / "a.txt", tmp_path / "words.txt"
    path.write_bytes(b"Teh mill go on and on here.")
    words.write_bytes(b"mill go\n\n")
    assert call(path, "--ignore", "Teh").out == b"Teh mill goes on and on here."
    assert call(path, "--ignore-file", words).out == b"The mill go on and on here."
    assert call(path, "--max-edit-ratio", "0").out == path.read_bytes()
    assert call(path, "--diff", "--in-place").code == 2
    assert call(path, "--ignore-file", tmp_path / "none").code == 1


@pytest.mark.slow
def test_the_command_runs_with_a_real_target(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """A command that works with its parts replaced only."""
    target, path = save_model("llama", tmp_path / "tiny"), tmp_path / "a.txt"
    path.write_bytes(BYTES)
    assert exit_code("correct", path, "--target", target, "--seed", "3") == 0 and capfdbinary.readouterr().out
