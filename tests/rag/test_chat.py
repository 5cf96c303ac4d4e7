"""Conversations: what a follow-up looks up, what its prompt holds, and what is dropped, kept and copied."""

import itertools
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_tokenizers import ALL
from small_parts import CONTEXT, DOCUMENTS, QUESTION, QUOTE, Switch

from ragspec.config import ChatConfig, ChunkingConfig, IndexConfig, RetrieverConfig
from ragspec.core import (
    Completion,
    Document,
    FinishReason,
    GenerationStats,
    Message,
    Passage,
    SamplingParams,
    SourceKind,
)
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import InputError, NotFound, PromptTooLong, RetrievalError, SaveError
from ragspec.rag.answer import Answer
from ragspec.rag.chat.chat import WHOLE_INDEX, Chat, PreparedTurn
from ragspec.rag.chat.conversations import ConversationStore, QaPair, ShownPassages
from ragspec.rag.chat.history import ChatHistory, ChatPrompt, ChatTurn, PastTurn, build_chat_prompt
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.quote_choice import quote_bias
from ragspec.rag.steps import build_answer, parse_scope
from ragspec.rag.wording import FORMER_RULES, AnswerFit, TextRules
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import RetrievalResult, Retriever, build_index
from ragspec.retrieval.search.segment_search import SearchScope

PARAMS = SamplingParams(max_tokens=48)
OPENING, FOLLOW_UP = "Tell me about the Old Mill of Brook Valley.", "Who built it?"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ConversationStore]:
    store = ConversationStore(tmp_path / "conversations.sqlite")
    yield store
    store.close()


@pytest.fixture
def prompts(target: Target) -> PromptBuilder:
    return PromptBuilder(target.tokenizer, CONTEXT)


@pytest.fixture
def chat(retriever: Retriever, prompts: PromptBuilder, store: ConversationStore) -> Chat:
    return Chat(retriever, prompts, store)


def turn(*texts: str, **options: Any) -> ChatTurn:
    """The user's and the assistant's texts in turn."""
    roles = itertools.cycle(("user", "assistant"))
    messages = tuple(Message(role, text) for role, text in zip(roles, texts, strict=False))
    return ChatTurn(**{"id": uuid.uuid4().hex, "messages": messages, "params": PARAMS, "num_passages": 1, **options})


def said(chat: Chat, asked: ChatTurn, text: str = QUOTE) -> tuple[PreparedTurn, Answer]:
    """A turn, and the answer that is kept of it."""
    ready = chat.prepare(asked)
    return ready, kept(chat, ready, text)


def kept(chat: Chat, ready: PreparedTurn, text: str = QUOTE) -> Answer:
    completion = Completion(ready.request.id, 0, (), text, FinishReason.STOP, (), GenerationStats())
    answer = build_answer(ready, completion)
    assert chat.remember(ready, answer)
    return answer


def built(
    folder: Path,
    retriever: Retriever,
    documents: Sequence[Document],
    config: IndexConfig | None = None,
    **settings: Any,
) -> Retriever:
    """An index of these documents, with the encoder of the retriever."""
    encoder = retriever.encoder
    build_index(documents, folder, encoder, config)
    return Retriever(encoder, Store.open(folder, encoder.identity), RetrieverConfig(**settings))


def ids(passages: Sequence[Passage]) -> list[str]:
    return [passage.document_id for passage in passages]


def test_a_follow_up_computes_nothing_of_the_turn_before_again(chat: Chat, engine: Engine, switch: Switch) -> None:
    """History laid out anew, or without its passages, made every turn pay for the whole conversation."""
    switch.answer, first = QUOTE, chat.prepare(turn(QUESTION))
    answer = build_answer(first, engine.generate([first.request])[0])
    assert chat.remember(first, answer) and answer.text == QUOTE and answer.citations
    switch.answer, second = "", chat.prepare(turn(QUESTION, QUOTE, FOLLOW_UP))
    prompt_ids = first.prompt.prompt_ids
    assert second.prompt.prompt_ids[: len(prompt_ids)] == prompt_ids
    answer = build_answer(second, engine.generate([second.request])[0])
    assert answer.stats.generation.num_cached_tokens >= len(prompt_ids)
    assert second.prompt.history[0].passages == first.prompt.passages


