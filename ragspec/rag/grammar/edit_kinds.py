"""The kind of each edit, and a message that explains it. English only.

Kinds come from the words alone. Owns closed classes of English words and the inflections of one word.

    >>> text = "He go to a old mill."
    >>> [edit.kind.value for edit in classify_edits(text, word_edits(text, "He goes to an old mill."))]
    ['agreement', 'article']
    >>> are_verb_forms("go", "went")
    True
"""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from ragspec.rag.grammar.edits import Edit, EditKind

ARTICLES = frozenset(("a", "an", "the"))
PREPOSITIONS = frozenset(
    "about above across after against along among around as at before behind below beneath beside besides between beyond by "
    "despite down during except for from in inside into like near of off on onto out outside over past since through throughout "
    "till to toward towards under until up upon via with within without".split()
)
AUXILIARIES = frozenset(
    "am is are was were be been being have has had having do does did done doing will would shall should can could may might "
    "must to not n't don't doesn't didn't isn't aren't wasn't weren't hasn't haven't hadn't won't wouldn't can't couldn't".split()
)
AGREEING = tuple(
    frozenset(group.split())
    for group in (
        "am is are 's 're| was were| have has| do does| don't doesn't| isn't aren't| wasn't weren't| haven't hasn't| this these|"
        "that those| i me| he him| she her| we us| they them| his their| her their| its their| it they| much many| less fewer|"
        "who whom| man men| woman women| child children| person people| foot feet| tooth teeth| mouse mice| life lives|"
        "wife wives| knife knives| leaf leaves| half halves| shelf shelves| self selves"
    ).split("|")
)
"""Groups of words that are chosen by number or person."""

_IRREGULAR = """
be am is are was were been being 's 're| have has had having| do did done doing| go went gone| say said
get got gotten| make made| know knew known| think thought| take took taken| see saw seen| come came| give gave given
find found| tell told| become became| leave left| feel felt| bring brought| begin began begun| keep kept| hold held
write wrote written| stand stood| hear heard| mean meant| meet met| run ran| pay paid| sit sat| speak spoke spoken
lie lay lain| lead led| grow grew grown| lose lost| fall fell fallen| send sent| build built| understand understood
draw drew drawn| break broke broken| spend spent| rise rose risen| drive drove driven| buy bought| wear wore worn
choose chose chosen| eat ate eaten| drink drank drunk| sing sang sung| swim swam swum| fly flew flown
forget forgot forgotten| catch caught| teach taught| fight fought| seek sought| sell sold| sleep slept| win won
throw threw thrown| show showed shown| steal stole stolen| hide hid hidden| ride rode ridden| shake shook shaken
bear bore born borne| bite bit bitten| blow blew blown| feed fed| freeze froze frozen| hang hung| lay laid| lend lent
light lit| ring rang rung| shine shone| shoot shot| sink sank sunk| slide slid| spring sprang sprung| stick stuck
strike struck| swear swore sworn| sweep swept| tear tore torn| wake woke woken| weep wept| wind wound| bend bent
bind bound| bleed bled| breed bred| burn burnt| deal dealt| dig dug| dream dreamt| flee fled
forgive forgave forgiven| learn learnt| beat beaten| will would| can could| may might| shall should
"""
_BASES = {form: group.split()[0] for group in _IRREGULAR.replace("\n", "|").split("|") for form in group.split()}
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
