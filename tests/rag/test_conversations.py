"""The store of conversations: what is kept, for whom, for how long, and what a crash, a full disk or damage can do to it."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import Clock

from ragspec.core import Passage
from ragspec.errors import InputError, NotFound, SaveError, StoreCorrupt
from ragspec.rag.chat.conversations import ConversationStore, QaPair, ShownPassages, turn_keys
from ragspec.rag.grammar import dictionaries
from ragspec.rag.grammar.dictionaries import DictionaryStore

PASSAGE = Passage("mill", 0, "The old mill was built in 1874.", 0, 31, "The mill", "mill.md", 0.5)
SECRET = "swordfish"


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[ConversationStore]:
    store = ConversationStore(tmp_path / "c.sqlite", ttl_s=3600.0, max_bytes_per_tenant=2**17, clock=clock)
    yield store
    store.close()


def test_what_was_said_and_shown_comes_back(store: ConversationStore) -> None:
    """A field of a passage was lost on the way, and its citation with it."""
    made = store.create("ann", {"topic": "mills"})
    assert store.find("ann", made.id) == made and store.turns("ann", made.id) == []
    store.append("ann", made.id, [QaPair("When?", "In 1874."), QaPair("Why?", "")])
    store.append("ann", made.id, [QaPair("Who?", "The people.")])
    assert store.turns("ann", made.id) == [("When?", "In 1874."), ("Why?", ""), ("Who?", "The people.")]
    shown = ShownPassages((PASSAGE,), "generation-1", ("mill#0",))
    store.save_shown("ann", "key", shown, conversation=made.id)
    assert store.load_shown("ann", ["key", "other"]) == {"key": shown}


def test_a_tenant_sees_and_deletes_its_own_alone(store: ConversationStore) -> None:
    """A name that another tenant learnt opened the conversation."""
    made = store.create("ann")
    store.save_shown("ann", "key", ShownPassages((PASSAGE,)))
    for refused in (store.find, store.turns, store.delete):
        with pytest.raises(NotFound):
            refused("bob", made.id)
    with pytest.raises(NotFound):
        store.append("bob", made.id, [QaPair("a", "b")])
    assert store.load_shown("bob", ["key"]) == {}
    store.forget_documents("bob", ["mill"])
    assert store.find("ann", made.id) and store.load_shown("ann", ["key"])


def test_what_is_deleted_is_gone_from_the_disk(store: ConversationStore, tmp_path: Path) -> None:
    """A deleted conversation could be read in the file, or in the log beside it."""
    made = store.create("ann")
    store.append("ann", made.id, [QaPair(SECRET, SECRET)] * 50)
    secret = Passage("note", 0, SECRET * 100, 0, 900)
    store.save_shown("ann", "key", ShownPassages((secret,)), conversation=made.id)
    store.save_shown("ann", "other", ShownPassages((secret, PASSAGE)))
    assert _on_disk(tmp_path)
    store.delete("ann", made.id)
    assert store.load_shown("ann", ["key"]) == {} and store.load_shown("ann", ["other"])
    store.forget_documents("ann", ["note"])
    assert store.load_shown("ann", ["other"]) == {}
    assert not _on_disk(tmp_path)


def _on_disk(folder: Path) -> bool:
    return any(SECRET.encode() in path.read_bytes() for path in folder.iterdir())


def test_a_clock_that_jumps_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock was set a month ahead, or that started in 1970, lost every conversation."""
    now = [1_700_000_000.0]
    monkeypatch.setattr("ragspec.rag.chat.conversations.time.time", lambda: now[0])
    path, turn = tmp_path / "c.sqlite", QaPair("Q?", "A.")
    with closing(ConversationStore(path, ttl_s=3600.0)) as store:
        before = store.create("ann", turns=[turn]).id
        now[0] += 30 * 86_400.0
        during = store.create("ann", turns=[turn]).id
        assert [store.find("ann", each).id for each in (before, during)] == [before, during]
    now[0] = 0.0
    with closing(ConversationStore(path, ttl_s=3600.0)) as store:
        early = store.create("ann", turns=[turn]).id
        assert [store.find("ann", each).id for each in (before, during, early)] == [before, during, early]
    now[0] = 1_700_000_060.0
    with closing(ConversationStore(path, ttl_s=3600.0)) as store:
        assert [store.find("ann", each).id for each in (before, during, early)] == [before, during, early]
    now[0] += 7200.0
    with closing(ConversationStore(path, ttl_s=3600.0)) as store, pytest.raises(NotFound):
        store.find("ann", early)