def test_a_named_conversation_is_supplied_by_the_server(chat: Chat, store: ConversationStore) -> None:
    """A client that sends its question alone was answered as if nothing had been said before."""
    name = store.create("acme").id
    own = partial(turn, conversation=name, scope=SearchScope("acme"))
    first, _ = said(chat, own(QUESTION))
    second, _ = said(chat, own(FOLLOW_UP), "The people.")
    assert second.prompt.prompt_ids[: len(first.prompt.prompt_ids)] == first.prompt.prompt_ids
    assert [tuple(each) for each in store.turns("acme", name)] == [(QUESTION, QUOTE), (FOLLOW_UP, "The people.")]
    assert second.request.affinity == first.request.affinity == name
    again, _ = said(chat, own(QUESTION, QUOTE, FOLLOW_UP, "The people.", "When?"), "In 1874.")
    assert [each.answer for each in store.turns("acme", name)] == [QUOTE, "The people.", "In 1874."]
    assert again.history.turns[0].passages == first.prompt.passages


def test_an_answer_with_nul_ends_no_conversation(chat: Chat, store: ConversationStore) -> None:
    """No question holds it, and neither may a turn before: from then on every follow-up was refused."""
    name = store.create("acme").id
    own = partial(turn, conversation=name, scope=SearchScope("acme"))
    _, answer = said(chat, own(QUESTION), "In\x001874.")
    assert answer.text == "In\x001874."
    said(chat, own(FOLLOW_UP), "The people.")
    assert [each.answer for each in store.turns("acme", name)] == ["In\ufffd1874.", "The people."]


@pytest.mark.parametrize("other", ["tenant", "filter", "salt", "conversation"])
def test_what_was_shown_to_another_is_not_shown(chat: Chat, store: ConversationStore, other: str) -> None:
    """The passages of a turn were found by the words before it, whoever had said them, and whatever they may see."""
    scope = parse_scope("acme", None)
    first, _ = said(chat, turn(QUESTION, scope=scope))
    assert first.prompt.passages
    name = store.create("acme").id
    asked = {
        "tenant": turn(QUESTION, QUOTE, FOLLOW_UP, scope=parse_scope("umbrella", None)),
        "filter": turn(QUESTION, QUOTE, FOLLOW_UP, scope=parse_scope("acme", {"type": "eq", "key": "x", "value": 1})),
        "salt": turn(QUESTION, QUOTE, FOLLOW_UP, scope=scope, cache_salt="other"),
        "conversation": turn(QUESTION, QUOTE, FOLLOW_UP, scope=scope, conversation=name),
    }
    ready = chat.prepare(asked[other])
    assert ready.prompt.history[0].passages == ()
    same = chat.prepare(turn(QUESTION, QUOTE, FOLLOW_UP, scope=scope))
    assert same.prompt.history[0].passages == first.prompt.passages


def test_salts_of_tenants_never_meet(chat: Chat) -> None:
    """Tenant a with salt bc and tenant ab with salt c shared a prefix cache."""
    salts = [
        chat.prepare(turn(QUESTION, scope=SearchScope(tenant), cache_salt=salt)).request.salt
        for tenant in ("a", "ab")
        for salt in ("", "c", "bc")
    ]
    assert len(set(salts)) == len(salts)
    assert salts[0] == "a"


def test_documents_of_the_turn_before_are_carried_over_once(chat: Chat) -> None:
    """A follow-up that its own search misunderstands lost the document that it is about; or had it twice."""
    first, _ = said(chat, turn(QUESTION))
    assert ids(first.prompt.passages) == ["mill"]
    carried = chat.prepare(turn(QUESTION, QUOTE, "Where does the river rise, in which hills?"))
    assert ids(carried.prompt.passages) == ["river", "mill"]
    same = chat.prepare(turn(QUESTION, QUOTE, "Does the old mill grind corn?"))
    assert ids(same.prompt.passages) == ["mill"]


