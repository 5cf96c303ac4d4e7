"""Questions asked in a stream, and many in a flow."""

import asyncio
from collections.abc import Sequence
from typing import Any

from ragspec.core import SamplingParams
from ragspec.rag.answer import Answer
from ragspec.rag.chat.chat import ChatSession
from ragspec.rag.pipeline import AsyncPipeline, Pipeline
from ragspec.rag.pipeline_stages import ItemResult
from ragspec.rag.steps import Question


def streamed(
    pipeline: Pipeline | ChatSession, question: str, params: SamplingParams, **options: Any
) -> tuple[str, Answer]:
    *pieces, answer = pipeline.stream(question, params, **options)
    assert isinstance(answer, Answer)
    return "".join(map(str, pieces)), answer


def run(flow: AsyncPipeline, asked: Sequence[Question]) -> dict[str, ItemResult[tuple[Answer, ...]]]:
    async def collect() -> list[ItemResult[tuple[Answer, ...]]]:
        return [finished async for finished in flow.run(asked)]

    finished = asyncio.run(asyncio.wait_for(collect(), 120))
    assert len({each.id for each in finished}) == len(finished)
    return {each.id: each for each in finished}