def test_an_entry_of_a_far_future_does_not_stop_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One start with a clock a century ahead, and what was said then and since grew older only while the service ran."""
    now, century_s = [1_700_000_000.0], 100 * 365 * 86_400.0
    monkeypatch.setattr("ragspec.rag.chat.conversations.time.time", lambda: now[0])
    made = list[str]()
    for ahead_s in (century_s, 0.0):
        now[0] = 1_700_000_000.0 + ahead_s
        with closing(ConversationStore(tmp_path / "c.sqlite", ttl_s=3600.0)) as store:
            made.append(store.create("ann").id)
            assert store.find("ann", made[0])
    now[0] += 2 * 3600.0 + 60.0
    with closing(ConversationStore(tmp_path / "c.sqlite", ttl_s=3600.0)) as store:
        for each in made:
            with pytest.raises(NotFound):
                store.find("ann", each)


def test_what_nobody_uses_grows_old(store: ConversationStore, clock: Clock) -> None:
    """Old conversations stayed for ever; or one in use was dropped."""
    old, used = store.create("ann").id, store.create("ann").id
    store.save_shown("ann", "old", ShownPassages((PASSAGE,)))
    store.save_shown("ann", "used", ShownPassages((PASSAGE,)))
    clock.now += 3000.0
    store.append("ann", used, [QaPair("a", "b")])
    store.save_shown("ann", "next", ShownPassages((PASSAGE,)), earlier=["used"])
    clock.now += 3000.0
    with pytest.raises(NotFound):
        store.find("ann", old)
    assert store.turns("ann", used) and set(store.load_shown("ann", ["old", "used", "next"])) == {"used", "next"}


def test_what_grew_old_is_not_on_the_disk_of_the_next_process(
    tmp_path: Path, store: ConversationStore, clock: Clock
) -> None:
    """A service that nobody wrote to kept what it had promised to forget."""
    store.append("ann", store.create("ann").id, [QaPair(SECRET, SECRET)])
    store.close()
    assert SECRET.encode() in (tmp_path / "c.sqlite").read_bytes()
    clock.now += 4000.0
    opened = ConversationStore(tmp_path / "c.sqlite", ttl_s=3600.0, clock=clock)
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.iterdir())
    opened.close()


def test_a_conversation_begins_with_all_its_turns_or_is_none(store: ConversationStore) -> None:
    """Too much to keep, and an empty conversation stayed."""
    made = store.create("ann", turns=[QaPair("a", "b"), QaPair("c", "d")])
    assert store.turns("ann", made.id) == [QaPair("a", "b"), QaPair("c", "d")]
    with pytest.raises(SaveError):
        store.create("ann", turns=[QaPair("a", "b" * 2**18)])
    with store._database.reading() as db:
        assert db.execute("SELECT id FROM conversations").fetchall() == [(made.id,)]


def test_a_tenant_takes_no_more_room_than_it_may(store: ConversationStore, clock: Clock) -> None:
    """One tenant filled the disk, or pushed out what others had."""
    store.append("bob", bobs := store.create("bob").id, [QaPair("a", "b")])
    names = []
    for _ in range(64):
        clock.now += 1.0
        names.append(store.create("ann").id)
        store.append("ann", names[-1], [QaPair("x" * 4096, "y" * 4096)])
    there = {each.id for each in store.conversations("ann")}
    kept = [name for name in names if name in there]
    assert 0 < len(kept) < 40 and kept == names[-len(kept) :]
    assert store.turns("bob", bobs)
    with pytest.raises(SaveError):
        store.append("ann", names[-1], [QaPair("x" * 2**17, "")])
    assert store.turns("ann", names[-1]) == [("x" * 4096, "y" * 4096)]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(max_size=5), min_size=2, max_size=6), st.integers(0, 5), st.text(min_size=1, max_size=3))
def test_a_turn_is_known_by_every_character_before_it(texts: list[str], at: int, more: str) -> None:
    """Two histories that join to the same text had the same key."""

    def keys(texts: list[str]) -> list[str]:
        said = [QaPair(*texts[n : n + 2]) for n in range(0, len(texts) - 1, 2)]
        return turn_keys("who", said, "question")

    at %= len(texts) // 2 * 2
    changed = [*texts[:at], texts[at] + more, *texts[at + 1 :]]
    assert keys(texts)[-1] != keys(changed)[-1] and len(set(keys(texts))) == len(keys(texts))
    assert turn_keys("", [QaPair("a", "b")], "c")[-1] != turn_keys("", [QaPair("ab", "")], "c")[-1]


_WRITER = """
import sys
from pathlib import Path
from ragspec.rag.chat.conversations import ConversationStore, QaPair
store = ConversationStore(Path(sys.argv[1]))
name = store.create("ann").id
print(name, flush=True)
for number in range(10**6):
    store.append("ann", name, [QaPair(str(number), "x" * 500)])
    print(number, flush=True)
