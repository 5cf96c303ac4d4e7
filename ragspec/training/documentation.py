"""Questions about documentation, made by rule from the passages that the product cuts and the blocks that its readers find.

Owns the rules (of sentences, terms with their definitions, blocks behind a colon, headings that ask, and tables) and the split: a
file whose sha256(path) mod 5 is 0 is for evaluation only. Every quote is a slice of its passage: one sentence, a term with the
sentence that defines it, a table row, or a sentence with the block that it announces. Equal files give equal questions.

    >>> next(documentation_questions(Path("docs"), evaluation=False)).question
    'What does PyBool_Check do?'
"""

import hashlib
import itertools
import re
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ragspec.config import ChunkingConfig
from ragspec.core import BlockKind, Document, Passage, blocks_reaching
from ragspec.retrieval.chunking import chunk, sentences
from ragspec.retrieval.reading import read_file
from ragspec.retrieval.search.bm25 import Postings, PostingsBuilder, sparse_query
from ragspec.training.sentences import Part, is_quotable, normalise, quotable_parts

_WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _pattern(text: str) -> str:
    """A pattern of `documentation.toml` with its parts in their places."""
    for name, part in _WORDS["parts"].items():
        text = text.replace(f"{{{name}}}", part)
    return text.replace("\n", "")


_PATTERNS = {name: re.compile(_pattern(text)) for name, text in _WORDS["patterns"].items()}


class RuleMatch(NamedTuple):
    """A question and the span of the document that answers it, `text[start:end]`."""

    question: str
    start: int
    end: int
    kind: str
    short_answer: str = ""


_INLINE = re.compile(r":[\w:]+:`[!~]?([^`<]*?)(?:\s*<[^`]*>)?`_*|\[([^\]]+)\]\([^)]*\)|[`*]+([^`*\n]+)[`*]+_*")


def _plain(text: str) -> str:
    """On one line and without the marks of code and emphasis that Markdown and reStructuredText leave in it: for questions."""
    return normalise(_INLINE.sub(lambda found: found[1] or found[2] or found[3] or "", text)).strip(" ;:,‘’“”\"'")


def matches(document: Document, passage: Passage, tool: str) -> Iterator[RuleMatch]:
    """Every question that a rule makes of a passage. `tool`: the program that the document is about; empty: it has no name."""
    text, parts = document.text, list(quotable_parts(passage))
    yield from _of_terms(document, passage, tool)
    yield from _of_heading(document, passage, parts)
    for part in parts:
        if part.kind is BlockKind.TABLE:
            yield from _of_row(document, part, passage, tool)
        elif part.announces:
            yield from _of_announcement(text, part, tool)
        elif "\n\n" not in text[part.start : part.end]:
            yield from _of_sentence(text, part, tool)


_TERM = _PATTERNS["term"]
_TERM_QUESTIONS: dict[str, str] = _WORDS["term_questions"]
_NO_TERM = _PATTERNS["no_term"]
_NAME = re.compile(r"(?:class |static |const |async )*(?P<name>[A-Za-z_$@%][\w.$:@%+-]*)(?:\s*(?:[(=\[<{].*)?)")
_NO_DEFINITION = tuple(_WORDS["no_definition"])
_DEFAULT = _PATTERNS["default"]


