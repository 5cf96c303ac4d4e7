"""What may be asked of files, vector stores and conversations, field by field. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

Attributes = dict[str, StrictStr | StrictBool | StrictInt | StrictFloat]
Metadata = dict[str, StrictStr]
Name = Annotated[str, Field(max_length=256)]
Limit = Annotated[int, Field(ge=1, le=100)]
Order = Literal["asc", "desc"]
Cursor = Annotated[str, Field(max_length=256)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Chunking(Body):
    """How passages are cut is the index's business, so that those of all documents can be compared."""

    type: Literal["auto"]


class NewStore(Body):
    """`expires_after` can only be null: stores stay until they are deleted."""

    name: Name | None = None
    description: Name | None = None
    metadata: Metadata | None = None
    file_ids: list[Name] = Field(default=[], max_length=500)
    chunking_strategy: Chunking | None = None
    expires_after: None = None


class StoreChange(Body):
    name: Name | None = None
    metadata: Metadata | None = None
    expires_after: None = None


class NewMember(Body):
    file_id: Name
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None


class MemberChange(Body):
    attributes: Attributes | None


class Ranking(Body):
    """`ranker` is the index's own, whatever is named."""

    ranker: str | None = None
    score_threshold: float = Field(0.0, ge=0.0, le=1.0)


class Search(Body):
    """`rewrite_query` changes nothing: a single question is not rewritten."""

    query: Annotated[str, Field(max_length=4096)] | Annotated[list[str], Field(min_length=1, max_length=16)]
    filters: dict[str, Any] | None = None
    max_num_results: int = Field(10, ge=1, le=50)
    ranking_options: Ranking | None = None
    rewrite_query: bool = False


class Part(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = []


class Item(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n\n".join(part.text for part in self.content)


class NewConversation(Body):
    items: list[Item] | None = Field(None, max_length=100)
    metadata: Metadata | None = None
