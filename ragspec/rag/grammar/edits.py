"""Minimal word-level edits between two texts, with offsets; the kind of each edit, and a message that explains it.

Pure functions over strings. A text is split into pieces: words, runs of white space, and other grapheme clusters. Kinds come from
the words alone, in English only. Owns closed classes of English words and the inflections of one word.

    >>> word_edits("He go to school.", "He goes to the school.")[0]
    Edit(start=3, end=5, original='go', replacement='goes', kind=<EditKind.OTHER: 'other'>)
    >>> text = "He go to a old mill."
    >>> [edit.kind.value for edit in classify_edits(text, word_edits(text, "He goes to an old mill."))]
    ['agreement', 'article']
    >>> are_verb_forms("go", "went")
    True
"""

import enum
import functools
import itertools
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

from ragspec.rag.citations import combining_marks, grapheme_pattern

_UNLIKE = 2
"""The cost of replacing a word by white space equals a deletion and an insertion."""
_CHANGE = 2**20
"""The cost of changing a piece. Smaller costs prefer pairs of similar pieces."""


class EditKind(enum.StrEnum):
    """The kind of mistake that an edit corrects."""

    SPELLING = "spelling"
    AGREEMENT = "agreement"
    ARTICLE = "article"
    PREPOSITION = "preposition"
    VERB_FORM = "verb_form"
    WORD_ORDER = "word_order"
    PUNCTUATION = "punctuation"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Edit:
    """`text[start:end] == original` becomes `replacement`; one of the two may be empty, never both. Units: characters."""

    start: int
    end: int
    original: str
    replacement: str
    kind: EditKind = EditKind.OTHER


def word_edits(before: str, after: str, *, keep_white: bool = False) -> list[Edit]:
    """Edits from `before` to `after`: in order, not adjacent, with the fewest pieces changed.

    `keep_white`: all white space counts as equal, so line breaks stay.
    Time is proportional to the product of the lengths of the differing parts.
    """
    old, new = split_pieces(before), split_pieces(after)
    same_old, same_new = (_unified(old), _unified(new)) if keep_white else (old, new)
    first, last = common_ends(same_old, same_new)
    at = sum(map(len, old[:first]))
    edits: list[Edit] = []
    pairs = _align(same_old[first : len(old) - last], same_new[first : len(new) - last])
    for stays, cut, put in _runs(pairs):
        original = "".join(old[first : first + cut])
        first += cut
        if not stays and original != put:
            edits.append(Edit(at, at + len(original), original, put))
        at += len(original)
    return edits


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """The text with its edits, which are in order and do not overlap."""
    parts, at = [], 0
    for edit in edits:
        parts += [text[at : edit.start], edit.replacement]
        at = edit.end
    return "".join([*parts, text[at:]])


def split_pieces(text: str) -> list[str]:
    """The pieces of a text; joined they are the text."""
    return _piece().findall(text)


@functools.cache
def _piece() -> re.Pattern[str]:
    word = rf"(?:\w[{combining_marks()}]*+)++"
    return re.compile(rf"{word}(?:['’]{word})*+|\s++|{grapheme_pattern()}", re.DOTALL)


def _unified(all_pieces: Sequence[str]) -> list[str]:
    return [" " if piece.isspace() else piece for piece in all_pieces]


def common_ends(old: Sequence[str], new: Sequence[str]) -> tuple[int, int]:
    """How many pieces are equal at the beginning, and then at the end."""
    first = _num_equal(old, new)
    return first, _num_equal(old[first:][::-1], new[first:][::-1])


