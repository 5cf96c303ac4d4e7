"""What the labels of an answer's sentences are worth: sentences altered by rule.

A supported sentence leaves words out of a passage's sentence. An alteration exchanges a number, a name, or subject and object, or
adds or removes a negation; it must lose the label. Equal passages give equal sentences.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipelines.benchmarks.harness import Row
from ragspec.core import Passage
from ragspec.rag.answer import AnswerSentence
from ragspec.rag.support import find_support
from ragspec.retrieval.chunking import sentences

KINDS = ("number", "name", "negation", "exchange")
_MIN_WORDS, _MAX_WORDS = 6, 40
_LEFT_OUT = (
    re.compile(r"\s*\([^()]*\)"),
    re.compile(r"^(?:However|Moreover|Furthermore|Thus|Therefore|Also|In addition|For example),\s+"),
    re.compile(r",[^,.;]*(?=\.$)"),
    re.compile(r"\b(?:[Tt]he|[Aa]n?)\s+"),
)
_NUMBER = re.compile(r"(?<![\w.,])\d+(?:[.,]\d+)*(?!\w)")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{2,}")
_VERB = re.compile(r"\b(?:is|are|was|were|can|could|will|would|has|have|had|may|must|should|does|did)\b")
_NEGATION = re.compile(r"\s(?:not|never)\b|\b(?:no)\s")
_AROUND = re.compile(r"\[\d+\]|^\d{1,3}[.)]\s")
_WORD = re.compile(r"\b[A-Za-z][a-z]{3,}\b")


class Statement(NamedTuple):
    """A sentence of the passage, shortened by some of its words."""

    text: str
    passage: Passage


class Alteration(NamedTuple):
    kind: str
    text: str


def statements(passages: Sequence[Passage]) -> Iterator[Statement]:
    """At most one statement of each passage that is labelled as supported."""
    for passage in passages:
        for start, end in sentences(passage.text):
            text = _shortened(passage.text[start:end])
            if _MIN_WORDS <= len(text.split()) <= _MAX_WORDS and labels_of(text, passage) == ["supported"]:
                yield Statement(text, passage)
                break


def alterations(statement: Statement, rng: random.Random) -> Iterator[Alteration]:
    """One alteration of each kind that the statement allows. A number or name of the passage replaces one of the statement."""
    text, source = statement
    for kind, pattern in (("number", _NUMBER), ("name", _NAME)):
        if found := list(pattern.finditer(text)):
            chosen = rng.choice(found)
            others = sorted(set(pattern.findall(source.text)) - {chosen.group()})
            other = rng.choice(others) if others else {"number": "1066", "name": "Melisande"}[kind]
            yield Alteration(kind, text[: chosen.start()] + other + text[chosen.end() :])
    if negation := _NEGATION.search(text):
        start, end = negation.span()
        yield Alteration("negation", text[:start] + " " * negation.group().endswith(" ") + text[end:])
    elif verb := _VERB.search(text):
        yield Alteration("negation", f"{text[: verb.end()]} not{text[verb.end() :]}")
    words = list(_NAME.finditer(text)) or list(_WORD.finditer(text))
    first, last = words[0] if words else None, list(_WORD.finditer(text))[-1] if words else None
    if first and last and first.end() < last.start() and first.group().lower() != last.group().lower():
        between = text[first.end() : last.start()]
        exchanged = last.group() + between + first.group()
        yield Alteration("exchange", text[: first.start()] + exchanged + text[last.end() :])


def measure_alterations(passages: Sequence[Passage], count: int, seed: int) -> Row:
    """`altered_still_supported`: the share of alterations that is not labelled as unsupported. `invented_marked`: the share of
    alterations, each in quotation marks, that is found to be no quotation. `quoted_confirmed`: of the passages' own sentences
    that are labelled as quoted, the share that is equal to the named span."""
    rng, counts, still = random.Random(seed), dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    num_marked = num_quoted = num_equal = num_statements = 0
    for statement in statements(passages):
        if sum(counts.values()) >= count:
            break
        num_statements += 1
        for kind, text in alterations(statement, rng):
            counts[kind] += 1
            still[kind] += labels_of(text, statement.passage) != ["unsupported"]
            num_marked += bool(find_support(f'It says "{text}" [1].', [statement.passage]).unknown_quotations)
    for passage in passages[:count]:
        for sentence in find_support(passage.text, [passage]).sentences:
            if sentence.label == "quoted":
                num_quoted += 1
                num_equal += is_equal(passage.text, sentence, passage)
    total = sum(counts.values())
    return {
        "num_supported": num_statements,
        "num_altered": total,
        "altered_still_supported": sum(still.values()) / max(total, 1),
        **{f"{kind}_still_supported": still[kind] / max(counts[kind], 1) for kind in KINDS},
        "invented_marked": num_marked / max(total, 1),
        "quoted_confirmed": num_equal / max(num_quoted, 1),
    }


def is_equal(text: str, sentence: AnswerSentence, passage: Passage) -> bool:
    """Whether the sentence is the named span, but for a bullet, quotation marks, passage numbers and a full stop around it."""
    quote = passage.text[sentence.passage_start : sentence.passage_end]
    around = text[sentence.start : sentence.end].split(quote, 1)
    return bool(quote) and len(around) == 2 and not re.search(r"\w", _AROUND.sub("", "".join(around)))


def _shortened(sentence: str) -> str:
    for pattern in _LEFT_OUT:
        sentence = pattern.sub("", sentence)
    return sentence[:1].upper() + " ".join(sentence[1:].split())


def labels_of(text: str, passage: Passage) -> list[str]:
    return [sentence.label for sentence in find_support(text, [passage]).sentences]