def _of_terms(document: Document, passage: Passage, tool: str) -> Iterator[RuleMatch]:
    """A paragraph that is a term, with the first sentence of the block behind it; and the default that it names."""
    text, of_tool = document.text, f" of {tool}" * bool(tool)
    blocks = blocks_reaching(document.blocks, passage.start, passage.end)
    for block, after in itertools.pairwise(each for each in blocks if each.start >= passage.start):
        is_term = block.kind in (BlockKind.PARAGRAPH, BlockKind.TERM)
        term = _TERM.fullmatch(text, block.start, block.end) if is_term else None
        if term is None or _NO_TERM.fullmatch(text, term.start("name"), block.end) or after.kind is BlockKind.TABLE:
            continue
        asked, behind = _asked_of_term(term, of_tool), sentences(text, after.start, min(after.end, passage.end))
        if asked is None or not behind or text.startswith(_NO_DEFINITION, behind[0][0]):
            continue
        if text[behind[0][1] - 1] not in ".!)" or not text[behind[0][0]].isupper():
            continue
        is_option = bool(term["option"]) or term["directive"] in ("option", "cmdoption", "envvar")
        yield RuleMatch(asked[0], block.start, behind[0][1], "option" if is_option else "definition")
        for start, end in behind[:2]:
            if (value := _DEFAULT.search(text, start, end)) and not re.match(r"see\b|\W*$", value["value"]):
                asks = f"What is the default of {asked[1]}?"
                yield RuleMatch(asks, block.start, end, "default", _short(_plain(value["value"])))


def _asked_of_term(term: re.Match[str], of_tool: str) -> tuple[str, str] | None:
    """The question, and the name as it is asked for; None for a paragraph that is no term."""
    if term["option"]:
        name = f"the option {_plain(term['option'])}{of_tool}"
        return f"What does {name} do?", name
    found = _NAME.fullmatch(_plain(term["name"]))
    if found is None or len(found["name"]) < 3:
        return None
    name = found["name"].rstrip(":.")
    is_code = re.search(r"[_.$:()-]|\w[A-Z]|\d", name) or re.search(r"\w\(", term["name"]) or term["directive"]
    if not is_code:
        return None
    name = name if "." in name or not of_tool else f"{name}{of_tool}"
    if not term["directive"] and "(" not in term["name"]:
        return f"What is {name} for?", name
    return _TERM_QUESTIONS.get(term["directive"] or "", "What does {} do?").format(name), name


_NUMBER = re.compile(r"^[\W\d]*(?:[A-Z]?\d*[.)]\d*\s+|Q:\s*|Question:\s*)?")


def _of_heading(document: Document, passage: Passage, parts: Sequence[Part]) -> Iterator[RuleMatch]:
    """A heading that is a question or names a task, with the part right behind it."""
    for block in blocks_reaching(document.blocks, passage.start, passage.end):
        if block.kind is not BlockKind.HEADING or block.start < passage.start:
            continue
        heading = _NUMBER.sub("", _plain(document.text[block.start : block.end]))
        behind = next((part for part in parts if part.start >= block.end), None)
        if behind is None or document.text[block.end : behind.start].strip() or behind.kind is BlockKind.TABLE:
            continue
        if _POINTS_BACK.search(heading) or not _shares_words(heading, document.text[behind.start : behind.end]):
            continue
        if re.fullmatch(r"(?:How|What|Why|When|Where|Which|Can|Is|Are|Does|Do|Should|Who)\b.{8,110}\?", heading):
            yield RuleMatch(heading, behind.start, behind.end, "how-to" if heading.startswith("How") else "faq")
        elif match := re.fullmatch(r"How [Tt]o (?P<aim>[A-Za-z].{5,70})|To (?P<also>[a-z].{8,70})", heading):
            aim = match["aim"] or match["also"]
            yield RuleMatch(f"How do I {aim[0].lower()}{aim[1:]}?", behind.start, behind.end, "how-to")


_ASKING_STEMS = frozenset("what when where which does shoul with".split())
_POINTS_BACK = _PATTERNS["points_back"]


def _shares_words(question: str, answer: str) -> bool:
    """Whether most long words of the question, cut to their stems, are in the answer."""
    stems = {word[:5] for word in re.findall(r"\w{4,}", question.lower())} - _ASKING_STEMS
    held = sum(stem in answer.lower() for stem in stems)
    return held > len(stems) / 2


_ANNOUNCING = [_pattern(each) for each in _WORDS["announcing"]]
_ANNOUNCING_LIST = _PATTERNS["announcing_list"]