"""


def test_an_acknowledged_turn_survives_a_kill(tmp_path: Path) -> None:
    """A turn that the user had seen kept was gone after the process was killed."""
    path = tmp_path / "c.sqlite"
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        name = writer.stdout.readline().strip()
        acknowledged = [int(writer.stdout.readline()) for _ in range(50)]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    store = ConversationStore(path)
    kept = [int(turn.question) for turn in store.turns("ann", name)]
    store.close()
    assert kept == list(range(len(kept))) and len(kept) > acknowledged[-1]


def test_a_full_disk_is_an_error_and_what_was_kept_stays(tmp_path: Path) -> None:
    """A full disk ended the process, or cost what was kept before."""
    store = ConversationStore(tmp_path / "c.sqlite")
    name = store.create("ann").id
    store.append("ann", name, [QaPair("first", "kept")])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, limit[1]))
        with pytest.raises(SaveError) as error:
            for _ in range(10):
                store.append("ann", name, [QaPair(SECRET, "x" * 2**16)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert SECRET not in str(error.value)
    assert store.turns("ann", name)[0] == ("first", "kept")
    store.append("ann", name, [QaPair("again", "kept")])
    assert store.turns("ann", name)[-1] == ("again", "kept")
    store.close()


@pytest.mark.parametrize("damage", ["no database", "middle", "schema"])
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    """A damaged file was taken for an empty one, or came out as a stranger's error."""
    path = tmp_path / "c.sqlite"
    if damage == "no database":
        path.write_bytes(b"These are no pages." * 100)
    else:
        store = ConversationStore(path)
        name = store.create("ann").id
        store.append("ann", name, [QaPair("x" * 5000, "y" * 5000)] * 20)
        store.close()
        raw = bytearray(path.read_bytes())
        if damage == "middle":
            raw[4096 : len(raw) // 2] = b"\xa5" * (len(raw) // 2 - 4096)
        else:
            raw[60:64] = (99).to_bytes(4, "big")
        path.write_bytes(raw)
    with pytest.raises(StoreCorrupt, match=r"c\.sqlite"):
        ConversationStore(path)


def test_many_threads_keep_every_turn(store: ConversationStore) -> None:
    """Two turns at once took each other's place."""
    name = store.create("ann").id

    def speak(who: int) -> None:
        for number in range(20):
            store.append("ann", name, [QaPair(f"{who}", f"{number}")])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(speak, range(4)))
    said = store.turns("ann", name)
    for who in range(4):
        assert [int(turn.answer) for turn in said if turn.question == f"{who}"] == list(range(20))
    store.close()
    with pytest.raises(SaveError):
        store.turns("ann", name)


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
