"""From the messages of a request to the turns before its question, with the passages each had."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ragspec.core import Message, Passage, check_text
from ragspec.errors import InputError, SaveError, StoreError
from ragspec.rag.chat.conversations import ConversationStore, QaPair, ShownPassages, turn_keys
from ragspec.rag.chat.prompt import PastTurn

log = logging.getLogger(__name__)

_NOTHING = ShownPassages(())


@dataclass(frozen=True, slots=True)
class ChatHistory:
    """The turns before a question, the oldest first, and what was shown with each.

    `keys` name the turns' questions, and the last of them this one; `unkept`: turns that a named conversation does not hold yet.
    """

    said: tuple[QaPair, ...]
    shown: tuple[ShownPassages, ...]
    keys: tuple[str, ...]
    unkept: tuple[QaPair, ...] = ()

    @property
    def history(self) -> tuple[PastTurn, ...]:
        return tuple(PastTurn(*turn, shown.passages) for turn, shown in zip(self.said, self.shown, strict=True))

    @property
    def cited(self) -> list[Collection[str]]:
        """Ids of the passages that each answer cites."""
        return [shown.cited for shown in self.shown]

    def of_other_generations(self, generation: str) -> list[Passage]:
        return [p for shown in self.shown if not generation or shown.generation != generation for p in shown.passages]

    def without(self, gone: Collection[tuple[str, str]]) -> tuple[PastTurn, ...]:
        """`history`, less the passages of these ids and texts. What is left of a turn's is numbered anew."""
        return tuple(
            replace(turn, passages=tuple(p for p in turn.passages if (p.id, p.text) not in gone))
            for turn in self.history
        )


def split_messages(messages: Sequence[Message]) -> tuple[str, list[QaPair], str]:
    """(all system messages, the turns that are over, the question). Neighbouring messages of one role are one.

    Raises: InputError unless the messages end with the user's and are of the roles system, user and assistant.
    """
    if not messages or messages[-1].role != "user":
        raise InputError("a conversation must end with a message of the user")
    system: list[str] = []
    turns: list[QaPair] = []
    for message in messages:
        # An answer may be empty, and whoever sends it back goes on.
        if message.role == "user" or message.content.strip():
            check_text(message.content, f"a message of the {message.role}")
        if message.role == "system":
            system.append(message.content)
        elif message.role == "user":
            open_turn = bool(turns) and not turns[-1].answer.strip()
            question = f"{turns.pop().question}\n\n{message.content}" if open_turn else message.content
            turns.append(QaPair(question, ""))
        elif message.role == "assistant":
            last = turns.pop() if turns else QaPair("", "")
            turns.append(QaPair(last.question, "\n\n".join(filter(None, (last.answer, message.content)))))
        else:
            raise InputError(f"unknown role {message.role!r}; known are system, user, assistant")
    *over, (question, _) = turns
    return "\n\n".join(filter(str.strip, system)), over, question


def load_history(
    store: ConversationStore | None, tenant: str, who: str, conversation: str, given: Sequence[QaPair], question: str
) -> ChatHistory:
    """What came before the question: the turns given, or else those the conversation holds.

    `who`: equal for those who may be told what was shown to each other. Where no conversation is named, a store that fails costs
    the passages of earlier turns and no more. Raises: NotFound, StoreError, SaveError for a conversation that is named.
    """
    said, unkept = tuple(given), tuple[QaPair, ...]()
    if conversation:
        if store is None:
            raise InputError("conversations are not kept here; send all messages instead")
        kept = tuple(store.turns(tenant, conversation))
        said = said or kept
        unkept = said[len(kept) :] if said[: len(kept)] == kept else ()
    keys = turn_keys(who, said, question)
    try:
        known = store.load_shown(tenant, keys[:-1]) if store is not None else {}
    except (SaveError, StoreError) as cause:
        if conversation:
            raise
        log.warning("the passages of earlier turns cannot be read: %s", cause)
        known = {}
    return ChatHistory(said, tuple(known.get(key, _NOTHING) for key in keys[:-1]), tuple(keys), unkept)
