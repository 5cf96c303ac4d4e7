"""/v2/check in LanguageTool's format.

Owns the request's fields with LanguageTool's error messages, the reply with every field that its clients read, the rules by whose
names clients enable and disable kinds of edits, and the path from edits to matches. Offsets of matches count UTF-16 code units of
the text with its markup. A match covers at least a word where possible, because clients underline it: an insertion is joined with
a word beside it. Applying the matches from the last to the first gives the corrected text. Never reads HTTP and never corrects.

    >>> CheckRequest.of({"text": "He go.", "language": "en-US"})
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, NamedTuple, NoReturn

from ragspec.core import check_text
from ragspec.errors import InputError
from ragspec.rag.citations import Utf16Offsets
from ragspec.rag.grammar.correction import Correction
from ragspec.rag.grammar.edits import Edit, EditKind, edit_message
from ragspec.rag.grammar.markup import MarkedText, TextPart
from ragspec.rag.languages import GuessedLanguage
from ragspec.retrieval.chunking import Span
from services.errors import ApiError
from services.languagetool.corrector import AUTO, DEFAULT, LANGUAGES, Corrected
from services.limits import check_num_items

_RENAMED = {
    "enabled": "the parameter is now called 'enabledRules'",
    "disabled": "the parameter is now called 'disabledRules'",
    "preferredvariants": "the parameter is now called 'preferredVariants' (uppercase 'V')",
    "autodetect": "automatic language detection is now activated with 'language=auto'",
}
_LEVELS = ("default", "picky")
_MAX_ITEMS = 100_000
"""Most items of the JSON in the field `data`."""
_TEXT_LEVEL_ONLY = "textLevelOnly"
"""A mode in which editors send the text again for rules that span sentences; there are no such rules here."""
_GRAMMAR = ("grammar", "GRAMMAR", "Grammar")
_CONTEXT_CHARS = 40
"""Characters shown before and after a match."""
_WORD_AFTER = re.compile(r"\w+|\S")
_WORD_BEFORE = re.compile(r"(?:\w+|\S)\Z")
_MAX_WORD_CHARS = 100
_OTHER_LANGUAGE = "The text seems to be {}, and only English is corrected"
_UNFINISHED = "There was not enough time for all of the text, or the correction of a sentence had no end"
_REWRITTEN = "The model rewrote {} of the sentences instead of correcting them; these were not checked"
_UNPROVEN = "The model left most sentences of a test as wrong as they were, so one without a match may be wrong too"
_VERSION = version("ragspec")
_SOFTWARE = {
    "name": "ragspec",
    "version": _VERSION,
    "buildDate": _VERSION,
    "apiVersion": 1,
    "premium": False,
    "premiumHint": "",
    "status": "",
}


class Rule(NamedTuple):
    """`issue` is a type of the Internationalization Tag Set; editors choose colours by it."""

    id: str
    description: str
    issue: str
    category: str
    category_name: str

    def as_json(self) -> dict[str, Any]:
        """The field `rule` of a match."""
        category = {"id": self.category, "name": self.category_name}
        return {"id": self.id, "description": self.description, "issueType": self.issue, "category": category}


RULES = {
    EditKind.SPELLING: Rule("RAGSPEC_SPELLING", "Possible spelling mistake", "misspelling", "TYPOS", "Possible Typo"),
    EditKind.AGREEMENT: Rule("RAGSPEC_AGREEMENT", "Agreement in number or person", *_GRAMMAR),
    EditKind.ARTICLE: Rule("RAGSPEC_ARTICLE", "Use of articles", *_GRAMMAR),
    EditKind.PREPOSITION: Rule("RAGSPEC_PREPOSITION", "Use of prepositions", *_GRAMMAR),
    EditKind.VERB_FORM: Rule("RAGSPEC_VERB_FORM", "Form of a verb", *_GRAMMAR),
    EditKind.WORD_ORDER: Rule("RAGSPEC_WORD_ORDER", "Order of words", *_GRAMMAR),
    EditKind.PUNCTUATION: Rule(
        "RAGSPEC_PUNCTUATION", "Punctuation and spacing", "typographical", "PUNCTUATION", "Punctuation"
    ),
    EditKind.OTHER: Rule("RAGSPEC_OTHER", "A better way to say it", "uncategorized", "MISC", "Miscellaneous"),
}


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """A text to check. `parts` None: a text without annotation. `kinds` None: all kinds of edits."""

    text: str
    parts: tuple[TextPart, ...] | None
    language: str
    variant: str
    kinds: frozenset[EditKind] | None
    dictionaries: tuple[str, ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> CheckRequest:
        """Raises: ApiError 400."""
        for name, hint in _RENAMED.items():
            if name in fields:
                raise ApiError(400, f"You specified '{name}' but {hint} in v2 of the API")
        text, parts = _text_of(fields)
        language, variant = _language_of(fields)
        level = fields.get("level", _LEVELS[0])
        if level.lower() not in _LEVELS:
            raise ApiError(400, f"If 'level' is set, it must be set to '{_LEVELS[0]}' or '{_LEVELS[1]}', not '{level}'")
        return cls(text, parts, language, variant, _kinds_of(fields), _list_of(fields, "dicts"))


def _text_of(fields: Mapping[str, str]) -> tuple[str, tuple[TextPart, ...] | None]:
    if "text" in fields and "data" in fields:
        raise ApiError(400, "Set only 'text' or 'data' parameter, not both")
    if "text" in fields:
        return _checked(fields["text"]), None
    if "data" not in fields:
        raise ApiError(400, "Missing 'text' or 'data' parameter")
    check_num_items(fields["data"].encode("utf-8", "replace"), _MAX_ITEMS)
    try:
        data = json.loads(fields["data"])
    except (ValueError, RecursionError) as cause:
        raise ApiError(400, f"Could not parse 'data' as JSON: {cause}") from None
    if isinstance(data, dict) and isinstance(data.get("annotation"), list):
        if "text" in data:
            raise ApiError(400, "'data' key in JSON requires either 'text' or 'annotation', not both")
        parts = annotated(data["annotation"])
        _checked("".join(part.read_as for part in parts))
        return _checked("".join(part.text for part in parts)), parts
    if isinstance(data, dict) and isinstance(data.get("text"), str):
        return _checked(data["text"]), None
    raise ApiError(400, "'data' key in JSON requires 'text' or 'annotation' key")


def annotated(nodes: list[Any]) -> tuple[TextPart, ...]:
    """The parts of an annotated text. Raises: ApiError 400."""
    return tuple(map(_part, nodes))


def _part(node: Any) -> TextPart:
    """Ignores all other keys, as LanguageTool does: the npm package annotatedtext adds an object `offset` to every node."""
    if not isinstance(node, dict):
        _refuse(node, "must be an object")
    node = {name: node[name] for name in ("text", "markup", "interpretAs") if node.get(name) is not None}
    if not all(isinstance(value, str) for value in node.values()):
        _refuse(node, "must hold strings")
    if "text" in node and "markup" in node:
        _refuse(node, "has both 'text' and 'markup', of which only one is supported")
    if "text" in node:
        if "interpretAs" in node:
            _refuse(node, "has 'interpretAs', which is for 'markup' only")
        return TextPart(node["text"])
    if "markup" not in node:
        _refuse(node, "has neither 'text' nor 'markup'")
    return TextPart(node["markup"], True, node.get("interpretAs", ""))


def _refuse(node: Any, what: str) -> NoReturn:
    shown = ", ".join(sorted(map(str, node))[:4])[:200] if isinstance(node, dict) else type(node).__name__
    raise ApiError(400, f"an item of 'annotation' ({shown}) {what}")


def _checked(text: str) -> str:
    """Accepts blank texts. Raises: ApiError 400 for lone surrogates and NUL."""
    try:
        return check_text(text, "the text") if text.strip() else text
    except InputError as cause:
        raise ApiError(400, str(cause)) from None


def _language_of(fields: Mapping[str, str]) -> tuple[str, str]:
    language = fields.get("language", "")
    if not language:
        reason = "Missing 'language' parameter, e.g. 'language=en-US' for American English or 'language=auto'"
        raise ApiError(400, reason)
    preferred = _list_of(fields, "preferredVariants")
    if preferred and language != AUTO and fields.get("multilingual", "").lower() != "true":
        raise ApiError(400, "You specified 'preferredVariants' but you didn't specify 'language=auto'")
    known = {code.lower(): code for code in LANGUAGES} | {AUTO: AUTO}
    if language.lower() not in known:
        codes = ", ".join([AUTO, *LANGUAGES])
        known_codes = f"is not a language code known to LanguageTool. Supported language codes are: {codes}"
        raise ApiError(400, f"'{language[:20]}' {known_codes}. This server corrects English only.")
    variants = [known[code.lower()] for code in preferred if code.lower() in known and code.lower() != AUTO]
    return known[language.lower()], variants[0] if variants else DEFAULT


def _kinds_of(fields: Mapping[str, str]) -> frozenset[EditKind] | None:
    """The kinds of edits to correct; None: all. Ignores rules and categories of other servers. Raises: ApiError 400."""
    names = ("enabledRules", "disabledRules", "enabledCategories", "disabledCategories")
    enabled, disabled, enabled_categories, disabled_categories = (_list_of(fields, name) for name in names)
    only = fields.get("enabledOnly", "").lower() in ("true", "yes")
    if only and not (enabled or enabled_categories):
        raise ApiError(400, "You must specify enabled rules or categories when using 'enabledOnly=true'")
    if only and (disabled or disabled_categories):
        raise ApiError(400, "You cannot specify disabled rules or categories using 'enabledOnly=true'")
    if fields.get("mode") == _TEXT_LEVEL_ONLY:
        return frozenset()
    kinds = frozenset(
        kind
        for kind, rule in RULES.items()
        if (rule.id in enabled or rule.category in enabled_categories)
        or not (only or rule.id in disabled or rule.category in disabled_categories)
    )
    return None if len(kinds) == len(RULES) else kinds


def _list_of(fields: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in fields.get(name, "").split(",") if item.strip())


def check_reply(language: str, found: GuessedLanguage, corrected: Corrected | None) -> dict[str, Any]:
    """`language`: the requested code. `corrected` None: the text is not English."""
    reason, matches, ranges = _incomplete(found, corrected), list[dict[str, Any]](), list[list[int]]()
    if corrected is not None:
        offsets = Utf16Offsets(corrected.correction.text)
        matches = matches_of(corrected.correction, corrected.marked, offsets)
        ranges = [[offsets.units(start), offsets.units(end)] for start, end in corrected.correction.sentences]
    code, confidence = language if language in LANGUAGES else found.code, found.confidence
    detected = {"name": found.name, "code": found.code, "confidence": confidence, "source": "words"}
    rates = [{"language": found.code.split("-")[0], "rate": confidence}]
    return {
        "software": _SOFTWARE,
        "warnings": {"incompleteResults": bool(reason)} | ({"incompleteResultsReason": reason} if reason else {}),
        "language": {"name": LANGUAGES.get(code, found.name), "code": code, "detectedLanguage": detected},
        "matches": matches,
        "sentenceRanges": ranges,
        "extendedSentenceRanges": [{"from": start, "to": end, "detectedLanguages": rates} for start, end in ranges],
    }


def _incomplete(found: GuessedLanguage, corrected: Corrected | None) -> str:
    """Why sentences may be wrong that have no match; empty if there is no reason."""
    if corrected is None:
        return _OTHER_LANGUAGE.format(found.name)
    if name := corrected.correction.other_language:
        return _OTHER_LANGUAGE.format(name)
    if corrected.correction.unfinished:
        return _UNFINISHED
    if num_rewritten := corrected.correction.num_rewritten:
        return _REWRITTEN.format(num_rewritten)
    return _UNPROVEN if corrected.is_unproven else ""


def languages_reply() -> list[dict[str, str]]:
    return [{"name": name, "code": code.split("-")[0], "longCode": code} for code, name in LANGUAGES.items()]


def software_reply() -> dict[str, Any]:
    kept = {name: _SOFTWARE[name] for name in ("name", "version", "buildDate", "premium")}
    return {"software": kept | {"commit": _VERSION}}


def config_reply(max_text_chars: int) -> dict[str, Any]:
    rules = [
        {
            "ruleId": rule.id,
            "description": rule.description,
            "categoryId": rule.category,
            "categoryName": rule.category_name,
            "locQualityIssueType": rule.issue,
            "isDictionaryBasedSpellingRule": False,
            "isOfficeDefaultOn": True,
            "isOfficeDefaultOff": False,
        }
        for rule in RULES.values()
    ]
    return {"software": _SOFTWARE, "parameter": {"maxTextLength": max_text_chars}, "rules": rules}


def matches_of(correction: Correction, marked: MarkedText, offsets: Utf16Offsets) -> list[dict[str, Any]]:
    """All edits as matches, in order."""
    starts = [start for start, _ in correction.sentences]
    found = []
    for edit in visible(correction.text, correction.edits, marked.text_spans()):
        number = bisect_right(starts, edit.start) - 1
        sentence = correction.sentences[max(0, number)]
        found.append(_match(correction.text, edit, sentence, offsets))
    return found


def visible(text: str, edits: Sequence[Edit], texts: Sequence[Span]) -> Iterator[Edit]:
    """The same edits, widened so that each covers text if possible. `texts`: the spans without markup."""
    at, starts = 0, [start for start, _ in texts]
    for number, edit in enumerate(edits):
        if edit.start == edit.end:
            following = edits[number + 1].start if number + 1 < len(edits) else len(text)
            low, high = _room(edit.start, texts, starts)
            edit = _widened(text, edit, max(at, low), min(following, high))
        at = edit.end
        yield edit


def _room(place: int, texts: Sequence[Span], starts: Sequence[int]) -> Span:
    """The span around `place` that a match may cover without covering markup."""
    number = bisect_right(starts, place) - 1
    if number < 0 or place > texts[number][1]:
        return place, place
    low, high = texts[number]
    if place == low and number and texts[number - 1][1] == place:  # adjacent texts count as one
        low = texts[number - 1][0]
    return low, high


def _widened(text: str, edit: Edit, low: int, high: int) -> Edit:
    """Joins an inserted word with the word after it, and any other insertion with the word before it."""
    place = edit.start
    before = _WORD_BEFORE.search(text, max(low, place - _MAX_WORD_CHARS), place)
    after = _WORD_AFTER.match(text, place, min(high, place + _MAX_WORD_CHARS))
    first = after if edit.replacement[:1].isalnum() else before
    chosen = first or before or after
    if chosen is None:
        return edit
    start, end = min(place, chosen.start()), max(place, chosen.end())
    replacement = text[start:place] + edit.replacement + text[place:end]
    return replace(edit, start=start, end=end, original=text[start:end], replacement=replacement)


def _match(text: str, edit: Edit, sentence: Span, offsets: Utf16Offsets) -> dict[str, Any]:
    rule, start = RULES[edit.kind], offsets.units(edit.start)
    return {
        "message": edit_message(edit),
        "shortMessage": rule.description,
        "replacements": [{"value": edit.replacement}],
        "offset": start,
        "length": offsets.units(edit.end) - start,
        "context": _context(text, edit),
        "sentence": text[slice(*sentence)],
        "type": {"typeName": "UnknownWord" if edit.kind is EditKind.SPELLING else "Other"},
        "rule": rule.as_json(),
        "ignoreForIncompleteSentence": False,
        "contextForSureMatch": 0,
    }


def _context(text: str, edit: Edit) -> dict[str, Any]:
    """The line around the match, with dots where it is cut."""
    begin, end = max(0, edit.start - _CONTEXT_CHARS), min(len(text), edit.end + _CONTEXT_CHARS)
    before = "..." if begin else ""
    around = re.sub(r"[\r\n\t]", " ", text[begin:end])
    shown = before + around + ("..." if end < len(text) else "")
    offsets, start = Utf16Offsets(shown), len(before) + edit.start - begin
    offset = offsets.units(start)
    return {"text": shown, "offset": offset, "length": offsets.units(start + edit.end - edit.start) - offset}
