"""Quotes that are verbatim by construction: the grammar of answers whose beginning is a quote.

The quote is a run of whole words of a passage, and the number behind it is that passage's. Everything behind the number is
free, and so is an answer that begins in another way. Drafts change no token: the grammar holds with speculation and without.

    >>> Request(..., grammar=answer_grammar(params, speculation, prompt.passages))
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ragspec.core import Passage, SamplingParams
from ragspec.rag.citations import pieces
from ragspec.speculation import AcceptanceRule, Speculation

_FREE = r"""
FREE: /(\s*[^"\s](.|\n)*)?/
REST: /(.|\n)*/
"""


def answer_grammar(
    params: SamplingParams, speculation: Speculation, passages: Sequence[Passage], *, quotes_first: bool = True
) -> str:
    """The grammar of an answer from passages; empty where quotes are free.

    They are free if they are asked to be, where answers do not begin with quotes, beside a JSON schema or `ignore_eos`, and under
    the published acceptance rules.
    """
    is_free = (
        not quotes_first or params.json_schema or params.ignore_eos or speculation.rule is not AcceptanceRule.KEYED
    )
    if is_free or not params.verbatim_quotes or not passages:
        return ""
    return quote_grammar([passage.text for passage in passages])


def quote_grammar(passages: Sequence[str]) -> str:
    """A grammar in llguidance's dialect of Lark. `passages`: numbered from 1, as in the prompt."""
    numbered = list(enumerate(passages, start=1))
    rules = [f'/\\s*/ "\\"" PASSAGE_{number} "\\" [{number}]" REST' for number, _ in numbered]
    words = [f'PASSAGE_{n}: %regex {{ "substring_chunks": {json.dumps(pieces(text))} }}' for n, text in numbered]
    return f"start: {' | '.join(['FREE', *rules])}{_FREE}" + "\n".join(words)
