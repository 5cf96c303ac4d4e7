"""A process that has an index open survives whoever overwrites its files: an error, or an answer, and never a crash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from letter_encoder import LetterEncoder

from ragspec.core import Document
from ragspec.retrieval.index.manifest import DOCUMENTS, PASSAGES, VECTORS
from ragspec.retrieval.retriever import build_index
from ragspec.retrieval.search.bm25 import POSTING_FILES

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]
_SEARCHING = """
import shutil, sys
from pathlib import Path
from letter_encoder import LetterEncoder
from ragspec.config import RetrieverConfig
from ragspec.errors import RagspecError
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search.filters import parse_filter
from ragspec.retrieval.search.segment_search import SearchScope

encoder = LetterEncoder()
scope = SearchScope("ann", parse_filter({"type": "gt", "key": "year", "value": 3}))

def use(store):
    for mode in ("sparse", "dense", "hybrid"):
        for where in (SearchScope("ann"), scope, SearchScope("bob")):
            attempt(lambda: Retriever(encoder, store, RetrieverConfig(mode=mode)).retrieve(["mill 7", "corn"], 40, where))
    for live in store.segments:
        for read in (live.segment.document, live.segment.passage):
            for number in range(live.segment.record.num_documents):
                attempt(lambda: read(number))

def attempt(call):
    try:
        call()
    except RagspecError as error:
        print("refused", type(error).__name__)

def overwrite(path, filler):
    size, start = path.stat().st_size, 128 if path.suffix == ".npy" else 8
    with open(path, "r+b") as file:
        file.seek(start)
        file.write((filler * size)[: size - start])

source, filler = Path(sys.argv[1]), bytes.fromhex(sys.argv[2])
for name in sys.argv[3:]:
    for is_used in (True, False):
        folder = source.with_name(f"{name}-{is_used}")
        shutil.copytree(source, folder)
        store = Store.open(folder, encoder.identity)
        if is_used:
            use(store)
        (path,) = folder.rglob(name)
        print("overwriting", name, is_used, flush=True)
        overwrite(path, filler)
        use(store)
print("alive")
"""


def check_alive(code: str, *arguments: str) -> str:
    """What the code prints in a process of its own, which must not crash."""
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
        check=False,
        timeout=600.0,
    )
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("refused")]
    assert (ended.returncode, lines[-1:]) == (0, ["alive"]), ended.stdout[-300:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.parametrize("filler", ["0123456789abcdef" * 3 + "55", "ff", "00"])
def test_an_open_index_whose_files_are_overwritten_ends_no_process(tmp_path: Path, filler: str) -> None:
    """Compiled code followed an index of the mapped file out of its arrays: SIGSEGV, and every stream of the process ended."""
    documents = [
        Document(f"d{n}", f"Mill number {n} grinds corn. It is old.", title=f"Mill {n}", metadata={"year": n})
        for n in range(60)
    ]
    build_index([*documents, Document("b", "A zebra of bob.", owner="bob")], tmp_path / "index", LetterEncoder())
    names = [VECTORS, PASSAGES, DOCUMENTS, *POSTING_FILES]
    printed = check_alive(_SEARCHING, str(tmp_path / "index"), filler, *names)
    assert filler == "00" or "refused StoreCorrupt" in printed


_DRAFTING = """
import sys
from pathlib import Path
import numpy as np
from ragspec.drafting.counted import CountedAcceptance, CountedDrafts
from ragspec.drafting.suffix_index import NO_TOKENS, SEPARATOR, SortedSuffixes, VisibleSuffixes
from ragspec.retrieval.index.segment_files import mapped_array, npy_bytes

path, rng = Path(sys.argv[1]), np.random.default_rng(0)
texts = [np.array([*rng.integers(0, 3, 200), SEPARATOR], np.int32) for _ in range(5)]
path.write_bytes(npy_bytes(np.stack(SortedSuffixes.build(np.concatenate(texts)))))
acceptance, both = CountedAcceptance(), mapped_array(path)
suffixes, (begin, half) = SortedSuffixes(*both), (path.stat().st_size - both.nbytes, both.nbytes // 2)
stores = [VisibleSuffixes(suffixes, visible) for visible in (NO_TOKENS, np.arange(half // 4 + 1, dtype=np.int32))]
assert CountedDrafts("datastore", stores, acceptance).grow(texts[0][:9].tolist(), 48, 16)[0]
for number in range(60):
    start, size = ((begin, half), (begin + half, half), (begin, 2 * half))[number % 3]
    filler = (rng.bytes(size), b"\\xff" * size, b"\\x80" * size, rng.integers(0, 4, size // 4, np.int32).tobytes())[number % 4]
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(filler)
    print("overwritten", number, flush=True)
    for store in stores:
        for text in texts:
            store.longest(text[:9])
            low, high = store.suffixes.find(text[:3])
            for span in ((low, high), (0, half // 4)):
                store.followers(*span, 3, 4)
            try:
                CountedDrafts("datastore", [store], CountedAcceptance()).grow(text[:9].tolist(), 48, 16)
            except ZeroDivisionError:
                print("no draft")
print("alive")
"""


def test_sorted_suffixes_that_are_overwritten_end_no_process(tmp_path: Path) -> None:
    """Compiled searches followed a place of the mapped file out of the tokens: SIGSEGV."""
    check_alive(_DRAFTING, str(tmp_path / "suffixes.npy"))
