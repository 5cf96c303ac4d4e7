"""Answers with guessed retrievals are the answers without, whatever is guessed, when, and what goes wrong meanwhile."""

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from iterative_parts import CONTEXT, DOCUMENTS, Always, Around, wide_target
from letter_encoder import LetterEncoder
from oracle import choose, next_logits, warped
from tiny_target import tiny_engine, tiny_tokenizer

from ragspec.cli.app import Iterative
from ragspec.config import ChunkingConfig, IndexConfig, RetrieverConfig, SpeculationConfig
from ragspec.core import Completion, Document, FinishReason, GenerationStats, SamplingParams, TokenLogprob
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import InputError, RetrievalError
from ragspec.rag.answer import Answer
from ragspec.rag.iterative import ralmspec
from ragspec.rag.iterative.pipeline import IterativePipeline
from ragspec.rag.iterative.policies import POLICIES as NAMED_POLICIES
from ragspec.rag.iterative.policies import Flare, InContextRalm, IterRetGen, PartialAnswer, Policy, RetrievalRound
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import RetrievalResult, Retriever, build_index
from ragspec.retrieval.search.segment_search import RetrievalMode, SearchResult
from ragspec.retrieval.speculative.stride import NEVER_PAYS, StridePlan, StrideScheduler

QUESTIONS = ["When was the bridge built?", "What does a mill need?", "river", "Where does the water go in spring?"]
GREEDY = SamplingParams(max_tokens=18, ignore_eos=True, seed=1)
SAMPLED = SamplingParams(max_tokens=18, temperature=1.0, top_p=0.95, seed=7)


SCHEDULERS: dict[str, Callable[[], StrideScheduler | None]] = {
    "measured": lambda: None,
    "off": lambda: Always(StridePlan()),
    "1 beside": lambda: Always(StridePlan(1, 1, 2.0)),
    "3": lambda: Always(StridePlan(3, 0, 2.0)),
    "3, 3 beside": lambda: Always(StridePlan(3, 3, 2.0)),
    "all": lambda: Always(StridePlan(64, 0, 2.0)),
    "changing": lambda: Always(StridePlan(2, 1, 2.0), StridePlan(5, 5, 2.0), StridePlan(1, 0), StridePlan(1, 1, 2.0)),
}
POLICIES: dict[str, Policy] = {
    "in-context RALM": InContextRalm(num_passages=1),
    "two passages": InContextRalm(3, 12, num_passages=2),
    "FLARE": Flare(least_prob=0.3, mask_prob=0.0, lookahead_tokens=7, num_passages=1),
    "Iter-RetGen": IterRetGen(3, num_passages=1),
}


@pytest.fixture(scope="module")
def index_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("iterative") / "index"
    build_index(DOCUMENTS, folder, LetterEncoder())
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return wide_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def engine(target: Target) -> Iterator[Engine]:
    with tiny_engine(target, [CopyDrafter(target.tokenizer, target.eos_ids)], num_kv_slots=8192) as made:
        yield made


def retriever(folder: Path, mode: RetrievalMode = "dense", follow: bool = False) -> Retriever:
    return Retriever(LetterEncoder(), Store.open(folder), RetrieverConfig(mode=mode), follow=follow)


def pipeline(engine: Engine, index: Any, **options: Any) -> IterativePipeline:
    return IterativePipeline(index, engine, PromptBuilder(engine.target.tokenizer, CONTEXT), **options)


def sequential(engine: Engine, index: Any, policy: Policy, params: SamplingParams) -> list[Answer]:
    plain = pipeline(engine, index, policy=policy, speculation=SpeculationConfig(enabled=False))
    return [plain.ask(question, params, speculation=False) for question in QUESTIONS]


def wait_until_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 30
    while not engine.idle() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.idle()


def said(answer: Answer) -> tuple[Any, ...]:
    """What must be equal of two answers."""
    return answer.token_ids, answer.text, answer.citations, answer.passages, answer.finish_reason, answer.logprobs


TRUTH: dict[tuple[Any, ...], list[Answer]] = {}


