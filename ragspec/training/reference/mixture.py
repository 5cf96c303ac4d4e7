"""The mixture of kinds of text that the adapter learns from, as groups of conversations that share a beginning.

Owns the split of SQuAD dev by article, in the file's order: the first 36 are trained on, two are for probes during training, the
last ten are for evaluation. No paragraph or title of an article behind the first 36 is trained on, from whatever file.

A pack is one set of numbered passages with many questions about it, so that many answers share one reading. A dialogue is
questions in a row, each with its passages, as the chat shows them. Paragraphs of the standard library and of documentation are
made here; no held-out name and no evaluation file is among them. A draw is a function of the data and the generator.

>>> question_paragraphs(Path("../shared/data"))[0].questions[0].quote
>>> group = Mixture(data_dir, chats).draw("questions", random.Random(0))    # many questions over one set of passages
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ragspec.config import ChunkingConfig
from ragspec.core import Document, Message
from ragspec.errors import InputError
from ragspec.rag import wording
from ragspec.retrieval.chunking import chunk
from ragspec.training.conversations import Conversation
from ragspec.training.documentation import WRITTEN, Neighbours, documentation_questions, is_for_evaluation
from ragspec.training.grammar_errors import TOKENISED_SHARE, GrammarErrors, tokenised
from ragspec.training.sentences import best_sentence, common_answer, normalise, split_sentences, window_around, words_of
from ragspec.training.stdlib_corpus import first_doc_sentence, is_held_out, stdlib_documents

NUM_TRAIN_ARTICLES, NUM_PROBE_ARTICLES, NUM_EVAL_ARTICLES = 36, 2, 10
PROBE_ARTICLES = slice(NUM_TRAIN_ARTICLES, NUM_TRAIN_ARTICLES + NUM_PROBE_ARTICLES)
MAX_QUOTE_WORDS, MAX_SHORT_WORDS = 60, 12
CANARD_QUOTE_WORDS, NO_ANSWER = range(6, 50), "CANNOTANSWER"
UNTITLED = ("pubmedqa",)
"""Files whose titles are no words."""
LEFT_OUT = ("qamr",)
"""Files that are not trained on: questions about single words of a sentence, which nobody asks of documents ("Which layers?")."""


class Question(NamedTuple):
    """`quote`: words of its paragraph; `short_answer`: empty where none is known. `follow_up`: as asked in its dialogue."""

    text: str
    quote: str
    short_answer: str = ""
    follow_up: str = ""


@dataclass
class Paragraph:
    """`group`: its article, which hard distractors come from. `absent`: questions that it does not answer. `is_whole`: a
    passage as the product cuts it, which is not cut again."""

    text: str
    group: str
    title: str = ""
    is_whole: bool = False
    questions: list[Question] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


def question_paragraphs(data_dir: Path) -> list[Paragraph]:
    """All paragraphs with questions, each once; equal files give equal lists. Raises: OSError."""
    articles = squad_articles(data_dir)
    held_out = {_key(p["context"]) for a in articles[NUM_TRAIN_ARTICLES:] for p in a["paragraphs"]}
    held_out_titles = {a["title"].replace("_", " ") for a in articles[NUM_TRAIN_ARTICLES:]}
    found: dict[str, Paragraph] = {}
    for name, row in _rows(data_dir, articles[:NUM_TRAIN_ARTICLES]):
        (text, key), title = _text_and_key(row["context"]), row["title"].replace("_", " ")
        if key not in held_out and (title not in held_out_titles or name in UNTITLED):
            new = Paragraph(text, f"{name}/{title}", "" if name in UNTITLED else title)
            _add(found.setdefault(key, new), row)
    texts = {row["id"]: row["text"] for row in json_lines(data_dir / "squad_open/corpus.jsonl")}
    for each in json_lines(data_dir / "squad_open/questions_unanswerable.jsonl"):
        if paragraph := found.get(_key(texts[each["gold"]])):
            paragraph.absent.append(normalise(each["question"]))
    return [p for p in found.values() if p.questions or p.absent]


def canard_pages(data_dir: Path) -> list[tuple[str, list[Question]]]:
    """Title and questions of CANARD's pages with at least two questions in a row; a quote is empty where there is no answer.

    A page's questions follow each other, its answers are words of the page, and a person made every question standalone. Articles
    for evaluation are left out. Raises: OSError.
    """
    pages = []
    for rows in canard_dialogues(json.loads((data_dir / "canard/dev.json").read_text(encoding="utf-8"))).values():
        title, _, *texts = max((row["History"] for row in rows.values()), key=len)
        turns = list[Question]()
        for number, answer in enumerate(map(normalise, texts[1::2]), start=1):
            if number in rows and (answer == NO_ANSWER or len(answer.split()) in CANARD_QUOTE_WORDS):
                follow_up, alone = (normalise(rows[number][kind]) for kind in ("Question", "Rewrite"))
                turns.append(Question(alone, "" if answer == NO_ANSWER else answer, follow_up=follow_up))
        if len(turns) >= 2 and answers_of(turns) and not is_for_evaluation(title):
            pages.append((title, turns))
    return pages


def canard_dialogues(rows: Iterable[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """CANARD's rows by their dialogues, and by the numbers of their questions."""
    dialogues: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        dialogues[row["QuAC_dialog_id"]][row["Question_no"]] = row
    return dialogues


