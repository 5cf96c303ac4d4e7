"""Everything the reference target is trained on, read from the data directory.

Owns the split: only the first 36 SQuAD articles in file order (the next two are for probes during training), no paragraph
of the last 10 anywhere, no JFLEG, no held-out standard-library function. Formats and licences of the files: the data
directory's own index.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragspec.training.sentences import normalise, split_sentences
from ragspec.training.stdlib_corpus import is_held_out, stdlib_documents

NUM_TRAIN_ARTICLES, NUM_PROBE_ARTICLES = 36, 2
NUM_EVAL_ARTICLES = 10
MAX_BOOK_CHARS = 300_000


@dataclass(frozen=True)
class Paragraph:
    """One paragraph as sentences; `group` names the article or module its hard distractors come from."""

    sentences: list[str]
    group: str
    title: str = ""


@dataclass(frozen=True)
class Question:
    """A question, the paragraph and the sentence that hold its answer; `short_answer` is empty where none is known."""

    text: str
    paragraph: Paragraph
    sentence_index: int
    short_answer: str


@dataclass
class Sources:
    """The loaded training data, by kind."""

    squad: list[Question] = field(default_factory=list)
    other_questions: list[Question] = field(default_factory=list)
    nqg: list[Question] = field(default_factory=list)
    unanswerable: list[tuple[str, Paragraph]] = field(default_factory=list)
    prose: list[Paragraph] = field(default_factory=list)
    plain_sentences: list[str] = field(default_factory=list)
    book_paragraphs: list[str] = field(default_factory=list)
    stdlib: list[tuple[str, str]] = field(default_factory=list)
    dialogues: list[list[tuple[str, str]]] = field(default_factory=list)
    conversations: list[list[tuple[str, str]]] = field(default_factory=list)
    by_group: dict[str, list[Paragraph]] = field(default_factory=dict)
    by_paragraph: dict[int, list[Question]] = field(default_factory=dict)
    unanswerable_by_paragraph: dict[int, list[str]] = field(default_factory=dict)

    def texts(self) -> Iterator[str]:
        """Paragraphs, questions, documentation and sentences, each once: what the meanings of tokens are counted in."""
        questions = (*self.squad, *self.other_questions, *self.nqg)
        paragraphs = (*self.prose, *(question.paragraph for question in self.nqg))
        texts = itertools.chain(
            (" ".join(paragraph.sentences) for paragraph in paragraphs),
            (question.text for question in questions),
            (text for _, text in self.stdlib),
            self.plain_sentences,
            self.book_paragraphs,
        )
        yield from dict.fromkeys(texts)


def load_sources(data_dir: Path) -> Sources:
    """All training sources; the same files give the same lists in the same order."""
    articles = json.loads((data_dir / "squad/dev-v1.1.json").read_text())["data"]
    forbidden = {_key(p["context"]) for a in articles[-NUM_EVAL_ARTICLES:] for p in a["paragraphs"]}
    sources = Sources()
    _add_squad(sources, articles[:NUM_TRAIN_ARTICLES], data_dir)
    sources.other_questions = [
        q for q in _t0_questions(data_dir) if _key(" ".join(q.paragraph.sentences)) not in forbidden
    ]
    sources.other_questions += _nq_questions(data_dir, {a["title"] for a in articles[-NUM_EVAL_ARTICLES:]})
    sources.nqg = list(_nqg_questions(data_dir))
    textbook = list(_textbook_paragraphs(data_dir))
    sources.prose = textbook + _squad_paragraphs(sources) + [q.paragraph for q in sources.other_questions]
    sources.book_paragraphs = list(_book_paragraphs(data_dir))
    sources.plain_sentences = list(_plain_sentences(textbook, sources.book_paragraphs, data_dir))
    sources.stdlib = [(name, text) for name, text in stdlib_documents() if not is_held_out(name)]
    sources.dialogues = list(_dialogues(data_dir))
    sources.conversations = list(_conversations(data_dir))
    for paragraph in sources.prose + [q.paragraph for q in sources.nqg]:
        sources.by_group.setdefault(paragraph.group, []).append(paragraph)
    for question in sources.squad + sources.other_questions + sources.nqg:
        sources.by_paragraph.setdefault(id(question.paragraph), []).append(question)
    for text, paragraph in sources.unanswerable:
        sources.unanswerable_by_paragraph.setdefault(id(paragraph), []).append(text)
    return sources


def _key(text: str) -> str:
    return re.sub(r"\W", "", text)[:80].lower()


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)


def _squad_paragraphs(sources: Sources) -> list[Paragraph]:
    return list({id(q.paragraph): q.paragraph for q in sources.squad}.values())


def best_sentence(question: str, answer: str, sentences: list[str]) -> int | None:
    """The sentence that holds the answer, preferring the one that shares most words with the question."""
    asked = set(re.findall(r"\w+", question.lower()))
    holding = [i for i, sentence in enumerate(sentences) if answer in sentence]
    if not holding:
        return None
    return max(holding, key=lambda i: (len(asked & set(re.findall(r"\w+", sentences[i].lower()))), -i))


def common_answer(answers: list[str]) -> str:
    """The answer most annotators gave; among equals the shortest."""
    counts = Counter(answers)
    return max(counts, key=lambda a: (counts[a], -len(a)))


def _add_squad(sources: Sources, articles: list[dict[str, Any]], data_dir: Path) -> None:
    by_text: dict[str, Paragraph] = {}
    for article in articles:
        for raw in article["paragraphs"]:
            title = article["title"].replace("_", " ")
            paragraph = Paragraph(split_sentences(normalise(raw["context"])), "squad/" + article["title"], title)
            by_text[_key(raw["context"])] = paragraph
            for asked in raw["qas"]:
                answer = normalise(common_answer([a["text"] for a in asked["answers"]]))
                index = best_sentence(asked["question"], answer, paragraph.sentences)
                if index is not None:
                    sources.squad.append(Question(normalise(asked["question"]), paragraph, index, answer))
    texts = {row["id"]: row["text"] for row in _json_lines(data_dir / "squad_open/corpus.jsonl")}
    for row in _json_lines(data_dir / "squad_open/questions_unanswerable.jsonl"):
        known = by_text.get(_key(texts[row["gold"]]))
        if known is not None:
            sources.unanswerable.append((normalise(row["question"]), known))


_T0_PATTERNS = {
    "adversarial_qa_dbert_based_on": r"Question: (?P<q>.*?)\nContext: (?P<c>.*)",
    "adversarial_qa_dbidaf_based_on": r"Question: (?P<q>.*?)\nContext: (?P<c>.*)",
    "adversarial_qa_droberta_based_on": r"Question: (?P<q>.*?)\nContext: (?P<c>.*)",
    "sciq_Direct_Question": r"given this paragraph:\s*(?P<c>.*?)\s*Q: (?P<q>.*?)\s*A:",
    "quoref_Answer_Question_Given_Context": r"(?P<q>[^\n]*\?)\s*(?P<c>.*)",
}


def _t0_questions(data_dir: Path) -> Iterator[Question]:
    known: dict[str, Paragraph] = {}
    for number, row in enumerate(_json_lines(data_dir / "t0_mix/t0_selected.jsonl")):
        pattern = _T0_PATTERNS.get(row["template"])
        match = re.search(pattern, row["prompt"], re.DOTALL) if pattern else None
        if match is None:
            continue
        sentences, answer = split_sentences(normalise(match["c"])), normalise(row["completion"])
        index = best_sentence(match["q"], answer, sentences)
        if index is not None and len(sentences) > 1:
            paragraph = Paragraph(sentences, f"t0/{row['template']}/{number // 20}")
            paragraph = known.setdefault(" ".join(sentences), paragraph)
            yield Question(normalise(match["q"]), paragraph, index, answer)


def _nq_questions(data_dir: Path, eval_titles: set[str]) -> Iterator[Question]:
    passages = {row["id"]: row for row in _json_lines(data_dir / "squad_open/corpus_distractors.jsonl")}
    known: dict[str, Paragraph] = {}
    for row in _json_lines(data_dir / "squad_open/questions_nq.jsonl"):
        passage = passages.get(row["gold"])
        if passage is None or passage["title"].replace(" ", "_") in eval_titles:
            continue
        sentences, answer = split_sentences(normalise(passage["text"])), normalise(row["answers"][0])
        index = best_sentence(row["question"], answer, sentences)
        if index is not None and len(answer.split()) <= 8:
            paragraph = Paragraph(sentences, "nq/" + str(int(row["gold"][3:]) // 20), passage["title"])
            paragraph = known.setdefault(row["gold"], paragraph)
            yield Question(normalise(row["question"]), paragraph, index, answer)


def _nqg_questions(data_dir: Path) -> Iterator[Question]:
    """Sentence and question pairs; neighbouring lines of the same article make up a paragraph."""
    sources = [detokenise(s) for s in (data_dir / "nqg/src-test.txt").read_text().splitlines()]
    questions = [detokenise(q) for q in (data_dir / "nqg/tgt-test.txt").read_text().splitlines()]
    unique = list(dict.fromkeys(sources))
    paragraphs, place = [], {}
    for start in range(0, len(unique), 5):
        for offset, sentence in enumerate(unique[start : start + 5]):
            place[sentence] = (start // 5, offset)
        paragraphs.append(Paragraph(unique[start : start + 5], f"nqg/{start // 50}"))
    for sentence, question in zip(sources, questions, strict=True):
        number, offset = place[sentence]
        yield Question(question, paragraphs[number], offset, "")


def detokenise(text: str) -> str:
    """Undo Penn-Treebank-like spacing and capitalise the first letter."""
    text = re.sub(r"\s+([.,;:!?%)\]]|'s\b|n't\b|'t\b|'re\b|'ve\b|'ll\b)", r"\1", normalise(text))
    text = text.replace("-lrb- ", "(").replace(" -rrb-", ")").replace("`` ", '"').replace(" ''", '"').replace("( ", "(")
    return text[:1].upper() + text[1:]


_NOT_PROSE = re.compile(r"^#|http|Retrieved|^[A-Z][\w'’-]+, [A-Z]|^Figure|^[“\"][^”]+,” |\(\d{4}[a-z]?\)\. ")
"""Headings, captions and lists of references."""


def _textbook_paragraphs(data_dir: Path) -> Iterator[Paragraph]:
    for path in sorted((data_dir / "openstax").glob("*.jsonl")):
        for row in _json_lines(path):
            for raw in row["text"].split("\n"):
                text = normalise(raw)
                if 120 < len(text) < 1200 and not _NOT_PROSE.search(text):
                    yield Paragraph(split_sentences(text), "openstax/" + row["id"], row["title"])


def _book_paragraphs(data_dir: Path) -> Iterator[str]:
    for row in _json_lines(data_dir / "books/classic_books.jsonl"):
        for raw in re.split(r"\n\s*\n", row["text"][2_000:MAX_BOOK_CHARS].replace("\r", "")):
            text = normalise(raw.replace("_", ""))
            if 150 < len(text) < 1500 and text.isascii() and not text.startswith("#"):
                yield text


def _plain_sentences(textbook: list[Paragraph], books: list[str], data_dir: Path) -> Iterator[str]:
    """Correct everyday and textbook sentences of 5-40 words, for the grammar task."""
    candidates = [s for p in textbook[::2] for s in p.sentences] + [s for b in books[::8] for s in split_sentences(b)]
    candidates += [turn for d in _dialogues(data_dir) for _, turn in d if len(turn) > 40][::6]
    for row in _json_lines(data_dir / "t0_mix/t0_selected.jsonl"):
        if row["template"].startswith(("cosmos_qa_context", "ropes", "common_gen_Put", "dream")):
            candidates += split_sentences(normalise(row["prompt"] + " " + row["completion"]))[1:-1]
    for sentence in candidates:
        is_plain = re.fullmatch(r"[A-Z][A-Za-z0-9 ,;:'’\"()\-]+[.!?]", sentence)
        if is_plain and 5 <= len(sentence.split()) <= 40:
            yield sentence.replace("’", "'")


def _dialogues(data_dir: Path) -> Iterator[list[tuple[str, str]]]:
    for number, row in enumerate(_json_lines(data_dir / "sgd/train.jsonl")):
        if number % 6 == 0:
            yield [(speaker, normalise(text)) for speaker, text in row["turns"]]


def _conversations(data_dir: Path) -> Iterator[list[tuple[str, str]]]:
    """Question and answer turns about one page, the answers taken verbatim from it."""
    turns: dict[str, list[tuple[str, str]]] = {}
    rows = json.loads((data_dir / "canard/dev.json").read_text())
    for row in rows:
        history = row["History"][2:]
        pairs = list(zip(history[::2], history[1::2], strict=False))
        if len(pairs) >= len(turns.get(row["QuAC_dialog_id"], [])):
            turns[row["QuAC_dialog_id"]] = [(normalise(q), normalise(a)) for q, a in pairs]
    yield from (t for t in turns.values() if len(t) >= 2)
