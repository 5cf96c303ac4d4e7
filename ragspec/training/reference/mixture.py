"""The mixture of kinds of text that the adapter learns from, as groups of conversations that share a beginning.

Paragraphs of the standard library and of documentation are made here; no held-out name and no evaluation file is among them.

>>> group = Mixture(data_dir, chats).draw("questions", random.Random(0))    # many questions over one set of passages
"""

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ragspec.config import ChunkingConfig
from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.rag.wording import grammar_messages
from ragspec.retrieval.chunking import chunk
from ragspec.training.conversations import Conversation, message
from ragspec.training.documentation import documentation_questions
from ragspec.training.grammar_errors import TOKENISED_SHARE, GrammarErrors, tokenised
from ragspec.training.reference.packs import Dialogues, PackStream
from ragspec.training.reference.sources import MAX_QUOTE_WORDS, Paragraph, Question, json_lines, question_paragraphs
from ragspec.training.sentences import normalise, split_sentences
from ragspec.training.stdlib_corpus import first_doc_sentence, is_held_out, stdlib_documents

SHARES = {"questions": 0.46, "documentation": 0.1, "stdlib": 0.08, "grammar": 0.17, "follow_ups": 0.09, "chat": 0.1}
LONG = {"follow_ups": 2.5}
"""Kinds whose rows are longer than the others', and how much."""
NUM_CORRECTIONS, PERSONA_SHARE = 14, 0.08
"""Corrections drawn at a time; packs under a system text of the user's own."""
PERSONAS = ("You are a helpful assistant.", "You answer for a support team.", "Be brief. Use plain English.")

CLEAN_SHARE, PAIRS_SHARE, MISSPELT_SHARE = 0.36, 0.3, 0.3
"""Sentences to leave as they are; real pairs; sentences with a misspelling of the lists beside other errors."""
NUM_BOOKS, NUM_WORDS = 40, range(4, 36)
REPEATS = {"eracond_pairs.jsonl": 3, "harper_pairs.jsonl": 1, "blimp_pairs.jsonl": 1, "zorro_pairs.jsonl": 1}
"""How often a pair of each file stands in the list."""
_PLAIN = re.compile(r"[A-Z][A-Za-z0-9 ,;:'’\"()\-]+[.!?]")


class Mixture:
    """Draws conversations. `chats`: prompts with the unadapted model's own answers.

    Raises: InputError if a data file is not there.
    """

    def __init__(self, data_dir: Path, chats: list[Conversation]) -> None:
        try:
            self.paragraphs = question_paragraphs(data_dir)
            self._packs = {"questions": PackStream(self.paragraphs), "stdlib": PackStream(stdlib_paragraphs())}
            self._packs["documentation"] = PackStream(documentation_paragraphs(data_dir / "docs"))
            self._corrections = Corrections(data_dir, self.paragraphs)
            self._dialogues = Dialogues(data_dir, self._packs["questions"])
        except OSError as cause:
            raise InputError(f"the training data lacks {cause.filename}: {cause.strerror}") from cause
        self._chats = chats

    def draw(self, kind: str, rng: random.Random) -> list[Conversation]:
        """Conversations that share a beginning."""
        if kind == "grammar":
            pairs = [self._corrections.draw(rng) for _ in range(NUM_CORRECTIONS)]
            return [Conversation([*grammar_messages(w), message("assistant", right)]) for w, right in pairs]
        if kind == "follow_ups":
            return self._dialogues.draw(rng)
        if kind == "chat":
            return [rng.choice(self._chats)]
        pack = self._packs[kind].draw(rng)
        return pack.conversations(rng.choice(PERSONAS) if rng.random() < PERSONA_SHARE else "")


ASKED = ("What does {} do?", "What is {}?", "Explain {}.", "How do I use {}?", "What is {} for?", "Describe {}.", "{}?",
    "Tell me about {}.", "What does the documentation say about {}?", "When would I use {}?", "what is {} used for",
    "Can you explain what {} does?", "How does {} work?", "What happens when I call {}?", "Purpose of {}")  # fmt: skip