def answers_of(turns: list[Question]) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(turn.quote for turn in turns if turn.quote))


def canard_paragraph(title: str, turns: list[Question]) -> Paragraph:
    """All answers in an order that the title tells."""
    answers = answers_of(turns)
    text = " ".join(random.Random(title).sample(answers, len(answers)))
    absent = [turn.text for turn in turns if not turn.quote]
    return Paragraph(text, "canard", is_whole=True, questions=[turn for turn in turns if turn.quote], absent=absent)


def squad_articles(data_dir: Path) -> list[dict[str, Any]]:
    """The articles of SQuAD dev 1.1. Raises: OSError."""
    articles: list[dict[str, Any]] = json.loads((data_dir / "squad/dev-v1.1.json").read_text())["data"]
    return articles


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file. Raises: OSError."""
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _rows(data_dir: Path, articles: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The set's name, and a question with `title` and `context`, of the given articles and of all files in `qa_more`."""
    for article in articles:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                yield "squad", asked | {"title": article["title"], "context": paragraph["context"]}
    for path in sorted(path for path in (data_dir / "qa_more").glob("*.jsonl") if path.stem not in LEFT_OUT):
        yield from ((path.stem, row) for row in json_lines(path))


def _add(paragraph: Paragraph, row: dict[str, Any]) -> None:
    """A question is left out unless a sentence holds its answer and is short enough to quote."""
    question = normalise(row["question"])
    if row.get("is_impossible"):
        paragraph.absent.append(question)
        return
    answer = normalise(common_answer([each["text"] for each in row["answers"]]))
    sentences = _split_once(paragraph.text)
    index = best_sentence(question, answer, sentences)
    quote = "" if index is None else sentences[index]
    if 2 < len(quote.split()) <= MAX_QUOTE_WORDS and not quote.endswith("?"):
        is_short = len(answer.split()) <= MAX_SHORT_WORDS and answer.rstrip(".") != quote.rstrip(".")
        paragraph.questions.append(Question(question, quote, answer if is_short else ""))


# Why caches: the questions about a paragraph stand behind each other
@lru_cache(maxsize=1)
def _text_and_key(context: str) -> tuple[str, str]:
    text = normalise(context)
    return text, _key(text)


_split_once = lru_cache(maxsize=1)(split_sentences)


def _key(text: str) -> str:
    """Equal for one paragraph in several files."""
    return re.sub(r"\W", "", text)[:80].lower()


