"""/v1/conversations: conversations that the service stores. Owns the routes and the items' format."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from ragspec.core import Message
from ragspec.errors import InputError
from ragspec.rag.chat.conversations import Conversation, ConversationStore, QaPair
from ragspec.rag.chat.history import split_messages
from services.backend import ServiceBackend
from services.errors import ApiError
from services.stores.library import checked_metadata
from services.stores.schemas import Fields, Name, NewConversation, PageQuery, Tenant, deleted


def routes(backend: ServiceBackend) -> APIRouter:
    router = APIRouter(prefix="/v1/conversations")
    conversations = backend.chat.conversations

    def store() -> ConversationStore:
        if conversations is None:
            raise ApiError(501, "conversations are not kept here")
        return conversations

    @router.post("")
    def create(tenant: Tenant, body: NewConversation | None = None) -> Fields:
        body = body or NewConversation()
        return _object(store().create(tenant, checked_metadata(body.metadata or {}), _turns(body)))

    @router.get("/{conversation}")
    def find(tenant: Tenant, conversation: Name) -> Fields:
        return _object(store().find(tenant, conversation))

    @router.delete("/{conversation}")
    def delete(tenant: Tenant, conversation: Name) -> Fields:
        store().delete(tenant, conversation)
        return deleted("conversation.deleted", conversation)

    @router.get("/{conversation}/items")
    def items(tenant: Tenant, conversation: Name, query: Annotated[PageQuery, Query()]) -> Fields:
        turns = store().turns(tenant, conversation)
        texts = [(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
        return query.page(
            list(enumerate(texts)),
            lambda item: _item(conversation, item[0], *item[1]),
            lambda item: (item[0], _item_id(conversation, item[0])),
        )

    return router


def _turns(body: NewConversation) -> list[QaPair]:
    """Raises: InputError unless the items are whole turns."""
    messages = [Message(item.role, item.text) for item in body.items or ()]
    if not messages:
        return []
    last, is_dialogue = messages[-1], all(message.role in ("user", "assistant") for message in messages)
    if not is_dialogue or last.role != "assistant" or not last.content.strip():
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
