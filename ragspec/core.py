"""Plain data that every part shares.

Dimension letters, used in every docstring and shape comment of the project:

    B sequences   T tokens      N tree nodes or rows of one forward   D depth of a tree
    V vocabulary  H hidden      K documents (passages)                E embedding

Nothing here computes. Sampling parameters stand in `ragspec.sampling_params`, and are found here too.
"""

from __future__ import annotations

import enum
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from ragspec.errors import InputError
from ragspec.sampling_params import LEAST_TEMPERATURE as LEAST_TEMPERATURE
from ragspec.sampling_params import SamplingOptions as SamplingOptions
from ragspec.sampling_params import SamplingParams as SamplingParams
from ragspec.speculation import ON, Speculation

log = logging.getLogger(__name__)


class Say(Protocol):
    """Gets the progress of long work: `say(stage)` when a stage begins, `say(stage, done, total)` while it goes on.

    `done` and `total` count any unit; `total` 0: the size of the stage is unknown.
    """

    def __call__(self, stage: str, done: int = 0, total: int = 0, /) -> object: ...


def log_progress(stage: str, done: int = 0, total: int = 0, /) -> None:
    """Logs the beginning of every stage."""
    if not done:
        log.info(stage)


class Heading(NamedTuple):
    """A heading in a document's text, at character `start`; level 1 is the highest. `anchor`: its fragment in an address."""

    start: int
    level: int
    text: str
    anchor: str = ""


class BlockKind(enum.StrEnum):
    HEADING = "heading"
    PARAGRAPH = "paragraph"
    LIST_ITEM = "list_item"
    TABLE = "table"
    CODE = "code"
    TERM = "term"
    """A line that the text below explains."""


class Block(NamedTuple):
    """The span `text[start:end]` of a document, in characters. `page`: of a PDF, from 1 on; 0 in formats without pages."""

    start: int
    end: int
    kind: BlockKind
    page: int = 0


def blocks_of(rows: Iterable[Sequence[Any]]) -> tuple[Block, ...]:
    """Blocks from their JSON form."""
    return tuple(Block(start, end, BlockKind(kind), page) for start, end, kind, page in rows)


def blocks_reaching(blocks: Sequence[Block], start: int, end: int) -> Sequence[Block]:
    """The sorted blocks that have a part inside [start, end)."""
    first = bisect_right(blocks, start, key=lambda each: each.end)
    return blocks[first : bisect_left(blocks, end, key=lambda each: each.start)]


def blocks_in(blocks: Sequence[Block], start: int, end: int) -> tuple[Block, ...]:
    """The parts of sorted blocks inside [start, end), with their places counted from `start`."""
    reaching = blocks_reaching(blocks, start, end)
    return tuple(
        each._replace(start=max(each.start, start) - start, end=min(each.end, end) - start) for each in reaching
    )


