"""Files of commit d5d7a05 stay readable: an index, conversations, dictionaries and half a batch job. So do a configuration with
every key and a keys file of commit 44b9a34, and half a job of questions of commit 8c684b18.

`tests/written_before/` holds the files. They are never written again; a new format needs new files beside them.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from batch_files import read_lines, texts_of
from letter_encoder import LetterEncoder
from tiny_target import SENTENCES, save_model

from pipelines.batch.backend import BackendSpec
from pipelines.batch.job import Job, run_job
from pipelines.batch_grammar import GrammarTask
from pipelines.batch_rag import RagTask
from ragspec.cluster.topology import ClusterConfig
from ragspec.config import IndexConfig, PipelineConfig, RetrieverConfig, load_settings
from ragspec.core import Block, BlockKind, Document, Heading, Passage
from ragspec.errors import ConfigError
from ragspec.rag.chat.conversations import ConversationStore, QaPair, ShownPassages
from ragspec.rag.grammar.dictionaries import DictionaryStore
from ragspec.rag.wording import FORMER_RULES, AnswerFit, TextRules
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.content_key import content_key
from ragspec.retrieval.index.manifest import Manifest, read_current
from ragspec.retrieval.index.store import Store, check_segment
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.search.analysis import RULES, rules_of
from services.keys import Caller, KeyFile
from services.settings import KeyLimits, ServiceConfig

WRITTEN = Path(__file__).parent / "written_before"
CONVERSATION = "conv_f8770f60fb917f646129803b"
GONE = Document("gone", "This sentence was deleted.")
RAIN = Document("rain", "今日は雨天です。 It rained all day.")
DOCUMENTS = [
    Document(
        "mill",
        f"The mill\n\n{SENTENCES[0]} {SENTENCES[3]}",
        title="The mill",
        source="mill.md",
        metadata={"year": 1874, "tags": ["old", "café"]},
        headings=(Heading(0, 1, "The mill"),),
        origin="docs/mill.md",
    ),
    Document("bridge", SENTENCES[2], source="bridge.txt", metadata={"year": 1921}),
    Document("secret", SENTENCES[4], owner="ann"),
]
FOUND = {
    "dense": [
        [("mill", 0.1919250230759023), ("bridge", -0.03037674292141787), ("rain", -0.19248999926165322)],
        [("bridge", 0.39171096108515935), ("rain", -0.018579845095187036), ("mill", -0.09887785108130054)],
    ],
    "sparse": [[("mill", 2.459149808415793), ("bridge", 0.7201668512636272)], [("rain", 1.4988543544683215)]],
    "hybrid": [
        [("mill", 0.03278688524590164), ("bridge", 0.03225806451612903), ("rain", 0.015873015873015872)],
        [("rain", 0.03252247488101534), ("bridge", 0.01639344262295082), ("mill", 0.015873015873015872)],
    ],
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A copy of the files, which the code may change."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "written"))


@pytest.mark.parametrize("mode", FOUND)
def test_an_index_answers_as_it_did(written: Path, mode: str) -> None:
    """An upgrade that asks for a rebuild, or ranks the same passages otherwise."""
    config = RetrieverConfig(index_dir=str(written / "index"), mode=mode, fusion="rank")  # type: ignore[arg-type]
    store = Store.open(written / "index", LetterEncoder.identity)
    assert list(store.documents()) == [*DOCUMENTS, RAIN]
    for live in store.segments:
        check_segment(live.segment)
    found = Retriever(LetterEncoder(), store, config).retrieve(["Where does the river flow past the mill?", "雨天"], 3)
    assert found.generation == "2-a21695649b4b"
    for passages, expected in zip(found.passages, FOUND[mode], strict=True):
        assert [passage.document_id for passage in passages] == [document_id for document_id, _ in expected]
        assert [passage.score for passage in passages] == pytest.approx([score for _, score in expected])


def test_the_same_changes_write_the_same_index(written: Path, tmp_path: Path) -> None:
    """A key, a term or a span that is stored otherwise, so that an index changed today is half old and half new."""
    with IndexWriter(tmp_path / "index", LetterEncoder(), read_current(written / "index")[1].config) as writer:
        for document in [*DOCUMENTS, GONE]:
            writer.upsert(document)
        writer.commit()
        writer.delete("gone")
        writer.upsert(RAIN)
        writer.commit()
    old, new = read_current(written / "index")[1], read_current(tmp_path / "index")[1]
    assert settings_of(new) == settings_of(old)
    assert (rules_of(old.analyzer), rules_of(new.analyzer)) == (1, RULES)
    assert new.content_key == content_key([RAIN, *DOCUMENTS], LetterEncoder.identity, old.config)
    for path in (path for path in (written / "index").glob("segment-*/*") if path.name != "vectors.npy"):
        new_path = tmp_path / path.relative_to(written)
        if path.suffix == ".arrow":
            now, before = (pa.ipc.open_file(pa.memory_map(str(each))).read_all() for each in (new_path, path))
            assert now.select(before.column_names) == before, path.name
        else:
            assert path.read_bytes() == new_path.read_bytes(), path.name


def settings_of(manifest: Manifest) -> dict[str, object]:
    """A manifest without the versions of its writer, its rules for words and the hashes of files that hold floats."""
    fields = manifest.model_dump(exclude={"created_by", "analyzer", "content_key", "schema_version"})
    return {**fields, "segments": [{**segment, "files": sorted(segment["files"])} for segment in fields["segments"]]}


def test_an_index_is_changed(written: Path) -> None:
    """A segment of the old code that cannot be merged with one of the new."""
    before = read_current(written / "index")[1]
    with IndexWriter(written / "index", LetterEncoder(), IndexConfig()) as writer:  # as `index add --config` gives it
        writer.upsert(GONE)
        writer.delete("secret")
        after = writer.compact()
    assert after.generation > 2 and (after.config, after.analyzer) == (before.config, before.analyzer)
    assert {document.id for document in Store.open(written / "index").documents()} == {"mill", "bridge", "rain", "gone"}


def test_documents_of_an_index_are_renewed_by_adding_them_again(written: Path) -> None:
    """Blocks that an old index never gets, or documents without blocks that are encoded again and again."""
    index, block = written / "index", Block(0, 8, BlockKind.HEADING)
    assert Store.open(index).former_documents() == ["mill", "bridge", "secret", "rain"]
    assert {live.segment.passage(0).blocks for live in Store.open(index).segments} == {()}
    for outcome in ("updated", "unchanged"):
        with IndexWriter(index, LetterEncoder()) as writer:
            for document in (replace(DOCUMENTS[0], blocks=(block,)), DOCUMENTS[1]):
                assert writer.upsert(document) == outcome
            writer.compact()
            assert (writer.changes.encoded, writer.changes.reused) == (0, 2 if outcome == "updated" else 0)
    store = Store.open(index)
    assert sorted(store.former_documents()) == ["rain", "secret"]
    found = {each.document_id: each.blocks for live in store.segments for each in map(live.segment.passage, range(4))}
    assert found == {"mill": (block,), "bridge": (), "secret": (), "rain": ()}
    for live in store.segments:
        check_segment(live.segment)


def test_an_index_keeps_its_rules_for_words_until_it_is_built_anew(written: Path) -> None:
    """A passage added by rules 2 to an index of rules 1: one query's terms can find half of the index only."""
    index, soft = written / "index", Document("soft", "The mill\u00adstone of \u0130zmir turned.")
    with IndexWriter(index, LetterEncoder(), IndexConfig()) as writer:
        writer.upsert(soft)
        assert rules_of(writer.commit().analyzer) == 1
    found = {}
    for _ in range(2):
        config = RetrieverConfig(index_dir=str(index), mode="sparse")
        retriever = Retriever(LetterEncoder(), Store.open(index, LetterEncoder.identity), config)
        passages = retriever.retrieve(["millstone", "stone", "izmir"], 3).passages
        found[rules_of(read_current(index)[1].analyzer)] = [[p.document_id for p in own] for own in passages]
        build_index([*DOCUMENTS, soft], index, LetterEncoder(), read_current(index)[1].config)
    assert found == {1: [[], ["soft"], []], RULES: [["soft"], [], ["soft"]]}
    assert [d.text for d in Store.open(index).documents() if d.id == "soft"] == [soft.text]


