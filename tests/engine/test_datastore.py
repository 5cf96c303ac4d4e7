"""Datastore drafting: no output changes, counts cover readable live documents alone, and a commit changes the next drafts."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datastore_parts import Numbers, write
from oracle_cases import PARAMS, PROMPTS, assert_equal, requests_of, truth
from tiny_target import SENTENCES, Tiny, tiny_engine, tiny_tokenizer

from ragspec.config import DatastoreConfig, DraftingConfig
from ragspec.core import Document, Request, SamplingParams
from ragspec.drafting.counted import CountedAcceptance, CountedDrafts
from ragspec.drafting.datastore import Datastore, DatastoreDrafter
from ragspec.drafting.drafter import Budget, SequenceView
from ragspec.engine.loading import make_drafters
from ragspec.errors import ConfigError, StoreCorrupt, StoreMissing
from ragspec.tree import Proposal

HARBOUR = "Ships lie in the deep harbour behind the long wall until the storm is over."


def drafted(drafter: DatastoreDrafter, text: str, tenant: str = "") -> list[str]:
    """The tokens of each path of the draft behind a text."""
    tokenizer = tiny_tokenizer()
    request = Request("r", tuple(tokenizer(text).input_ids), SamplingParams(), salt=tenant)
    sequence: Any = SimpleNamespace(
        request=request, tokens=[*request.prompt_ids], prepared={drafter.name: drafter.prepare(request)}
    )
    (proposals,) = drafter.propose([sequence], Budget(48, 1.0, [16]))
    paths: list[list[int]] = []
    for proposal in proposals:
        paths.append([*(paths[proposal.parent] if proposal.parent >= 0 else []), proposal.token_id])
    return [str(tokenizer.decode(path)) for path in paths]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three segments; a document deleted, one of another tenant."""
    folder = tmp_path_factory.mktemp("index")
    write(folder, *(Document(f"s{i}", text) for i, text in enumerate(SENTENCES)))
    write(folder, Document("gone", HARBOUR), Document("b", "The river rises in the secret garden.", owner="b"))
    return write(folder, Document("n", SENTENCES[0]), delete=["gone"])


def test_what_the_documents_say_is_drafted(written: Path) -> None:
    """Passages that nothing retrieved helped no answer; or the most frequent continuation did not come first."""
    drafter = DatastoreDrafter(Datastore(written, tiny_tokenizer()))
    paths = drafted(drafter, "They say that every spring the water carries sand")
    assert max(paths, key=len).startswith(" and small stones down to")
    assert drafted(drafter, "zq") == []


def test_deleted_and_foreign_documents_are_not_counted(written: Path) -> None:
    """A deleted document, or another tenant's, showed in a draft; or the owner's own did not."""
    drafter = DatastoreDrafter(Datastore(written, tiny_tokenizer()))
    assert drafted(drafter, "Ships lie in the deep") == drafted(drafter, "Ships lie in the deep", "b")
    assert not any("harbour" in path for path in drafted(drafter, "Ships lie in the deep"))
    own, others = (drafted(drafter, "The river rises in the", tenant) for tenant in ("b", "a"))
    assert any(path.startswith(" secret garden") for path in own) and own != others
    assert not any("secret" in path for path in others)
    assert others == drafted(drafter, "The river rises in the")


def test_sorted_suffixes_that_are_overwritten_are_an_error(written: Path, tmp_path: Path) -> None:
    """Bytes of the mapped file chose documents that do not exist: IndexError."""
    folder = Path(shutil.copytree(written, tmp_path / "index"))
    Datastore(folder, tiny_tokenizer())
    datastore = Datastore(folder, tiny_tokenizer())
    for path in folder.rglob("suffixes-*.npy"):
        half = (path.stat().st_size - 128) // 2  # of the suffixes' places, behind the tokens
        with open(path, "r+b") as file:
            file.seek(128 + half)
            file.write(b"\x7f" * half)
    with pytest.raises(StoreCorrupt, match="changed"):
        datastore.views("b")  # of whose segment one document is deleted


def test_a_tenants_drafts_do_not_depend_on_others_documents(tmp_path: Path) -> None:
    """Another tenant's documents in the same segment changed the counts."""
    own = [Document(f"s{i}", text, owner="b" if i % 2 else "") for i, text in enumerate(SENTENCES)]
    foreign = [Document(f"a{i}", text + " Sand.", owner="a") for i, text in enumerate(SENTENCES * 3)]
    alone, beside = (
        DatastoreDrafter(Datastore(write(tmp_path / name, *documents), tiny_tokenizer()))
        for name, documents in (("alone", own), ("beside", [*own, *foreign]))
    )
    for text in ("The river rises", "A mill needs", "the bridge was"):
        assert drafted(alone, text, "b") == drafted(beside, text, "b") != []
    assert drafted(alone, "needs rain.", "a") != drafted(beside, "needs rain.", "a"), "a test that cannot fail"