ABSENT_SHARE = 0.5
"""Questions without an answer, of a pack's questions."""
RETRIEVED_SHARE, FOREIGN_SHARE = 0.4, 0.15
"""Packs whose distractors a search finds, the others being of the same article; distractors from anywhere."""
WINDOW_SHARE, TITLE_SHARE = 0.6, 0.1
"""Passages cut to a window of sentences, and passages under their title."""
WINDOW_WORDS, MAX_PASSAGE_WORDS, MAX_PACK_WORDS = (50, 110), 200, 300
NUM_OTHERS = (0, 1, 2, 2, 2, 2, 3, 3, 4)
MAX_WEIGHT = 5
"""A paragraph is drawn in proportion to its questions, up to this many."""
Shown = tuple[Paragraph, str]
"""A paragraph, and the passage that is shown of it."""
ALONE_SHARE, PACK_SHARE, BARE_SHARE, SAME_SHARE = 0.3, 0.3, 0.15, 0.7
"""Draws of standalone questions; of dialogues, those over a pack; earlier questions whose passages are left out, as where a
prompt grows too long; dialogues whose passages are the same with every question."""
NUM_TURNS, NUM_OTHER_PAGES = (2, 2, 3, 3, 4, 5, 6), (0, 1, 2, 2)
MAX_WORDS, TURN_WORDS = 1250, 45
"""Words of a dialogue, and those of a question with its answer."""


class Pack(NamedTuple):
    """Passages, and (question, answer) pairs about them."""

    passages: list[str]
    turns: list[tuple[str, str]]

    def conversations(self, own_system: str = "") -> list[Conversation]:
        """A conversation for each turn; they share the system's text and the passages."""
        asked = [(wording.question_messages(text, self.passages, own_system), answer) for text, answer in self.turns]
        return [Conversation([*prompt, Message("assistant", answer)]) for prompt, answer in asked]


