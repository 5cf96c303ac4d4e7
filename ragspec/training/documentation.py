"""Questions about software documentation (.md and .rst), made by rule from the passages that the product cuts.

Owns the rules (of directives, flags, glossary terms, sentences and tables) and the split: a file whose sha256(path) mod 5 is 0 is
for evaluation only. Every quote is a slice of its passage. Equal folders give equal questions.

    >>> next(documentation_questions(Path("docs"), evaluation=False)).question
    'What does PyBool_Check do?'
"""

import hashlib
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ragspec.config import AnalyzerConfig, ChunkingConfig
from ragspec.core import Passage
from ragspec.retrieval.chunking import chunk, sentences
from ragspec.retrieval.reading import read_file
from ragspec.retrieval.search.analysis import Analyzer
from ragspec.retrieval.search.bm25 import Postings, PostingsBuilder, SparseConfig, sparse_query
from ragspec.training.sentences import normalise


class RuleMatch(NamedTuple):
    """A question and the sentence or row of the passage that answers it."""

    question: str
    quote: str
    kind: str
    short_answer: str = ""


_MARKUP = (
    (r"\{\{<\s*glossary_tooltip[^>]*?text=\"([^\"]*)\"[^>]*>\}\}", r"\1"),
    (r"\[([^\]]*)\]\([^)]*\)", r"\1"),
    (r":[\w:]+:`[!~]?([^`<]*?)(?:\s*<[^`]*>)?`", r"\1"),
    (r"`+([^`]*)`+_*", r"\1"),
    (r"\*+([^*\n]+)\*+", r"\1"),
    (r"\{\{[^}]*\}\}|</?\w+[^>]*>", ""),
    (r"&nbsp;|\s+", " "),
)


def _plain(text: str) -> str:
    """Without markup, on one line: for questions."""
    for pattern, kept in _MARKUP:
        text = re.sub(pattern, kept, text)
    return text.strip(" ;:,")


def found_in(passage: Passage, module: str, tool: str) -> Iterator[RuleMatch]:
    """Every question that a rule makes of a passage. `tool`: the file's name, of which tables of flags are about."""
    directives, spans = list(_directives(passage.text)), list(sentences(passage.text))
    yield from _of_directives(passage.text, directives, spans, module, tool)
    for match in _FLAG.finditer(passage.text):
        flag = f"What does the {tool.replace('_', ' ')} flag {match['flag']} do?"
        yield RuleMatch(flag, match["text"].strip(), "option")
    for match in _TERM.finditer(passage.text):
        asked = f"What is meant by {match['term']}?"
        yield RuleMatch(asked, _sentence_at(passage.text, spans, match.end()), "definition")
    for start, end in spans:
        owner = next((each.name for each in reversed(directives) if each.start < start), "")
        yield from _of_sentence(passage.text[start:end], owner)
    yield from _of_tables(passage)


_DIRECTIVE = re.compile(
    r"[ \t]*\.\. (?:c:|py:)?(function|method|classmethod|staticmethod|class|data|attribute|exception|macro|option|cmdoption"
    r"|envvar|decorator):: (.+)"
)
_QUESTION_OF = {
    "option": "What does the option {} do?", "envvar": "What does the environment variable {} do?", "class": "What is {}?",
    "data": "What is {}?", "attribute": "What is {}?", "exception": "When is {} raised?", "macro": "What is {}?",
}  # fmt: skip
_FLAG = re.compile(
    r"<td colspan=\"2\">(?P<flag>--[\w-]+)[^<]*</td>\s*</tr>\s*<tr>\s*<td></td><td[^>]*>(?:<p>)?(?P<text>[^<]{20,}?[.)]?)"
    r"(?=</p>|</td>|<br)"
)
_TERM = re.compile(r"(?:^|\n)   (?P<term>[a-z_][\w .-]{2,30})\n      (?=[A-Z])")
_NOT_DEFINING = (
    "The *", "If ", "Using ", "Note", "See ", "Deprecated", "For ", "As ", "In ", "When ", "Changed", "New in", "There ",
    "The first ", "This is ", "Same as ", "Like ",
)  # fmt: skip