@pytest.mark.parametrize(("name", "kind"), [("service", ServiceConfig), ("cluster", ClusterConfig)])
def test_a_configuration_with_every_key_is_read(
    name: str, kind: type[PipelineConfig], caplog: pytest.LogCaptureFixture
) -> None:
    """A key that a release dropped stops a service at its start."""
    config = load_settings(kind, WRITTEN / f"{name}.yaml")
    assert config.retriever.num_passages == (5 if name == "service" else 3)
    assert len(caplog.records) == 1


def test_keys_stay_valid() -> None:
    """Every client is locked out by an upgrade."""
    caller = KeyFile(WRITTEN / "keys.json").caller("rs-written-before")
    assert caller == Caller("office", "ann", True, KeyLimits(requests_per_minute=60))


def test_conversations_go_on(written: Path) -> None:
    """A customer's conversations that an upgrade loses."""
    store = ConversationStore(written / "conversations.sqlite", ttl_s=1e12, clock=lambda: 1_000_001.0)
    assert store.find("ann", CONVERSATION).metadata == {"topic": "mills"}
    assert store.turns("ann", CONVERSATION) == [QaPair("When?", "In 1874."), QaPair("Why?", "")]
    passage = Passage("mill", 0, "The old mill was built in 1874.", 0, 31, "The mill", "mill.md", 0.5)
    former = ShownPassages((passage,), "generation-1", ("mill#0",), rules=FORMER_RULES)
    assert store.load_shown("ann", ["key"]) == {"key": former}
    new = ShownPassages((passage,), rules=TextRules(fit=AnswerFit(0.5, -2.0), languages=("en",)))
    store.save_shown("ann", "new", new)
    assert store.load_shown("ann", ["new"]) == {"new": new}
    store.append("ann", CONVERSATION, [QaPair("Who?", "The people.")])
    assert len(store.turns("ann", CONVERSATION)) == 3
    store.close()


