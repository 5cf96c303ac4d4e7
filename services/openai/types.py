"""Request bodies under /v1, as pydantic models.

Owns which fields a body may have. Unknown fields are refused, so that a misspelt field is not ignored.
`ragspec.rag.openai_fields` names the fields without effect and the unsupported fields, and translates sampling parameters.
"""

import json
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, create_model, model_validator
from pydantic_core import PydanticCustomError

from ragspec.core import Message, SamplingParams
from ragspec.errors import InputError
from ragspec.numerics.noise import portable_seed
from ragspec.rag import openai_fields
from ragspec.retrieval_config import When
from services.errors import ApiError
from services.limits import RequestBody, at_most

MAX_MESSAGES = 2048
MAX_STOPS = 16
MAX_CHOICES = 8
MAX_BIASES = 1024
MAX_PROMPTS = 32
MAX_INPUTS = 2048
MAX_TOOLS = 128


def _text(value: Any) -> str:
    try:
        return openai_fields.content_text(value)
    except InputError as cause:
        raise PydanticCustomError("content", "{reason}", {"reason": str(cause)}) from cause


def _prompts(value: Any) -> Any:
    """Wraps a single prompt, a text or token ids, in a list."""
    is_one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    prompts = [value] if is_one else value
    for prompt in prompts if isinstance(prompts, list) else ():
        if isinstance(prompt, list) and not set(map(type, prompt)) <= {int}:  # one error, not one for each item
            raise PydanticCustomError("token_ids", "a prompt is a text or a list of whole numbers")
    return prompts


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _texts(value: Any) -> Any:
    """Refuses token ids by name: LangChain's client sends those of another tokenizer by default."""
    texts = _listed(value)
    if isinstance(texts, list) and texts and isinstance(texts[0], int | list):
        reason = "token ids are of a client's own tokenizer; send texts (LangChain: check_embedding_ctx_length=False)"
        raise PydanticCustomError("token_ids", "{reason}", {"reason": reason})
    return texts


StopText = Annotated[str, Field(min_length=1, max_length=512)]
Stops = Annotated[list[StopText], at_most(MAX_STOPS), Field(max_length=MAX_STOPS)]
Stop = Annotated[Stops, BeforeValidator(_listed, json_schema_input_type=StopText | Stops)]
LogitBias = Annotated[dict[str, float], Field(max_length=MAX_BIASES), at_most(MAX_BIASES)]
Prompts = Annotated[
    list[str | list[int]],
    at_most(MAX_PROMPTS),
    Field(min_length=1, max_length=MAX_PROMPTS),
    BeforeValidator(_prompts, json_schema_input_type=str | list[int] | list[str | list[int]]),
]
ShortText = Annotated[str, Field(max_length=512)]


class Body(RequestBody):
    model_config = ConfigDict(frozen=True, strict=True)


class GenerationBody(Body):
    """Base class of bodies that ask for an answer. `_supported`: fields of `UNSUPPORTED_FIELDS` that a body supports."""

    _supported: ClassVar[frozenset[str]] = frozenset()

    user: Any = None
    metadata: Any = None
    store: bool | None = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        """Refuses unsupported fields, unless their value asks for nothing. Raises: ApiError."""
        if not isinstance(given, dict):
            return given
        refused = openai_fields.UNSUPPORTED_FIELDS.keys() - cls._supported
        if name := openai_fields.refused_field({name: given[name] for name in given if name in refused}):
            raise ApiError(400, openai_fields.UNSUPPORTED_FIELDS[name], param=name, code="unsupported_parameter")
        return {n: value for n, value in given.items() if n not in refused and (value or n not in cls._supported)}


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = Annotated[str, BeforeValidator(_text, json_schema_input_type=str | list[TextPart])]


class ToolModel(RequestBody):
    """A part of a call or of a tool, as OpenAI's clients send it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class ToolName(ToolModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")


class CalledFunction(ToolName):
    arguments: str = "{}"


class MessageCall(ToolModel):
    """A call that an earlier answer made."""

    id: ShortText = ""
    function: CalledFunction

    @property
    def arguments(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(self.function.arguments))

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        try:
            is_object = isinstance(json.loads(self.function.arguments), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise PydanticCustomError("arguments", "the arguments of a call are a JSON object as text")
        return self


class FunctionTool(ToolName):
    """`parameters`: a JSON schema of the arguments."""

    description: str | None = None
    parameters: dict[str, Any] = Field(default={})


class ChatTool(ToolModel):
    type: Literal["function"]
    function: FunctionTool


class NamedTool(ToolModel):
    """The tool that has to be called."""

    type: Literal["function"]
    function: ToolName


class ChatMessage(Body):
    """A message. Clients send earlier answers back whole, so all fields of an answer but its text and calls are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], at_most(MAX_TOOLS)] | None = None
    tool_call_id: ShortText | None = None

    @model_validator(mode="before")
    @classmethod
    def _keep_text(cls, given: Any) -> Any:
        """Drops empty fields; of an answer, all but its calls and its text or refusal."""
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value not in (None, [], {})}
        if given.get("role") != "assistant":
            return given
        if "function_call" in given:
            raise PydanticCustomError("function_call", "functions are of an earlier API: send tool_calls")
        calls = {"tool_calls": given["tool_calls"]} if "tool_calls" in given else {}
        return {"role": "assistant", "content": given.get("content", given.get("refusal", "")), **calls}

    @property
    def message(self) -> Message:
        return Message("system" if self.role == "developer" else self.role, self.content)

    @property
    def template_fields(self) -> dict[str, Any]:
        """The message as chat templates take it: the arguments of a call are an object."""
        calls = [
            {"id": each.id, "type": "function", "function": {"name": each.function.name, "arguments": each.arguments}}
            for each in self.tool_calls or ()
        ]
        fields: dict[str, Any] = {"role": self.message.role, "content": self.content}
        given = {"tool_calls": calls, "tool_call_id": self.tool_call_id, "name": self.name}
        return fields | {name: value for name, value in given.items() if value}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = True