class _Directive(NamedTuple):
    """`start`: where the directive stands; `body`: where the text under it begins."""

    kind: str
    signature: str
    start: int
    body: int

    @property
    def name(self) -> str:
        found = re.match(r"(?:[^(]*?[\s*])?([\w.]+)\s*(?:[(\[=:]|$)", self.signature)
        return found[1] if found else self.signature.split("(")[0]


def _directives(text: str) -> Iterator[_Directive]:
    """Those with a text of their own, which begins with a capital letter."""
    last, at, is_blank = None, 0, False
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if match := _DIRECTIVE.match(line):
            last, is_blank = (match[1], match[2].strip(), at), False
        elif last and not bare:
            is_blank = True
        elif last and is_blank and not bare.startswith((":", "..")):
            if bare[0].isupper():
                yield _Directive(*last, at + len(line) - len(line.lstrip()))
            last = None
        at += len(line)


def _of_directives(
    text: str, directives: Iterable[_Directive], spans: list[tuple[int, int]], module: str, tool: str
) -> Iterator[RuleMatch]:
    for each in directives:
        is_option, name = each.kind in ("option", "cmdoption", "envvar"), each.name
        if is_option:
            name = _plain(each.signature.split(",")[0]) + f" of {module or tool}" * (each.kind != "envvar")
        elif "method" in each.kind or each.kind == "attribute":
            name = name if "." in name else f"the {each.kind} {name}{f' of {module}' * bool(module)}"
        elif module and "." not in name and not name.startswith("Py"):
            name = f"{module}.{name}"
        asked = _QUESTION_OF.get(each.kind.removeprefix("cmd"), "What does {} do?").format(name)
        quote = _sentence_at(text, spans, each.body)
        if not quote.startswith(_NOT_DEFINING):
            yield RuleMatch(asked, quote, "option" if is_option else "definition")


def _sentence_at(text: str, spans: list[tuple[int, int]], at: int) -> str:
    end = next((end for start, end in spans if start <= at < end), len(text))
    return text[at:end].strip()