def test_a_follow_ups_own_words_search_the_cited_document_and_choose_the_quote(
    tmp_path: Path, retriever: Retriever, prompts: PromptBuilder, store: ConversationStore, monkeypatch: Any
) -> None:
    """The passage that had just answered was shown again, the next paragraph missed, and the topic's name was quoted; a begun
    conversation goes on so."""
    text = "The old mill was built in 1874 by the people of the valley. It grinds on Sundays at nine."
    config = IndexConfig(chunking=ChunkingConfig(max_chars=64))
    index = built(tmp_path, retriever, [Document("mill", text, "The mill"), *DOCUMENTS[1:]], config)
    follow_up = "Where does the river rise, in which hills, and who grinds?"
    found_by, closeness = index.retrieve, {follow_up: (0.6,)}

    def scored(asked: Any, *how: Any) -> Any:
        return found_by(asked, *how)._replace(closeness=closeness.get(*asked, (0.05,)))

    monkeypatch.setattr(index, "retrieve", scored)
    cases = ("cited", "hidden", "grinds"), ("carried", "shown", "built"), ("cited", "shown", "grinds")
    for follow_ups, history, found in cases:
        rules = replace(prompts.rules, follow_ups=follow_ups, fit=AnswerFit(quote_weight=20.0))
        chat = Chat(index, prompts.by(rules), store, ChatConfig(history=history))
        said(chat, turn(QUESTION))
        ready = chat.prepare(turn(QUESTION, QUOTE, follow_up))
        *own, last = ready.prompt.passages
        assert ids(own) == ["river"] and last.document_id == "mill" and found in last.text
        # A passage that was carried over has no score
        refusals = [chat.prepare(turn(QUESTION, QUOTE, follow_up, abstain_below=least)).said for least in (0.5, 0.7)]
        assert [*map(bool, refusals)] == [False, follow_ups == "cited"]
        asked = follow_up if (follow_ups, history) == ("cited", "shown") else ready.question
        bias = partial(quote_bias, passages=(*own, last), encode=prompts.plain_ids, rules=rules)
        assert ready.request.params.prefix_bias == bias(asked, left_out=[QUOTE.split('"')[1]])
    assert bias(follow_up) != bias(ready.question)


def test_a_row_is_quoted_again_for_another_column(
    tmp_path: Path, retriever: Retriever, prompts: PromptBuilder, store: ConversationStore
) -> None:
    """The row that had just answered was forbidden, and the next question quoted another; a begun conversation goes on so."""
    rows = [f"host: db{n}\nsystem: Debian\nmemory: {2**n} GB\nuse: a database of the old mill" for n in (1, 2)]
    texts = [*rows, "What a memory costs depends on how much of it the system uses."]
    index = built(tmp_path, retriever, [Document(f"{n}", text) for n, text in enumerate(texts)])
    asked, answer = "Which system has db1?", f'"{rows[0]}" [1]'
    found = []
    for places in (True, False):
        rules = replace(prompts.rules, places=places, fit=AnswerFit(quote_weight=20.0))
        chat = Chat(index, prompts.by(rules), store)
        own = partial(turn, scope=SearchScope(str(places)), num_passages=3)
        said(chat, own(asked), answer)
        ready = chat.prepare(own(asked, answer, "How much memory does it use, and what costs it?"))
        found.append("db1" in ready.request.grammar)
    assert found == [True, False]


def test_a_question_that_stands_alone_is_answered_from_its_own_passages(chat: Chat) -> None:
    """After a change of subject the passage of the old one stood in the prompt, and was quoted again."""
    said(chat, turn(QUESTION))
    ready = chat.prepare(turn(QUESTION, QUOTE, "What happened in the flood of the Brook in 1921?"))
    assert ready.question == ready.user_question and ids(ready.prompt.passages) == ["bridge"]


def test_a_hidden_history_leaves_the_standalone_question_alone(
    retriever: Retriever, store: ConversationStore, engine: Engine
) -> None:
    """A target that never saw a second turn wrote its first answer again, whatever was asked."""
    tokenizer = ALL["chat"]
    chat = Chat(retriever, PromptBuilder(tokenizer, CONTEXT), store, ChatConfig(history="hidden"))
    first, _ = said(chat, turn(OPENING))
    ready = chat.prepare(turn(OPENING, QUOTE, FOLLOW_UP))
    text = tokenizer.decode(list(ready.request.prompt_ids))
    assert ready.question in text and "Old Mill" in ready.question and "Tell me" not in text
    assert ready.prompt.num_dropped_turns == 1 and ready.dropped_passages == first.prompt.passages
    assert (SourceKind.HISTORY, QUOTE) in {(source.kind, source.text) for source in ready.request.sources}
    shown = Chat(retriever, PromptBuilder(tokenizer, CONTEXT), store)
    assert "Tell me" in tokenizer.decode(list(shown.prepare(turn(OPENING, QUOTE, FOLLOW_UP)).request.prompt_ids))


def test_the_passages_that_an_answer_cites_are_carried_before_others(chat: Chat) -> None:
    """The best-ranked one was carried although the answer came from another."""
    quote = '"A stone bridge was rebuilt after the flood of 1921." [2]'
    first, answer = said(chat, turn("When was the old mill or a bridge rebuilt?", num_passages=3), quote)
    second_best = first.prompt.passages[1]
    assert {citation.document_id for citation in answer.citations} == {"bridge"}
    ready = chat.prepare(turn("When was the old mill or a bridge rebuilt?", quote, "Where does the river rise?"))
    assert second_best.document_id in ("bridge", "mill", "river")
    assert ids(ready.prompt.passages)[-1] == "bridge"


