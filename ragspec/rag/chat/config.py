"""Settings of a chat."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ragspec.config import ConfigSection


class ChatConfig(ConfigSection):
    """`rewriter` rewrites a follow-up question before retrieval. `rules`: with rules; `model`: with the target, in at most
    `rewriter_tokens` tokens, or with rules if its output is unusable; `auto`: `model` if the target has at least
    `least_rewriter_parameters`, else `rules`; `off`: not at all.

    `history`: whether the prompt shows earlier turns; `auto` shows them. `max_carried`: passages of the latest
    `carried_turns` answers that are added to those of a follow-up question. `answer_without_index`: answer without passages, and
    say so, if the index does not answer; otherwise that is an error.
    """

    rewriter: Literal["auto", "rules", "model", "off"] = "auto"
    least_rewriter_parameters: int = Field(1_000_000_000, ge=0)
    rewriter_tokens: int = Field(64, ge=1, le=1024)
    history: Literal["auto", "shown", "hidden"] = "auto"
    max_carried: int = Field(1, ge=0, le=16)
    carried_turns: int = Field(2, ge=0, le=16)
    answer_without_index: bool = False
