"""The suite `answers`: what the target answers, what retrieval finds, what labels are worth, and whether silence is right.

* target:    quotes, citations, short answers and abstentions on held-out SQuAD questions; follow-ups; corrections; documentation
* labels:    altered sentences must lose their label (`labels`)
* retrieval: SQuAD, Cranfield, documentation questions and follow-ups; recall in the first passages
* together:  documentation questions with their file and without, where retrieval and target may both abstain
"""

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter

from pipelines.benchmarks.cases.follow_ups import follow_up_cases, read_canard, spread
from pipelines.benchmarks.cases.labels import measure_alterations
from pipelines.benchmarks.harness import Result, Row, Run, Suite, metrics_of
from ragspec.config import DraftingConfig, EngineConfig, PipelineConfig, PromptConfig, RetrieverConfig, TargetConfig
from ragspec.core import CopySource, Document, Message, Passage, Request, SamplingParams, SourceKind
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.engine.target import Target
from ragspec.evaluation import datasets, target_scores
from ragspec.numerics.threads import num_processors, run_in_thread
from ragspec.rag.chat.query_rewriter import AskedBefore, rewrite_by_rules
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import PreparedQuestion, Question, RetrievedQuestion, build_request, generate_answers
from ragspec.rag.wording import ABSTENTION, abstains, grammar_messages, parse_answer
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.reading import read_file
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search.filters import parse_filter
from ragspec.retrieval.search.index_searcher import CALIBRATED_THRESHOLD
from ragspec.retrieval.search.segment_search import RetrievalMode, SearchScope
from ragspec.training.documentation import (
    DocumentationQuestion,
    documentation_files,
    documentation_questions,
    evaluation_questions,
)

TOP = 3
_DEPTH = 10
_AT_ONCE = 128
_PERPLEXITY_WINDOW = 512
_MODES: dict[str, RetrievalMode] = {"dense": "dense", "bm25": "sparse", "hybrid": "hybrid"}


class Answers(ExitStack):
    """The engine, encoder and data of one run, each made when a row first needs it."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.data = run.require_data("squad, squad_open, jfleg, canard, cranfield and docs")

    @cached_property
    def engine(self) -> Engine:
        return self.enter_context(load_engine(self.run.target, EngineConfig(), DraftingConfig()))

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder.load(self.run.encoder)

    @cached_property
    def prompts(self) -> PromptBuilder:
        """Of answers that begin with a quote, which the rows judge."""
        config = PipelineConfig(target=self.run.target, prompts=PromptConfig(layout="quote"))
        return PromptBuilder.of(self.engine.target.tokenizer, self.engine.max_context_tokens, config)

    def answers(self, cases: Sequence[target_scores.QuestionCase]) -> list[str]:
        """Greedy answers by the product's steps, with its look and biases on quotes. Its biases on refusals are left out, as the
        passages come from no search that scored them; so are a chat's rules for quotes that were given before."""
        params, prepared = SamplingParams(max_tokens=target_scores.MAX_NEW_TOKENS), list[PreparedQuestion]()
        for n, case in enumerate(cases):
            shown = [Passage("", number, text, 0, len(text)) for number, text in enumerate(case.passages)]
            asked = Asked(f"target-{n}", case.question, params, said=case.said)
            prepared.append(build_request(RetrievedQuestion(asked, shown, "", 0.0), self.prompts))
        return [completions[0].text for _, completions in generate_answers(prepared, self.engine)]

    def corrected(self, sentences: Sequence[str]) -> list[str]:
        """Greedy corrections, which may copy their sentence."""
        params = SamplingParams(max_tokens=target_scores.MAX_NEW_TOKENS)
        source, ids_of = partial(CopySource, SourceKind.HISTORY), self.prompts.tokens
        requests = [
            Request(f"target-{n}", ids_of(grammar_messages(each)), params, (source(each),))
            for n, each in enumerate(sentences)
        ]
        return [completion.text for completion in self.engine.generate(requests)]

    @cached_property
    def asked(self) -> list[DocumentationQuestion]:
        return list(documentation_questions(self.data / "docs", evaluation=True))

    @cached_property
    def passages(self) -> list[Passage]:
        """Passages of SQuAD and of the documentation in turns."""
        squad = [p["context"] for article in datasets.held_out_articles(self.data) for p in article["paragraphs"]]
        pages = list(dict.fromkeys(question.passage for question in self.asked))
        return mixed_passages({"squad": squad, "docs": pages}, self.run.seed)

    @cached_property
    def documentation(self) -> tuple[Store, list[DocumentationQuestion]]:
        documents = evaluation_documents(self.data / "docs", self.run.quick)
        names = {document.id for document in documents}
        questions = [question for question in self.asked if question.path in names]
        return self.run.store(documents, self.encoder), datasets.fixed_sample(questions, self.run.count(400, 40))