def test_a_quote_just_given_answers_another_question_only_if_it_is_the_closest(chat: Chat) -> None:
    """Each follow-up was answered with the first quote again."""
    said(chat, turn("When was the mill built?"))
    for follow_up, is_left in (
        ("When was the mill built?", True), ("Who owns the bridge near it?", False), ("In which year was the mill built?", True)
    ):  # fmt: skip
        ready = chat.prepare(turn("When was the mill built?", QUOTE, follow_up, num_passages=3))
        quote = QUOTE.split('"')[1]
        assert any(quote in passage.text for passage in ready.prompt.passages) and ready.request.grammar
        assert (quote in ready.request.grammar) is is_left, follow_up


def test_a_follow_up_is_completed_from_questions_and_cited_titles_and_never_from_answers(chat: Chat) -> None:
    """A wrong answer's words were searched for, and each further answer was about them."""
    wrong = f"{QUOTE} It was moved to Samarkand by Captain Beefheart."
    said(chat, turn("when was it built?"), wrong)
    ready = chat.prepare(turn("when was it built?", wrong, "and who did that?"))
    assert ready.question.startswith("and who did that? (") and "Samarkand" not in ready.question
    titles = {title for asked in ready.history.asked for title in asked.titles}
    assert titles <= {passage.title for shown in ready.history.shown for passage in shown.passages}


def test_a_conversation_keeps_the_order_of_its_passages(
    chat: Chat, retriever: Retriever, store: ConversationStore, target: Target
) -> None:
    """A setting that changed in the course of a conversation made its whole history another prompt."""
    prompts = PromptBuilder(target.tokenizer, CONTEXT, passage_order="shared")
    shared = Chat(retriever, prompts, store)
    question, follow_up = "When was the old mill or a bridge rebuilt?", "Where does the river rise?"
    new, answer = said(shared, turn(question, num_passages=3), "Perhaps.")
    best = new.prompt.passages[new.prompt.ranks.index(1)]
    assert new.prompt.order == answer.passage_order == "shared" and answer.ranks == new.prompt.ranks
    assert new.prompt.passages == tuple(
        sorted(new.prompt.passages, key=lambda each: (-len(each.text), each.document_id))
    )
    assert best != new.prompt.passages[0]
    for later in (chat, shared):  # with the setting by rank, too
        ready = later.prepare(turn(question, "Perhaps.", follow_up))
        assert ready.prompt.order == "shared" and ready.prompt.prompt_ids[:99] == new.prompt.prompt_ids[:99]
        assert ready.prompt.history[0].passages == new.prompt.passages
        assert best.document_id in ids(ready.prompt.passages)  # carried over as the best
    begun, _ = said(chat, turn(QUESTION, num_passages=3))  # another answer, so another conversation
    assert shared.prepare(turn(QUESTION, QUOTE, FOLLOW_UP)).prompt.order == begun.prompt.order == "rank"


def test_a_conversation_goes_on_by_the_rules_it_was_begun_with(chat: Chat, store: ConversationStore) -> None:
    """A conversation of an earlier version got other texts after an upgrade: other quotes, a bias, messages without a search; or
    another model was biased by the fit of the one before."""
    begun, _ = said(chat, turn(QUESTION))
    key = begun.history.keys[-1]
    (shown,) = store.load_shown("", [key]).values()
    thanks = replace(turn(QUESTION, QUOTE, "Thanks!"), when="auto")
    assert shown.rules == begun.prompts.rules != FORMER_RULES and not chat.prepare(thanks).searched
    store.save_shown("", key, replace(shown, rules=FORMER_RULES))
    former = chat.prepare(thanks)
    assert former.searched and former.prompts.rules == FORMER_RULES
    assert "substring_chunks" in former.request.grammar and "NO_SPACE_AT_ENDS" not in former.request.grammar
    own = TextRules(fit=AnswerFit(0.5, -2.0), languages=("en",), target="another model")
    assert FORMER_RULES.with_target_of(own) == FORMER_RULES and own.with_target_of(own) is own
    assert TextRules(quotes="words", target="this").with_target_of(own) == replace(own, quotes="words")


def test_the_first_question_is_looked_up_as_it_is_and_the_first_follow_up_is_not(
    chat: Chat, retriever: Retriever, prompts: PromptBuilder
) -> None:
    """Rewriting that begins with the second follow-up is the classic mistake."""
    first, _ = said(chat, turn(OPENING))
    assert first.question == first.user_question
    second = chat.prepare(turn(OPENING, QUOTE, FOLLOW_UP))
    assert second.user_question == FOLLOW_UP and "Old Mill" in second.question
    off = Chat(retriever, prompts, None, ChatConfig(rewriter="off"))
    assert off.prepare(turn(OPENING, QUOTE, FOLLOW_UP)).question == FOLLOW_UP