_SUBJECT = r"(?P<subject>(?:(?:[Aa]n?|[Tt]he) )?[\w`*:~.{}<>\" ()=/_-]{3,90}?)"
_STEP = "you (?:can|must|need|should)|use|run|set|call|add|specify|create|pass|just|simply|do|define|make|type|enter|start|first"
_GIVEN = r"The (?:optional )?(?:\*\w+\* (?:argument|parameter|option|flag)|(?:argument|parameter|option|flag) \*\w+\*)"
_BEING = "is|are|does|do|has|have|will|can"
_HOW = r"faster|slower|more \w+|less \w+|simpler|safer|easier|larger|smaller|cheaper"
_RULES = (
    (" ", "definition", rf"{_SUBJECT} (?P<is>is|are) (?:an?|the|one of) [a-z].{{25,}}", "What {is} {subject}?"),
    ("To ", "how-to", rf"To (?:also |then )?(?P<aim>[a-z]+ [^,.]{{8,90}}), (?:{_STEP})\b.{{8,}}", "How do I {aim}?"),
    ("You can ", "how-to", r"You can (?:also |then |now |optionally |either )?(?P<aim>[a-z]+ [^,.;]{8,80}?) "
     r"(?:by|using|with the|via) .{8,}", "How can I {aim}?"),
    ("se ", "how-to", r"(?:You )?[Uu]se (?P<tool>[^,.;]{3,60}) to (?P<aim>[a-z]+ [^,.;]{8,80})\.$",
     "What can I use to {aim}?"),
    ("If *", "option", r"If (?P<case>\*\w+\* is [^,.;]{2,50}), .{15,}", "What happens{where} if {case}?"),
    ("The ", "option", rf"(?P<given>{_GIVEN}) .{{20,}}", "What is {given}{where} for?"),
    ("Unlike ", "comparison", rf"Unlike (?!with\b)(?P<other>[^,.]{{3,60}}), (?P<this>.{{3,60}}?) "
     rf"(?:{_BEING}|must|cannot)\b.{{10,}}", "How does {this} differ from {other}?"),
    (", ", "comparison", r"(?:Like|Similar to|Same as|Identical to|The same as) (?P<other>[^,.]{3,60}?),? "
     r"(?:but|except|with the exception|and also)\b.{10,}", "How does {owner} differ from {other}?"),
    ("difference between", "comparison", r"The (?:main |only |key )?difference between (?P<this>[^,.]{3,60}) and "
     r"(?P<other>[^,.]{3,60}?) is .{10,}", "What is the difference between {this} and {other}?"),
    (" than ", "comparison", rf"(?P<this>[^,.]{{3,60}}?) is (?P<how>{_HOW}) than (?P<other>[^,.;]{{3,60}})",
     "Which is {how}: {this} or {other}?"),
    (", whereas ", "comparison", r"(?P<this>[^,.]{4,60}?) [^,]{5,90}, whereas (?P<other>[^,.]{4,40}?) "
     rf"(?:{_BEING}|only|always)\b.{{5,}}", "How do {this} and {other} differ?"),
)  # fmt: skip
"""A text that every match holds; the kind; the beginning of a sentence; the question, made of the named parts."""
_CLAUSE = re.compile(r"\b(?:that|which|shows|because|when|where|replaces|this|it)\b")
_VAGUE = re.compile(
    r"^(?:(?:if|with|for|when|in|on|it|this|that|these|those|they|there|he|which|what|here|all|each|another|some|one|both)\b"
    r"|the (?:above|following|latter|former|result|first|second|default|value|next|only|code|sequence|same|most|other|reason"
    r"|example|output|idea|point|problem|main|function|method|class|module|argument)\b)"
    r"|\b(?:below|above|following|them|this|these|those|it)\b|[][{}<>`]|\(|^.{0,2}$",
    re.I,
)
MAX_PART_WORDS, MAX_SUBJECT_WORDS = 14, 6


def _of_sentence(sentence: str, owner: str) -> Iterator[RuleMatch]:
    """`owner`: the name of the last directive before the sentence."""
    line = normalise(sentence)
    where = f" in {owner}" if owner else ""
    for needle, kind, pattern, question in _RULES:
        match = re.match(pattern, line) if needle in line else None
        if match is None or (re.search(r"\{owner|\{where", question) and not owner):
            continue
        parts = {name: _plain(part) for name, part in match.groupdict().items()}
        if _is_vague(kind, parts):
            continue
        if "given" in parts:
            parts["given"] = parts["given"][:1].lower() + parts["given"][1:]
        asked = question.format(**parts, owner=owner, where=where)
        if kind == "how-to":
            asked = re.sub(r"\byour\b", "my", asked)
        if re.search(r"\w\w[^s]s$", parts.get("this", "")):
            asked = re.sub("^How does ", "How do ", asked)
        yield RuleMatch(asked, sentence, kind)
        return


def _is_vague(kind: str, parts: dict[str, str]) -> bool:
    if any(_VAGUE.search(part) or len(part.split()) > MAX_PART_WORDS for part in parts.values()):
        return True
    simple = parts.values() if kind == "comparison" else [parts.get("tool", "")]
    if any(_CLAUSE.search(part) for part in simple):
        return True
    return kind == "definition" and len(parts["subject"].split()) > MAX_SUBJECT_WORDS


_BORDER = re.compile(r"\s*\+[-=+]+\+\s*$|\s*\|?[ :|-]*---[ :|-]*\|?\s*$")
_CONTINUED = re.compile(r"\s*\|\s+\|")
MAX_SHORT_WORDS = 8


class _Row(NamedTuple):
    cells: list[str]
    quote: str
    header: list[str]


