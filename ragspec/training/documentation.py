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


_TERM = re.compile(
    r"(?:\.\. (?:c:|py:)?(?P<directive>[a-z]+):: )?(?P<option>[‘'\"`]?-{1,2}\w[\w-]*)?(?P<name>[^\n]{0,70}?)[’'\"`]?\s*:?"
)
_TERM_QUESTIONS = {
    "option": "What does the option {} do?", "cmdoption": "What does the option {} do?", "class": "What is {}?",
    "envvar": "What does the environment variable {} do?", "data": "What is {}?", "attribute": "What is {}?",
    "macro": "What is {}?", "exception": "When is {} raised?",
}  # fmt: skip
_NO_TERM = re.compile(
    r"(?i)(?:note|notes|warning|caution|tip|hint|important|example|examples|see|see also|usage|synopsis|syntax|"
    r"parameters?|arguments?|returns?|raises|version|changed|new|added|deprecated|default|description|options?|"
    r"attention|todo|where|or|and|danger|summary)\b.*"
)
_NAME = re.compile(r"(?:class |static |const |async )*(?P<name>[A-Za-z_$@%][\w.$:@%+-]*)(?:\s*(?:[(=\[<{].*)?)")
_NO_DEFINITION = (
    "The *", "If ", "Using ", "Note", "See ", "Deprecated", "For ", "As ", "In ", "When ", "Changed", "New in", "There ",
    "This is ", "Same as ", "Like ", "Example", "Type:", "By default", "These ", "It ", "You ", "Default", "We ", "(",
    "Also ", "However", "But ", "Please", "Since ", "Available", "Added", "Possible", "Valid ", "Grammar", "Syntax",
    "Value", "Context", "Status", "That ", "They ", "Its ", "Such ", "Here", "So ", "Then ", "Otherwise", "Thus",
    "Therefore", "No ", "Not ",
)  # fmt: skip
_DEFAULT = re.compile(
    r"(?:\b[Dd]efaults? (?:[a-z]+ )?(?:is|to)(?: of)?|\b[Dd]efault(?: value)?:|\(default)"
    r" (?P<value>[^\s,;)(][^,;)(\n]{0,40}?)(?=\.?(?:[,;)\n]|\s|$))"
)


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
_POINTS_BACK = re.compile(
    r"\b(?:this|these|it|that|they|them|following|above|below|manual|document|section|chapter|help)\b", re.IGNORECASE
)


def _shares_words(question: str, answer: str) -> bool:
    """Whether most long words of the question, cut to their stems, are in the answer."""
    stems = {word[:5] for word in re.findall(r"\w{4,}", question.lower())} - _ASKING_STEMS
    held = sum(stem in answer.lower() for stem in stems)
    return held > len(stems) / 2


_VERBS = (
    "install|create|add|start|stop|restart|enable|disable|configure|build|compile|remove|delete|list|check|test|show|"
    "convert|copy|set|set up|update|upgrade|mount|open|close|connect|change|restore|verify|generate|export|import|"
    "define|declare|load|print|initialize|clone|edit"
)
_RUN = (
    r"(?:you (?:can|must|need to|should|have to) )?(?:simply |just |first )?(?:use|run|type|enter|issue|execute|do|add|set|call"
    r"|put|invoke|write|specify)"
)
_FIRST = r"(?:Then |Now |First,? |Finally,? |Next,? )?"
_ANNOUNCING = (
    rf"To (?:also |then |now |still )?(?P<aim>[a-z]+ [^,.:]{{6,80}}?),? {_RUN}\b[^.]{{0,90}}:",
    rf"{_FIRST}(?:[Yy]ou|[Oo]ne) can (?:also |then |now |still )?(?P<aim>[a-z]+ [^,.:]{{8,80}}?)"
    r"(?: (?:with|by|using|like|as)\b[^.]{0,70})?:",
    rf"{_FIRST}(?:[Uu]se|[Rr]un|[Tt]ype|[Ee]nter|[Ii]ssue|[Ee]xecute)\b[^.:]{{0,70}}? to (?P<aim>[a-z]+ [^,.:]{{6,80}}?):",
    rf"(?P<aim>(?:{_VERBS}) [^,.:]{{6,70}}?)(?: (?:with|by|using|like|as follows|as)\b[^.]{{0,50}})?:",
)
_ANNOUNCING_LIST = re.compile(
    r"(?:The )?(?:following|supported|available|possible) (?P<what>[a-z-]+ [a-z -]{3,40}?) (?P<are>are|can be|is|"
    r"may be) (?P<how>supported|available|allowed|defined|provided|recognized|possible|used|accepted|required|valid|"
    r"understood)[^.:]{0,50}:"
)


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