@pytest.mark.parametrize(("when", "searched"), [("auto", False), ("always", True), ("never", False)])
def test_thanks_are_answered_without_passages_unless_they_are_asked_for(chat: Chat, when: str, searched: bool) -> None:
    """ "Thanks!" was looked up, and answered with a quotation; the passages before it asked for another."""
    said(chat, turn(QUESTION))
    ready = chat.prepare(turn(QUESTION, QUOTE, "Thanks, that was it!", when=when))
    assert ready.searched is searched is bool(ready.prompt.passages) and bool(ready.request.grammar) is searched
    assert any(each.passages for each in ready.prompt.history) is (when != "auto")
    assert chat.prepare(turn(QUESTION, QUOTE, "Thanks! Who built it?", when="auto")).searched


def test_a_question_that_does_not_fit_is_refused_and_never_cut(chat: Chat) -> None:
    """The end of a long question was cut off and something else answered."""
    with pytest.raises(PromptTooLong):
        chat.prepare(turn(QUESTION, QUOTE, "Why? " * CONTEXT))
    system = Message("system", "Be brief. " * CONTEXT)
    with pytest.raises(PromptTooLong):
        chat.prepare(ChatTurn("x", (system, Message("user", QUESTION)), PARAMS))
    with pytest.raises(PromptTooLong):
        chat.prepare(turn(QUESTION, params=SamplingParams(max_tokens=CONTEXT)))


def test_a_megabyte_of_history_costs_a_context_of_it(chat: Chat) -> None:
    """Every request tokenised the whole conversation, a hundred times what fits."""
    texts = [text for n in range(200) for text in (f"Question {n}?", "word " * 1_000)]
    ready = chat.prepare(turn(*texts, QUESTION))
    assert 190 <= ready.prompt.num_dropped_turns == 200 - len(ready.prompt.history)
    assert len(ready.prompt.prompt_ids) + PARAMS.max_tokens <= CONTEXT and ready.prompt.passages


def test_history_passages_and_prediction_are_copied_from(chat: Chat) -> None:
    """What is edited or repeated in a later turn was written token by token."""
    said(chat, turn(QUESTION))
    ready = chat.prepare(turn(QUESTION, QUOTE, FOLLOW_UP, prediction="The people of the valley."))
    sources = {(source.kind, source.text) for source in ready.request.sources}
    assert (SourceKind.PREDICTION, "The people of the valley.") in sources
    assert {(SourceKind.HISTORY, QUOTE), (SourceKind.HISTORY, FOLLOW_UP)} <= sources
    assert (SourceKind.PASSAGE, DOCUMENTS[0].text) in sources


def test_system_messages_stay_in_front(chat: Chat, prompts: PromptBuilder) -> None:
    """An instruction between two turns moved the whole history behind it."""
    messages = (
        Message("system", "Be brief."),
        Message("user", QUESTION),
        Message("assistant", QUOTE),
        Message("system", "Be kind."),
        Message("user", FOLLOW_UP),
    )
    ready = chat.prepare(ChatTurn("x", messages, PARAMS))
    text = prompts.tokenizer.decode(list(ready.request.prompt_ids))
    assert text.index("Be brief.\n\nBe kind.") < text.index(QUESTION) < text.index(FOLLOW_UP)


@pytest.mark.parametrize(
    "messages",
    [
        (),
        (Message("assistant", "Hm."),),
        (Message("user", QUESTION), Message("assistant", QUOTE)),
        (Message("tool", "x"), Message("user", QUESTION)),
        (Message("user", " "),),
        (Message("user", "a\0"),),
        (Message("user", QUESTION), Message("assistant", "\udcff"), Message("user", FOLLOW_UP)),
    ],
)
def test_messages_that_are_no_conversation_are_refused(chat: Chat, messages: tuple[Message, ...]) -> None:
    """They reached the template or the index, and came back as a server's error."""
    with pytest.raises(InputError):
        chat.prepare(ChatTurn("x", messages, PARAMS))


