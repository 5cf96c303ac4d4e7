"""Builds the target's prompt, in token ids, from a question and its passages.

Owns wording and order; the target's chat template owns the control tokens. Text of users and documents never becomes a control
token: `<|end|>` in a passage is tokenised as plain characters.

    >>> PromptBuilder(tokenizer, max_context_tokens=2048).build("When did it rain?", passages, max_tokens=96).prompt_ids
"""

from __future__ import annotations

import copy
import functools
import re
import threading
import uuid
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import itemgetter
from typing import Any, Self

from jinja2 import TemplateError

from ragspec.config import PassageOrder, PipelineConfig, PromptConfig
from ragspec.core import Message, Passage, Request, SamplingParams, check_text
from ragspec.drafting.references import stateless
from ragspec.errors import InputError, PromptTooLong
from ragspec.rag.citations import answer_grammar
from ragspec.rag.languages import guess_language
from ragspec.rag.quote_choice import LatestQuote, quote_bias
from ragspec.rag.retrieval_head import Look, PassageTokens, SpanAttention
from ragspec.rag.wording import (
    ABSTENTION,
    DOUBTS,
    FREE_INSTRUCTION,
    GRAMMAR_REQUEST,
    INSTRUCTION,
    QUESTION,
    SHORT_INSTRUCTION,
    TODAYS_DOUBT,
    UNKNOWN_CLOSENESS,
    TextRules,
    numbered,
    system_text,
    user_text,
)
from ragspec.retrieval.expansion import widths
from ragspec.speculation import Speculation

_INSTRUCTIONS = {"auto": INSTRUCTION, "quote": INSTRUCTION, "free": FREE_INSTRUCTION, "short": SHORT_INSTRUCTION}
_YES_OR_NO = 'start: "Yes" | "No"'
_ROLES = frozenset({"system", "user", "assistant", "context"})
_MAX_CHARS_PER_TOKEN = 64
"""A text with more characters per token of the context is refused before it is tokenised."""
_SHORT_CHARS = 2048
_LEAST_CONFIDENCE = 0.35
"""In another language than the target's. Of 6,800 English questions none is above it."""

_PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}Answer: {% endif %}{{ "
    "message.content }}\n\n{% endfor %}Answer:"
)
"""For models without a chat template."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`passages[i]` has the number i + 1 in the prompt and is the `ranks[i]`-th best; `dropped` passages did not fit."""

    prompt_ids: tuple[int, ...]
    passages: tuple[Passage, ...] = ()
    dropped: tuple[Passage, ...] = ()
    ranks: tuple[int, ...] = ()
    order: PassageOrder = "rank"

    @classmethod
    def of(
        cls,
        prompt_ids: tuple[int, ...],
        ranked: Sequence[Passage],
        dropped: Sequence[Passage],
        order: PassageOrder,
        **more: Any,
    ) -> Self:
        """The prompt that shows the `ranked` passages, best first, in this order."""
        passages, ranks = in_order(ranked, order)
        return cls(prompt_ids, passages, tuple(dropped), ranks, order, **more)

    def best_first(self) -> list[Passage]:
        return [passage for _, passage in sorted(zip(self.ranks, self.passages, strict=True), key=itemgetter(0))]


def in_order(ranked: Sequence[Passage], order: PassageOrder) -> tuple[tuple[Passage, ...], tuple[int, ...]]:
    """Passages, given best first, as a prompt shows them; and their ranks, from 1.

    In the order "shared" a passage's place depends on the passages alone, so prompts with the same first passages share a prefix.
    Why the longest first: of two questions that share one passage, the shared one is then first more often, and saves more.
    """

    def key(place: int) -> tuple[int, str, int]:
        return -len(ranked[place].text), ranked[place].document_id, ranked[place].start

    places = sorted(range(len(ranked)), key=key if order == "shared" else None)
    return tuple(ranked[place] for place in places), tuple(place + 1 for place in places)


class PromptBuilder:
    """Builds prompts for one tokenizer. `max_context_tokens`: prompt and output together. Safe to call from several threads.

    `tokenizer` decodes and lays out. Why copies encode: whether text may contain control tokens is a state of it that a call
    changes. Texts without the spelling of a control token go past transformers to a compiled tokenizer whose state never
    changes, which takes a third of the time. The first other text makes the second copy, which a lock protects.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_context_tokens: int,
        words: PromptConfig | None = None,
        rules: TextRules | None = None,
        passage_order: PassageOrder = "rank",
    ) -> None:
        words, self.rules = words or PromptConfig(), rules or TextRules()
        self.passage_order: PassageOrder = passage_order
        self.layout: str = words.layout
        self.require_support = words.require_support
        self._own_instruction = words.instruction
        self._label, self._grammar_request = words.question or QUESTION, words.grammar or GRAMMAR_REQUEST
        self.tokenizer = tokenizer
        self._encoding = threading.Lock()
        self.fast = stateless(tokenizer)
        """The compiled tokenizer, if there is one."""
        self._control = re.compile("|".join(map(re.escape, tokenizer.get_added_vocab())) or r"(?!)")
        self.max_context_tokens = max_context_tokens
        self.max_chars = max_context_tokens * _MAX_CHARS_PER_TOKEN
        # Why `sanitize_control_tokens`: only the template may write control tokens; their spelling in a text is plain text
        self._layout: dict[str, Any] = {"sanitize_control_tokens": True, "return_dict": False}
        self._layout |= _plain_layout(tokenizer) if tokenizer.chat_template is None else {}
        self._has_system_role = self._accepts_system_message()

    @classmethod
    def of(cls, tokenizer: Any, max_context_tokens: int, config: PipelineConfig) -> PromptBuilder:
        """In the words of a configuration, by the rules for its target. Raises: ModelError."""
        words, order = config.wording, config.generation.passage_order
        return cls(tokenizer, max_context_tokens, words, TextRules.of(config.target, words.layout), order)

    @property
    def quotes_first(self) -> bool:
        """Whether answers begin with a verbatim quote."""
        return self.layout not in ("free", "short")

    @property
    def _instruction(self) -> str:
        return self._own_instruction or _INSTRUCTIONS[self.layout]

    def by(self, rules: TextRules) -> PromptBuilder:
        """The same prompts for answers by other rules; in the layout of earlier versions, if the rules are theirs."""
        other = copy.copy(self)
        other.rules = rules
        if self.layout == "free" and not rules.layout:
            other.layout = "short"
        return other

    def unknown_language(self, question: str) -> str:
        """The name of the question's language if the target does not know it, or an empty text."""
        if not self.rules.languages:
            return ""
        found = guess_language(question)
        return "" if found.code in self.rules.languages or found.confidence < _LEAST_CONFIDENCE else found.name

    def biased(
        self,
        params: SamplingParams,
        question: str,
        prompt: Prompt,
        closeness: float | None,
        left_out: Collection[str] = (),
        *,
        holds_quotes: bool = True,
        latest: LatestQuote | None = None,
        seen: SpanAttention | None = None,
    ) -> SamplingParams:
        """The parameters of an answer to a prompt, with the fitted biases unless they have biases of their own.

        `holds_quotes`: a grammar holds the quote to the passages, without `left_out`; the bias on quotes is for these alone.
        `latest`: of the dialogue that a question follows up. `seen`: where the target looks.
        """
        rules, fit = self.rules, self.rules.fit
        if params.json_schema or not self.quotes_first or not prompt.passages:
            return params
        if fit.quote_weight and holds_quotes and not params.prefix_bias:
            biases = quote_bias(question, prompt.best_first(), self.plain_ids, rules, left_out, latest, seen)
            params = replace(params, prefix_bias=biases)
        is_fitted = (fit.intercept or fit.slope or fit.mark) and fit.doubts != TODAYS_DOUBT  # its odds are of the "No"
        if closeness is None or params.first_token_bias or not is_fitted:
            return params
        (first, *_), (mark, *_) = self.plain_ids([ABSTENTION, '"'])
        first_biases = {first: fit.abstention_bias(closeness), mark: fit.mark}
        return replace(params, first_token_bias={token: bias for token, bias in first_biases.items() if bias})

    def look(self, prompt: Prompt, request: Request, biased: Callable[..., SamplingParams]) -> Look | None:
        """The request that shows where the target looks as the answer to `request` begins; None where nothing follows from it.
        `request`: in the caller's own parameters; `biased`: as in `Look`."""
        fit, params = self.rules.fit, request.params
        is_read = bool(fit.retrieval_head and fit.quote_weight and fit.attention_weight and request.grammar)
        if not is_read or self.fast is None or params.json_schema or params.prefix_bias:
            return None
        ids = (*prompt.prompt_ids, *self.plain_ids(['"'])[0])
        tokens = PassageTokens.of(prompt.prompt_ids, prompt.passages, self.fast) if prompt.passages else None
        if tokens is None or len(ids) >= self.max_context_tokens:
            return None
        name, asked = uuid.uuid4().hex, SamplingParams(max_tokens=1, temperature=0.0)
        heads = (fit.retrieval_head,) if fit.retrieval_head else ()
        shown = Request(name, ids, asked, salt=request.salt, affinity=request.affinity, attention_heads=heads)
        return Look(shown, tokens, biased)

    @property
    def doubt_words(self) -> str:
        return DOUBTS.get(self.rules.fit.doubts, "")

    def doubt(
        self, build: Callable[[], Prompt], prompt: Prompt, closeness: float | None, request: Request
    ) -> Request | None:
        """The request that asks the target whether the passages of a prompt answer its question; None where no fit says so.

        `build`: the prompt with `doubt_words` behind the question. `request`: the answer's. Why before the answer: nearly all of
        both prompts is the same, and read once.
        """
        fit = self.rules.fit
        if not fit.doubts or self.layout != "free" or not prompt.passages or request.params.json_schema:
            return None
        try:
            asked = build()
        except InputError:  # the question fills the context
            return None
        ((no, *_),) = self.plain_ids(["No"])
        odds = fit.abstention_bias(UNKNOWN_CLOSENESS[fit.doubts] if closeness is None else closeness)
        params = SamplingParams(max_tokens=1, first_token_bias={no: odds})
        name, salt, affinity = uuid.uuid4().hex, request.salt, request.affinity
        return Request(name, asked.prompt_ids, params, salt=salt, grammar=_YES_OR_NO, affinity=affinity)

    def answer_grammar(
        self,
        params: SamplingParams,
        speculation: Speculation,
        passages: Sequence[Passage],
        left_out: Collection[str] = (),
    ) -> str:
        """The grammar of an answer from passages, as `ragspec.rag.citations` writes it; empty where quotes are free, as they are
        where answers do not begin with quotes."""
        if not self.quotes_first:
            return ""
        rules = self.rules
        return answer_grammar(
            params, speculation, passages, left_out=left_out, quotes=rules.quotes, short_answers=rules.short_answers
        )

    def build(
        self,
        question: str | Sequence[Message],
        passages: Sequence[Passage],
        max_tokens: int,
        *,
        question_first: bool = False,
    ) -> Prompt:
        """The prompt with as many of the best passages as leave room for `max_tokens` of output.

        `question`: a text, or a conversation that ends with the user's message. `passages`: ranked, the last are dropped first;
        with as many neighbours as fit beside all of them.
        `question_first`: put the question before the passages; for iterative answers, which replace passages.
        Raises: InputError for invalid text, PromptTooLong if the question alone does not fit.
        """
        messages = [Message("user", question)] if isinstance(question, str) else list(question)
        self._check(messages)
        room = self.max_context_tokens - max_tokens
        *wider, passages = widths(passages)
        order: PassageOrder = "rank" if question_first else self.passage_order

        def tokens(shown: Sequence[Passage]) -> tuple[int, ...]:
            context = [self.context(in_order(shown, order)[0])] if shown else []
            return self._encode(self._merge_context([*messages, *context], question_first))

        for shown in filter(None, (*wider, passages)):  # all of them fit, most of the time
            longer_ids = tokens(shown)
            if len(longer_ids) <= room:
                return Prompt.of(longer_ids, shown, (), order)

        @functools.cache
        def of_best(count: int) -> tuple[int, ...]:
            return tokens(passages[:count])

        if len(of_best(0)) > room:
            raise PromptTooLong(len(of_best(0)), max(room, 0), max_tokens)
        fitting = bisect_left(range(1, len(passages)), True, key=lambda count: len(of_best(count)) > room)
        return Prompt.of(of_best(fitting), passages[:fitting], passages[fitting:], order)

    def context(self, passages: Sequence[Passage]) -> Message:
        """The message of numbered passages that follows their question."""
        return Message("context", numbered([passage.text for passage in passages]))

    def tokens(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt of a conversation that ends with the user's message or its passages; of any length.

        Each earlier turn is laid out as when it was the last, so the prefix cache stays valid. Raises: InputError.
        """
        self._check(messages[:-1] if messages and messages[-1].role == "context" else messages)
        return self._encode(self._merge_context(messages))

    def plain_ids(self, texts: Sequence[str], *, begins: bool = False) -> list[list[int]]:
        """Token ids of each text, without control tokens. `begins`: add the tokenizer's special tokens around it."""
        if self.fast is not None and not any(map(self._control.search, texts)):
            return [encoding.ids for encoding in self.fast.encode_batch_fast(list(texts), add_special_tokens=begins)]
        with self._encoding:
            encoded = self._encoder(list(texts), add_special_tokens=begins, split_special_tokens=True, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def answered(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The token ids of a conversation that ends with an answer.

        Raises: InputError.
        """
        self._check(messages[:-2] if messages[-2].role == "context" else messages[:-1])
        return self._encode(self._merge_context(messages), add_generation_prompt=False)

    @functools.cached_property
    def beginning(self) -> tuple[int, ...]:
        """The tokens with which all prompts begin that show passages, without a system message of the caller."""
        ids = [self.tokens([Message("user", text), self.context([Passage("", 0, text, 0, 1)])]) for text in ("a", "1")]
        return tuple(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*ids, strict=False)))

    def check(self, question: str) -> None:
        """Raises: InputError for a question that `build` would refuse before tokenising."""
        self._check([Message("user", question)])

    def grammar_prompt(self, sentence: str, max_tokens: int = 0) -> Prompt:
        """The prompt that asks for a corrected sentence. Raises: as `build`."""
        check_text(sentence, "the sentence")
        return self.build([Message("user", self._grammar_request + sentence)], (), max_tokens)

    def _check(self, messages: Sequence[Message]) -> None:
        if not messages or messages[-1].role != "user":
            raise InputError("a conversation must end with a message of the user")
        for message in messages:
            if message.role not in _ROLES:
                raise InputError(f"unknown role {message.role!r}; known are {', '.join(sorted(_ROLES))}")
            what = "the question" if message is messages[-1] else f"the message of the {message.role}"
            check_text(message.content, what)
            if (num_chars := len(message.content)) > self.max_chars:
                context = f"a context of {self.max_context_tokens} tokens"
                raise InputError(f"{what} has {num_chars} characters, which cannot fit {context}")

    def _merge_context(self, messages: Sequence[Message], question_first: bool = False) -> list[Message]:
        """Passages move into the user's message before them, and the instruction into the system message.

        Without a system message in the template, the instruction stands before the passages, and the caller's own system message
        before the first question.
        """
        merged: list[Message] = []
        for message in messages:
            if message.role != "context":
                merged.append(message)
            elif merged and merged[-1].role == "user":
                text = user_text(merged[-1].content, message.content, question_first=question_first, label=self._label)
                merged[-1] = Message("user", text if self._has_system_role else f"{self._instruction}\n\n{text}")
            else:
                raise InputError("a message of the role context must follow a message of the user")
        own = merged.pop(0).content if merged[0].role == "system" else ""
        if not self._has_system_role:
            first = Message(merged[0].role, f"{own}\n\n{merged[0].content}") if own else merged[0]
            return [first, *merged[1:]]
        if any(message.role == "context" for message in messages):
            own = system_text(own, self._instruction)
        return [Message("system", own), *merged] if own else merged

    @functools.cached_property
    def _encoder(self) -> Any:
        return copy.deepcopy(self.tokenizer)

    def _accepts_system_message(self) -> bool:
        """Whether the template shows a system message: some templates refuse it, others drop it without a word."""
        question = [Message("user", "a")]
        try:
            shown = self._encode([Message("system", "An instruction."), *question])
            return shown not in (self._encode([Message("system", "Another."), *question]), self._encode(question))
        except InputError:
            return False

    def _encode(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> tuple[int, ...]:
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        return self.encode(conversation, add_generation_prompt=add_generation_prompt)

    def encode(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> tuple[int, ...]:
        """The token ids of messages as the chat template takes them, with its options. Raises: InputError."""
        layout = {**options, **self._layout}
        try:
            texts = _texts([conversation, options.get("tools")])
            if self.fast is not None and not any(map(self._control.search, texts)):
                return tuple(_ids(self.fast, self.laid_out(conversation, **options)))
            with self._encoding:
                token_ids = self._encoder.apply_chat_template(conversation, **layout)
        except TemplateError as cause:
            raise InputError(f"the target's chat template refuses this conversation: {cause}") from cause
        return tuple(token_ids)

    def laid_out(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of messages as the chat template takes them. Raises: TemplateError."""
        layout = {**options, **self._layout, "sanitize_control_tokens": False, "tokenize": False}
        return str(self.tokenizer.apply_chat_template(conversation, **layout))

    def writes_control(self, value: Any) -> bool:
        """Whether a name in a JSON value spells a control token. Why: the template would write it as such a token."""
        return any(map(self._control.search, _names(value)))


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value but the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _names(value: Any) -> Iterator[str]:
    """The names of all fields in a JSON value."""
    if isinstance(value, Mapping):
        yield from map(str, value)
        yield from _names(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _names(each)


def _ids(fast: Any, text: str) -> list[int]:
    """Long texts are read without the interpreter lock, so that engine and event loop go on; a short one is read sooner than the
    lock comes back."""
    read = fast.encode if len(text) <= _SHORT_CHARS else lambda text, **how: fast.encode_batch_fast([text], **how)[0]
    ids: list[int] = read(text, add_special_tokens=False).ids
    return ids


def _plain_layout(tokenizer: Any) -> dict[str, str]:
    """The template for models without one; it writes the beginning-of-text token only if the tokenizer does."""
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return {"chat_template": _PLAIN_TEMPLATE} | ({} if begins else {"bos_token": ""})