class Prediction(Body):
    """Text that the answer probably contains. Drafters copy from it; the answer stays the same."""

    type: Literal["content"]
    content: Content


class JsonSchema(Body):
    """`strict` has no other meaning here: outputs always follow the schema."""

    name: str = Field("", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`json_object`: any JSON object. `json_schema`: a value of that schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise PydanticCustomError("json_schema", "a json_schema goes with the type json_schema, and with no other")
        return self


class RetrievalOptions(Body):
    """When and which documents are searched, and for how many passages. Default: all documents that the caller may see."""

    vector_store_ids: Annotated[list[ShortText], at_most(64), Field(min_length=1, max_length=64)] | None = None
    num_passages: int | None = Field(None, ge=1, le=64)
    filter: dict[str, Any] | None = None
    when: When | None = None


def _switch_or_options(value: Any) -> str:
    return "switch" if isinstance(value, bool) else "options"


RetrievalField = Annotated[
    Annotated[bool, Tag("switch")] | Annotated[RetrievalOptions, Tag("options")], Discriminator(_switch_or_options)
]


def _sampling_fields() -> dict[str, Any]:
    """The numbers and switches among the sampling parameters, as optional fields. `SamplingParams` checks their ranges."""
    kinds = {each.name: each.metadata.get("kind", type(each.default)) for each in fields(SamplingParams)}
    return {
        name: (kinds[name] | None, None)
        for name in openai_fields.SAMPLING_FIELDS
        if kinds.get(name) in (float, int, bool)
    }


SamplingFields = create_model("SamplingFields", __base__=GenerationBody, **_sampling_fields())


class SamplingBody(SamplingFields):
    """Fields that chat and text completions share."""

    model: str = Field(max_length=512)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stop | None = None
    logit_bias: LogitBias | None = None
    first_token_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: bool | dict[str, Any] | None = None
    cache_salt: ShortText | None = None
    metrics: bool | None = None
    privacy: Literal["normal", "strict"] | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options are for streams: set stream to true")
        return self

    @property
    def num_alternatives(self) -> int | None:
        """Alternatives of each token to return log-probabilities for; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def output_limit(self) -> tuple[str, int]:
        """The field that limits the output, and its value; 0: none was given."""
        given = {name: getattr(self, name, None) for name in ("max_completion_tokens", "max_tokens")}
        return next(((name, value) for name, value in given.items() if value), ("max_tokens", 0))

    @property
    def options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """The body's parameters over the defaults. Draws a seed if there is none.

        Raises: InputError.
        """
        body = {name: getattr(self, name, None) for name in openai_fields.SAMPLING_FIELDS}
        if isinstance(form := body["response_format"], ResponseFormat):
            body["response_format"] = form.model_dump(by_alias=True, exclude_none=True)
        given = openai_fields.sampling_arguments(body)
        if given.get("seed", defaults.seed) is None:
            given["seed"] = portable_seed()
        return replace(defaults, **given, logprobs=self.num_alternatives)


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    _supported = frozenset({"tools", "tool_choice"})

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], at_most(1)] | None = None
    conversation: ShortText | None = None
    retrieval: RetrievalField | None = None
    citations: Literal["openai", "anthropic", "cohere"] | None = None
    tools: Annotated[list[ChatTool], at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None

    @property
    def uses_tools(self) -> bool:
        """Whether the answer may hold calls, or earlier messages hold calls or their results."""
        is_asked = self.tool_choice != "none" and (bool(self.tools) or self.tool_choice not in (None, "auto"))
        return is_asked or any(message.role == "tool" or message.tool_calls for message in self.messages)

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs need logprobs: set it to true")
        return self

    @property
    def num_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def retrieval_options(self) -> RetrievalOptions:
        if isinstance(self.retrieval, bool):
            return RetrievalOptions(when="always" if self.retrieval else "never")
        return self.retrieval or RetrievalOptions()


class CompletionBody(SamplingBody):
    """`POST /v1/completions`. Text prompts hold no control tokens; token ids may."""

    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise PydanticCustomError("best_of", "best_of must equal n: all choices are returned")
        return self

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs


class EmbeddingBody(Body):
    """`POST /v1/embeddings`. `input_type`: some encoders encode queries and documents differently."""

    model: str = Field(max_length=512)
    input: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(_texts),
        at_most(MAX_INPUTS),
        Field(min_length=1, max_length=MAX_INPUTS),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    input_type: Literal["query", "document"] = "document"
    user: Any = None