def test_messages_of_one_role_in_a_row_are_one(chat: Chat) -> None:
    """Templates that want roles to alternate refuse what clients send after an aborted answer."""
    messages = [Message("user", "One?"), Message("assistant", ""), Message("user", QUESTION)]
    ready = chat.prepare(ChatTurn("x", tuple(messages), PARAMS))
    assert ready.user_question == f"One?\n\n{QUESTION}" and ready.prompt.history == ()
    blank = [Message("system", " "), Message("user", "One?"), Message("assistant", "\n"), Message("user", QUESTION)]
    assert (
        chat.prepare(ChatTurn("x", tuple(blank), PARAMS)).user_question == f"One?\n\n{QUESTION}"
    )  # a target may write just that
    greeted = chat.prepare(ChatTurn("x", (Message("assistant", "Hello."), Message("user", QUESTION)), PARAMS))
    assert greeted.prompt.history[0].answer == "Hello."


def test_an_unknown_conversation_is_said_to_be_unknown(
    chat: Chat, retriever: Retriever, prompts: PromptBuilder, store: ConversationStore
) -> None:
    """It began anew in silence, and the client thought its history was known."""
    for tenant, name in (("acme", "conv_1"), ("umbrella", store.create("acme").id)):
        with pytest.raises(NotFound):
            chat.prepare(turn(QUESTION, conversation=name, scope=SearchScope(tenant)))
    with pytest.raises(InputError):
        Chat(retriever, prompts, None).prepare(turn(QUESTION, conversation="conv_1"))


class Broken:
    """A retriever or a store that fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise self.error

        return fail


def test_without_an_index_there_is_an_error_or_an_answer_that_says_so(prompts: PromptBuilder) -> None:
    """An answer from nothing looked like one from the documents."""
    broken: Any = Broken(RetrievalError("the index does not answer"))
    with pytest.raises(RetrievalError):
        Chat(broken, prompts, None).prepare(turn(QUESTION))
    ready = Chat(broken, prompts, None, ChatConfig(answer_without_index=True)).prepare(turn(QUESTION))
    assert ready.missing == (WHOLE_INDEX,) and not ready.prompt.passages


def test_a_follow_up_that_looks_nothing_up_needs_no_index_where_that_is_allowed(
    retriever: Retriever, prompts: PromptBuilder, store: ConversationStore
) -> None:
    """It failed all the same: the passages of the turn before were to be confirmed."""
    chat = Chat(retriever, prompts, store)
    said(chat, turn(QUESTION))
    broken: Any = Broken(RetrievalError("the index does not answer"))
    follow_up = replace(turn(QUESTION, QUOTE, FOLLOW_UP), when="never")
    ready = Chat(broken, prompts, store, ChatConfig(answer_without_index=True)).prepare(follow_up)
    assert ready.missing == (WHOLE_INDEX,) and not ready.prompt.passages
    with pytest.raises(RetrievalError):
        Chat(broken, prompts, store).prepare(follow_up)


def test_a_follow_up_keeps_what_was_found_before_its_further_search_failed(
    retriever: Retriever, prompts: PromptBuilder, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own passages were thrown away."""
    cited = prompts.by(replace(prompts.rules, follow_ups="cited"))
    allowed, follow_up = ChatConfig(answer_without_index=True), turn(QUESTION, QUOTE, FOLLOW_UP)
    chat = Chat(retriever, cited, store, allowed)
    said(chat, turn(QUESTION))
    whole, search = chat.prepare(follow_up), retriever.retrieve

    def fails_within_documents(queries: Sequence[str], k: int, scope: SearchScope) -> RetrievalResult:
        if scope.filter is not None:
            raise RetrievalError("the index does not answer")
        return search(queries, k, scope)

    monkeypatch.setattr(retriever, "retrieve", fails_within_documents)
    ready = chat.prepare(follow_up)
    assert ready.missing == (WHOLE_INDEX,)
    assert ready.prompt.passages and {*ready.prompt.passages} <= {*whole.prompt.passages}
    with pytest.raises(RetrievalError):
        Chat(retriever, cited, store).prepare(follow_up)


def test_a_full_disk_takes_nothing_from_the_answer(
    retriever: Retriever, prompts: PromptBuilder, engine: Engine, switch: Switch
) -> None:
    """The user lost an answer that was written because it could not be kept."""
    broken: Any = Broken(SaveError("no space"))
    chat = Chat(retriever, prompts, broken)
    switch.answer = QUOTE
    ready = chat.prepare(turn(QUESTION, QUOTE, FOLLOW_UP))
    answer = build_answer(ready, engine.generate([ready.request])[0])
    assert answer.text == QUOTE and not chat.remember(ready, answer)