@dataclass(frozen=True, slots=True)
class Asked(Question):
    """`said`: the conversation before it."""

    said: tuple[Message, ...] = ()

    @property
    def messages(self) -> list[Message]:
        return [*self.said, Message("user", self.text)]


def mixed_passages(texts_by_name: dict[str, list[str]], seed: int) -> list[Passage]:
    """Passages of each list in turns, shuffled by the seed; as many of each as the shortest list has."""
    passages = []
    for name, texts in texts_by_name.items():
        random.Random(seed).shuffle(texts)
        passages.append([Passage(f"{name}-{n}", 0, text, 0, len(text)) for n, text in enumerate(texts)])
    return [passage for turn in zip(*passages, strict=False) for passage in turn]


def evaluation_documents(folder: Path, quick: bool) -> list[Document]:
    """The documentation's files that nothing is trained on; `quick`: a fixed quarter of them."""
    named = documentation_files(folder, evaluation=True, suffixes=(".md", ".rst"))
    chosen = [(path, name) for path, name in named if not quick or sha256(name.encode()).digest()[0] % 4 == 0]
    return [document for path, name in chosen for document in read_file(path, name)]


def run_answers(run: Run) -> Iterator[Row]:
    """Raises: ConfigError without data, InputError, ModelError, SaveError."""
    with Answers(run) as bench:
        parts: dict[str, Callable[[Answers], Row]] = {
            "labels, altered sentences": _altered,
            "retrieval, documentation": _retrieved_documentation,
            "retrieval, SQuAD": partial(_retrieved, datasets.squad_collection(bench.data)[0]),
            "retrieval, Cranfield": partial(_retrieved, datasets.cranfield_collection(bench.data)),
            "retrieval, follow-ups of CANARD": _follow_ups,
            "retrieval and target together": _together,
            "target, questions": _questions,
            "target, follow-ups": _answered_follow_ups,
            "target, corrections": _corrections,
            "target, documentation": _documentation,
            "target, perplexity": _perplexity,
        }
        for number, (name, part) in enumerate(parts.items(), 1):
            yield run.row(name, partial(part, bench))
            run.tick("answers", number, len(parts))


def _altered(bench: Answers) -> Row:
    return measure_alterations(bench.passages, bench.run.count(500, 100), bench.run.seed)


def _retrieved_documentation(bench: Answers) -> Row:
    """Every question is asked twice, the second time without its file, as if it had been deleted.

    `doc_top1`, `doc_top3`: the share of questions whose gold passage is among the first. `wrongly_answered_ratio`: the share that
    does not abstain without its file. `good_answers_lost`: of the questions with their gold passage among the first three, the
    share that abstains.
    """
    store, questions = bench.documentation
    retriever = _abstaining(bench, store)
    ranks: list[int] = []
    seconds: list[float] = []
    num_lost = num_answered = 0
    for asked in questions:
        begin = perf_counter()
        found = retriever.retrieve([asked.question], TOP)
        seconds.append(perf_counter() - begin)
        ranks.append(rank_of(asked, found.passages[0]))
        num_lost += ranks[-1] < TOP and found.closeness[0] < CALIBRATED_THRESHOLD
        without = retriever.retrieve([asked.question], TOP, _other_files(asked))
        num_answered += without.closeness[0] >= CALIBRATED_THRESHOLD
    num_found = sum(rank < TOP for rank in ranks)
    return {
        "num_doc_questions": len(ranks),
        "num_doc_passages": store.manifest.num_passages,
        "doc_top1": sum(rank == 0 for rank in ranks) / len(ranks),
        "doc_top3": num_found / len(ranks),
        "good_answers_lost": num_lost / max(num_found, 1),
        "wrongly_answered_ratio": num_answered / len(ranks),
        "retrieval_p50_ms": 1e3 * median(seconds),
    }


def _abstaining(bench: Answers, store: Store) -> Retriever:
    return Retriever(bench.encoder, store, RetrieverConfig(abstain_below=CALIBRATED_THRESHOLD), follow=False)


def _other_files(asked: DocumentationQuestion) -> SearchScope:
    return SearchScope("", parse_filter({"type": "ne", "key": "document.id", "value": asked.path}))


def rank_of(asked: DocumentationQuestion, passages: Sequence[Passage]) -> int:
    """The place of the first passage that holds the quote, from 0; `TOP` if there is none."""
    return next((n for n, passage in enumerate(passages) if asked.quote in passage.text), TOP)


