"""What one kind of batch job does with its rows: the part that jobs differ in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

from pipelines.batch.machines import Serving
from pipelines.batch.records import Written
from pipelines.batch.rows import Form, Row
from ragspec.config import PipelineConfig
from ragspec.core import SamplingParams
from ragspec.rag.pipeline_stages import Named, Stages


class Asking(NamedTuple):
    """What decides how a row is asked, beside the row."""

    config: PipelineConfig
    defaults: SamplingParams
    seed: int

    def params(self, row: Row) -> SamplingParams:
        """Raises: InputError."""
        return row.params(self.defaults, self.seed)


class Task(ABC):
    """What a job does with a row. Light to make: what is heavy is imported where it is used."""

    form: ClassVar[Form]
    rows: ClassVar[str]
    """What its rows are called, in the plural."""
    sections: ClassVar[tuple[str, ...]]
    """Of the configuration, those that decide a text."""

    @abstractmethod
    def pinned(self, config: PipelineConfig) -> AbstractContextManager[PipelineConfig]:
        """The configuration, made so that nothing it names changes while the job runs. Raises: ConfigError, StoreError."""

    @abstractmethod
    def what_decides(self, config: PipelineConfig) -> dict[str, Any]:
        """Everything but rows, seed, target and parameters that decides a text."""

    @abstractmethod
    def stages(self, served: Serving) -> Stages:
        """From `asked` to what `written` takes."""

    @abstractmethod
    def asked(self, row: Row, asking: Asking) -> Named:
        """The row as the stages take it; it has the row's id."""

    @abstractmethod
    def written(self, result: Any) -> Written:
        """Raises: EngineError for a result that is not to be written down: a part of what it takes was missing."""