@pytest.mark.parametrize("mode", ["hybrid", "dense", "sparse"])
def test_what_was_deleted_is_in_no_later_turn(
    tmp_path: Path, retriever: Retriever, prompts: PromptBuilder, store: ConversationStore, mode: Any
) -> None:
    """A deleted document lived on in the history of conversations, and was copied from. One that is there was shown no more where
    it has no word of the next question."""
    documents = [*DOCUMENTS, Document("old", "The old mill is for sale.")]
    index = built(tmp_path / "index", retriever, documents, mode=mode)
    chat = Chat(index, prompts, store)
    ready, _ = said(chat, turn(QUESTION, num_passages=3))
    assert {"old", "mill"} <= set(ids(ready.prompt.passages))
    with IndexWriter(tmp_path / "index") as writer:
        writer.delete("old")
        writer.commit()
    later = chat.prepare(turn(QUESTION, QUOTE, FOLLOW_UP, num_passages=3))
    kept = [passage for passage in ready.prompt.passages if passage.document_id != "old"]
    assert list(later.prompt.history[0].passages) == kept
    assert "for sale" not in prompts.tokenizer.decode(list(later.request.prompt_ids))
    assert not any("for sale" in source.text for source in later.request.sources)
    without = chat.prepare(turn(QUESTION, QUOTE, "Xyzzy?", when="never"))
    assert list(without.prompt.history[0].passages) == kept and not without.prompt.passages


def test_a_carried_passage_stands_where_its_document_has_it_now(
    tmp_path: Path, retriever: Retriever, prompts: PromptBuilder, store: ConversationStore
) -> None:
    """A sentence before it was edited: its text was the same, and its citation named other characters of the document."""
    config, kept = IndexConfig(chunking=ChunkingConfig(max_chars=64)), QUOTE.split('"')[1]
    mill = Document("mill", f"The mill opens at nine on Sundays. {kept}", "The mill")
    chat = Chat(built(tmp_path, retriever, [mill, *DOCUMENTS[1:]], config), prompts, store)
    said(chat, turn(QUESTION))
    mill = Document("mill", f"The mill is shut on all Sundays of winter. {kept}", "The mill")
    build_index([mill, *DOCUMENTS[1:]], tmp_path, retriever.encoder, config)
    later = chat.prepare(turn(QUESTION, QUOTE, "Where does the river rise, in which hills?"))
    for passage in (later.prompt.passages[-1], later.prompt.history[0].passages[0]):
        assert (passage.document_id, passage.text) == ("mill", kept)
        assert mill.text[passage.start : passage.end] == kept


def test_what_is_deleted_while_its_turn_is_answered_is_not_kept(chat: Chat, store: ConversationStore) -> None:
    """The answer ended after the deletion, and wrote the deleted passages to the disk again."""
    ready = chat.prepare(turn(QUESTION, scope=SearchScope("acme")))
    key = ready.history.keys[-1]
    chat.forget("acme", ["mill"])
    assert kept(chat, ready).passages and store.load_shown("acme", [key]) == {}
    said(chat, turn(QUESTION, scope=SearchScope("acme")))
    assert key in store.load_shown("acme", [key])


def test_a_passage_that_was_changed_takes_nothing_from_its_new_text() -> None:
    """The old text was gone, and with it went the new one of the same name, shown a turn later."""
    old, new = (Passage("d", 0, text, 0, len(text)) for text in ("The old text.", "The new text."))
    said = (QaPair("One?", "1."), QaPair("Two?", "2."))
    past = ChatHistory(said, (ShownPassages((old,), "a"), ShownPassages((new,), "b")), ("1", "2", "3"))
    assert [turn.passages for turn in past.turns_without({(old.id, old.text)}, {})] == [(), (new,)]


def test_what_may_be_copied_is_bounded_by_context_and_output(chat: Chat, prompts: PromptBuilder) -> None:
    """Ten megabytes of prediction, or of earlier messages that do not fit the prompt, were tokenised and kept."""
    messages = (Message("user", "a " * 10**6), Message("assistant", "b " * 10**6), Message("user", QUESTION))
    turn = ChatTurn(uuid.uuid4().hex, messages, PARAMS, SearchScope("ann"), prediction="c " * 10**6)
    request = chat.prepare(turn).request
    lengths = dict.fromkeys(SourceKind, 0)
    for source in request.sources:
        lengths[source.kind] += len(source.text)
    assert lengths[SourceKind.PREDICTION] == 16 * PARAMS.max_tokens < prompts.max_chars
    assert lengths[SourceKind.HISTORY] <= prompts.max_chars + len(QUESTION)