@dataclass(frozen=True, slots=True)
class Document:
    """A text with an identity, as the user gave it.

    `owner`: the tenant whose requests may see the document; empty: all tenants. `headings` are sorted by `start`. `origin`: the
    file that the document was read from, or empty; `digest`: the SHA-256 of that file, or empty. `blocks` are sorted and do not
    overlap; empty: the reader knows none.
    """

    id: str
    text: str
    title: str = ""
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    owner: str = ""
    headings: tuple[Heading, ...] = ()
    origin: str = ""
    blocks: tuple[Block, ...] = ()
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk of a document: `text == document.text[start:end]`, in characters.

    `headings`: those above the passage, from the highest level down. `heading`: the same in one line, "Install > On Linux", which
    is shortened if it is long, and ends with the header of a large table. `anchor`: of the lowest heading that has an anchor.
    `blocks`: the parts of the document's blocks inside `text`, by their places in `text`; empty: the reader, or the index of an
    earlier version, knows none, and the passage is one paragraph.
    """

    document_id: str
    ordinal: int
    text: str
    start: int
    end: int
    title: str = ""
    source: str = ""
    score: float = 0.0
    heading: str = ""
    headings: tuple[str, ...] = ()
    anchor: str = ""
    blocks: tuple[Block, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.document_id}#{self.ordinal}"

    @property
    def page(self) -> int:
        """The page on which the passage begins, from 1 on; 0 if the document has no pages."""
        return self.blocks[0].page if self.blocks else 0


@dataclass(frozen=True, slots=True)
class Citation:
    """Two spans of equal text: `answer[start:end] == passage.text[passage_start:passage_end]`.

    Units: characters. `document_start/end` are the same span inside the whole document.
    """

    start: int
    end: int
    passage_id: str
    passage_start: int
    passage_end: int
    document_id: str
    document_start: int
    document_end: int
    source: str = ""


class SourceKind(enum.IntEnum):
    """The kind of text that a span is copied from; acceptance is learned for each kind."""

    PASSAGE = 0
    INPUT = 1
    HISTORY = 2
    PREDICTION = 3
    OUTPUT = 4
    EARLIER = 5
    DRAFT = 6


@dataclass(frozen=True, slots=True)
class CopySource:
    """A text that the output is likely to repeat. `passage_id`: the provenance of tokens copied from it."""

    kind: SourceKind
    text: str
    passage_id: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of an output to generate now: after `output_ids`, which are decided, up to `end` output tokens in all.

    `end` None: to the end of the output. `draft_ids`: a likely continuation; like every draft it changes nothing but the time.
    Noise and penalties depend on output positions only, so an output generated in segments equals the output generated at once
    (under the keyed rule; the published rules draw anew at the start of a segment).
    `choice`: generate only this choice of the request's `n`; None: all.
    """

    output_ids: tuple[int, ...] = ()
    end: int | None = None
    draft_ids: tuple[int, ...] = ()
    choice: int | None = None


WHOLE = Segment()


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. `salt` separates tenants in every cache. `speculation` takes any value that `Speculation.of` takes.

    Deltas and the completion of a `segment` hold only its new tokens and text. A segment that pauses finishes with LENGTH; text
    that is not certain yet (half a character, the beginning of a stop string) comes with the next segment. Requests with the
    same `affinity` (documents, a conversation) should run on the same replica; it never changes the output. `grammar`: one in
    llguidance's dialect of Lark, which the output follows; empty: none. It is not followed beside a JSON schema, nor where
    llguidance cannot read the tokenizer, of which the engine warns. `attention_heads`: (layer, head) of the target, whose
    attention the completion shows.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    sources: tuple[CopySource, ...] = ()
    salt: str = ""
    speculation: Speculation = ON
    segment: Segment = WHOLE
    affinity: str = ""
    grammar: str = ""
    attention_heads: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculation", Speculation.of(self.speculation))

    @property
    def choices(self) -> tuple[int, ...]:
        """The choices to generate."""
        choice = self.segment.choice
        return tuple(range(self.params.n)) if choice is None else (choice,)


class FinishReason(enum.StrEnum):
    """ERROR: the request failed. LOST: its replica is lost and no other replica can take over now."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of probabilities before any warp; `top` is sorted by (-logprob, id)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Attention = tuple[tuple[float, ...], ...]
"""[heads, T]: from the last of T positions to each of them; of a head it sums to 1."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The new tokens and text of one choice after one step: the engine's only message to listeners.

    `text` never ends inside a character and never holds the beginning of a stop string. `attention`: comes with the last delta;
    as in `Completion`.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stats: GenerationStats | None = None
    error: str = ""
    attention: Attention = ()


_EXACTNESS = ("path", "distribution", "none")


