"""Words that are right for one tenant: kept, apart, and bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragspec.errors import InputError
from ragspec.rag.grammar import dictionaries
from ragspec.rag.grammar.dictionaries import DictionaryStore


def test_words_are_kept_for_their_tenant_alone(tmp_path: Path) -> None:
    """A word of one customer's that nobody else is told is wrong any more; one that is gone after a restart."""
    words = DictionaryStore(tmp_path / "words.sqlite")
    assert words.add("ann", "Ragspec") and not words.add("ann", "Ragspec")
    assert words.add("ann", "Zzz", "other") and words.add("", "Nobody")
    words.close()
    again = DictionaryStore(tmp_path / "words.sqlite")
    assert again.words("ann") == ["Ragspec", "Zzz"] and again.words("ann", ["other", "other"]) == ["Zzz"]
    assert again.words("bob") == [] and again.words("") == ["Nobody"]
    assert again.delete("ann", "Ragspec") and not again.delete("bob", "Zzz") and not again.delete("ann", "Zzz")
    assert again.words("ann") == ["Zzz"]
    again.close()


@pytest.mark.parametrize("word", ["", " ", "two words", " led", "x" * 101, "nul\0", "half\ud800"])
def test_what_is_no_word_is_refused(word: str) -> None:
    """A whole page in a dictionary; a character that no database takes."""
    words = DictionaryStore(Path(":memory:"))
    with pytest.raises(InputError):
        words.add("ann", word)
    assert words.words("ann") == []
    words.close()


def test_a_dictionary_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that fills the disk; a list of names longer than a statement may be."""
    monkeypatch.setattr(dictionaries, "MAX_WORDS", 2)
    words = DictionaryStore(Path(":memory:"))
    assert words.add("ann", "a") and words.add("ann", "b", "other") and words.add("bob", "c")
    with pytest.raises(InputError, match="full"):
        words.add("ann", "d")
    with pytest.raises(InputError, match="at most 16"):
        words.words("ann", [str(number) for number in range(260_000)])
    assert words.words("ann", ["a"] * 260_000) == []
    words.close()
