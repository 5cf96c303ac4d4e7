"""Settings of a chat."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ragspec.config import ConfigSection


class ChatConfig(ConfigSection):
    """`rewriter` makes a follow-up question standalone before it is looked up: by rules, or by the target itself; auto: by the
    target if it has `least_rewriter_parameters`; off: it is looked up as it is. The target may write `rewriter_tokens`
    tokens; where they are no question, the rules decide.

    `history`: whether the target reads earlier turns, or only the question made standalone; auto: unless it was trained on
    single questions, as those with a role for passages are, which would write an earlier answer again. Of what the latest
    `carried_turns` answers were given from, up to `max_carried` passages stand behind those of a question that leans on them.
    `answer_without_index`: where no passage can be looked up, answer without any and say so, instead of an error.
    """

    rewriter: Literal["auto", "rules", "model", "off"] = "auto"
    least_rewriter_parameters: int = Field(1_000_000_000, ge=0)
    rewriter_tokens: int = Field(64, ge=1, le=1024)
    history: Literal["auto", "shown", "hidden"] = "auto"
    max_carried: int = Field(1, ge=0, le=16)
    carried_turns: int = Field(2, ge=0, le=16)
    answer_without_index: bool = False
