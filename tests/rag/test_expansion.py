"""Neighbours of found passages: verbatim, once each, of readable and living documents only, and never in place of a passage."""

import pickle
import re
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letter_encoder import LetterEncoder
from prompt_tokenizers import CHAT
from split_shards import one_each

from ragspec.config import ChatConfig, ChunkingConfig, IndexConfig, RetrieverConfig
from ragspec.core import Block, BlockKind, Document, Heading, Message, Passage, SamplingParams, blocks_in
from ragspec.rag.chat.chat import ChatRetriever
from ragspec.rag.chat.conversations import ConversationStore, QaPair, ShownPassages
from ragspec.rag.chat.history import ChatHistory, ChatTurn, PastTurn, build_chat_prompt
from ragspec.rag.citations import find_citations
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.expansion import WidePassage, is_part, joined, widths
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search.segment_search import SearchScope

CHUNKING = ChunkingConfig(max_chars=45)
OVERLAPPING = ChunkingConfig(max_chars=90, overlap_chars=45)
TEXTS = {
    "mill": (
        "The mill\n\nThe mill was built in 1874.  It grinds no corn.\n\nUse\n\n\n• It is a café. 今日は雨天です。明日も雨です。"
        " The end of it."
    ),
    "river": "The river rises in the hills. It flows past the mill. It ends in the sea. Boats sail there. They return at night.",
    "short": "One sentence alone.",
    "secret": "The secret mill is open. Nobody knows of it. The key hangs behind the door.",
}
DOCUMENTS = {
    name: Document(
        name,
        text,
        headings=(Heading(0, 1, "The mill"),) * (name == "mill"),
        owner="ann" * (name == "secret"),
        blocks=tuple(
            Block(*line.span(), BlockKind.PARAGRAPH, 1 + line.start() // 40) for line in re.finditer(".+", text)
        ),
    )
    for name, text in TEXTS.items()
}


def built(folder: Path, chunking: ChunkingConfig = CHUNKING) -> Path:
    """Two segments, and a document that was changed and one that was deleted in the first."""
    with IndexWriter(folder, LetterEncoder(), IndexConfig(chunking=chunking)) as writer:
        writer.upsert(Document("river", "The river was a brook. The mill stood there. It is gone now. Deleted text."))
        writer.upsert(Document("gone", "The deleted mill. It was deleted text. Nobody reads it."))
        for document in list(DOCUMENTS.values())[::2]:
            writer.upsert(document)
        writer.commit()
        writer.delete("gone")
        for document in list(DOCUMENTS.values())[1::2]:
            writer.upsert(document)
        writer.commit()
    return folder


@pytest.fixture(scope="module", params=[CHUNKING, OVERLAPPING], ids=["apart", "overlapping"])
def store(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Store:
    return Store.open(built(tmp_path_factory.mktemp("index"), request.param))


def retriever(store: Store, expand_passages: int) -> Retriever:
    config = RetrieverConfig(mode="dense", expand_passages=expand_passages)
    return Retriever(LetterEncoder(), store, config, shard=one_each)


def found(store: Store, query: str, k: int, expand_passages: int, tenant: str = "") -> list[Passage]:
    (passages,) = retriever(store, expand_passages).retrieve([query], k, SearchScope(tenant)).passages
    return passages


def plain(passages: list[Passage]) -> list[tuple[str, str, float]]:
    return [(passage.id, passage.text, passage.score) for passage in passages]


@settings(deadline=None, max_examples=12)
@given(
    st.sampled_from(["When was the mill built?", "river boats", "雨", "secret key", "the end"]),
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from(["", "ann", "bob"]),
)
def test_what_is_shown_is_verbatim_once_and_readable(
    store: Store, query: str, k: int, expand_passages: int, tenant: str
) -> None:
    """Doubled overlaps, text between passages that is left out, offsets of the hit for the joined text, another's document."""
    hits = found(store, query, k, expand_passages, tenant)
    assert plain(hits) == plain(found(store, query, k, 0, tenant))
    assert all(isinstance(hit, WidePassage) and pickle.loads(pickle.dumps(hit)) == hit for hit in hits)
    chunking = store.manifest.config.chunking
    ordinals = {name: chunk(document, chunking) for name, document in DOCUMENTS.items()}
    *all_widths, apart = widths(hits)
    assert len(all_widths) == expand_passages + 1 and apart == found(store, query, k, 0, tenant)
    for num_neighbours, shown in zip(range(expand_passages, -1, -1), all_widths, strict=True):
        assert is_part(hits[0], shown[:1]) and all(is_part(hit, shown) for hit in hits)
        assert len({passage.id for passage in shown}) == len(shown)
        for passage in shown:
            assert not isinstance(passage, WidePassage) and passage.document_id in {hit.document_id for hit in hits}
            assert passage.text == TEXTS[passage.document_id][passage.start : passage.end]
            blocks = DOCUMENTS[passage.document_id].blocks
            assert passage.blocks == blocks_in(blocks, passage.start, passage.end)
        for one, other in combinations(shown, 2):
            if one.document_id == other.document_id:
                low, high = sorted((one, other), key=lambda each: each.start)
                assert TEXTS[one.document_id][low.end : high.start].strip(), "touching hits are one"
        expected = {
            (hit.document_id, n)
            for hit in hits
            for n in range(hit.ordinal - num_neighbours, hit.ordinal + num_neighbours + 1)
            if 0 <= n < len(ordinals[hit.document_id])
        }
        for name, own in ordinals.items():
            for each in own:
                if (name, each.ordinal) in expected:
                    assert is_part(each, shown)
        edges = {edge for name, n in expected for edge in (ordinals[name][n].start, ordinals[name][n].end)}
        assert {edge for passage in shown for edge in (passage.start, passage.end)} <= edges


def test_without_neighbours_passages_stay_as_they_are(store: Store) -> None:
    """The default target's prompt, which its adapter was trained on, must not change: also hits that touch stay apart."""
    hits = found(store, "river", 9, 0)
    assert all(type(hit) is Passage for hit in hits)
    assert list(widths(hits)) == [hits]


def test_a_quote_over_two_joined_passages_is_cited_in_the_document(store: Store) -> None:
    """A citation that is cut at the border of the hit, or whose offsets count from the hit."""
    quote = "It flows past the mill. It ends in the sea."
    shown = next(each for each in next(widths(found(store, "river", 9, 1))) if quote in each.text)
    (citation,) = find_citations(f'"{quote}" [1]', [shown])
    assert shown.text[citation.passage_start : citation.passage_end] == quote
    assert TEXTS["river"][citation.document_start : citation.document_end] == quote


def test_parts_of_two_states_of_a_document_are_not_joined() -> None:
    """A passage of an earlier turn whose offsets are those of a text before a change."""
    new = WidePassage(
        "a", 1, "New text.", 10, 19, around="Old text. New text.", spans=((0, 9), (10, 19)), num_neighbours=1
    )
    old = Passage("a", 0, "Another.", 0, 8)
    assert [passage.text for passage in joined([new, old], 1)] == ["Old text. New text.", "Another."]
    same = Passage("a", 0, "Old text.", 0, 9)
    assert [passage.text for passage in joined([same, new], 0)] == ["Old text. New text."]


@pytest.mark.parametrize("with_history", [False, True])
def test_neighbours_take_only_room_that_is_left(store: Store, with_history: bool) -> None:
    """A neighbour that pushes a found passage or an earlier turn out of the prompt."""
    question, history = "When was the mill built?", [PastTurn("Hello?", "Hello.")] if with_history else []
    wide, narrow = found(store, question, 4, 2), found(store, question, 4, 0)
    num_chars = set()
    for max_context_tokens in range(250, 1000, 50):
        prompts = PromptBuilder(CHAT, max_context_tokens)
        for max_tokens in (1, 23):
            if with_history:
                shown, without = (
                    build_chat_prompt(prompts, "", history, question, p, max_tokens) for p in (wide, narrow)
                )
                assert shown.history == without.history and shown.dropped_history == without.dropped_history
            else:
                shown, without = (prompts.build(question, p, max_tokens) for p in (wide, narrow))  # type: ignore[assignment]
            assert len(shown.prompt_ids) <= max_context_tokens - max_tokens
            assert all(is_part(passage, shown.passages) for passage in without.passages)
            num_chars.add(sum(len(passage.text) for passage in shown.passages))
            if not shown.dropped:
                assert shown.passages in [tuple(each) for each in widths(wide)]
    assert {0, sum(len(passage.text) for passage in next(widths(wide)))} <= num_chars and len(num_chars) > 4


def shown_in_a_turn(folder: Path) -> tuple[list[Passage], ShownPassages]:
    """The hits of a turn, and the passages that its prompt showed, as the store gives them back."""
    index = Retriever(LetterEncoder(), Store.open(folder), RetrieverConfig(mode="dense", expand_passages=1))
    result = index.retrieve(["When was the mill built?"], 4)
    passages = tuple(next(widths(result.passages[0])))
    assert {passage.document_id for passage in passages} > {"river"} and any(len(p.text) > 45 for p in passages)
    kept = ConversationStore(folder / "conversations.sqlite")
    kept.save_shown("", "earlier", ShownPassages(passages, result.generation, tuple(p.id for p in passages)))
    shown = kept.load_shown("", ["earlier"])["earlier"]
    kept.close()
    assert shown.passages == passages
    return result.passages[0], shown


def history_of(shown: ShownPassages) -> ChatHistory:
    return ChatHistory((QaPair("When?", "In 1874."),), (shown,), ("earlier", "now"))


@pytest.mark.parametrize("later", [1, 2, 0])
def test_earlier_passages_are_confirmed_after_a_change(tmp_path: Path, later: int) -> None:
    """A joined passage is no passage of the index, so a change of any other document took it out of the conversation; so did
    a lower setting."""
    _, shown = shown_in_a_turn(built(tmp_path))
    config = RetrieverConfig(index_dir=str(tmp_path), mode="dense", expand_passages=later)
    index = Retriever(LetterEncoder(), Store.open(tmp_path), config)
    turn = ChatTurn("id", (Message("user", "Who?"),), SamplingParams(), when="never")
    with IndexWriter(tmp_path, LetterEncoder()) as writer:
        writer.upsert(Document("river", "The river was moved. Nothing of it is left."))
        writer.commit()
    (kept,) = ChatRetriever(index, ChatConfig()).retrieve(turn, "Who?", "Who?", history_of(shown), "cited").history
    assert list(kept.passages) == [passage for passage in shown.passages if passage.document_id != "river"]


def test_passages_are_carried_over_without_their_neighbours(tmp_path: Path) -> None:
    """A follow-up's prompt without room for the neighbours of earlier passages lost earlier turns to them."""
    hits, shown = shown_in_a_turn(built(tmp_path))
    index = Retriever(LetterEncoder(), Store.open(tmp_path), RetrieverConfig(mode="dense", expand_passages=1))
    turn = ChatTurn("id", (Message("user", "secret"),), SamplingParams(), num_passages=1)
    chat = ChatRetriever(index, ChatConfig(max_carried=9))
    own, *carried = chat.retrieve(turn, "And it?", "One sentence alone.", history_of(shown), "carried").passages
    assert own.document_id == "short" and len(carried) > 1
    assert set(plain(carried)) <= set(plain(hits))