def _of_tables(passage: Passage) -> Iterator[RuleMatch]:
    """What a column says of the first cell of a row, where no other row begins with that cell.

    A table whose header is in another passage has two columns or is left alone.
    """
    about = _plain(passage.heading.rsplit(" > ", 1)[-1] or passage.title).split(" --- ")[0].rstrip("?")
    rows = list(_rows(passage.text.split("\n")))
    names = [row.cells[0] for row in rows]
    for cells, quote, header in rows:
        if names.count(cells[0]) > 1:
            continue
        for column, cell in list(zip(header, cells, strict=False))[1:]:
            if re.fullmatch(r"[\w /()-]{3,40}", column) and cell != cells[0] and re.search(r"\w\w", cell):
                asked = f"In the table of {about}, what is the {column.lower()} of {cells[0]}?"
                yield RuleMatch(asked, quote, "table value", _short(cell))
        if not header and len(cells) == 2 and cells[1] not in ("", cells[0]):
            asked = f"What does the table of {about} say about {cells[0]}?"
            yield RuleMatch(asked, quote, "table value", _short(cells[1]))


def _rows(lines: list[str]) -> Iterator[_Row]:
    """The rows of tables in pipes that stand on one line."""
    header: list[str] = []
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        border_before, border_after = _BORDER.match(before), _BORDER.match(after)
        if not line.strip().startswith("|") or _BORDER.match(line):
            header = header if _BORDER.match(line) else []
            continue
        cells = [_plain(cell) for cell in line.strip().strip("|").split("|")]
        is_grid = (border_before and "+" in before) or (border_after and "+" in after)
        if "===" in after or (border_after and "+" not in after):
            header = cells
        elif _is_row(cells) and not _CONTINUED.match(after) and (not is_grid or (border_before and border_after)):
            yield _Row(cells, line.strip().strip("|").strip(), header)


def _is_row(cells: list[str]) -> bool:
    is_name = bool(re.search(r"\w.{0,58}[^.]$|^\w$", cells[0])) and len(cells[0]) < 60
    return len(cells) >= 2 and is_name and all(len(cell) < 120 for cell in cells)


def _short(cell: str) -> str:
    return cell if len(cell.split()) <= MAX_SHORT_WORDS else ""


ANSWERED_KINDS = ("definition", "how-to", "option", "table value", "comparison")
UNANSWERABLE = "not answerable"
MAX_QUOTE_WORDS, MAX_QUESTION_WORDS = 55, 28
SAME_QUOTE = 2
"""Most questions of one quote: tools share their flags."""
NUM_OTHERS, SAME_FILE = 3, 10
"""Distractors of a question, and most questions of one file in the evaluation."""


class DocumentationQuestion(NamedTuple):
    """`quote`: the sentence of `passage` that answers; empty if no passage does. `path`: relative to the folder. `others`:
    passages that share words with the question and do not hold the quote."""

    question: str
    passage: str
    quote: str
    short_answer: str
    kind: str
    path: str
    others: tuple[str, ...] = ()


