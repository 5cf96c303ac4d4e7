"""Paragraphs of reference documentation with questions: the standard library's docstrings and the documentation set.

No held-out name of the library and no evaluation file of the documentation is among them.
"""

import random
from pathlib import Path

from ragspec.config import ChunkingConfig
from ragspec.core import Document
from ragspec.retrieval.chunking import chunk
from ragspec.training.documentation import documentation_questions
from ragspec.training.reference.sources import MAX_QUOTE_WORDS, Paragraph, Question
from ragspec.training.stdlib_corpus import first_doc_sentence, is_held_out, stdlib_documents

ASKED = (
    "What does {} do?", "What is {}?", "Explain {}.", "How do I use {}?", "What is {} for?", "Describe {}.", "{}?",
    "Tell me about {}.", "What does the documentation say about {}?", "When would I use {}?", "what is {} used for",
    "Can you explain what {} does?", "How does {} work?", "What happens when I call {}?", "Purpose of {}",
)  # fmt: skip


def stdlib_paragraphs(rng: random.Random) -> list[Paragraph]:
    """The first passage of each document that is not held out, with two questions that its first sentence answers."""
    found = []
    for name, text in stdlib_documents():
        if not is_held_out(name):
            quote, passage = first_doc_sentence(name, text), chunk(Document(name, text), ChunkingConfig())[0].text
            if 2 <= len(quote.split()) <= MAX_QUOTE_WORDS and quote in passage:
                questions = [Question(_asked(name, rng), quote, "") for _ in range(2)]
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
