"""The routes of /v1/conversations: OpenAI's, and beside them the list, the sources of stored answers and feedback on them.

`schemas` has their fields; `ConversationStore` does the work. Whoever holds a key of the tenant sees all of its conversations.
"""

from typing import Annotated

from fastapi import APIRouter, Query

from ragspec.core import Message
from ragspec.errors import InputError, NotFound
from ragspec.rag.chat.conversations import Conversation, Feedback, QaPair, ShownPassages
from ragspec.rag.chat.history import split_messages
from services.backend import ServiceBackend
from services.openai.answer_fields import passages_of, support_of
from services.stores import schemas
from services.stores.schemas import Fields, Name, Tenant


def add_conversations(router: APIRouter, backend: ServiceBackend) -> None:
    conversations = backend.conversations

    def shape(conversation: Conversation) -> Fields:
        return schemas.conversation_object(conversation, conversations.ttl_s)

    @router.post("/v1/conversations")
    def create(tenant: Tenant, body: schemas.NewConversation | None = None) -> Fields:
        body = body or schemas.NewConversation()
        return shape(conversations.create(tenant, body.metadata or {}, _turns(body)))

    @router.get("/v1/conversations")
    def find_all(tenant: Tenant, query: Annotated[schemas.PageQuery, Query()]) -> Fields:
        page = query.page(conversations.conversations(tenant), shape, lambda each: (each.used_s, each.id))
        return page | {"ttl_s": conversations.ttl_s}

    @router.get("/v1/conversations/{conversation}")
    def find(tenant: Tenant, conversation: Name) -> Fields:
        return shape(conversations.find(tenant, conversation))

    @router.post("/v1/conversations/{conversation}")
    def change(tenant: Tenant, conversation: Name, body: schemas.ConversationChange) -> Fields:
        return shape(conversations.change(tenant, conversation, body.metadata))

    @router.delete("/v1/conversations/{conversation}")
    def delete(tenant: Tenant, conversation: Name) -> Fields:
        conversations.delete(tenant, conversation)
        return schemas.deleted("conversation.deleted", conversation)

    @router.get("/v1/conversations/{conversation}/items")
    def items(tenant: Tenant, conversation: Name, query: Annotated[schemas.ItemQuery, Query()]) -> Fields:
        turns = conversations.turns(tenant, conversation)
        shown = conversations.shown(tenant, conversation) if query.include else {}
        feedback = conversations.feedback(tenant, conversation) if query.include else {}

        def item_of(number: int) -> Fields:
            turn, is_answer = divmod(number, 2)
            item = schemas.conversation_item(conversation, number, turns[turn][is_answer])
            if not is_answer or not query.include:
                return item
            sources = {"ragspec": _sources_of(backend, turns[turn], shown.get(turn, ShownPassages(())))}
            return item | sources | ({"feedback": feedback[turn]._asdict()} if turn in feedback else {})

        return query.page(range(2 * len(turns)), item_of, lambda number: (0.0, schemas.item_id(conversation, number)))

    @router.post("/v1/conversations/{conversation}/items/{item}/feedback")
    def rate(tenant: Tenant, conversation: Name, item: Name, body: schemas.FeedbackBody) -> Fields:
        """Keeps a verdict on an answer, or takes it back. It is deleted with its conversation."""
        turn, is_answer = divmod(schemas.number_of(item), 2)
        if not is_answer or item != schemas.item_id(conversation, 2 * turn + 1):
            raise NotFound(f"there is no answer {item!r}")
        feedback = Feedback(body.rating, body.note) if body.rating else None
        conversations.rate(tenant, conversation, turn, feedback)
        return body.model_dump()


def _sources_of(backend: ServiceBackend, turn: QaPair, shown: ShownPassages) -> Fields:
    """The field `ragspec` of a stored answer, as far as its passages are still kept."""
    answer = backend.target.chat.supported(turn, shown)
    ranks = shown.ranks or range(1, 1 + len(shown.passages))
    return {"passages": passages_of(shown.passages, ranks)} | support_of(answer)


def _turns(body: schemas.NewConversation) -> list[QaPair]:
    """Raises: InputError unless the items are whole turns."""
    messages = [Message(item.role, item.text) for item in body.items or ()]
    if not messages:
        return []
    last, is_dialogue = messages[-1], all(message.role in ("user", "assistant") for message in messages)
    if not is_dialogue or last.role != "assistant" or not last.content.strip():
        raise InputError("items must be messages of user and assistant, the last of them the assistant's, not empty")
    return split_messages([*messages, Message("user", "?")])[1]
