"""Settings of an index, its encoder and its searches. Other modules import them from `ragspec.config`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

When = Literal["always", "auto", "never"]


class ConfigSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def over(self, defaults: Self) -> Self:
        """These settings, with the defaults for those that were not given."""
        return defaults.model_copy(update={name: getattr(self, name) for name in self.model_fields_set})


class ChunkingConfig(ConfigSection):
    """Passages of whole sentences, overlapping by whole sentences."""

    max_chars: int = Field(600, ge=40)
    """Characters of a passage at most. Longer: more context for each hit, fewer passages in a prompt."""
    overlap_chars: int = Field(0, ge=0)
    """Characters that neighbouring passages share. More: fewer answers cut in two, a larger index."""
    max_tokens: int | None = Field(None, ge=32)
    """Encoder tokens of a passage with its title and heading at most; null: as many as the encoder reads."""


class EncoderConfig(ConfigSection):
    """The model that turns texts into vectors. An index keeps the encoder it was built with."""

    model: str = "all-MiniLM-L6-v2"
    """A sentence-transformers path or name; "all-MiniLM-L6-v2" is the packaged file, accepted only with its published
    hash."""
    max_tokens: int = Field(256, ge=8)
    """Tokens read of a text, if the model reads as many. More: longer passages are understood whole, at more time."""


class DenseConfig(ConfigSection):
    """How a segment of an index finds its nearest vectors."""

    kind: Literal["exact", "hnsw", "ivf"] = "exact"
    """"exact" compares every vector; FAISS's "hnsw" and "ivf" are faster on large segments, and may miss passages."""
    factory: str = ""
    """A FAISS factory string in place of the one that `ragspec.retrieval.search.faiss_index` chooses."""
    search_width: int = Field(0, ge=0, le=65_536)
    """FAISS's efSearch (hnsw) or nprobe (ivf); 0: chosen by the segment's size. Wider: fewer passages missed, slower."""


Language = Literal[
    "auto", "none", "arabic", "danish", "dutch", "english", "finnish", "french", "german", "greek", "hungarian", "italian",
    "norwegian", "portuguese", "romanian", "russian", "spanish", "swedish", "tamil", "turkish",
]  # fmt: skip

NO_STOP_WORDS = {"none", "arabic", "greek", "romanian", "tamil", "turkish"}


class AnalyzerConfig(ConfigSection):
    """How word search splits texts into terms."""

    language: Language = "auto"
    """Language of stemming and accent folding; "none": neither; "auto": English, and beside it the language of each text that
    its script or commonest words tell."""
    stop_words: bool = False
    """Leave out the language's commonest words: a smaller index, but "to be or not to be" is not found."""

    @model_validator(mode="after")
    def _check_stop_words(self) -> AnalyzerConfig:
        if self.stop_words and self.language in NO_STOP_WORDS:
            raise ValueError(f"there are no stop words for language {self.language!r}")
        return self


class IndexConfig(ConfigSection):
    """How documents become an index. An index keeps the settings it was built with."""

    chunking: ChunkingConfig = ChunkingConfig()
    dense: DenseConfig = DenseConfig()
    words: AnalyzerConfig = AnalyzerConfig()


class RetrieverConfig(ConfigSection):
    """How passages are found."""

    index_dir: str = ""
    """Folder of the index."""
    pointer: str = ""
    """Content of the index's file CURRENT for a generation to stay with; empty: always the current generation."""
    num_passages: int = Field(3, ge=1, le=64)
    """Passages shown to the target; unset: 5 in the layout "free". More: more is found, prompts take longer."""
    when: When = "auto"
    """Which messages of chats are searched for: "always", "never", or "auto": all but greetings, thanks, texts to correct, small
    talk and requests about the conversation."""
    mode: Literal["dense", "sparse", "hybrid"] = "hybrid"
    """"dense": nearest in meaning; "sparse": best by words (BM25); "hybrid": both, fused."""
    fusion: Literal["learned", "rank"] = "learned"
    """"rank": reciprocal ranks of both lists. "learned" reorders the first 32 of these by learned weights of ranks and of the
    places of the question's words, and moves repetitions behind."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where vectors are searched; "auto": on a GPU if FAISS finds one."""
    gpu_memory_bytes: int | None = Field(None, ge=0)
    """GPU memory that the index takes at most; null: no limit. Segments beyond it are searched on the CPU, which is
    slower."""
    reranker: str = ""
    """Name or path of a cross-encoder that reorders the first 32 passages: better order, slower;
    empty: none."""
    fail_closed: bool = True
    """If a shard cannot be searched: an error; false: an answer from the other shards that names the missing segments."""
    abstain_below: float = Field(0.0, ge=0.0, lt=1.0)
    """A question whose best passage scores less is answered with "nothing is close" and the nearest titles; 0: off. 0.12
    loses 3 in 100 answerable SQuAD questions, catches 60 of 100 others. Unset: 0.12 in the layout "free" of targets without
    a fit. Needs mode hybrid; calibrated for the default encoder."""
    expand_passages: int = Field(0, ge=0, le=8)
    """Neighbours before and after each passage that the prompt shows with it, if all fit. More context, longer prompts; the
    default target's adapter was trained with 0."""

    @model_validator(mode="after")
    def _check_abstention(self) -> Self:
        if self.abstain_below and self.mode != "hybrid":
            raise ValueError("abstain_below needs mode hybrid, which compares both meaning and words")
        return self