class PackStream:
    """Draws packs from paragraphs with questions."""

    def __init__(self, paragraphs: list[Paragraph]) -> None:
        self.paragraphs = paragraphs
        self._weights = list(accumulate(len(p.questions[:MAX_WEIGHT]) + 0.3 * bool(p.absent) for p in paragraphs))
        self._groups: dict[str, list[Paragraph]] = defaultdict(list)
        for paragraph in paragraphs:
            self._groups[paragraph.group].append(paragraph)
        self._neighbours = Neighbours([p.text for p in paragraphs])

    def draw(self, rng: random.Random) -> Pack:
        """A pack with at least one turn."""
        while True:
            main = rng.choices(self.paragraphs, cum_weights=self._weights)[0]
            shown = self._shown(main, rng)
            answered = list(_answered(shown))
            turns = answered + self._unanswered(shown, len(answered), rng)
            if turns:
                rng.shuffle(turns)
                return Pack([text for _, text in shown], turns)

    def _shown(self, main: Paragraph, rng: random.Random) -> list[Shown]:
        """The paragraph and its distractors, in random order."""
        count, group = rng.choice(NUM_OTHERS), self._groups[main.group]
        if main.questions and rng.random() < RETRIEVED_SHARE:
            asked = rng.choice(main.questions).text
            near = [self.paragraphs[row] for row in self._neighbours.nearest(asked, count + 1)]
        else:
            near = rng.sample(group, min(count, len(group)))
        others = [other if rng.random() > FOREIGN_SHARE else rng.choice(self.paragraphs) for other in near]
        chosen = {id(each): each for each in (main, *others)}
        shown, num_words = list[Shown](), 0
        for paragraph in list(chosen.values())[: count + 1]:
            text = _passage(paragraph, rng)
            num_words += len(text.split())
            if num_words <= MAX_PACK_WORDS or not shown:
                shown.append((paragraph, text))
        rng.shuffle(shown)
        return shown

    def _unanswered(self, shown: list[Shown], num_answered: int, rng: random.Random) -> list[tuple[str, str]]:
        """Questions that were written to have no answer, and questions whose passage retrieval missed."""
        count = max(1, round(num_answered * ABSENT_SHARE / (1 - ABSENT_SHARE)))
        everything = " ".join(text for _, text in shown).lower()
        written = [text for paragraph, _ in shown for text in paragraph.absent]
        missed = [q for paragraph, text in shown for q in paragraph.questions if q.quote not in text]
        for paragraph, _ in shown:
            missed += rng.choice(self._groups[paragraph.group]).questions[:1]
        missed = [q for q in missed if not _may_answer(q, everything)]
        chosen = rng.sample(written, min(len(written), count - count // 3))
        chosen += [q.text for q in rng.sample(missed, min(len(missed), 1 + count // 3))]
        return [(text, wording.ABSTENTION) for text in dict.fromkeys(chosen)]


def _answered(shown: list[Shown]) -> Iterator[tuple[str, str]]:
    for number, (paragraph, text) in enumerate(shown, start=1):
        for question in paragraph.questions:
            if question.quote in text:
                yield question.text, wording.quoted_answer(question.quote, number, question.short_answer)


def _may_answer(question: Question, text: str) -> bool:
    """Whether a lower-case text may hold the answer: it has the short answer, or the question's names and rare words."""
    if question.short_answer:
        return question.short_answer.lower() in text
    words = [word.lower().rsplit(".", 1)[-1] for word in words_of(question.text) if len(word) > 4]
    return question.quote.lower() in text or all(word in text for word in words[1:])


def _passage(paragraph: Paragraph, rng: random.Random) -> str:
    """Some sentences around one that is asked about, or all; sometimes under its title."""
    text, limit = paragraph.text, rng.randint(*WINDOW_WORDS) if rng.random() < WINDOW_SHARE else MAX_PASSAGE_WORDS
    if not paragraph.is_whole and len(text.split()) > limit:
        sentences = split_sentences(text)
        quotes = [q.quote for q in paragraph.questions if q.quote in sentences]
        index = sentences.index(rng.choice(quotes)) if quotes else rng.randrange(len(sentences))
        text = window_around(sentences, index, limit, rng)
    return f"{paragraph.title}\n{text}" if paragraph.title and rng.random() < TITLE_SHARE else text


class Dialogues:
    """Draws groups of conversations, over packs and over CANARD's pages. Raises: OSError."""

    def __init__(self, data_dir: Path, packs: PackStream) -> None:
        self.pages = canard_pages(data_dir)
        self._packs = packs
        self._alone = PackStream([canard_paragraph(title, turns) for title, turns in self.pages])

    def draw(self, rng: random.Random) -> list[Conversation]:
        """A dialogue, or standalone questions over one reading of their passages."""
        if rng.random() < ALONE_SHARE:
            return self._alone.draw(rng).conversations()
        return [self._from_pack(rng) if rng.random() < PACK_SHARE else self._from_page(rng)]

    def _from_pack(self, rng: random.Random) -> Conversation:
        passages, turns = self._packs.draw(rng)
        return _dialogue([(asked, answer, passages) for asked, answer in turns[: rng.choice(NUM_TURNS)]], rng)

    def _from_page(self, rng: random.Random) -> Conversation:
        """Why answers are shuffled: in the dialogue's order, the answer would be whatever stands behind the last quote."""
        _, page = rng.choice(self.pages)
        start = rng.randrange(len(page) - 1)
        turns = page[start : start + rng.choice(NUM_TURNS)]
        room = MAX_WORDS // len(turns) - TURN_WORDS
        text = _joined(answers_of(turns), answers_of(page), room * 2 // 3, rng)
        others = [answers_of(other) for _, other in rng.sample(self.pages, rng.choice(NUM_OTHER_PAGES))]
        shown = [each for each in (text, *(_joined([], answers, room // 4, rng) for answers in others)) if each]
        orders = [rng.sample(shown, len(shown)) for _ in turns]
        orders = orders[:1] * len(turns) if rng.random() < SAME_SHARE else orders
        told = list[tuple[str, str, list[str]]]()
        for turn, passages in zip(turns, orders, strict=True):
            answer = wording.quoted_answer(turn.quote, passages.index(text) + 1) if turn.quote else wording.ABSTENTION
            told.append((turn.follow_up if told else turn.text, answer, passages))
        return _dialogue(told, rng)


def _joined(needed: list[str], texts: list[str], max_words: int, rng: random.Random) -> str:
    """The needed texts and as many others as have room, in random order."""
    chosen, others = list(needed), [text for text in texts if text not in needed]
    for text in rng.sample(others, len(others)):
        if sum(len(each.split()) for each in (*chosen, text)) <= max_words:
            chosen.append(text)
    return " ".join(rng.sample(chosen, len(chosen)))


def _dialogue(turns: list[tuple[str, str, list[str]]], rng: random.Random) -> Conversation:
    """Questions with answer and passages; the last question is always shown with them."""
    messages = [Message("system", wording.system_text())]
    for number, (question, answer, passages) in enumerate(turns, start=1):
        is_bare = number < len(turns) and rng.random() < BARE_SHARE
        asked = question if is_bare else wording.user_text(question, wording.numbered(passages))
        messages += [Message("user", asked), Message("assistant", answer)]
    return Conversation(messages)


SHARES = {"questions": 0.46, "documentation": 0.1, "stdlib": 0.08, "grammar": 0.17, "follow_ups": 0.09, "chat": 0.1}
DOCUMENTATION_SHARES = dict(
    SHARES, questions=0.15, documentation=0.1, written=0.35, stdlib=0.05, grammar=0.15, follow_ups=0.1
)
"""With rows of documentation packages; `written`: those that a reader wrote."""
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
    """Draws conversations. `chats`: prompts with the unadapted model's own answers. `documentation`: a file of `TextRow`s.

    Raises: InputError if a data file is not there.
    """

    def __init__(self, data_dir: Path, chats: list[Conversation], documentation: Path | None = None) -> None:
        try:
            self.paragraphs = question_paragraphs(data_dir)
            self._packs = {"questions": PackStream(self.paragraphs), "stdlib": PackStream(stdlib_paragraphs())}
            by_rule = documentation_paragraphs(data_dir / "docs", documentation)
            written = row_paragraphs(documentation, is_written=True) if documentation else []
            self._packs |= {"documentation": PackStream(by_rule), "written": PackStream(written or by_rule)}
            self._corrections = Corrections(data_dir, self.paragraphs)
            self._dialogues = Dialogues(data_dir, self._packs["questions"])
        except OSError as cause:
            raise InputError(f"the training data lacks {cause.filename}: {cause.strerror}") from cause
        self._chats = chats
        self.shares = DOCUMENTATION_SHARES if documentation else SHARES

    def draw(self, kind: str, rng: random.Random) -> list[Conversation]:
        """Conversations that share a beginning."""
        if kind == "grammar":
            pairs = [self._corrections.draw(rng) for _ in range(NUM_CORRECTIONS)]
            return [Conversation([*wording.grammar_messages(w), Message("assistant", right)]) for w, right in pairs]
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


def documentation_paragraphs(folder: Path, rows: Path | None = None) -> list[Paragraph]:
    """The passages of the documentation's training files that a rule makes questions of, and those of a file of rows by rule."""
    found: dict[str, Paragraph] = {}
    for each in documentation_questions(folder, evaluation=False):
        paragraph = found.setdefault(each.passage, Paragraph(each.passage, f"docs/{each.path}", is_whole=True))
        paragraph.questions.append(Question(each.question, each.quote, each.short_answer))
    return list(found.values()) + (row_paragraphs(rows, is_written=False) if rows else [])


def row_paragraphs(rows: Path, *, is_written: bool) -> list[Paragraph]:
    """The passages of a file of rows with the questions that a reader wrote, or that rules made."""
    found: dict[str, Paragraph] = {}
    for row in json_lines(rows):
        if (row["kind"] == WRITTEN) is not is_written:
            continue
        paragraph = found.setdefault(row["passage"], Paragraph(row["passage"], row["path"], is_whole=True))
        if row["quote"]:
            paragraph.questions.append(Question(row["question"], row["quote"]))
        else:
            paragraph.absent.append(row["question"])
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
