"""Sentence boundaries in many scripts. Knows no document and no passage.

>>> sentences("It rained. Then it stopped.")
[(0, 10), (11, 27)]
"""

import re

_ABBREVIATIONS = frozenset(
    # English
    "dr mr mrs ms prof st jr sr vs cf al fig figs eq sec ch vol pp ed eds approx dept inc ltd co corp gen rep sen gov lt col sgt "
    "capt rev hon messrs mme mlle mt ft e.g i.e viz resp incl ca jan feb mar apr jun jul aug sep sept oct nov dec "
    # German
    "bzw bspw sog evtl ggf ggfs vgl inkl exkl zzgl abzgl geb verh hrsg dipl frl insb insbes allg urspr mio mrd jh jhdt okt dez "
    # French
    "mgr éd boul bd janv févr avr juil déc p.ex "
    # Spanish
    "sra srta sres dra profa dña avda núm pág págs gral lic arq aprox depto excmo ilmo admón dic abr p.ej ej "
    # Italian
    "sigg dott avv ing geom egr spett pagg ott "
    # Portuguese
    "exmo exma ilma fev "
    # Dutch
    "dhr mevr drs jhr bijv blz zgn mln mld nl".split()
)
"""Whose full stops end no sentence. Words that also end English sentences ("min.", "art.", "set.") are left out, or count only
before a number. An ambiguous text stays one sentence: a quote that is too long harms less than a quote that is cut."""
_CASED_ABBREVIATIONS = frozenset("Hr Hrn Fr MM Mw Ir EE Abs Bd Tel Sig Ud Uds Vd Vds".split())
"""Abbreviations only in this case: 5 mm, 300 MW."""

_BEFORE_NUMBERS = frozenset(
    "no nos art para p nr str tel abb kap cap tab ziff rn núm pág págs pag pagg blz tav".split()
)
_PAIRS = frozenset(
    "z.b d.h u.a u.ä o.ä o.g i.d d.r z.t z.zt v.a u.u s.o s.u n.chr v.chr p.ex p.ej a.c d.c n.b o.a".split()
)
"""Written with or without a space inside."""

_ARTICLES = frozenset("der das den dem des vom zum zur im beim ins".split())
_DAYS = frozenset("am ab bis seit den dem der vom zum".split())
_MONTHS = frozenset("januar jänner februar märz mai juni juli oktober dezember jahrhundert jahrhunderts".split())
_SHARED_MONTHS = frozenset("april august september november".split())  # English too

_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_LAST_WORD = re.compile(r"[\w.]*\Z")
_LAST_PAIR = re.compile(r"(?<![\w'’])([^\W\d_]{1,3})\.[ \u00a0\u202f]?([^\W\d_]{1,3})\Z")
_ORDINAL = re.compile(r"(?:([^\W\d_]+)\s+)?(\d{1,2})\Z")
_NEXT_WORD = re.compile(r"[^\W\d_]{1,12}")
_LONGEST_ABBREVIATION = 12
_LONGEST_PAIR = 24


def is_abbreviation(text: str, start: int, stop: int, following: int) -> bool:
    """Whether the full stop at `stop` belongs to its word; `start` begins the sentence, `text[following]` the next word."""
    head = text[following]
    found = _LAST_WORD.search(text, max(start, stop - _LONGEST_ABBREVIATION), stop)
    word = found.group() if found else ""
    if not word:
        return False
    if _INITIALS.fullmatch(word) and (word[0].isupper() or "." in word):
        return word != "I"
    lower = word.lower()
    if lower in _ABBREVIATIONS or word in _CASED_ABBREVIATIONS:
        return True
    if head.isdigit():
        return lower in _BEFORE_NUMBERS or word == "max"  # Max. may be a name
    before = text[max(start, stop - _LONGEST_PAIR) : stop]
    found = _NEXT_WORD.match(text, following)
    next_word = found.group().lower() if found else ""
    if word.isdigit():
        return head.isupper() and _is_ordinal(before, next_word)
    pair = _LAST_PAIR.search(before)
    after_apostrophe = before[: -len(word)].endswith(("'", "’"))  # ain't
    if not after_apostrophe and f"{lower}.{next_word}" in _PAIRS:
        return True
    return pair is not None and f"{pair[1]}.{pair[2]}".lower() in _PAIRS


