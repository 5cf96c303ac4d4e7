"""Personal dictionaries: words that the grammar check leaves alone, per tenant, in one SQLite file.

>>> words = DictionaryStore(Path("dictionaries.sqlite"))
>>> words.add("acme", "Ragspec")
True
>>> words.words("acme")
['Ragspec']
"""

from collections.abc import Sequence
from pathlib import Path

from ragspec.core import check_text
from ragspec.database import Database
from ragspec.errors import InputError

MAX_WORDS = 20_000
_MAX_CHARS = 100
_MAX_NAMES = 16
_SCHEMA = 1
_TABLES = "CREATE TABLE IF NOT EXISTS words (tenant TEXT, name TEXT, word TEXT, PRIMARY KEY (tenant, name, word)) WITHOUT ROWID"


class DictionaryStore:
    """Owns the file. A tenant may have several named dictionaries; the default has the name "". Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises: SaveError, StoreCorrupt."""
        self._database = Database(path, _TABLES, _SCHEMA)

    def words(self, tenant: str, names: Sequence[str] = ()) -> list[str]:
        """A tenant's words, sorted: of the named dictionaries, or of all.

        Raises: InputError for too many names, SaveError, StoreCorrupt.
        """
        names = sorted({check_text(name, "the dictionary's name") for name in names})
        if len(names) > _MAX_NAMES:
            raise InputError(f"at most {_MAX_NAMES} dictionaries can be named, not {len(names)}")
        which = f" AND name IN ({','.join('?' * len(names))})" if names else ""
        with self._database.reading() as db:
            query = f"SELECT DISTINCT word FROM words WHERE tenant=?{which} ORDER BY word"
            return [word for (word,) in db.execute(query, (tenant, *names))]

    def add(self, tenant: str, word: str, name: str = "") -> bool:
        """Add a word; False if it was there. Raises: InputError for an invalid word or too many; SaveError, StoreCorrupt."""
        check_text(word, "the word")
        if word != word.strip() or len(word.split()) > 1:
            raise InputError("the word holds white space; a dictionary has single words")
        if name:
            check_text(name, "the dictionary's name")
        if max(len(word), len(name)) > _MAX_CHARS:
            raise InputError(f"the word, or its dictionary's name, is longer than {_MAX_CHARS} characters")
        with self._database.writing() as db:
            (count,) = db.execute("SELECT COUNT(*) FROM words WHERE tenant=?", (tenant,)).fetchone()
            if count >= MAX_WORDS:
                raise InputError(f"the dictionary is full: it has {MAX_WORDS} words")
            return bool(db.execute("INSERT OR IGNORE INTO words VALUES (?,?,?)", (tenant, name, word)).rowcount)

    def delete(self, tenant: str, word: str, name: str = "") -> bool:
        """Delete a word; False if it was not there. Raises: InputError for invalid text; SaveError, StoreCorrupt."""
        check_text(word, "the word")
        if name:
            check_text(name, "the dictionary's name")
        with self._database.writing() as db:
            found = db.execute("DELETE FROM words WHERE tenant=? AND name=? AND word=?", (tenant, name, word))
            return bool(found.rowcount)

    def close(self) -> None:
        self._database.close()
