"""A text to correct, and how: plain data that a job may check before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from ragspec.core import SamplingParams
from ragspec.errors import InputError
from ragspec.rag.grammar.edit_filters import CAREFUL, Guard
from ragspec.rag.grammar.markup import MarkedText, TextPart
from ragspec.speculation import ON, Speculation

DEFAULTS = SamplingParams(max_tokens=256)

_HARMLESS = {"n": 1, "stop": (), "ignore_eos": False, "min_tokens": 0, "logprobs": None}


@dataclass(frozen=True, slots=True)
class Manuscript:
    """A text to correct. `id` names its requests; `params.max_tokens` bounds the correction of one sentence.

    Every sentence has a seed of its own, made from `params.seed` and its number. `parts`: the text once more, with what of it is
    markup; None: found in the text itself. `guard`: what is not corrected.
    Raises: InputError for parameters that would cut a text short or write it several times.
    """

    id: str
    text: str
    params: SamplingParams = DEFAULTS
    tenant: str = ""
    speculation: Speculation = ON
    guard: Guard = CAREFUL
    parts: tuple[TextPart, ...] | None = None

    def __post_init__(self) -> None:
        for name, harmless in _HARMLESS.items():
            if (given := getattr(self.params, name)) != harmless:
                raise InputError(f"{name} {given!r} means nothing for a correction, which ends where its sentence does")
        if self.parts is not None and "".join(part.text for part in self.parts) != self.text:
            raise InputError("the parts of a text must be the text when joined")

    def marked(self) -> MarkedText:
        """With its markup told apart."""
        return MarkedText.read(self.text) if self.parts is None else MarkedText(self.parts)
