"""The rules that make questions of documentation: of directives, flags, glossary terms, sentences and tables. Never chooses.

>>> [found.question for found in found_in(passage, module="json", tool="json")]
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ragspec.core import Passage
from ragspec.retrieval.chunking import sentences
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
