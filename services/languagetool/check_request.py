"""A LanguageTool check request: the fields of a form or query string, validated with LanguageTool's error messages.

Owns the fields of /v2/check, and the rules by whose names clients enable and disable kinds of edits. Never reads HTTP and never
corrects.

    >>> CheckRequest.of({"text": "He go.", "language": "en-US"})
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ragspec.core import check_text
from ragspec.errors import InputError
from ragspec.rag.grammar.edits import EditKind
from ragspec.rag.grammar.markup import TextPart
from services.errors import ApiError
from services.languagetool.languages import AUTO, DEFAULT, LANGUAGES
from services.request_limits import check_num_items

_RENAMED = {
    "enabled": "You specified 'enabled' but the parameter is now called 'enabledRules' in v2 of the API",
    "disabled": "You specified 'disabled' but the parameter is now called 'disabledRules' in v2 of the API",
    "preferredvariants": "You specified 'preferredvariants' but the parameter is now called 'preferredVariants' "
    "(uppercase 'V') in v2 of the API",
    "autodetect": "You specified 'autodetect' but automatic language detection is now activated with 'language=auto' "
    "in v2 of the API",
}
_LEVELS = ("default", "picky")
_MAX_ITEMS = 100_000
"""Of the field `data`."""
_TEXT_LEVEL_ONLY = "textLevelOnly"
"""A mode in which editors send the text again for rules that span sentences; there are no such rules here."""


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


_GRAMMAR = ("grammar", "GRAMMAR", "Grammar")
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
                raise ApiError(400, hint)
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
    if not isinstance(node, dict) or not all(isinstance(value, str) for value in node.values() if value is not None):
        _refuse(node, "must be an object of strings")
    node = {name: value for name, value in node.items() if value is not None}
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
        raise ApiError(
            400, "Missing 'language' parameter, e.g. 'language=en-US' for American English or 'language=auto'"
        )
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
    names = ("enabledRules", "disabledRules", "enabledCategories", "disabledCategories")
    enabled, disabled, enabled_categories, disabled_categories = (_list_of(fields, name) for name in names)
    only = fields.get("enabledOnly", "").lower() in ("true", "yes")
    if only and not (enabled or enabled_categories):
        raise ApiError(400, "You must specify enabled rules or categories when using 'enabledOnly=true'")
    if only and (disabled or disabled_categories):
        raise ApiError(400, "You cannot specify disabled rules or categories using 'enabledOnly=true'")
    if fields.get("mode") == _TEXT_LEVEL_ONLY:
        return frozenset()
    return enabled_kinds(enabled, disabled, enabled_categories, disabled_categories, enabled_only=only)


def _list_of(fields: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in fields.get(name, "").split(",") if item.strip())


def enabled_kinds(
    enabled_rules: Collection[str],
    disabled_rules: Collection[str],
    enabled_categories: Collection[str],
    disabled_categories: Collection[str],
    *,
    enabled_only: bool,
) -> frozenset[EditKind] | None:
    """The kinds of edits to correct; None: all. Ignores rules and categories of other servers."""
    kinds = {
        kind
        for kind, rule in RULES.items()
        if (rule.id in enabled_rules or rule.category in enabled_categories)
        or not (enabled_only or rule.id in disabled_rules or rule.category in disabled_categories)
    }
    return None if len(kinds) == len(RULES) else frozenset(kinds)