@dataclass(slots=True)
class GenerationStats:
    """Counters of one choice; times in seconds, wall clock.

    `num_cached_tokens`: of the prompt, not computed. `num_restored_tokens`: read back from KV offloading; each preemption counts
    them again, with the output before it.
    `num_first_tokens`: tokens of the step that ended the prompt, more than one if a draft was accepted there. `decode_s`
    begins after that step. `draft_s`: this choice's share of the drafters' time. `prompt_draft_s`: what drafting added to the
    time before: preparation, the drafters' time, and the rows of the first draft, but not their sampling.
    `positions[drafter][i]`: (steps in which the drafter proposed nodes at depth i of the accepted path, those of them in
    which one of its nodes was accepted). `expected_accepted`: the expected value of `num_accepted` by the estimated
    probabilities. `drafted_by_source` and `accepted_by_source` count nodes copied from the request's sources, by kind
    ("passage", "prediction"); a node proposed by several drafters counts for the most probable proposal.
    `exactness`: what drafts leave unchanged: the "path" of tokens, their "distribution", or "none".
    `num_near_ties`: always 0. Earlier versions counted tokens that another rounding could change; the self-test names such a
    machine now. The next version leaves the field out.
    `num_replays`: how often another replica took over. Of steps on a lost replica only accepted nodes count.
    `doubt`: counters of the question that the target was asked first, whether the passages answer; the same in all choices.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_restored_tokens: int = 0
    num_output_tokens: int = 0
    num_first_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    expected_accepted: float = 0.0
    accepted_by_drafter: dict[str, int] = field(default_factory=dict)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    positions: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    draft_s: float = 0.0
    prompt_draft_s: float = 0.0
    exactness: str = "path"
    num_near_ties: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_replays: int = 0
    seed: int = 0
    system_fingerprint: str = ""
    doubt: GenerationStats | None = None

    @property
    def acceptance_length(self) -> float:
        """Mean tokens emitted a step, bonus token included."""
        return self.num_output_tokens / self.num_steps if self.num_steps else 0.0

    def add(self, part: GenerationStats) -> None:
        """Add another part of the same output. Keeps the weaker exactness, and the part's seed and fingerprint."""
        for counter in fields(self):
            value = getattr(part, counter.name)
            if isinstance(value, int | float) and counter.name != "seed":
                setattr(self, counter.name, getattr(self, counter.name) + value)
        for table in ("accepted_by_drafter", "drafted_by_source", "accepted_by_source"):
            counts = getattr(self, table)
            for name, count in getattr(part, table).items():
                counts[name] = counts.get(name, 0) + count
        for name, depths in part.positions.items():
            pairs = zip_longest(self.positions.get(name, ()), depths, fillvalue=(0, 0))
            self.positions[name] = tuple((reached + r, accepted + a) for (reached, accepted), (r, a) in pairs)
        self.exactness = max(self.exactness, part.exactness, key=_EXACTNESS.index)
        self.seed, self.system_fingerprint = part.seed, part.system_fingerprint


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole output of one choice. `attention`: of the request's heads, from the prompt's last token; empty where the target
    lacks one of them, is not in safetensors, or is of a family whose decoder ragspec does not replace, and where the output was
    generated in several segments."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    stats: GenerationStats
    attention: Attention = ()


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation. Roles: system, user, assistant, context (numbered passages)."""

    role: str
    content: str


def salt_belongs_to(salt: str, whole: str) -> bool:
    """Whether a salt is `whole` (a tenant, say) or a part of it, written as `whole`, NUL and a name."""
    return salt == whole or salt.startswith(f"{whole}\0")


def check_text(text: str, what: str) -> str:
    """Refuse text that no tokenizer should see.

    Raises: InputError for a non-string, an empty string, lone surrogates or NUL.
    """
    if not check_characters(text, what).strip():
        raise InputError(f"{what} is empty")
    return text


def check_characters(text: str, what: str) -> str:
    """Refuse what no file holds. Raises: InputError for a non-string, lone surrogates or NUL."""
    if not isinstance(text, str):
        raise InputError(f"{what} must be a string, not {type(text).__name__}")
    if "\0" in text:
        raise InputError(f"{what} holds a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as cause:
        raise InputError(f"{what} holds a lone surrogate at character {cause.start}") from cause
    return text