def truth_of(engine: Engine, index: Any, mode: RetrievalMode, policy: str, params: SamplingParams) -> list[Answer]:
    key = mode, policy, params.seed
    if key not in TRUTH:
        TRUTH[key] = sequential(engine, index, POLICIES[policy], params)
    return TRUTH[key]


PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}
CASES = [  # every pair of a policy, a scheduler and parameters
    *(
        ("dense", policy, scheduler, [*PARAMS][(i + j) % 2])
        for (i, policy), (j, scheduler) in itertools.product(enumerate(POLICIES), enumerate(SCHEDULERS))
    ),
    *itertools.product(["sparse", "hybrid"], ["in-context RALM"], ["3, 3 beside", "changing"], PARAMS),
]
QUICK = {  # each scheduler, policy and mode at least once
    *(("dense", policy, scheduler) for policy, scheduler in zip(itertools.cycle(POLICIES), SCHEDULERS, strict=False)),
    *itertools.product(["sparse", "hybrid"], ["in-context RALM"], ["changing"]),
}


@pytest.mark.parametrize(
    ("mode", "policy", "scheduler", "name"),
    [case if case[:3] in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_guessing_changes_nothing(
    engine: Engine, index_dir: Path, mode: RetrievalMode, policy: str, scheduler: str, name: str
) -> None:
    """A guess that was never checked, a rollback to the wrong place, a draft taken for text."""
    index, params = retriever(index_dir, mode), PARAMS[name]
    truth = truth_of(engine, index, mode, policy, params)
    guessed = pipeline(engine, Around(index), policy=POLICIES[policy], scheduler=SCHEDULERS[scheduler]())
    assert [said(a) for a in guessed.ask_many(QUESTIONS, params)] == [said(a) for a in truth]
    assert said(guessed.ask(QUESTIONS[0], params)) == said(truth[0])


def test_guessing_changes_nothing_where_passages_have_neighbours(engine: Engine, tmp_path: Path) -> None:
    """A guessed passage without its neighbours has the right name and gives another prompt; one passage twice in an answer."""
    texts = {f"long{n}": "\n\n".join(each.text for each in DOCUMENTS[n::3]) for n in range(3)}
    documents = [Document(name, text) for name, text in texts.items()]
    build_index(documents, tmp_path, LetterEncoder(), IndexConfig(chunking=ChunkingConfig(max_chars=60)))
    config = RetrieverConfig(mode="dense", expand_passages=1)
    index = Retriever(LetterEncoder(), Store.open(tmp_path), config, follow=False)
    for policy in ("two passages", "FLARE"):
        truth = sequential(engine, index, POLICIES[policy], SAMPLED)
        guessed = pipeline(engine, Around(index), policy=POLICIES[policy], scheduler=SCHEDULERS["changing"]())
        found = guessed.ask_many(QUESTIONS, SAMPLED)
        assert [said(a) for a in found] == [said(a) for a in truth]
        for answer in found:
            assert answer.passages and len({p.id for p in answer.passages}) == len(answer.passages)
            assert all(texts[p.document_id][p.start : p.end] == p.text for p in answer.passages)
            assert any(len(passage.text) > 60 for passage in answer.passages)
    assert sum(answer.stats.iterative.num_right for answer in found if answer.stats.iterative)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_waiting_for_each_retrieval_is_what_the_definition_says(
    engine: Engine, tmp_path: Path, index_dir: Path, params: SamplingParams
) -> None:
    """Guesses were compared with a baseline that was wrong itself: noise restarted with each segment, an old passage kept."""
    target = wide_target(tmp_path)  # the same weights; the engine's own pool is the engine's
    prompts, index = PromptBuilder(target.tokenizer, CONTEXT), retriever(index_dir)
    for question, answer in zip(QUESTIONS, truth_of(engine, index, "dense", "in-context RALM", params), strict=True):
        question_ids, output, named = target.tokenizer(question)["input_ids"], list[int](), set[str]()
        while len(output) < params.max_tokens:
            if len(output) % 4 == 0:
                ids = [*question_ids, *output][-32:]
                written = target.tokenizer.decode(ids, skip_special_tokens=True).replace("\0", " ")
                query = written if output else question
                (passages,) = index.retrieve([query], 1).passages
                named.update(passage.id for passage in passages)
                prompt = prompts.build(question, passages, params.max_tokens, question_first=True).prompt_ids
            x = warped(next_logits(target, [*prompt, *output]), prompt, output, params, target.eos_ids)
            output.append(choose(x, params, params.seed or 0, 0, len(output)))
            if output[-1] in target.eos_ids and not params.ignore_eos:
                break
        assert answer.token_ids == tuple(output) and {passage.id for passage in answer.passages} == named


def test_wrong_guesses_do_happen_here(engine: Engine, index_dir: Path) -> None:
    """Guards the test above: with guesses that are all right it could not fail."""
    index = retriever(index_dir)
    narrow = SpeculationConfig(prefetch_k=1)
    guessed = pipeline(engine, index, speculation=narrow, scheduler=Always(StridePlan(3, 3, 2.0)))
    stats = [answer.stats.iterative for answer in guessed.ask_many(QUESTIONS, GREEDY)]
    assert sum(each.num_wrong for each in stats if each) >= 5
    assert sum(each.num_lost_tokens for each in stats if each) >= 20
    assert sum(each.num_kept_tokens for each in stats if each) > 0


def test_right_guesses_save_lookups(engine: Engine, index_dir: Path) -> None:
    """Guessing asked the index as often as not guessing."""
    everything = SpeculationConfig(prefetch_k=24)
    index = Around(retriever(index_dir))
    guessed = pipeline(engine, index, speculation=everything, scheduler=Always(StridePlan(8, 0, 2.0)))
    answer = guessed.ask(QUESTIONS[0], GREEDY)
    assert answer.stats.iterative is not None
    assert (answer.stats.iterative.num_right, answer.stats.iterative.num_wrong) == (4, 0)
    assert index.num_calls == answer.stats.iterative.num_lookups == 2  # the first, and one for all others


def test_decoding_goes_on_beside_a_verification(
    engine: Engine, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asynchronous verification waited for its answer before anything was written."""
    written_meanwhile = threading.Event()

    def before(number: int) -> None:
        if number == 2:
            assert written_meanwhile.wait(30)

    index, wide = Around(retriever(index_dir), before), SpeculationConfig(prefetch_k=24)
    guessed = pipeline(engine, index, speculation=wide, scheduler=Always(StridePlan(1, 1, 2.0)))
    stream = engine.stream

    def watched(request: Any) -> Any:
        if request.segment.output_ids:
            written_meanwhile.set()
        return stream(request)

    monkeypatch.setattr(engine, "stream", watched)
    guessed.ask(QUESTIONS[0], GREEDY)
    assert written_meanwhile.is_set()


def test_an_empty_index_of_a_tenant_is_an_answer_without_passages(engine: Engine, index_dir: Path) -> None:
    """No passage was taken for no guess, and the index asked for ever; or one of another tenant's was used."""
    index = retriever(index_dir)
    nothing = {"type": "eq", "key": "year", "value": 1}
    truth = pipeline(engine, index, speculation=SpeculationConfig(enabled=False)).ask("mill", GREEDY, filter=nothing)
    guessed = pipeline(engine, index, scheduler=Always(StridePlan(4, 4, 2.0)))
    assert said(guessed.ask("mill", GREEDY, filter=nothing)) == said(truth)
    assert truth.passages == ()


def test_a_commit_in_the_middle_is_seen_by_the_next_answer(engine: Engine, tmp_path: Path) -> None:
    """Half an answer came from one generation, half from another; or the new one was never seen."""
    folder = tmp_path / "index"
    build_index(DOCUMENTS[:12], folder, LetterEncoder())
    old = sequential(engine, retriever(folder), InContextRalm(), GREEDY)[0]
    swapped: list[int] = []

    def before(number: int) -> None:
        if number == 2 and not swapped:
            swapped.append(number)
            with IndexWriter(folder, LetterEncoder()) as writer:
                for document in DOCUMENTS[:10]:
                    writer.delete(document.id)
                for document in DOCUMENTS[12:]:
                    writer.upsert(document)
                writer.commit()

    class Following(Around):
        def pinned(self) -> Any:
            return Around(self.index.pinned(), before)

    guessed = pipeline(engine, Following(retriever(folder, follow=True)), scheduler=Always(StridePlan(2, 1, 2.0)))
    during = guessed.ask(QUESTIONS[0], GREEDY)
    assert swapped
    assert (said(during), during.stats.index_generation) == (said(old), old.stats.index_generation)
    new = sequential(engine, retriever(folder), InContextRalm(), GREEDY)[0]
    after = guessed.ask(QUESTIONS[0], GREEDY)
    assert (said(after), after.stats.index_generation) == (said(new), new.stats.index_generation)
    assert after.stats.index_generation != old.stats.index_generation


@pytest.mark.parametrize("plan", [StridePlan(), StridePlan(1, 1, 2.0), StridePlan(3, 3, 2.0)])
def test_a_lookup_that_fails_ends_the_answer_with_its_error(engine: Engine, index_dir: Path, plan: StridePlan) -> None:
    """The answer went on unverified, or hung, or took the engine with it."""

    def before(number: int) -> None:
        if number == 2:
            raise RetrievalError("the index is lost")

    index = retriever(index_dir)
    guessed = pipeline(engine, Around(index, before), scheduler=Always(plan))
    with pytest.raises(RetrievalError, match="lost"):
        guessed.ask(QUESTIONS[0], GREEDY)
    assert said(guessed.ask(QUESTIONS[0], GREEDY)) == said(sequential(engine, index, InContextRalm(), GREEDY)[0])


def test_a_lookup_that_never_returns_is_given_up(
    engine: Engine, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waited for ever for a reply that was lost."""
    release = threading.Event()

    def before(number: int) -> None:
        if number >= 2:
            release.wait(60)

    monkeypatch.setattr(ralmspec, "SEARCH_TIMEOUT_S", 0.3)
    guessed = pipeline(engine, Around(retriever(index_dir), before), scheduler=Always(StridePlan(2, 2, 2)))
    try:
        with pytest.raises(RetrievalError, match="did not answer"):
            guessed.ask(QUESTIONS[0], GREEDY)
    finally:
        release.set()


def test_one_answers_failure_ends_the_others_of_the_call(engine: Engine, index_dir: Path) -> None:
    """The others ran on in the engine with nobody to hear them."""

    def before(number: int) -> None:
        if number >= 4:
            raise RetrievalError("the index is lost")

    guessed = pipeline(engine, Around(retriever(index_dir), before), scheduler=Always(StridePlan(2, 2, 2.0)))
    with pytest.raises(RetrievalError):
        guessed.ask_many(QUESTIONS * 3, GREEDY)
    wait_until_idle(engine)


@pytest.mark.parametrize(
    ("question", "params"),
    [
        ("   ", GREEDY),
        (["a"], GREEDY),
        ("mill " * 2000, GREEDY),
        ("mill", SamplingParams(n=2)),
        ("mill", [GREEDY, GREEDY]),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(
    engine: Engine, index_dir: Path, question: Any, params: Any
) -> None:
    """It failed in the middle of the answer, with an error of another kind."""
    with pytest.raises(InputError):
        pipeline(engine, retriever(index_dir)).ask(question, params)


async def test_answers_may_be_asked_for_inside_an_event_loop(engine: Engine, index_dir: Path) -> None:
    """`answer` blocked the loop it ran in, or mixed up two answers; in a notebook `ask` ended in an error about event loops."""
    index = retriever(index_dir)
    truth = sequential(engine, index, InContextRalm(), GREEDY)
    guessed = pipeline(engine, index, scheduler=Always(StridePlan(3, 1, 2.0)))
    asked = guessed.ask(QUESTIONS[0], GREEDY)
    others = await asyncio.gather(*(guessed.answer(question, GREEDY) for question in QUESTIONS[1:]))
    assert [said(a) for a in (asked, *others)] == [said(a) for a in truth]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stream_is_the_answer_in_pieces(engine: Engine, index_dir: Path, policy: str) -> None:
    """A piece was told that a later verification took back, or a stop string's beginning."""
    index = retriever(index_dir)
    guessed = pipeline(engine, index, policy=POLICIES[policy], scheduler=Always(StridePlan(3, 2, 2.0)))
    plain = truth_of(engine, index, "dense", policy, GREEDY)[0]
    stop = SamplingParams(max_tokens=18, ignore_eos=True, seed=1, stop=(plain.text[8:11],))
    for params in (GREEDY, stop):
        *pieces, answer = guessed.stream(QUESTIONS[0], params)
        assert isinstance(answer, Answer) and said(answer) == said(guessed.ask(QUESTIONS[0], params))
        assert "".join(map(str, pieces)) == answer.text
        assert len(pieces) > 1 or policy == "Iter-RetGen" or params is stop


def test_leaving_a_stream_gives_the_answer_up(engine: Engine, index_dir: Path) -> None:
    """The engine wrote on for nobody."""
    guessed = pipeline(engine, retriever(index_dir), scheduler=Always(StridePlan(1, 0)))

    async def first_piece() -> Any:
        async for piece in guessed.stream(QUESTIONS[0], SamplingParams(max_tokens=100, ignore_eos=True)):
            return piece

    assert isinstance(asyncio.run(first_piece()), str)
    wait_until_idle(engine)


def test_each_question_may_have_its_own_parameters(engine: Engine, index_dir: Path) -> None:
    """One set of parameters was used for all."""
    guessed = pipeline(engine, retriever(index_dir))
    both = guessed.ask_many(QUESTIONS[:2], [GREEDY, SAMPLED])
    alone = [guessed.ask(*each) for each in zip(QUESTIONS, (GREEDY, SAMPLED), strict=False)]
    assert [said(a) for a in both] == [said(a) for a in alone]


def test_what_did_not_fit_is_no_source(engine: Engine, index_dir: Path) -> None:
    """A passage that the target never saw was among the answer's passages, and could be cited."""
    index, narrow = retriever(index_dir), PromptBuilder(engine.target.tokenizer, 60)
    answer = IterativePipeline(index, engine, narrow).ask("mill", GREEDY)
    assert answer.passages == ()
    assert answer.dropped_passages
    assert answer.citations == ()


def test_without_a_seed_one_is_drawn_and_told(engine: Engine, index_dir: Path) -> None:
    """Every segment drew its own seed: the answer could not be had again."""
    guessed = pipeline(engine, retriever(index_dir))
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    first = guessed.ask("mill", params)
    again = guessed.ask("mill", SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, seed=first.seed))
    assert said(again) == said(first)
    assert guessed.ask("mill", params).seed != first.seed


@pytest.mark.parametrize("policy", POLICIES)
def test_counters_add_up(engine: Engine, index_dir: Path, policy: str) -> None:
    """Statistics counted what was taken back or written twice, a segment's prompt as output, planned guesses as made ones."""
    guessed = pipeline(engine, retriever(index_dir), policy=POLICIES[policy], scheduler=Always(StridePlan(3, 2, 2.0)))
    answer = guessed.ask(QUESTIONS[1], GREEDY)
    stats = answer.stats.iterative
    assert stats is not None
    assert answer.stats.generation.num_output_tokens == len(answer.token_ids) == 18
    assert answer.to_dict()["stats"]["iterative"]["num_rounds"] == stats.num_rounds > 0
    assert stats.num_right + stats.num_wrong <= sum(stats.strides) <= stats.num_retrievals
    assert 0 <= stats.num_kept_tokens <= stats.num_lost_tokens
    assert answer.logprobs == ()


def test_guesses_are_learned_from_the_cache_they_will_be_made_from(
    engine: Engine, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While off, nothing was prefetched: guesses looked poor, and speculation stayed off for good."""
    index, seen = Around(retriever(index_dir)), list[int]()
    look_up = index.search

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append(options["prefetch_k"])
        return look_up(*arguments, **options)

    monkeypatch.setattr(index, "search", watched)
    pipeline(engine, index, scheduler=Always(StridePlan())).ask(QUESTIONS[0], GREEDY)
    assert set(seen) == {8}
    seen.clear()
    pipeline(engine, index, scheduler=Always(NEVER_PAYS)).ask(QUESTIONS[0], GREEDY)
    assert set(seen) == {0}


def test_the_pipelines_names_and_the_commands_are_the_same() -> None:
    """A policy that the command does not know, or the other way round."""
    assert set(get_args(Iterative)) == set(NAMED_POLICIES)


MISSING = ("segment-000002",)


class Partial(Around):
    """The first `count` lookups find no passage but the last, and say that a segment is missing."""

    def __init__(self, index: Retriever, count: int) -> None:
        super().__init__(index)
        self._count = count

    def search(self, queries: Any, *args: Any, **options: Any) -> SearchResult:
        found = super().search(queries, *args, **options)
        if self.num_calls > self._count:
            return found
        return found._replace(passages=[some[-1:] for some in found.passages], missing=MISSING)

    def retrieve(self, queries: Any, k: int, scope: Any) -> RetrievalResult:
        found = self.search(self.encode(queries), k, scope)
        return RetrievalResult(found.passages, found.generation, found.missing)


def test_an_answer_says_what_was_missing(engine: Engine, index_dir: Path) -> None:
    """An answer from half an index that looks like any other."""
    prompts = PromptBuilder(engine.target.tokenizer, CONTEXT)
    one_shot = Pipeline(Partial(retriever(index_dir), 1), engine, prompts)
    partial, whole = (one_shot.ask(QUESTIONS[0], GREEDY) for _ in range(2))
    assert partial.is_partial and partial.stats.missing_segments == MISSING
    assert partial.to_dict()["stats"]["missing_segments"] == MISSING
    assert not whole.is_partial and whole.stats.missing_segments == () and len(whole.passages) > len(partial.passages)


@pytest.mark.parametrize("guessing", [True, False])
def test_a_lookup_with_parts_missing_is_not_remembered(engine: Engine, index_dir: Path, guessing: bool) -> None:
    """Guesses and verified answers from half an index, used after all of it has come back."""

    def ask(count: int) -> Any:
        around = Partial(retriever(index_dir), count)
        config = SpeculationConfig(enabled=guessing)
        asked = pipeline(engine, around, speculation=config, scheduler=Always(StridePlan(1, 0, 1.0)))
        return asked.ask(QUESTIONS[0], GREEDY), around

    whole, _ = ask(0)
    partial, _ = ask(1000)
    first, around = ask(1)
    assert whole.stats.missing_segments == () and partial.stats.missing_segments == MISSING
    assert first.stats.missing_segments == MISSING and around.num_calls > 1
    assert first.stats.iterative.num_right + first.stats.iterative.num_wrong == 0 or guessing


TOKENIZER = tiny_tokenizer()


def decode(token_ids: object) -> str:
    return str(TOKENIZER.decode(token_ids))


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text)["input_ids"])


def written(token_ids: tuple[int, ...], prob: float = 0.9, ends: bool = False) -> Completion:
    reason = FinishReason.STOP if ends else FinishReason.LENGTH
    logprobs = tuple(TokenLogprob(token, math.log(prob)) for token in token_ids)
    return Completion("r", 0, token_ids, decode(token_ids), reason, logprobs, GenerationStats())


def unwritten(max_tokens: int = 40) -> PartialAnswer:
    return PartialAnswer(QUESTIONS[0], ids(QUESTIONS[0]), max_tokens)


def play(
    policy: Policy, text: str, max_tokens: int, unsure: frozenset[int] = frozenset()
) -> tuple[PartialAnswer, list[RetrievalRound]]:
    """The rounds of an answer that would be `text`; tokens at the places `unsure` are improbable."""
    progress, rounds = unwritten(max_tokens), []
    whole = ids(text)[:max_tokens]
    while (round := policy.next(progress, decode)) is not None:
        assert policy.next(progress, decode) == round
        assert len(rounds) < 200
        rounds.append(round)
        part = whole[len(round.output_ids) : round.end]
        probs = [0.1 if len(round.output_ids) + i in unsure else 0.9 for i in range(len(part))]
        logprobs = tuple(TokenLogprob(token, math.log(prob)) for token, prob in zip(part, probs, strict=True))
        progress = progress.after(round, replace(written(part, ends=round.end >= len(whole)), logprobs=logprobs))
    return progress, rounds


@pytest.mark.parametrize("policy", [InContextRalm(), Flare(), IterRetGen(), InContextRalm(1), InContextRalm(100)])
@pytest.mark.parametrize("max_tokens", [1, 7, 40])
def test_the_whole_answer_is_written(policy: Policy, max_tokens: int) -> None:
    """A round too few cut the answer, one too many repeated it."""
    text = "The bridge was built in 1874. The mill is older. It rained."
    progress, _ = play(policy, text, max_tokens)
    assert progress.output_ids == ids(text)[:max_tokens]
    assert len(progress.logprobs) == len(progress.output_ids)


def test_in_context_ralm_asks_with_the_last_words() -> None:
    """The query was the question for ever, or the whole text."""
    _, rounds = play(InContextRalm(4, query_tokens=6), "The bridge was built in 1874.", 40)
    assert [round.end - len(round.output_ids) for round in rounds] == [4] * len(rounds)
    everything = [*ids(QUESTIONS[0]), *ids("The bridge was built in 1874.")]
    for round in rounds:
        assert round.query == decode(everything[: len(ids(QUESTIONS[0])) + len(round.output_ids)][-6:])


def test_a_short_question_is_asked_as_it_stands() -> None:
    """The first query lost words to a detour through tokens."""
    (first, *_) = play(InContextRalm(), "x", 4)[1]
    assert first.query == QUESTIONS[0]


def test_flare_retrieves_only_for_what_it_is_not_sure_of() -> None:
    """Every sentence was retrieved for, or an unsure one kept without."""
    text = "The mill is old. The bridge was built in 1874. It rained."
    sure, rounds = play(Flare(), text, 80)
    assert sure.output_ids == ids(text)
    assert [round.query for round in rounds[1:] if round.query] == []
    year = len(ids("The mill is old. The bridge was built in 1"))
    _, rounds = play(Flare(), text, 80, frozenset({year}))
    (again,) = [round for round in rounds[1:] if round.query]
    assert "bridge was built" in str(again.query)
    assert "874" not in str(again.query)
    assert again.draft_ids
    assert decode(again.output_ids).strip() == "The mill is old."


def test_iter_retgen_asks_with_the_answer_and_drafts_it() -> None:
    """The second iteration asked the question alone, or went on behind the first answer."""
    first, second = play(IterRetGen(), "In 1874.", 40)[1]
    assert (first.query, first.draft_ids) == (QUESTIONS[0], ())
    assert second.query == f"{QUESTIONS[0]} In 1874."
    assert second.output_ids == ()
    assert second.draft_ids == ids("In 1874.")


def test_blank_text_is_no_query() -> None:
    """An answer that begins with white space ended in an error about an empty question."""
    progress = unwritten().after(RetrievalRound(None, (), 4), written(ids("    ")))
    assert InContextRalm(4, query_tokens=1).next(progress, decode) is not None
    assert InContextRalm(4, query_tokens=1).next(progress, decode).query == QUESTIONS[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", [InContextRalm(), IterRetGen()])
def test_no_query_holds_a_nul(policy: Policy) -> None:
    """A target that wrote one ended its answer with an error about the question."""
    progress = unwritten().after(RetrievalRound(None, (), 6), written(ids("a\0b c\0")[:6]))
    round = policy.next(progress, decode)
    assert round is not None
    assert "b c" in str(round.query) and "\0" not in str(round.query)
