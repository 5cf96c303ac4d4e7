"""One conversation from Python: each question is asked after the turns before it and the passages that these were shown.

    >>> with pipeline.chat() as chat:
    ...     print(chat.ask("When was the old mill built?").text)
    ...     for piece in chat.stream("And who built it?"): ...
    ...     chat.save("mill.json")
    >>> with pipeline.chat(saved="mill.json") as chat: ...

A turn is prepared and kept as the service prepares and keeps it, so both give the same text. The store is the only form of a
conversation; `SavedConversation` is its copy in a file.
"""

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ragspec.core import Completion, Message, SamplingOptions, SamplingParams
from ragspec.disk import saving, write_atomically
from ragspec.errors import InputError
from ragspec.rag.answer import Answer, AnswerStream
from ragspec.rag.chat.chat import Chat, PreparedTurn
from ragspec.rag.chat.conversations import QaPair, ShownPassages, turn_keys
from ragspec.rag.chat.history import ChatTurn, load_history
from ragspec.rag.chat.prompt import PastTurn
from ragspec.rag.steps import Closeable, EngineLike, all_doubted, params_of_each, said_completions, stream_answer
from ragspec.retrieval_config import When
from ragspec.speculation import Speculation, SpeculationGiven


class TurnOptions(SamplingOptions, total=False):
    """`retrieve`: when passages are retrieved; False is "never", left out is the setting. `prediction`: text that the answer may
    repeat."""

    num_passages: int | None
    speculation: SpeculationGiven
    retrieve: When | bool
    prediction: str


@dataclass(frozen=True)
class SavedConversation:
    """A conversation in a file: its turns, the passages of each, and the system message before them."""

    turns: tuple[QaPair, ...]
    shown: tuple[ShownPassages, ...]
    system: str = ""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Raises: InputError."""
        try:
            found = TypeAdapter(cls).validate_json(Path(path).read_bytes())
        except (OSError, ValidationError) as cause:
            raise InputError(f"{path} is no saved conversation: {cause}") from cause
        if len(found.turns) != len(found.shown):
            raise InputError(
                f"{path} is no saved conversation: it has {len(found.turns)} turns, {len(found.shown)} shown"
            )
        return found

    def save(self, path: str | Path) -> None:
        """Raises: SaveError."""
        with saving(Path(path)):
            write_atomically(Path(path), json.dumps(TypeAdapter(type(self)).dump_python(self, mode="json"), indent=1))


class ChatSession(Closeable):
    """Asks one question at a time. `id` names the conversation in its store."""

    def __init__(self, chat: Chat, engine: EngineLike, turn: ChatTurn, *, owns_store: bool = False) -> None:
        """`turn`: a turn without a question, whose settings all turns share. Without a conversation it begins a new one.

        Raises: NotFound, SaveError, StoreCorrupt.
        """
        assert chat.conversations is not None, "a session needs a store"
        self._chat, self._engine, self._store, self._owns_store = chat, engine, chat.conversations, owns_store
        self.id = turn.conversation or self._store.create(turn.scope.tenant).id
        self._store.find(turn.scope.tenant, self.id)
        self._turn = replace(turn, conversation=self.id)
        self.kept = True
        """Whether the store has kept the latest turn; a turn that it could not keep is missing from the next prompt."""

    def restore(self, saved: SavedConversation) -> None:
        """Append the turns of a file. Raises: NoRoom, SaveError."""
        tenant, keys = self._turn.scope.tenant, turn_keys(self._turn.visibility, saved.turns, "")
        self._store.append(tenant, self.id, saved.turns)
        for key, shown in zip(keys[:-1], saved.shown, strict=True):
            self._store.save_shown(tenant, key, shown, conversation=self.id)

    def save(self, path: str | Path) -> None:
        """Write the conversation as JSON. Raises: SaveError, StoreCorrupt."""
        history = load_history(self._store, self._turn, (), "")
        system = "\n\n".join(message.content for message in self._turn.messages)
        SavedConversation(history.pairs, history.shown, system).save(path)

    @property
    def turns(self) -> tuple[PastTurn, ...]:
        """The turns so far, each with the passages that it was shown. Raises: NotFound, SaveError, StoreCorrupt."""
        return load_history(self._store, self._turn, (), "").turns

    def ask(self, question: str, params: SamplingParams | None = None, **options: Unpack[TurnOptions]) -> Answer:
        """The answer to the next question; of several choices the first. Single sampling parameters replace those of `params`.

        Raises: InputError, PromptTooLong, NotFound, RetrievalError, StoreError, EngineError.
        """
        (prepared,) = all_doubted([self._prepare(question, params, **options)], self._engine)
        completions = said_completions(prepared) or self._engine.generate([prepared.request])
        return self._finish(prepared, completions[0])

    def stream(
        self, question: str, params: SamplingParams | None = None, **options: Unpack[TurnOptions]
    ) -> AnswerStream:
        """As `ask`, in pieces of text as they are decided. A stream that is left early leaves no turn. One choice."""
        options["n"] = 1
        return AnswerStream(
            stream_answer(self._engine, lambda: self._prepare(question, params, **options), self._finish)
        )

    def close(self) -> None:
        """Close the store, if the session opened it."""
        if self._owns_store:
            self._store.close()

    def _prepare(
        self,
        question: str,
        params: SamplingParams | None = None,
        *,
        num_passages: int | None = None,
        speculation: SpeculationGiven = True,
        retrieve: When | bool = True,
        prediction: str = "",
        **sampling: Any,
    ) -> PreparedTurn:
        (params,) = params_of_each([question], params, self._turn.params, sampling)
        turn = replace(
            self._turn,
            id=uuid.uuid4().hex,
            messages=(*self._turn.messages, Message("user", question)),
            params=params,
            num_passages=self._turn.num_passages if num_passages is None else num_passages,
            speculation=Speculation.of(speculation),
            when=retrieve if isinstance(retrieve, str) else self._turn.when if retrieve else "never",
            prediction=prediction,
        )
        return self._chat.prepare(turn)

    def _finish(self, prepared: PreparedTurn, completion: Completion) -> Answer:
        (answer,), self.kept = self._chat.answers(prepared, [completion])
        return answer