def stdlib_paragraphs() -> list[Paragraph]:
    """The first passage of each document that is not held out, with two questions that its first sentence answers."""
    found, rng = list[Paragraph](), random.Random(0)
    for name, text in stdlib_documents():
        if not is_held_out(name):
            quote, passage = first_doc_sentence(name, text), chunk(Document(name, text), ChunkingConfig())[0].text
            if 2 <= len(quote.split()) <= MAX_QUOTE_WORDS and quote in passage:
                questions = [Question(_asked(name, rng), quote) for _ in range(2)]
                found.append(Paragraph(passage, "stdlib/" + name.split(".")[0], is_whole=True, questions=questions))
    return found


def _asked(name: str, rng: random.Random) -> str:
    shown = name if rng.random() < 0.8 else name.split(".", 1)[-1]
    return rng.choice(ASKED).format(shown + "()" if rng.random() < 0.1 else shown)


def documentation_paragraphs(folder: Path) -> list[Paragraph]:
    """The passages of the documentation's training files that a rule makes questions of."""
    found: dict[str, Paragraph] = {}
    for each in documentation_questions(folder, evaluation=False):
        paragraph = found.setdefault(each.passage, Paragraph(each.passage, f"docs/{each.path}", is_whole=True))
        paragraph.questions.append(Question(each.question, each.quote, each.short_answer))
    return list(found.values())


class Corrections:
    """Draws (wrong, right) pairs, never of JFLEG. Raises: OSError.

    Right sentences come from textbooks, books, dialogues and questions, their errors from `GrammarErrors` and lists of
    misspellings. Real pairs come from `gec_more`.
    """

    def __init__(self, data_dir: Path, paragraphs: list[Paragraph]) -> None:
        self._errors = GrammarErrors(data_dir)
        texts = [text for text in _sentences(data_dir, paragraphs) if _PLAIN.fullmatch(text)]
        self._right = [text.replace("’", "'") for text in texts if len(text.split()) in NUM_WORDS]
        folder, self._misspelt = data_dir / "gec_more", defaultdict[str, list[str]](list)
        rows = [row for name, times in REPEATS.items() for row in json_lines(folder / name) for _ in range(times)]
        self._pairs = [(row["source"], row["target"]) for row in rows]
        for row in json_lines(folder / "misspellings.jsonl"):
            if row["target"].isalpha() and row["target"].islower():
                self._misspelt[row["target"]].append(row["source"])

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """A sentence, wrong or not, and its correction."""
        if rng.random() < PAIRS_SHARE:
            wrong, right = rng.choice(self._pairs)
            return (right, right) if rng.random() < CLEAN_SHARE / 2 else (wrong, right)
        right = rng.choice(self._right)
        wrong = right if rng.random() < CLEAN_SHARE else self._wrong(right, rng)
        return (tokenised(wrong), tokenised(right)) if rng.random() < TOKENISED_SHARE else (wrong, right)

    def _wrong(self, right: str, rng: random.Random) -> str:
        words = self._errors.corrupt(right, rng).split(" ")
        known = [number for number, word in enumerate(words) if word in self._misspelt]
        if known and rng.random() < MISSPELT_SHARE:
            number = rng.choice(known)
            words[number] = rng.choice(self._misspelt[words[number]])
        return " ".join(words)


def _sentences(data_dir: Path, paragraphs: list[Paragraph]) -> Iterator[str]:
    """Every kind about as often as a writer meets it."""
    for path in sorted((data_dir / "openstax").glob("*.jsonl")):
        for row in json_lines(path):
            for text in row["text"].split("\n")[::4]:
                yield from split_sentences(normalise(text))
    for number, row in zip(range(NUM_BOOKS), json_lines(data_dir / "books/classic_books.jsonl"), strict=False):
        for text in re.split(r"\n\s*\n", row["text"][2_000:100_000])[number % 3 :: 3]:
            yield from split_sentences(normalise(text.replace("_", "")))
    for row in list(json_lines(data_dir / "sgd/train.jsonl"))[::12]:
        yield from (normalise(text) for _, text in row["turns"] if len(text) > 40)
    yield from (question.text for paragraph in paragraphs for question in paragraph.questions[:1])