def _of_announcement(text: str, part: Part, tool: str) -> Iterator[RuleMatch]:
    """A sentence that names a task and announces a command, or names a set and announces its list."""
    line = normalise(text[part.start : part.block_start])
    is_list = text[part.block_start : part.end].lstrip()[:1] in "-*•"
    if is_list and (found := _ANNOUNCING_LIST.fullmatch(line)):
        by = "in" if found["how"] in ("available", "possible", "valid", "required") else "by"
        asked = f"Which {found['what']} {found['are']} {found['how']}{f' {by} {tool}' * bool(tool)}?"
        yield RuleMatch(asked, part.start, part.end, "command")
        return
    if is_list:
        return
    lowered = line if line.startswith("To ") else line[:1].lower() + line[1:]
    for pattern in _ANNOUNCING:
        if found := re.fullmatch(pattern, line) or re.fullmatch(pattern, lowered):
            aim = _plain(found["aim"])
            if not _is_vague("command", {"aim": aim}):
                yield RuleMatch(_mine(f"How do I {aim}?"), part.start, part.end, "command")
            return


def _mine(question: str) -> str:
    """As the user asks for himself."""
    question = re.sub(r"\byou are\b", "I am", re.sub(r"\byou (?:like|wish|want|need)(?= to\?|\?)", "", question))
    question = re.sub(r"\byour\b", "my", question)
    return re.sub(r"\byourself\b", "myself", re.sub(r"\byou\b", "I", question))


_RULES = [(each["holds"], each["kind"], _pattern(each["pattern"]), each["question"]) for each in _WORDS["rules"]]
"""A text that every match holds; the kind; the pattern of a sentence; the question, made of the named groups."""
_CLAUSE = re.compile(r"\b(?:that|which|shows|because|when|where|replaces|this|it|if|and|or|has|have|will|can|must)\b")
_VAGUE = _PATTERNS["vague"]
_NAMES = re.compile(r"\w[._/:-]\w|[-_/$~]\w|\w[A-Z]|\b[A-Z]{2}|\d|\S [A-Z]|[\"“]")
"""A name of a program, file, option or thing, in distinction to common words."""
MAX_PART_WORDS, MAX_SUBJECT_WORDS = 14, 6


def _of_sentence(text: str, part: Part, tool: str) -> Iterator[RuleMatch]:
    line = normalise(text[part.start : part.end])
    for needle, kind, pattern, question in _RULES:
        match = re.fullmatch(pattern, line) if needle in line else None
        if match is None:
            continue
        parts = {name: _plain(found) for name, found in match.groupdict().items()}
        if _is_vague(kind, {name: found for name, found in parts.items() if name != "value"}):
            continue
        for name in ("subject", "this"):
            if parts.get(name, "").startswith(("The ", "A ", "An ")):
                parts[name] = parts[name][:1].lower() + parts[name][1:]
        asked = question.format(**parts)
        asked = _mine(asked) if kind in ("how-to", "condition") else asked
        if re.search(r"\w\w[^su]s$", parts.get("this", "")):
            asked = re.sub("^How does ", "How do ", asked)
        yield RuleMatch(asked, part.start, part.end, kind, _short(parts.get("value", "")))
        return


def _is_vague(kind: str, parts: dict[str, str]) -> bool:
    named = [part for name, part in parts.items() if name not in ("is", "case")]
    if any(_VAGUE.search(part) or len(part.split()) > MAX_PART_WORDS for part in named):
        return True
    if "case" in parts and not (_NAMES.search(parts["case"]) or len(parts["case"].split()) > 8):
        return True
    if re.search(r"\b(?:this|these|it|above|below|that|they|them|want|wish|like)\b|[<>{}]", parts.get("case", "")):
        return True
    simple = parts.values() if kind == "comparison" else [parts.get("tool", ""), parts.get("subject", "")]
    if any(_CLAUSE.search(part) for part in simple):
        return True
    return len(parts.get("subject", "").split()) > MAX_SUBJECT_WORDS


MAX_SHORT_WORDS = 8
_DESCRIPTION = re.compile(r"(?i)(?:description|meaning|explanation|function|purpose|semantics|what it does)s?")


