"""The rules that LanguageTool's clients see: one for each kind of edit, with an id, a category and a type of issue.

Owns their names, by which clients enable and disable rules and categories.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from ragspec.rag.grammar.edits import EditKind


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
