"""Whether a message of a chat is searched for in the documents: by signs in its words, each with a weight (`routing.toml`).

Greetings, thanks, requests about the conversation, texts to correct and small talk are not searched for. A message without such a
sign is. The weights were fitted to `pipelines/benchmarks/documentation/tuning/routing.jsonl`.

    >>> needs_documents("Thanks, that was it!"), needs_documents("Thanks! And where is the log file?")
    (False, True)
"""

import re
import tomllib
from pathlib import Path

_MAX_READ_CHARS = 500
_SIGNS = tomllib.loads((Path(__file__).parent / "routing.toml").read_text(encoding="utf-8"))


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("{polite}", _SIGNS["polite"]).replace("\n", ""), re.IGNORECASE)


_COURTESY = _compiled(_SIGNS["courtesy"])
_PATTERNS = {name: (sign["weight"], _compiled(sign["pattern"])) for name, sign in _SIGNS["signs"].items()}


def needs_documents(text: str) -> bool:
    """Whether a message asks for something that documents may hold."""
    if len(text) > _MAX_READ_CHARS:  # up to a whole word
        text = text[:_MAX_READ_CHARS].rpartition(" ")[0] or text[:_MAX_READ_CHARS]
    text = text.strip()
    said = text[lead.end() :] if (lead := _COURTESY.match(text)) else text
    if not re.search(r"\w", said):
        return False
    if corrected := _PATTERNS["correction"][1].search(said):
        said = said[: corrected.end()]  # Why: the words of a text to correct are no sign
    weight = sum(weight for weight, pattern in _PATTERNS.values() if pattern.search(said))
    return bool(_SIGNS["intercept"] + weight <= 0.0)