def _is_ordinal(before: str, noun: str) -> bool:
    """German: "am 3. Oktober", "im 19. Jahrhundert", "der 2. Weltkrieg"."""
    found = _ORDINAL.search(before)
    if not found:
        return False
    article = (found[1] or "").lower()
    return article in _ARTICLES or noun in _MONTHS or (article in _DAYS and noun in _SHARED_MONTHS)


Span = tuple[int, int]

_GREEK = "Ͱ-Ͽἀ-῿"
_BREAK = re.compile(
    # Why the first character before the alternatives: the search skips to it, and no alternative is tried elsewhere
    "[.!?…。！？｡।॥؟።፧፨։៕။។۔;\u037e\n](?:"
    r"(?P<stop>(?<=[.!?…])(?<![.!?…]{2})[.!?…]*+[\"')\]}”’»“«‹›]*+(?:[ \u00a0\u202f]»)?+)(?=\s)"  # `_ends_sentence` decides
    r"|(?P<wide>(?<=[。！？｡])[。！？｡]*+[」』”’）]*+)"  # an ideographic full stop needs no space after it
    # nor do those of South Asia, Ethiopia, Armenia
    r"|(?P<script>(?:(?<=[।॥؟።፧፨։៕။])|(?<=។)(?!ល។)|(?<=۔)(?=\s))[।॥؟!?…]*+[\"')\]}”’»]*+)"
    rf"|(?P<greek>(?<=[{_GREEK}][;\u037e])[;\u037e]*+[\"')\]}}”’»]*+)(?=\s+[\"'(“‘«]*+[{_GREEK}])"
    r"|(?P<lines>(?<=\n)(?=[ \t]*\n|[ \t]*(?:[-*•] |\d{1,3}[.)] |>>> |=====|-----|\| [^\n]*\|[ \t]*(?:\n|\Z)))))"
    # a blank line, or a line that is an item, a doctest, a rule or a row of a table
)
_OPENING = "\"'(“‘«"


def sentences(text: str, start: int = 0, end: int | None = None) -> list[Span]:
    """Half-open character spans of the sentences of `text[start:end]`, in order, without the white space around them.

    Everything but white space lies in exactly one span. Abbreviations, initials and decimals do not end a sentence; blank
    lines, list items, doctest prompts and rows of tables do.
    """
    end = len(text) if end is None else end
    spans: list[Span] = []
    for match in _BREAK.finditer(text, start, end):
        if _ends_sentence(text, start, end, match):
            _append(spans, text, start, match.end())
            start = match.end()
    _append(spans, text, start, end)
    return spans


def _ends_sentence(text: str, start: int, end: int, match: re.Match[str]) -> bool:
    if match.lastgroup not in ("stop", "greek"):
        return True
    following = lstrip(text, match.end(), end)
    if following == end or text.count("\n", match.end(), following) > 1:
        return True
    head = text[following]
    if match.lastgroup == "greek":
        return not text[following : following + 3].lstrip(_OPENING)[:1].islower()
    if head.islower():
        return False
    if match.group() != ".":
        return True
    return not is_abbreviation(text, start, match.start(), following)


def _append(spans: list[Span], text: str, start: int, end: int) -> None:
    start = lstrip(text, start, end)
    end = rstrip(text, start, end)
    if start < end:
        spans.append((start, end))


def lstrip(text: str, start: int, end: int) -> int:
    while start < end and text[start].isspace():
        start += 1
    return start


def rstrip(text: str, start: int, end: int) -> int:
    while end > start and text[end - 1].isspace():
        end -= 1
    return end
