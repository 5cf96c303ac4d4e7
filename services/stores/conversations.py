"""/v1/conversations: what the service keeps of what was said, for clients that do not send it each time."""

from __future__ import annotations

from fastapi import APIRouter, Request

from ragspec.core import Message
from ragspec.errors import InputError
from ragspec.rag.chat.conversations import Conversation, ConversationStore, QaPair
from ragspec.rag.chat.history import split_messages
from services.backend import Backend
from services.errors import ApiError
from services.stores.bodies import Cursor, Limit, NewConversation, Order
from services.stores.shapes import Fields, deleted, page


def routes(backend: Backend) -> APIRouter:
    router = APIRouter(prefix="/v1/conversations")
    kept = backend.chat.conversations

    def store() -> ConversationStore:
        if kept is None:
            raise ApiError(501, "conversations are not kept here")
        return kept

    @router.post("")
    def create(request: Request, body: NewConversation | None = None) -> Fields:
        tenant, body = request.state.caller.tenant, body or NewConversation()
        return _object(store().create(tenant, body.metadata, _said(body)))

    @router.get("/{conversation}")
    def find(request: Request, conversation: Cursor) -> Fields:
        return _object(store().find(request.state.caller.tenant, conversation))

    @router.delete("/{conversation}")
    def delete(request: Request, conversation: Cursor) -> Fields:
        store().delete(request.state.caller.tenant, conversation)
        return deleted("conversation.deleted", conversation)

    @router.get("/{conversation}/items")
    def items(
        request: Request, conversation: Cursor, limit: Limit = 20, order: Order = "desc", after: Cursor = ""
    ) -> Fields:
        said = store().turns(request.state.caller.tenant, conversation)
        texts = [(role, text) for turn in said for role, text in zip(("user", "assistant"), turn, strict=True)]
        numbered = list(enumerate(texts))
        return page(
            numbered,
            lambda item: _item(conversation, item[0], *item[1]),
            lambda item: (item[0], _item_id(conversation, item[0])),
            limit=limit,
            order=order,
            after=after,
        )

    return router


def _said(body: NewConversation) -> list[QaPair]:
    """Raises: InputError unless the items are whole turns."""
    messages = [Message(item.role, item.text) for item in body.items or ()]
    if not messages:
        return []
    last = messages[-1]
    if (
        any(m.role not in ("user", "assistant") for m in messages)
        or last.role != "assistant"
        or not last.content.strip()
    ):
        raise InputError(
            "items must be messages of user and assistant, and the last of them the assistant's and not empty"
        )
    return split_messages([*messages, Message("user", "?")])[1]


def _object(conversation: Conversation) -> Fields:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_s),
        "metadata": dict(conversation.metadata),
    }


def _item_id(conversation: str, number: int) -> str:
    return f"msg_{conversation.removeprefix('conv_')}_{number:06d}"


def _item(conversation: str, number: int, role: str, text: str) -> Fields:
    kind: Fields = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
    return {
        "id": _item_id(conversation, number),
        "type": "message",
        "status": "completed",
        "role": role,
        "content": [{**kind, "text": text}],
    }