def test_a_commit_changes_the_next_requests_drafts(tmp_path: Path) -> None:
    """New documents were never drafted, or a deleted one until a restart."""
    store = Datastore(write(tmp_path, *(Document(f"s{i}", text) for i, text in enumerate(SENTENCES))), tiny_tokenizer())
    drafter = DatastoreDrafter(store)
    assert drafted(drafter, "Ships lie in the deep") == drafted(drafter, "Ships lie in the deep")
    write(tmp_path, Document("h", HARBOUR))
    drafted(drafter, "Ships lie in the deep")  # sees the commit
    store.wait()
    assert any(path.startswith(" harbour behind") for path in drafted(drafter, "Ships lie in the deep"))
    write(tmp_path, delete=["h"])
    assert not any("harbour" in path for path in drafted(drafter, "Ships lie in the deep"))


def test_sorted_suffixes_are_kept_and_a_damaged_file_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every start tokenised all documents again, or read places outside the tokens from a damaged file."""
    folder = write(tmp_path, *(Document(f"s{i}", text) for i, text in enumerate(SENTENCES)))
    before = drafted(DatastoreDrafter(Datastore(folder, tiny_tokenizer())), "The river rises")
    (path,) = folder.glob("segment-*/suffixes-*.npy")
    with monkeypatch.context() as patch:
        patch.setattr(Datastore, "_sorted", lambda *_: pytest.fail("sorted again"))
        assert drafted(DatastoreDrafter(Datastore(folder, tiny_tokenizer())), "The river rises") == before
    content = np.load(path)
    for damaged in (content[:, :-1], content.astype(np.int64), content + 1000, content[:1]):
        path.unlink()
        np.save(path, damaged)
        assert drafted(DatastoreDrafter(Datastore(folder, tiny_tokenizer())), "The river rises") == before
        assert (np.load(path) == content).all()
    path.write_bytes(b"no array")
    assert drafted(DatastoreDrafter(Datastore(folder, tiny_tokenizer())), "The river rises") == before


def test_several_segments_count_as_one(tmp_path: Path) -> None:
    """A token behind a segment's own most frequent ones was not counted there."""
    followers = [5] * 4 + [6] * 4 + [7] * 3 + [8] * 3 + [9] * 2 + [9] * 5
    documents = [Document(f"d{i}", f"1 2 {token}") for i, token in enumerate(followers)]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    write(whole, *documents)
    write(parts, *documents[:16])  # here 9 is the fifth
    write(parts, *documents[16:])
    numbers: Any = Numbers()
    stores = [Datastore(folder, numbers).views("") for folder in (whole, parts)]
    drafts = [CountedDrafts("counted", each, CountedAcceptance()).grow([3, 1, 2], 4, 4)[0] for each in stores]
    of_whole, of_parts = ([(p.token_id, p.path_prob) for p in each] for each in drafts)
    assert of_whole == of_parts and [token for token, _ in of_whole] == [9, 5, 6, 7]


class Noting(DatastoreDrafter):
    """Keeps every draft."""

    def __init__(self, datastore: Datastore) -> None:
        super().__init__(datastore)
        self.drafts: list[list[Proposal]] = []

    def propose(self, sequences: Sequence[SequenceView], budget: Budget) -> list[list[Proposal]]:
        self.drafts += (lists := super().propose(sequences, budget))
        return lists


def test_a_lost_index_costs_drafts_and_nothing_else(tiny: Tiny, tmp_path: Path) -> None:
    """A request failed because its drafts could not be made."""
    target = tiny()
    folder = write(tmp_path / "index", *(Document(f"s{i}", text) for i, text in enumerate(SENTENCES)))
    drafter = Noting(Datastore(folder, target.tokenizer))
    (request,) = requests_of(target, PARAMS["greedy"], PROMPTS[:1])
    with tiny_engine(target, [drafter]) as engine:
        assert_equal(engine.generate([request]), truth(target, [request], "greedy"))
        assert any(drafter.drafts)
        drafter.drafts.clear()
        folder.rename(tmp_path / "elsewhere")
        assert_equal(engine.generate([request]), truth(target, [request], "greedy"))
        assert engine.num_drafter_failures == 1 and not any(drafter.drafts)


def test_it_is_named_in_the_configuration(tiny: Tiny, written: Path) -> None:
    """The drafter had no entry, was on for everybody, or its index was not asked for."""
    target = tiny()
    config = DraftingConfig(drafters=("datastore",), datastore=DatastoreConfig(index_dir=str(written)))
    (drafter,) = make_drafters(target, config)
    assert isinstance(drafter, DatastoreDrafter)
    with pytest.raises(ConfigError, match=r"drafting\.datastore\.index_dir is empty"):
        make_drafters(target, DraftingConfig(drafters=("datastore",)))
    with pytest.raises(StoreMissing):
        make_drafters(target, DraftingConfig(drafters=("datastore",), datastore=DatastoreConfig(index_dir="/nowhere")))
