"""Closed classes of English words, and inflections of one word. It classifies edits and never makes one.

>>> are_verb_forms("go", "went")
True
"""

from __future__ import annotations

import functools

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