def is_for_evaluation(name: str) -> bool:
    """Whether a file of the documentation, by its path in the folder, or an article of CANARD, by its title, is kept out of all
    training."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()) % 5 == 0


def documentation_questions(folder: Path, *, evaluation: bool) -> Iterator[DocumentationQuestion]:
    """All questions about the evaluation files, or about all other files, in the order of their paths.

    Raises: InputError for a file that cannot be read.
    """
    num_asked: Counter[str] = Counter()
    for path, name in _files(folder, evaluation):
        module = re.search(r"^\.\. (?:module|currentmodule):: ([\w.]+)", path.read_text(), re.MULTILINE)
        passages = [p for document in read_file(path, name) for p in chunk(document, ChunkingConfig())]
        asked: set[str] = set()
        for passage in passages:
            for found in found_in(passage, module[1] if module else "", path.stem):
                question = normalise(found.question)
                if question in asked or not _is_good(question, found, passage.text):
                    continue
                num_asked[found.quote] += 1
                if num_asked[found.quote] <= SAME_QUOTE or found.kind == "table value":
                    asked.add(question)
                    answer = found.quote, found.short_answer, found.kind
                    yield DocumentationQuestion(question, passage.text, *answer, name)


def evaluation_questions(folder: Path, count: int = 300) -> list[DocumentationQuestion]:
    """A sixth of them not answerable, the other kinds alike as far as the files have them; each with other passages.

    No quote occurs in a file that is trained on.
    """
    trained = normalise("\n".join(path.read_text() for path, _ in _files(folder, evaluation=False)))
    questions = list(documentation_questions(folder, evaluation=True))
    questions.sort(key=lambda q: hashlib.sha256(f"{q.path}\n{q.question}".encode()).digest())
    texts = list(dict.fromkeys(q.passage for q in questions))
    neighbours = Neighbours(texts)

    def others(question: DocumentationQuestion) -> list[str]:
        near = [texts[row] for row in neighbours.nearest(question.question, NUM_OTHERS + 5)]
        return [text for text in near if text != question.passage and question.quote not in text]

    num_absent, chosen, absent = count // 6, list[DocumentationQuestion](), list[DocumentationQuestion]()
    num_of_file: Counter[str] = Counter()
    kinds = [[q for q in questions if q.kind == kind] for kind in ANSWERED_KINDS]
    for question in itertools.chain.from_iterable(itertools.zip_longest(*kinds)):
        if question is None or normalise(question.quote) in trained or num_of_file[question.path] == SAME_FILE:
            continue
        num_of_file[question.path] += 1
        if len(chosen) < count - num_absent:
            chosen.append(question._replace(others=tuple(others(question)[:NUM_OTHERS])))
            continue
        apart = [text for text in others(question) if not _may_answer(question.question, text)]
        if len(absent) < num_absent and len(apart) > 2 and question.kind != "table value":
            changes = {"passage": apart[0], "quote": "", "short_answer": "", "kind": UNANSWERABLE}
            absent.append(question._replace(**changes, others=tuple(apart[1:3])))
    return chosen + absent


def _files(folder: Path, evaluation: bool) -> Iterator[tuple[Path, str]]:
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".rst")):
        name = path.relative_to(folder).as_posix()
        if is_for_evaluation(name) == evaluation:
            yield path, name


def _is_good(question: str, found: RuleMatch, passage: str) -> bool:
    num_words = len(found.quote.split())
    is_sized = num_words <= MAX_QUOTE_WORDS and (num_words >= 4 or found.kind == "table value")
    is_text = not found.quote.endswith(":") and "::" not in found.quote and not re.search(r"`_|:\w+:`", question)
    return is_sized and is_text and found.quote in passage and len(question.split()) <= MAX_QUESTION_WORDS


def _may_answer(question: str, text: str) -> bool:
    """Whether the text holds the name that the question asks about, or nearly all its long words."""
    words = [word.strip(".").rsplit(".", 1)[-1] for word in re.findall(r"[\w.-]{4,}", question.lower())]
    words = [word for word in words if word not in ("what", "does", "flag", "from", "with", "happens", "differ")]
    return sum(word in text.lower() for word in words) > len(words) - (2 if len(words) > 3 else 1)


class Neighbours:
    """Texts and their postings."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._analyzer, builder = Analyzer(AnalyzerConfig()), PostingsBuilder()
        for text in texts:
            builder.add(self._analyzer.terms(text))
        with tempfile.TemporaryDirectory() as folder:
            builder.write(Path(folder))
            self._postings = Postings.open(Path(folder))  # a mapped file outlives its name

    def nearest(self, text: str, count: int) -> list[int]:
        """Numbers of at most `count` texts, the best first."""
        terms = self._analyzer.terms(text)
        rows, scores = self._postings.scores(sparse_query(terms, self._postings.statistics(terms), SparseConfig()))
        return [int(row) for row in rows[np.lexsort((rows, -scores))[:count]]]