_SUBJECT = r"(?P<subject>(?:(?:[Aa]n?|[Tt]he) )?[\w`*:~.{}<>\" ()=/_-]{3,90}?)"
_NAMED = (
    r"(?P<subject>[Tt]he [\w`*.:$/<>_-]{2,40}(?: [\w-]{2,20})? (?:option|command|directive|module|parameter|setting|"
    r"variable|flag|function|file|attribute|keyword|program|tool|utility|plugin|method|class|filter|section|field|"
    r"property|argument|script|daemon|server|library|statement)|[`*]*[a-z][\w.-]*[_.(-][\w.()-]*[`*]*|"
    r"[A-Z][a-z]+[A-Z]\w+)"
)
_DOES = (
    "specifies|defines|controls|determines|sets|enables|disables|provides|contains|returns|prints|displays|lists|"
    "creates|removes|converts|reads|writes|deletes|starts|stops|checks|generates|shows|adds|limits|tells|causes|"
    "allows|describes|stores|turns|forces|prevents|manages|handles|supports|represents|changes|indicates|holds|runs|"
    "sends|takes|implements|restricts|updates"
)
_STEP = "you (?:can|must|need|should)|use|run|set|call|add|specify|create|pass|just|simply|do|define|make|type"
_BEING = "is|are|does|do|has|have|will|can"
_HOW = r"faster|slower|more \w+|less \w+|simpler|safer|easier|larger|smaller|cheaper"
_RULES = (
    (" ", "definition", rf"{_SUBJECT} (?P<is>is|are) (?:an?|the|one of) [a-z].{{25,}}", "What {is} {subject}?"),
    (" used ", "definition", rf"{_SUBJECT} (?P<is>is|are) used (?:to|for|when|by|as|in) .{{12,}}",
     "What {is} {subject} used for?"),
    (" ", "option", rf"{_NAMED} (?:{_DOES}) .{{15,}}", "What does {subject} do?"),
    ("default", "default", r"(?:The|Its) default (?:value |setting )?(?:of|for) (?P<subject>[^,;:]{3,50}?) is"
    r" (?P<value>[^;:]{1,60}?)\.?",
     "What is the default of {subject}?"),
    ("efaults to ", "default", rf"{_NAMED} defaults to (?P<value>[^;:]{{1,60}}?)\.?",
     "What does {subject} default to?"),
    ("y default", "default", rf"By default,? {_NAMED} (?P<is>is|are|uses|has|listens|will|does|runs|looks|writes"
    rf"|reads|creates) .{{8,}}",
     "What does {subject} do by default?"),
    ("To ", "how-to", rf"To (?:also |then |now |still )?(?P<aim>[a-z]+ [^,.]{{8,90}}), (?:{_STEP})\b.{{8,}}", "How do I {aim}?"),
    ("ou can ", "how-to", r"(?:You|you) can (?:also |then |now |optionally |either )?(?P<aim>[a-z]+ [^,.;]{8,80}?) "
     r"(?:by|using|via|with the) .{8,}", "How can I {aim}?"),
    ("se ", "how-to", r"(?:You )?[Uu]se (?P<tool>[^,.;]{3,60}) to (?P<aim>[a-z]+ [^,.;]{8,80})\.$", "What can I use to {aim}?"),
    ("f you want to ", "how-to", r"If you (?:want|wish|would like) to (?P<aim>[a-z]+ [^,.]{8,80}), .{12,}", "How do I {aim}?"),
    ("If ", "condition", r"If (?P<case>(?:the|no|an?|you) [^,.;]{12,80}), (?:then )?(?:the|an?|it|they|all|any"
    r"|no|each|only|[A-Z]\w+|[\w.-]+ "
     r"(?:will|is|are|does|assumes)) (?!may|can)[^?]{20,}", "What happens if {case}?"),
    ("Unlike ", "comparison", rf"Unlike (?!with\b)(?P<other>[^,.]{{3,60}}), (?P<this>.{{3,60}}?) (?:{_BEING}"
    rf"|must|cannot)\b.{{10,}}",
     "How does {this} differ from {other}?"),
    ("imilar to ", "comparison", r"(?P<this>[^,.]{3,60}?) (?:is|works|behaves)(?: very)? similar(?:ly)? to"
    r" (?P<other>[^,.;]{3,50}?),? "
     r"(?:but|except|with the exception)\b.{10,}", "How does {this} differ from {other}?"),
    ("difference between", "comparison", r"The (?:main |only |key )?difference between (?P<this>[^,.]{3,60}) and "
     r"(?P<other>[^,.]{3,60}?) is .{10,}", "What is the difference between {this} and {other}?"),
    (" than ", "comparison", rf"(?P<this>[^,.]{{3,60}}?) (?:is|are) (?:much |often |usually |generally"
    rf" )?(?P<how>{_HOW}) than (?P<other>[^,.;]{{3,60}})\b.*",
     "Which is {how}: {this} or {other}?"),
    (", whereas ", "comparison", r"(?P<this>[^,.]{4,60}?) [^,]{5,90}, whereas (?P<other>[^,.]{4,40}?) "
     rf"(?:{_BEING}|only|always)\b.{{5,}}", "How do {this} and {other} differ?"),
)  # fmt: skip
"""A text that every match holds; the kind; the beginning of a sentence; the question, made of the named parts."""
_CLAUSE = re.compile(r"\b(?:that|which|shows|because|when|where|replaces|this|it|if|and|or|has|have|will|can|must)\b")
_VAGUE = re.compile(
    r"(?i)^\W|^\w+ing \w|^(?:(?:presumably|although|if|with|for|when|in|on|it|this|that|these|those|they|there|he|which|"
    r"what|here|all|each|another|some|one|both|such|other|most|many|its|however|also|note|example|but|and|so|to|by|at|"
    r"as|we|you|i|everything|something|nothing|another|none|only|therefore|thus|since|once|after|before|during)\b|"
    r"the (?:above|following|latter|former|first|second|third|next|only|same|other|last|previous|resulting|main)\b)|"
    r"^(?:the|an?) [a-z]+$|\b(?:that problem|do so|doing so|similar tasks)\b|\b(?:while|currently|optional|desired|"
    r"below|above|following|them|this|these|those|it|its|here|previous|respectively|he|she|they|their|such)\b|"
    r"[][{}<>`\\|]|\(|^.{0,2}$"
)
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
UNANSWERABLE = "not answerable"
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


_INCOMPLETE = re.compile(
    r"\b(?:via|with|when|by|using|I|as|is|of|for|so|the|and|or|then|that|in|to|from|at"
    r"|the (?:plugin|module|program|package|tool|feature|script|file|server|service))\?$|[^\x00-\u024f\u2010-\u2026]"
)
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
            self._postings = Postings.open(Path(folder))  # a mapped file outlives its name

    def nearest(self, text: str, count: int) -> list[int]:
        """Numbers of at most `count` texts, the best first."""
        terms = _stems(text)
        rows, scores = self._postings.scores(sparse_query(terms, self._postings.statistics(terms)))
        return [int(row) for row in rows[np.lexsort((rows, -scores))[:count]]]


def _stems(text: str) -> list[str]:
    return [word[:6] for word in _WORD.findall(text.lower())]