TEXT = st.text("ab <|>\n[1]é", min_size=1, max_size=12).filter(str.strip)
PASSAGES = st.lists(
    st.builds(lambda text, number: Passage(f"d{number}", 0, text, 0, len(text)), TEXT, st.integers(0, 9)), max_size=3
).map(tuple)
TURNS = st.lists(st.builds(PastTurn, TEXT, TEXT, PASSAGES), min_size=1, max_size=7)


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=20)
@given(turns=TURNS, system=st.sampled_from(["", "Be brief."]))
def test_every_prompt_begins_with_the_one_before_it(name: str, turns: list[PastTurn], system: str) -> None:
    """The instruction moved to the newest question, or passages were left out of history: nothing cached held any more."""
    prompts = PromptBuilder(ALL[name], 100_000)
    before: tuple[int, ...] = ()
    for number, turn in enumerate(turns):
        prompt = build_chat_prompt(prompts, system, turns[:number], turn.question, turn.passages, 8)
        assert prompt.num_dropped_turns == 0 and not prompt.dropped and not prompt.dropped_history
        if name == "strict" or not turn.passages or any(earlier.passages for earlier in turns[:number]):
            assert prompt.prompt_ids[: len(before)] == before, "only the first passages bring the instruction"
        before = prompt.prompt_ids


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=25)
@given(turns=TURNS, share=st.floats(0.0, 1.0))
def test_what_is_not_in_the_prompt_is_reported_and_nothing_else(name: str, turns: list[PastTurn], share: float) -> None:
    """A turn or a passage vanished without a word; or was reported and stood in the prompt all the same."""
    *history, last = turns
    everything = len(_prompt(name, 100_000, history, last).prompt_ids)
    least = len(_prompt(name, 100_000, [], PastTurn(last.question, "")).prompt_ids)
    room = least + int(share * (everything - least))
    prompt = _prompt(name, room + 8, history, last)
    assert len(prompt.prompt_ids) <= room
    assert (*prompt.passages, *prompt.dropped) == last.passages
    kept = [*(("", "", ()),) * prompt.num_dropped_turns, *((t.question, t.answer, t.passages) for t in prompt.history)]
    assert len(kept) == len(history)
    gone: list[Passage] = []
    for turn, (question, answer, passages) in zip(history, kept, strict=True):
        assert passages in ((), turn.passages)
        assert (question, answer) in (("", ""), (turn.question, turn.answer))
        gone += () if passages else turn.passages
    assert tuple(gone) == prompt.dropped_history
    alone = _prompt(name, 100_000, prompt.history, PastTurn(last.question, "", prompt.passages))
    assert alone.prompt_ids == prompt.prompt_ids
    if room == everything:
        assert not prompt.dropped_history and not prompt.dropped
    with pytest.raises(PromptTooLong):
        _prompt(name, least + 7, history, last)


def test_the_oldest_goes_first_and_the_beginning_then_holds_for_a_while() -> None:
    """One turn was dropped with each new one, and the whole rest computed again every time."""
    turns = [
        PastTurn(f"Question {n}?", f"Answer {n}.", (Passage(f"d{n}", 0, "It rained. " * 8, 0, 88),)) for n in range(24)
    ]
    prompts = [_prompt("chat", 700, turns[:n], turns[n]) for n in range(24)]
    assert all(prompt.passages and not prompt.dropped for prompt in prompts)
    assert prompts[-1].num_dropped_turns > 0 and prompts[-1].history[-1].passages
    shared = [
        sum(itertools.takewhile(bool, (a == b for a, b in zip(earlier.prompt_ids, later.prompt_ids, strict=False))))
        for earlier, later in itertools.pairwise(prompts)
    ]
    kept = [count > len(earlier.prompt_ids) / 2 for count, earlier in zip(shared, prompts, strict=False)]
    assert sum(kept) >= 0.7 * len(kept)


def _prompt(name: str, context: int, history: list[PastTurn] | tuple[PastTurn, ...], last: PastTurn) -> ChatPrompt:
    return build_chat_prompt(PromptBuilder(ALL[name], context), "", history, last.question, last.passages, 8)


def test_a_turn_without_an_answer_leaves_no_two_messages_of_the_user_in_a_row() -> None:
    """Templates that want roles to alternate refused every later turn of a conversation that held one."""
    prompts = PromptBuilder(ALL["chat"], 2048)
    passage = Passage("d", 0, "The mill is old.", 0, 16)
    turns = [PastTurn("One?", "1."), PastTurn("", ""), PastTurn("Two?", " ", (passage,)), PastTurn("Three?", "")]
    found = build_chat_prompt(prompts, "", turns, "Four?", [], 64)
    expected = prompts.tokens(
        [Message("user", "One?"), Message("assistant", "1."), Message("user", "Two?\n\nThree?\n\nFour?")]
    )
    assert found.prompt_ids == expected
    assert found.dropped_history == (passage,) and [turn.passages for turn in found.history] == [(), (), (), ()]