def _of_row(document: Document, part: Part, passage: Passage, tool: str) -> Iterator[RuleMatch]:
    """What a column says of the first cell of a row, where the table has a header and no other row begins with that cell."""
    table = blocks_reaching(document.blocks, part.start, part.end)[0]
    text, row = document.text[table.start : table.end], document.text[part.start : part.end]
    cells = _cells(row)
    is_repeated = text.count(f"| {row.strip('| ').partition(' |')[0]} |") > 1
    headed = re.match(r"([^\n]+)\n[ \t|+]*[-=]{2}[-=+| :]*\n", text)
    titles = [title for title in passage.heading.split(" > ") if " | " not in title] or [passage.title]
    about = re.sub(r"^[\d.]+ ", "", _plain(titles[-1]).split(" --- ")[0].rstrip("?¶ "))
    if len(cells) == 2 and re.fullmatch(r"[: ]*default(?: value)?[: ]*", cells[0].lower()):
        name, value = about.removesuffix(" Directive"), cells[1]
        if re.search(r"\w", value) and not value.startswith(("See", "none", "-")) and not _VAGUE.search(name):
            asked = f"What is the default of {name}?"
            yield RuleMatch(asked, part.start, part.end, "default", _short(value.removeprefix(f"{name} ")))
    columns = _cells(headed[1] if headed else passage.heading.rsplit(" > ", 1)[-1])
    is_named = bool(about) and re.fullmatch(r"[\w$-][\w .$:/()-]{2,40}", cells[0])
    if len(columns) != len(cells) or columns == cells or is_repeated or not is_named:
        return
    for column, cell in list(zip(columns, cells, strict=True))[1:]:
        is_clear = re.fullmatch(r"[A-Za-z][A-Za-z /-]{2,30}", column) and len(cell) <= 160
        if not is_clear or "\\" in cell or cell == cells[0]:
            continue
        is_description = _DESCRIPTION.fullmatch(column)
        if is_description and len(cell.split()) > 3:
            yield RuleMatch(f"What is {cells[0]}{f' of {tool}' * bool(tool)}?", part.start, part.end, "table value")
            return
        if not is_description and re.search(r"[A-Za-z]{2}|\d" if "efault" in column else r"[A-Za-z]{2}", cell):
            asked = f"What {'are' if re.search('[^s]s$', column) else 'is'} the {_lowered(column)} of {cells[0]} in {about}?"
            yield RuleMatch(asked, part.start, part.end, "table value", _short(cell))
            return


def _lowered(column: str) -> str:
    """A column's name inside a question; abbreviations stay."""
    return " ".join(word if word.isupper() else word.lower() for word in column.split())


def _cells(line: str) -> list[str]:
    return [_plain(cell) for cell in line.strip().strip("|").split("|")]


def _short(cell: str) -> str:
    return cell if len(cell.split()) <= MAX_SHORT_WORDS else ""


ANSWERED_KINDS = "definition,how-to,option,table value,comparison,default,command,condition,faq".split(",")
UNANSWERABLE, WRITTEN = "not answerable", "written"
"""Kinds of questions: that the passage does not answer, and that a reader wrote; the others are those of the rules."""
MAX_QUESTION_WORDS = 28
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
    for path, name in documentation_files(folder, evaluation=evaluation):
        for document in read_file(path, name):
            module = re.search(r"^\.\. (?:module|currentmodule):: ([\w.]+)", document.text, re.MULTILINE)
            tool = module[1] if module else path.stem.replace("_", " ")
            for passage, found in rule_questions(document, tool, num_asked):
                quote = document.text[found.start : found.end]
                yield DocumentationQuestion(found.question, passage.text, quote, found.short_answer, found.kind, name)


_PROGRAM = re.compile(r"([a-z][\w.+-]{2,30})(?:\(\d\w*\))?(?: manual page)? [-–—]+ (?!.*documentation)")
"""A title that names the program."""


