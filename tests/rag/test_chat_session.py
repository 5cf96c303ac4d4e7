"""`pipeline.chat()`: the turns of one conversation, streamed, kept and resumed."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from small_parts import CONTEXT, GREEDY, QUESTION, SAMPLED
from tiny_target import save_model

from ragspec import ChatSession, ConversationStore, load_config
from ragspec.core import Passage, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.errors import InputError, NotFound
from ragspec.rag.answer import Answer
from ragspec.rag.chat.chat import SavedConversation
from ragspec.rag.chat.conversations import QaPair, ShownPassages
from ragspec.rag.pipeline import Pipeline
from ragspec.retrieval.expansion import JoinedPassage
from ragspec.retrieval.index.store import Store

QUESTIONS = (QUESTION, "Who built it?", "And where does the river rise?", "When was the bridge rebuilt?", "Why?")


def told(chat: ChatSession, params: SamplingParams, questions: tuple[str, ...] = QUESTIONS) -> list[str]:
    return [chat.ask(question, params).text for question in questions]


def streamed(chat: ChatSession, params: SamplingParams) -> list[str]:
    return ["".join(p for p in chat.stream(question, params) if isinstance(p, str)) for question in QUESTIONS]


def from_file(pipeline: Pipeline, folder: Path, params: SamplingParams) -> list[str]:
    with pipeline.chat(system="Be brief.") as chat:
        first = told(chat, params, QUESTIONS[:2])
        chat.save(folder / "talk.json")
    with pipeline.chat(saved=folder / "talk.json") as chat:
        assert [turn.answer for turn in chat.turns] == [text.replace("\0", "\ufffd") for text in first]
        assert chat.turns[1].passages
        return first + told(chat, params, QUESTIONS[2:])


def from_store(pipeline: Pipeline, folder: Path, params: SamplingParams) -> list[str]:
    """The first store is not closed: its process was killed."""
    killed = pipeline.chat(store=folder / "talks.sqlite", system="Be brief.")
    first = told(killed, params, QUESTIONS[:2])
    with pipeline.chat(killed.id, store=folder / "talks.sqlite", system="Be brief.") as chat:
        return first + told(chat, params, QUESTIONS[2:])


def in_an_event_loop(pipeline: Pipeline, folder: Path, params: SamplingParams) -> list[str]:
    """A notebook: its thread runs a loop, and its cells may have either kind of `for`."""

    async def cell() -> list[str]:
        with pipeline.chat(system="Be brief.") as chat:
            first = streamed(chat, params)
        with pipeline.chat(system="Be brief.") as chat:
            again = ["".join([p async for p in chat.stream(q, params) if isinstance(p, str)]) for q in QUESTIONS]
        assert first == again
        return first

    return asyncio.run(cell())


@pytest.mark.parametrize(
    ("resumed", "params"),
    [(from_file, SAMPLED), (from_store, GREEDY), (in_an_event_loop, SAMPLED)],
    ids=["file", "store", "event loop"],
)
def test_a_conversation_has_the_same_text_however_it_is_asked(
    pipeline: Pipeline, tmp_path: Path, resumed: Callable[..., list[str]], params: SamplingParams
) -> None:
    """A resumed conversation without the passages of its turns; a stream with a prompt of its own."""
    with pipeline.chat(system="Be brief.") as chat:
        texts = told(chat, params)
        assert chat.kept and len(set(texts)) > 1
        assert [turn.question for turn in chat.turns] == list(QUESTIONS)
    assert resumed(pipeline, tmp_path, params) == texts


_KILLED = """
import json, os, signal, sys
from ragspec import Pipeline, load_config
from ragspec.core import SamplingParams
config, store, params, *questions = sys.argv[1:]
chat = Pipeline.from_config(load_config(config)).chat(store=store)
for question in questions:
    chat.ask(question, SamplingParams(**json.loads(params)))