def _retrieved(collection: datasets.Collection, bench: Answers) -> Row:
    """`recall10_...`: the share of a question's relevant documents among the first ten; `ndcg_...`: also by rank and grade."""
    encoder = datasets.WholeTexts(bench.encoder)
    store = bench.run.store(collection.documents, encoder, datasets.WHOLE)
    asked = collection.first(bench.run.count(1_000, 200))
    row: Row = {"num_questions": len(asked.queries)}
    for name, mode in _MODES.items():
        retriever = Retriever(encoder, store, RetrieverConfig(mode=mode), follow=False)
        found = passages_of(retriever, list(asked.queries.values()), 2 * _DEPTH)
        recalls: list[float] = []
        gains: list[float] = []
        for query_id, passages in zip(asked.queries, found, strict=True):
            ranking = list(dict.fromkeys(passage.document_id for passage in passages))[:_DEPTH]
            relevant = {key: grade for key, grade in collection.relevant[query_id].items() if grade > 0}
            recalls.append(sum(document in relevant for document in ranking) / max(1, len(relevant)))
            gains.append(ndcg([relevant.get(document, 0) for document in ranking], list(relevant.values())))
        row[f"recall10_{collection.name}_{name}"] = target_scores.mean(recalls)
        row[f"ndcg_{collection.name}_{name}"] = target_scores.mean(gains)
    return row


def passages_of(retriever: Retriever, texts: Sequence[str], count: int) -> Iterator[Sequence[Passage]]:
    """The best passages of each text."""
    for first in range(0, len(texts), _AT_ONCE):
        yield from retriever.retrieve(texts[first : first + _AT_ONCE], count).passages


def ndcg(grades: Sequence[int], all_grades: Sequence[int]) -> float:
    """Discounted cumulative gain of a ranking's grades over the best possible ranking's, to the same depth.

    Source: Järvelin and Kekäläinen 2002, gains linear as in trec_eval.
    """
    best = sorted(all_grades, reverse=True)[: max(_DEPTH, len(grades))]
    gain, ideal = (sum(g / math.log2(n + 2) for n, g in enumerate(each)) for each in (grades, best))
    return gain / ideal if ideal else 0.0


def _follow_ups(bench: Answers) -> Row:
    """Recall in the first passages over the half of the dialogues that the rewriting rules were not tuned on."""
    known = read_canard(bench.data / "canard/dev.json")
    held_out = [question for question in known.questions if question.half == "held_out"]
    questions = spread(held_out, bench.run.count(1_000, 60))
    queries = {
        "follow_up_recall_plain": [each.question for each in questions],
        "follow_up_recall": [
            rewrite_by_rules(each.question, [AskedBefore(turn.question) for turn in each.said]) for each in questions
        ],
        "follow_up_recall_people": [each.rewrite for each in questions],
    }
    row: Row = {"num_questions": len(questions)}
    store = bench.run.store(known.documents, bench.encoder)
    retriever = Retriever(bench.encoder, store, RetrieverConfig(), follow=False)
    for name, texts in queries.items():
        pairs = zip(questions, passages_of(retriever, texts, TOP), strict=True)
        num_found = sum(any(p.document_id == each.gold for p in best) for each, best in pairs)
        row[name] = num_found / max(len(texts), 1)
    return row


def _together(bench: Answers) -> Row:
    """As `_retrieved_documentation`, where the target alone abstains, and where retrieval or the target abstains."""
    store, questions = bench.documentation
    retriever = _abstaining(bench, store)
    params = SamplingParams(max_tokens=96)
    lost, answered, num_found = Counter[str](), Counter[str](), 0
    pipeline = Pipeline(retriever, bench.engine, bench.prompts, num_passages=TOP)
    questions = questions[: bench.run.count(60, 8)]
    for asked in questions:
        others = {"type": "ne", "key": "document.id", "value": asked.path}
        for left_out in (None, others):
            answer = pipeline.ask(asked.question, params, filter=left_out)
            scope = _other_files(asked) if left_out else SearchScope()
            is_close = retriever.retrieve([asked.question], TOP, scope).closeness[0] >= CALIBRATED_THRESHOLD
            replies = not abstains(answer.text)
            ways = {"target": replies, "together": replies and is_close}
            if left_out:
                answered.update(ways)
            elif rank_of(asked, answer.passages) < TOP:
                num_found += 1
                lost.update({way: not own for way, own in ways.items()})
    row: Row = {"num_questions": len(questions)}
    for way in ("target", "together"):
        row[f"wrongly_answered_{way}"] = answered[way] / len(questions)
        row[f"good_answers_lost_{way}"] = lost[way] / max(num_found, 1)
    return row


