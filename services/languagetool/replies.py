"""What is answered under /v2, in LanguageTool's shapes: every field that its clients look for is always there."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from ragspec.rag.characters import Utf16Offsets
from ragspec.rag.grammar.edits import EditKind
from services.languagetool.correcting import Corrected
from services.languagetool.languages import LANGUAGES, Detected
from services.languagetool.matches import matches_of
from services.languagetool.rules import RULES

API_VERSION = 1
_NOT_IN_TIME = "There was not enough time for all of the text, or the correction of a sentence had no end"


def software() -> dict[str, Any]:
    own = version("ragspec")
    return {
        "name": "ragspec",
        "version": own,
        "buildDate": own,
        "apiVersion": API_VERSION,
        "premium": False,
        "premiumHint": "",
        "status": "",
    }


def check_reply(language: str, found: Detected, corrected: Corrected | None) -> dict[str, Any]:
    """`language`: the code asked for; `corrected` None: the text is in a language that is not corrected."""
    incomplete = ""
    if corrected is None:
        incomplete = f"The text seems to be {found.name}, and only English is corrected"
    elif corrected.correction.unfinished:
        incomplete = _NOT_IN_TIME
    code = language if language in LANGUAGES else found.code
    reply: dict[str, Any] = {
        "software": software(),
        "warnings": {"incompleteResults": bool(incomplete)},
        "language": {
            "name": LANGUAGES.get(code, found.name),
            "code": code,
            "detectedLanguage": {
                "name": found.name,
                "code": found.code,
                "confidence": found.confidence,
                "source": "words",
            },
        },
        "matches": [],
        "sentenceRanges": [],
        "extendedSentenceRanges": [],
    }
    if incomplete:
        reply["warnings"]["incompleteResultsReason"] = incomplete
    if corrected is not None:
        offsets = Utf16Offsets(corrected.correction.text)
        ranges = [[offsets.units(start), offsets.units(end)] for start, end in corrected.correction.sentences]
        rates = [{"language": found.code.split("-")[0], "rate": found.confidence}]
        reply["matches"] = matches_of(corrected.correction, corrected.marked, offsets)
        reply["sentenceRanges"] = ranges
        reply["extendedSentenceRanges"] = [
            {"from": start, "to": end, "detectedLanguages": rates} for start, end in ranges
        ]
    return reply


def languages_reply() -> list[dict[str, str]]:
    return [{"name": name, "code": code.split("-")[0], "longCode": code} for code, name in LANGUAGES.items()]


def info_reply() -> dict[str, Any]:
    own = software()
    kept = {name: own[name] for name in ("name", "version", "buildDate", "premium")}
    return {"software": kept | {"commit": own["version"]}}


def config_reply(max_text_chars: int) -> dict[str, Any]:
    return {
        "software": software(),
        "parameter": {"maxTextLength": max_text_chars},
        "rules": [_rule(kind) for kind in RULES],
    }


def _rule(kind: EditKind) -> dict[str, Any]:
    rule = RULES[kind]
    return {
        "ruleId": rule.id,
        "description": rule.description,
        "categoryId": rule.category,
        "categoryName": rule.category_name,
        "locQualityIssueType": rule.issue,
        "isDictionaryBasedSpellingRule": False,
        "isOfficeDefaultOn": True,
        "isOfficeDefaultOff": False,
    }