def _num_equal(old: Sequence[str], new: Sequence[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def _runs(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[bool, int, str]]:
    """Equal and changed runs: (is equal, number of old pieces, new text)."""
    for stays, run in itertools.groupby(pairs, lambda pair: pair[0] == pair[1]):
        for part in [list(run)] if stays else _split_run(list(run)):
            yield stays, sum(bool(a) for a, _ in part), "".join(b for _, b in part)


def _split_run(run: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Separate replacements from adjacent insertions and deletions, unless the run only joins or splits words."""
    cut, put = ("".join(side).split() for side in zip(*run, strict=True))
    if "".join(cut) == "".join(put):
        return [run]
    return [list(part) for _, part in itertools.groupby(run, lambda pair: bool(pair[0] and pair[1]))]


def _align(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str]]:
    """Levenshtein alignment: pairs with the fewest differences, then the most similar; "" faces insertions and deletions."""
    costs = [[j * _CHANGE for j in range(len(new) + 1)]]  # costs[i][j]: from old[:i] to new[:j]
    for i, a in enumerate(old, 1):
        row, above = [i * _CHANGE], costs[-1]
        for j, b in enumerate(new, 1):
            row.append(min(above[j] + _CHANGE, row[j - 1] + _CHANGE, above[j - 1] + _cost(a, b)))
        costs.append(row)
    pairs, i, j = [], len(old), len(new)
    while i or j:
        if i and j and costs[i][j] == costs[i - 1][j - 1] + _cost(old[i - 1], new[j - 1]):
            i, j = i - 1, j - 1
            pairs.append((old[i], new[j]))
        elif i and costs[i][j] == costs[i - 1][j] + _CHANGE:
            i -= 1
            pairs.append((old[i], ""))
        else:
            j -= 1
            pairs.append(("", new[j]))
    return _shift_spaces(pairs[::-1])


def _shift_spaces(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same change with the space after the word: insert "to " before "school", not " to" after "goes"."""
    for first, (a, b) in enumerate(pairs):
        if (a and b) or not (a or b).isspace() or (first and bool(pairs[first - 1][0]) != bool(pairs[first - 1][1])):
            continue
        last = first
        while last < len(pairs) and (bool(pairs[last][0]), bool(pairs[last][1])) == (bool(a), bool(b)):
            last += 1
        if last < len(pairs) and pairs[last][0] == pairs[last][1] == (a or b):
            pairs[first : last + 1] = [pairs[last], *pairs[first + 1 : last], (a, b)]
    return pairs


@functools.lru_cache(maxsize=4096)
def _cost(a: str, b: str) -> int:
    if a == b:
        return 0
    if a.isspace() != b.isspace():
        return _UNLIKE * _CHANGE
    return _CHANGE + _unlikeness(a.casefold(), b.casefold())


def _unlikeness(a: str, b: str) -> int:
    """0 to 100: the share of two words outside their common prefix and suffix."""
    return 100 - 200 * sum(common_ends(a, b)) // (len(a) + len(b))


ENGLISH: dict[str, str] = tomllib.loads(Path(__file__).with_name("english.toml").read_text(encoding="utf-8"))
ARTICLES, PREPOSITIONS, AUXILIARIES = (
    frozenset(ENGLISH[name].split()) for name in ("articles", "prepositions", "auxiliaries")
)
AGREEING = tuple(frozenset(group.split()) for group in ENGLISH["agreeing"].splitlines())
"""Groups of words that are chosen by number or person."""
_BASES = {form: group.split()[0] for group in ENGLISH["irregular"].splitlines() for form in group.split()}
_DOUBLED = frozenset("bdgklmnprtvz")
_SIBILANTS = ("s", "x", "z", "ch", "sh", "o")


def are_numbers_of_one_word(a: str, b: str) -> bool:
    """Whether one word is the other with the ending -s: mill and mills, city and cities, go and goes."""
    return a != b and any(_with_s(one) == other or one + "es" == other for one, other in ((a, b), (b, a)))


def are_verb_forms(a: str, b: str) -> bool:
    """Whether both are forms of one verb: go and went, try and tried. Two words in -s are a form and its misspelling."""
    return not (a.endswith("s") and b.endswith("s")) and bool(_bases(a) & _bases(b))


def verb_base(word: str) -> str:
    """The shortest word that this may be a form of; the word itself if it has no ending."""
    return min(_bases(word), key=lambda base: (len(base), base))


def _with_s(word: str) -> str:
    if word.endswith("y") and len(word) > 2 and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(_SIBILANTS) else "s")


@functools.lru_cache(maxsize=4096)
def _bases(word: str) -> frozenset[str]:
    bases = {word, _BASES.get(word, word)}
    for ending in ("ing", "ed", "en", "es", "s", "d"):
        stem = word.removesuffix(ending)
        if stem != word and len(stem) > 1:
            bases |= {stem, stem + "e"}
            bases |= {stem[:-1] + "y"} if stem.endswith("i") else set()
            bases |= {stem[:-1]} if stem[-1] in _DOUBLED and stem[-2:-1] == stem[-1] else set()
    return frozenset(bases)


_WORD = re.compile(r"\w+(?:['’]\w+)*")
_MAX_MOVED = 4
"""A word moved over more words than this counts as two edits."""
_EXCHANGED = frozenset({EditKind.ARTICLE, EditKind.PREPOSITION, EditKind.AGREEMENT, EditKind.VERB_FORM})
"""Two edits of these kinds are not a move: in "a apple and an pear" both articles are corrected."""
_ALIKE = 0.6
"""The least similarity of a word and its misspelling (`SequenceMatcher.ratio`)."""

_REASONS = {
    EditKind.SPELLING: "Possible spelling mistake",
    EditKind.AGREEMENT: "These words do not agree in number or person",
    EditKind.ARTICLE: "The article does not fit here",
    EditKind.PREPOSITION: "The preposition does not fit here",
    EditKind.VERB_FORM: "The form of the verb does not fit here",
    EditKind.WORD_ORDER: "The words are in another order",
    EditKind.PUNCTUATION: "Punctuation or spacing",
    EditKind.OTHER: "This reads better otherwise",
}


def classify_edits(text: str, edits: Sequence[Edit]) -> list[Edit]:
    """The edits of `text` with kinds; two edits that move a word become one."""
    return [replace(edit, kind=edit_kind(edit.original, edit.replacement)) for edit in _joined_moves(text, edits)]


def edit_message(edit: Edit) -> str:
    """One line that explains the edit to the writer."""
    old, new = edit.original.strip(), edit.replacement.strip()
    if not old and not new:
        what = "a space here" if edit.replacement else "no space here"
    elif not new:
        what = f"leave out “{old}”"
    elif not old:
        what = f"put in “{new}”"
    else:
        what = f"“{new}” instead of “{old}”"
    return f"{_REASONS[edit.kind]}: {what}."


def edit_kind(original: str, replacement: str) -> EditKind:
    """The kind of one change. Unambiguous kinds are tried first."""
    old, new = _words(original), _words(replacement)
    if _bare(old) == _bare(new):
        return EditKind.PUNCTUATION
    lower_old, lower_new = [w.casefold() for w in old], [w.casefold() for w in new]
    if "".join(_bare(lower_old)) == "".join(_bare(lower_new)):
        return EditKind.SPELLING
    if len(old) > 1 and sorted(lower_old) == sorted(lower_new):
        return EditKind.WORD_ORDER
    return _kind_of_words(lower_old, lower_new)


def _kind_of_words(old: Sequence[str], new: Sequence[str]) -> EditKind:
    gone, come = _difference(old, new), _difference(new, old)
    for words, kind in ((ARTICLES, EditKind.ARTICLE), (PREPOSITIONS, EditKind.PREPOSITION)):
        if {*gone, *come} <= words:
            return kind
    if len(gone) == len(come) == 1:
        return _kind_of_word(gone[0], come[0])
    if {*gone, *come} <= AUXILIARIES:
        return EditKind.VERB_FORM
    if [verb_base(w) for w in gone if w not in AUXILIARIES] == [verb_base(w) for w in come if w not in AUXILIARIES]:
        return EditKind.VERB_FORM
    return EditKind.OTHER


def _kind_of_word(old: str, new: str) -> EditKind:
    if any({old, new} <= group for group in AGREEING) or are_numbers_of_one_word(old, new):
        return EditKind.AGREEMENT
    if {old, new} <= AUXILIARIES or are_verb_forms(old, new):
        return EditKind.VERB_FORM
    alike = SequenceMatcher(None, old, new, autojunk=False).ratio() >= _ALIKE
    return EditKind.SPELLING if alike else EditKind.OTHER


def _joined_moves(text: str, edits: Sequence[Edit]) -> list[Edit]:
    """Why: to a reader, a word deleted here and inserted there is one change."""
    joined: list[Edit] = []
    for edit in edits:
        if joined and (whole := _move(text, joined[-1], edit)):
            joined[-1] = whole
        else:
            joined.append(edit)
    return joined


def _move(text: str, first: Edit, second: Edit) -> Edit | None:
    between = text[first.end : second.start]
    old = [w.casefold() for w in _words(first.original + " " + second.original)]
    new = [w.casefold() for w in _words(first.replacement + " " + second.replacement)]
    if not old or sorted(old) != sorted(new) or len(_words(between)) > _MAX_MOVED or "\n" in between:
        return None
    if sorted(_words(first.original.casefold())) == sorted(_words(first.replacement.casefold())):  # nothing moves
        return None
    exchanged = (_words(e.original) and edit_kind(e.original, e.replacement) in _EXCHANGED for e in (first, second))
    if all(exchanged):
        return None
    original = text[first.start : second.end]
    return Edit(first.start, second.end, original, first.replacement + between + second.replacement)


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _bare(words: Iterable[str]) -> list[str]:
    return ["".join(c for c in word if c.isalnum()) for word in words]


def _difference(one: Sequence[str], other: Sequence[str]) -> list[str]:
    return list((Counter(one) - Counter(other)).elements())