def _questions(bench: Answers) -> Row:
    count = bench.run.count(500, 8)
    return {"num_questions": count} | target_scores.case_scores(
        bench.answers, *target_scores.question_cases(bench.data, count, bench.run.seed)
    )


def _answered_follow_ups(bench: Answers) -> Row:
    """Quotes that hold the answer, of standalone questions and of the same as follow-ups, and the difference in points."""
    asked = follow_up_cases(bench.data / "canard/dev.json", bench.run.count(250, 6), bench.run.seed)
    both = map(list, zip(*asked, strict=True))
    right, later = (target_scores.question_scores(own, bench.answers(own))["quote_has_answer"] for own in both)
    return {
        "num_questions": len(asked),
        "standalone_right": right,
        "followup_right": later,
        "followup_gap": 100 * (right - later),
    }


def _corrections(bench: Answers) -> Row:
    """GLEU on JFLEG dev of the outputs and of the untouched source (0 to 100), and the edit rate on correct sentences."""
    sentences = datasets.jfleg_sentences(bench.data, bench.run.count(754, 8))
    clean = datasets.clean_sentences(bench.data, bench.run.count(200, 8))
    corrected, untouched = target_scores.jfleg_gleu(sentences, bench.corrected([each.text for each in sentences]))
    kept = zip(clean, bench.corrected(clean), strict=True)
    edits = sum(target_scores.edit_distance(a.split(), b.split()) for a, b in kept)
    return {
        "num_sentences": len(sentences),
        "gleu_jfleg_dev": corrected,
        "gleu_source": untouched,
        "edit_rate_clean": edits / sum(len(sentence.split()) for sentence in clean),
    }


def _documentation(bench: Answers) -> Row:
    """Share of documentation questions whose sentence is quoted, or that are refused where no passage answers."""
    rng = random.Random(bench.run.seed)
    asked = evaluation_questions(bench.data / "docs")
    asked = rng.sample(asked, min(bench.run.count(500, 8), len(asked)))
    cases = list[target_scores.QuestionCase]()
    for each in asked:
        shown = rng.sample(own := [each.passage, *each.others[:2]], len(own))
        quotes = [each.quote] if each.quote else []
        cases.append(target_scores.QuestionCase(each.question, shown, 1 + shown.index(each.passage), quotes))
    right = [is_right(each.quote, output) for each, output in zip(asked, bench.answers(cases), strict=True)]
    return {"num_questions": len(asked), "documentation_right": target_scores.mean(right)}


def is_right(quote: str, output: str) -> bool:
    """Whether the output quotes the sentence, or abstains where there is no sentence to quote."""
    if not quote:
        return output.strip().startswith(ABSTENTION)
    answer = parse_answer(output)
    return answer is not None and quote in answer.quote


def _perplexity(bench: Answers) -> Row:
    """Perplexity of WikiText-2 by word, and of int8 weights over float weights on WikiText-2 and Python code."""
    num_chars = 20_000 if bench.run.quick else 300_000
    texts = {"code": Path(argparse.__file__).read_text(encoding="utf-8")[:num_chars]}
    if (path := bench.data / "wikitext2/test.txt").is_file():
        texts["wikitext2"] = path.read_text(encoding="utf-8")[:num_chars]
    served = _perplexities(bench.run.target, texts)
    row: Row = {"num_chars": num_chars, "perplexity_code_per_token": served["code"][0]}
    if "wikitext2" in texts:
        per_token, num_tokens = served["wikitext2"]
        row["perplexity_wikitext2_per_token"] = per_token
        row["perplexity_wikitext2"] = per_token ** (num_tokens / len(texts["wikitext2"].split()))
    if bench.run.target.is_int8:
        exact = _perplexities(bench.run.target.model_copy(update={"quantization": "none"}), texts)
        row["perplexity_ratio"] = max(served[name][0] / exact[name][0] for name in texts)
    return row


def _perplexities(config: TargetConfig, texts: dict[str, str]) -> dict[str, tuple[float, int]]:
    """Perplexity by token and number of tokens of each text, in independent windows."""

    def measured() -> dict[str, tuple[float, int]]:
        target = Target.load(config, 2 * _PERPLEXITY_WINDOW)
        found = {}
        for name, text in texts.items():
            ids = target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            found[name] = target_scores.perplexity(target, ids, _PERPLEXITY_WINDOW), len(ids)
        return found

    return run_in_thread(measured, num_processors())


def summarise(rows: Sequence[Row]) -> Result:
    """Every row's figures under their own names."""
    left_out = ("row", "commit", "num_questions")
    return {key: value for row in rows for key, value in row.items() if key not in left_out}


SUITE = Suite("answers", run_answers, summarise, metrics_of("answers"))