print(chat.id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_conversation_of_a_killed_process_goes_on_with_the_same_text(
    opened_index: Store, tmp_path: Path, temperature: float
) -> None:
    """A turn that a killed process had answered and not kept, or a seed that depends on the process."""
    model = save_model("llama", tmp_path / "model", max_position_embeddings=CONTEXT)
    sections = {"target": {"model": str(model)}, "retriever": {"index_dir": str(opened_index.index_dir)}}
    config, store = tmp_path / "config.yaml", tmp_path / "talks.sqlite"
    config.write_text(json.dumps(sections))
    given = {"temperature": temperature, "max_tokens": 12, "seed": 7}
    command = [sys.executable, "-c", _KILLED, str(config), str(store), json.dumps(given), *QUESTIONS[:2]]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    params = SamplingParams(**given)
    with Pipeline.from_config(load_config(config)) as pipeline:
        with pipeline.chat() as chat:
            whole = told(chat, params)
        with pipeline.chat(killed.stdout.strip(), store=store) as chat:
            assert [turn.answer for turn in chat.turns] == [text.replace("\0", "\ufffd") for text in whole[:2]]
            assert told(chat, params, QUESTIONS[2:]) == whole[2:]


def test_a_stream_without_an_event_loop_is_the_answer(pipeline: Pipeline, engine: Engine) -> None:
    """Pieces that do not add up; a loop that is left and leaves its request running, or a turn that nobody saw the end of."""
    *pieces, answer = pipeline.stream(QUESTION, GREEDY)
    assert (
        isinstance(answer, Answer) and "".join(map(str, pieces)) == answer.text == pipeline.ask(QUESTION, GREEDY).text
    )
    with pipeline.chat() as chat:
        for _ in chat.stream(QUESTION, replace(GREEDY, max_tokens=600)):
            break
        assert chat.ask(QUESTION, GREEDY).text == answer.text and len(chat.turns) == 1
    assert engine.idle()
    with pytest.raises(InputError, match="the question"):
        list(pipeline.stream(" "))


def test_retrieving_alone_finds_the_passages_of_an_answer(pipeline: Pipeline) -> None:
    """Passages in another number or order than those that an answer is made from."""
    assert tuple(pipeline.retrieve(QUESTION)) == pipeline.ask(QUESTION, GREEDY).passages
    only = {"type": "eq", "key": "document.id", "value": "river"}
    assert {p.document_id for p in pipeline.retrieve(QUESTION, num_passages=1, filter=only)} == {"river"}
    with pytest.raises(InputError, match="at least 1"):
        pipeline.retrieve(QUESTION, num_passages=0)


def test_turns_take_the_options_of_a_request(pipeline: Pipeline) -> None:
    """Options that only HTTP has; two conversations of one store that mix; a conversation of another tenant."""
    store = ConversationStore(":memory:")
    ann, bob = pipeline.chat(store=store, tenant="ann"), pipeline.chat(store=store, tenant="bob")
    assert not ann.ask(QUESTION, GREEDY, retrieve=False).passages
    assert len(bob.ask(QUESTION, GREEDY, num_passages=1, speculation=False).passages) == 1
    assert [len(chat.turns) for chat in (ann, bob)] == [1, 1]
    with pytest.raises(NotFound):
        pipeline.chat(ann.id, store=store, tenant="bob")
    ann.close()
    assert bob.turns, "a session closed a store that was given to it"
    with pytest.raises(TypeError, match="no option 'temprature'"):
        bob.ask(QUESTION, temprature=1.0)  # type: ignore[call-arg]


def test_a_saved_conversation_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A joined passage that comes back as a plain one; a file of another program that fails deep in a turn."""
    plain, joined = Passage("a", 0, "It rained.", 0, 10), JoinedPassage("a", 1, "It rained. é", 0, 12, hit_end=10)
    saved = SavedConversation((QaPair("q", "a"),), (ShownPassages((plain, joined), "g", ("a#0",)),), "Be brief.")
    saved.save(tmp_path / "talk.json")
    assert SavedConversation.load(tmp_path / "talk.json") == saved
    for text in ("", "[]", json.dumps({"turns": [["q", "a"]], "shown": []})):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InputError, match="no saved conversation"):
            SavedConversation.load(tmp_path / "bad.json")
