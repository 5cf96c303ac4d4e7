"""The mixture of kinds of text that the adapter learns from, as groups of conversations that share a beginning.

Paragraphs of the standard library and of documentation are made here; no held-out name and no evaluation file is among them.

>>> group = Mixture(data_dir, chats).draw("questions", random.Random(0))    # many questions over one set of passages
"""

import random
from pathlib import Path

from ragspec.config import ChunkingConfig
from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.rag import wording
from ragspec.retrieval.chunking import chunk
from ragspec.training.conversations import Conversation, message
from ragspec.training.documentation import documentation_questions
from ragspec.training.reference.corrections import Corrections
from ragspec.training.reference.dialogues import Dialogues
from ragspec.training.reference.packs import PackStream
from ragspec.training.reference.sources import MAX_QUOTE_WORDS, Paragraph, Question, question_paragraphs
from ragspec.training.stdlib_corpus import first_doc_sentence, is_held_out, stdlib_documents

SHARES = {"questions": 0.46, "documentation": 0.1, "stdlib": 0.08, "grammar": 0.17, "follow_ups": 0.09, "chat": 0.1}
NUM_CORRECTIONS = 14
"""Corrections drawn at a time."""
LONG = {"follow_ups": 2.5}
"""Kinds whose rows are longer than the others', and how much."""
PERSONA_SHARE = 0.08
PERSONAS = ("You are a helpful assistant.", "You answer for a support team.", "Be brief. Use plain English.")


class Mixture:
    """Draws conversations. `chats`: prompts with the unadapted model's own answers.

    Raises: InputError if a data file is not there.
    """

    def __init__(self, data_dir: Path, chats: list[Conversation]) -> None:
        try:
            self.paragraphs = question_paragraphs(data_dir)
            self._packs = {
                "questions": PackStream(self.paragraphs),
                "documentation": PackStream(documentation_paragraphs(data_dir / "docs")),
                "stdlib": PackStream(stdlib_paragraphs(random.Random(0))),
            }
            self._corrections = Corrections(data_dir, self.paragraphs)
            self._dialogues = Dialogues(data_dir, self._packs["questions"])
        except OSError as cause:
            raise InputError(f"the training data lacks {cause.filename}: {cause.strerror}") from cause
        self._chats = chats

    def kind(self, rng: random.Random) -> str:
        """One of `SHARES`."""
        return rng.choices(list(SHARES), list(SHARES.values()))[0]

    def draw(self, kind: str, rng: random.Random) -> list[Conversation]:
        """Conversations that share a beginning."""
        if kind == "grammar":
            pairs = [self._corrections.draw(rng) for _ in range(NUM_CORRECTIONS)]
            return [Conversation([*wording.grammar_messages(w), message("assistant", right)]) for w, right in pairs]
        if kind == "follow_ups":
            return self._dialogues.draw(rng)
        if kind == "chat":
            return [rng.choice(self._chats)]
        pack = self._packs[kind].draw(rng)
        own_system = rng.choice(PERSONAS) if rng.random() < PERSONA_SHARE else ""
        prompts = [(wording.question_messages(q, pack.passages, own_system), answer) for q, answer in pack.turns]
        return [Conversation([*prompt, message("assistant", answer)]) for prompt, answer in prompts]


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