def rule_questions(document: Document, tool: str, num_asked: Counter[str]) -> Iterator[tuple[Passage, RuleMatch]]:
    """Good questions about a document, each once, with their passages. `num_asked`: how often each quote was asked for so far."""
    asked: set[str] = set()
    if program := _PROGRAM.match(document.title):
        tool = program[1]
    for passage in chunk(document, ChunkingConfig()):
        for found in matches(document, passage, tool):
            question, quote = normalise(found.question), document.text[found.start : found.end]
            is_new = question not in asked and 3 <= len(question.split()) <= MAX_QUESTION_WORDS and _is_whole(question)
            if not is_new or normalise(quote).rstrip(".?") in question:
                continue
            if is_quotable(passage, found.start, found.end):
                num_asked[quote] += 1
                if num_asked[quote] <= SAME_QUOTE or found.kind == "table value":
                    asked.add(question)
                    yield passage, found._replace(question=question)


_INCOMPLETE = _PATTERNS["incomplete"]
"""The end of a question whose rest was cut, or whose thing has no name; a letter of another script."""


def _is_whole(text: str) -> bool:
    pairs = [(text.count(first), text.count(last)) for first, last in ("“”", "‘’", "()")]
    return all(first == last for first, last in pairs) and text.count('"') % 2 == 0 and not _INCOMPLETE.search(text)


def evaluation_questions(folder: Path, count: int = 300) -> list[DocumentationQuestion]:
    """A sixth of them not answerable, the other kinds alike as far as the files have them; each with other passages.

    No quote occurs in a file that is trained on.
    """
    trained = normalise("\n".join(path.read_text() for path, _ in documentation_files(folder, evaluation=False)))
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
        apart = [text for text in others(question) if not may_answer(question.question, text)]
        if len(absent) < num_absent and len(apart) > 2 and question.kind != "table value":
            changes = {"passage": apart[0], "quote": "", "short_answer": "", "kind": UNANSWERABLE}
            absent.append(question._replace(**changes, others=tuple(apart[1:3])))
    return chosen + absent


def documentation_files(
    folder: Path, *, evaluation: bool, suffixes: Sequence[str] = (".md", ".rst", ".html")
) -> Iterator[tuple[Path, str]]:
    """The evaluation files, or all other files, with their names: paths relative to the folder."""
    for path in sorted(path for path in folder.rglob("*") if path.suffix in suffixes):
        name = path.relative_to(folder).as_posix()
        if is_for_evaluation(name) == evaluation:
            yield path, name


def may_answer(question: str, text: str) -> bool:
    """Whether the text holds a name of the question, such as an option's, or nearly all its long words."""
    words = [word.strip(".,?") for word in re.findall(r"[^\s()\"'“”‘’]{4,}", question)]
    if any(_NAMES.search(word) and word in text for word in words):
        return True
    common = ("what", "does", "flag", "option", "default", "from", "with", "happens", "differ")
    words = [word.lower() for word in words if word.lower() not in common]
    return sum(word in text.lower() for word in words) > len(words) - (2 if len(words) > 3 else 1)


_WORD = re.compile(r"[^\W_]+")


class Neighbours:
    """Texts and their postings, by the stems of their words. Why no `Analyzer`: training runs without tantivy."""

    def __init__(self, texts: Sequence[str]) -> None:
        builder = PostingsBuilder()
        for text in texts:
            builder.add(_stems(text))
        with tempfile.TemporaryDirectory() as folder:
            builder.write(Path(folder))
            self._postings = Postings(Path(folder))  # a mapped file outlives its name

    def nearest(self, text: str, count: int) -> list[int]:
        """Numbers of at most `count` texts, the best first."""
        terms = _stems(text)
        rows, scores = self._postings.scores(sparse_query(terms, self._postings.statistics(terms)))
        return [int(row) for row in rows[np.lexsort((rows, -scores))[:count]]]


def _stems(text: str) -> list[str]:
    return [word[:6] for word in _WORD.findall(text.lower())]