def test_dictionaries_go_on(written: Path) -> None:
    """Words that are wrong again after an upgrade."""
    words = DictionaryStore(written / "words.sqlite")
    assert words.words("ann") == ["Ragspec", "Zzz"] and words.words("ann", ["other"]) == ["Zzz"]
    assert words.add("ann", "Tantivy") and not words.add("ann", "Zzz", "other")
    words.close()


@pytest.fixture
def begun(written: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """A half-done job of the folder, whose job.json names the target as "target"."""
    monkeypatch.chdir(written)
    save_model("llama", written / "target", max_position_embeddings=1024)
    for name in ("config.json", "generation_config.json"):  # the job knows the target by a digest of its files
        file = written / "target" / name
        config = json.loads(file.read_text()) | {"transformers_version": "5.23.0"}
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    def job(name: str, generation: dict[str, Any], **sections: Any) -> Job:
        engine = {"max_kv_tokens": 8192, "max_num_batched_tokens": 64, "max_num_seqs": 1}
        generation = {"max_tokens": 24, "seed": 5, **generation}
        settings = {"target": {"model": "target"}, "engine": engine, "generation": generation, **sections}
        config = PipelineConfig.model_validate(settings)
        return Job(written / f"{name}.jsonl", written / name, config, 5, backend=BackendSpec(address="local"))

    return job


def test_half_a_job_is_finished(begun: Callable[..., Job]) -> None:
    """A job of days that starts again because the code was replaced while it was stopped."""
    job = begun("job", {"temperature": 0.8})
    *whole_lines, torn = (job.out / "answers-00000.jsonl.part").read_text().split("\n")
    kept = {row["id"]: row for row in map(json.loads, whole_lines)}
    assert kept.keys() == {"t0", "t1", "t3"} and torn
    summary = run_job(job, task := GrammarTask())
    assert (summary.num_skipped, summary.num_answered, summary.num_failed) == (3, 2, 0)
    assert "structure" not in task.text_settings(job.config)
    task.rules(job.config, {})  # the task's next job is new
    assert "structure" in task.text_settings(job.config)
    assert texts_of(job.out, "corrected").keys() == {"t0", "t1", "t2", "t3", "t4"}
    assert read_lines(job.out / "answers-00000.jsonl") == list(kept.values())


def test_half_a_job_of_questions_is_finished_by_its_rules(
    begun: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a job's quotes were whole sentences, and half were any words."""
    monkeypatch.setattr(Encoder, "load", lambda _: LetterEncoder())
    retriever = {"index_dir": "index", "mode": "sparse", "num_passages": 2}
    job = begun("rag_job", {}, retriever=retriever, prompts={"layout": "quote"})
    summary = run_job(job, RagTask())
    assert (summary.num_skipped, summary.num_answered, summary.num_failed) == (1, 3, 0)
    quotes = {"q0": '""" [1]', "q1": '""" [2]', "q2": '""" [1]', "q3": '"" [1]'}  # as the code of then wrote them
    words = texts_of(job.out)
    assert words == {name: text.ljust(24, '"') for name, text in quotes.items()}

    run_job(replace(job, resume=False), RagTask())
    assert not words.items() & texts_of(job.out).items()
    settings = json.loads((job.out / "job.json").read_text())
    newer = {"layout": "quote", "symbols": True, "places": True, "follow_ups": "cited", "says_none_found": True}
    newer["quotes"], newer["short_answers"] = "blocks", "quoted"
    rules = TextRules.from_json({"target": "target, adapter auto"} | newer).to_json()
    assert settings["rules"] == rules
    fewer = {name: value for name, value in rules.items() if name not in newer} | {"fit": [0.0, 0.0, 0.0]}
    (job.out / "job.json").write_text(json.dumps(settings | {"rules": fewer}))  # as an earlier version wrote them
    assert run_job(job, RagTask()).num_skipped == 4
    for later in ({"quotes": "pages"}, {"pages": "quotes"}):
        (job.out / "job.json").write_text(json.dumps(settings | {"rules": later}))
        with pytest.raises(ConfigError, match=r"pages.*does not know: finish it with the version that began it"):
            run_job(job, RagTask())
