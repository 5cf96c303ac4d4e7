"""The suite `target`: scores of a target on held-out data.

Owns the scores; the text comes from a `generate` callable, so transformers, the engine or a fake can be scored alike.
`evaluate_target(data_dir, ...)` returns one flat dictionary of floats.

`followup_gap` compares CANARD's questions made standalone by a person with the same questions at the end of their dialogue, which
is laid out as in the product's chat, over the same passages: the difference of `quote_has_answer`, in points.
`chat_not_worse` counts verdicts by people (see `chat_pairs`): the share of ordinary requests without passages that the adapted
target answered better than the unadapted one, or as well. The suite writes the pairs to read into the benchmark's cache folder.
Either is NaN where its data are missing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.engine.checkpoints.target_files import target_folder
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.engine.target import Target
from ragspec.evaluation.cases import RAG_PASSAGES, conversation_cases
from ragspec.evaluation.datasets import clean_sentences, jfleg_sentences, stdlib_list
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.metrics import best_f1, edit_distance, exact_match, jfleg_gleu, perplexity
from ragspec.evaluation.report import PEAK_MEMORY, Metric, nested
from ragspec.evaluation.suite import QUICK_QUESTIONS, Outcome, Settings, Suite
from ragspec.evaluation.suites.chat_pairs import chat_requests, shuffled_pairs, verdict_scores, write_pairs
from ragspec.evaluation.suites.target_cases import QuestionCase, follow_up_cases, question_cases
from ragspec.evaluation.timing import Tick
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.verbatim_quotes import quote_grammar
from ragspec.rag.wording import ABSTENTION, grammar_messages, parse_answer, question_messages
from ragspec.training.conversations import Message, message
from ragspec.training.documentation import evaluation_questions
from ragspec.training.stdlib_corpus import first_doc_sentence, is_held_out, stdlib_documents

Retrieve = Callable[[str], list[str]]

_PERPLEXITY_SLOTS = 1024
MAX_NEW_TOKENS = 192
NUM_CLEAN = 200


class Generate(Protocol):
    """Answers to conversations; `passages`: those that the last message of each conversation shows, where it shows any."""

    def __call__(self, conversations: list[list[Message]], passages: Sequence[Sequence[str]] = ()) -> list[str]: ...


def evaluate_target(
    data_dir: Path,
    *,
    generate: Generate,
    retrieve: Retrieve,
    num_questions: int = 500,
    num_sentences: int = 754,
    seed: int = 0,
) -> dict[str, float]:
    """Every score of the target suite; fractions lie in 0-1, GLEU in 0-100."""
    scores = case_scores(generate, *question_cases(data_dir, num_questions, seed))
    scores |= follow_up_scores(data_dir / "canard/dev.json", generate, num_questions // 2, seed)
    scores |= grammar_scores(data_dir, generate, num_sentences)
    scores["documentation_right"] = documentation_score(generate, data_dir / "docs", num_questions, seed)
    scores["stdlib_quote"] = scores["stdlib_first_sentence"] = stdlib_score(
        generate, retrieve, num_questions // 2, seed
    )
    return scores


def case_scores(
    generate: Generate, answerable: list[QuestionCase], unanswerable: list[QuestionCase]
) -> dict[str, float]:
    """Quotes of the answerable questions, and abstentions."""
    outputs = _answers(generate, answerable + unanswerable)
    answered, refused = outputs[: len(answerable)], outputs[len(answerable) :]
    half = len(unanswerable)  # as many answerable as unanswerable questions, so that precision means something
    abstentions = abstention_scores(answerable[:half] + unanswerable, answered[:half] + refused)
    return question_scores(answerable, answered) | abstentions


def model_generate(model: Any, tokenizer: Any, batch_tokens: int = 12_000) -> Generate:
    """Greedy decoding with a loaded model, in batches of similar length. Quotes are free: `passages` are not read."""

    def generate(conversations: list[list[Message]], passages: Sequence[Sequence[str]] = ()) -> list[str]:
        prompts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
        ids = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
        outputs = [""] * len(ids)
        for batch in _length_batches(ids, batch_tokens):
            inputs = tokenizer.pad({"input_ids": [ids[i] for i in batch]}, padding_side="left", return_tensors="pt")
            with torch.inference_mode():
                generated = model.generate(**inputs.to(model.device), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            for i, row in zip(batch, generated[:, inputs["input_ids"].shape[1] :], strict=True):
                outputs[i] = str(tokenizer.decode(row, skip_special_tokens=True))
        return outputs

    return generate


def _length_batches(ids: list[list[int]], batch_tokens: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for i in sorted(range(len(ids)), key=lambda i: len(ids[i])):
        if batch and (len(batch) + 1) * len(ids[i]) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _answers(generate: Generate, cases: list[QuestionCase]) -> list[str]:
    prompts = [question_messages(case.question, case.passages) for case in cases]
    return generate(prompts, [case.passages for case in cases])


def question_scores(cases: list[QuestionCase], outputs: list[str]) -> dict[str, float]:
    """Quotes, citations and short answers of answerable questions. EM and F1 as in SQuAD's own script."""
    exact, has_answer, em, f1, cited = [], [], [], [], []
    for case, output in zip(cases, outputs, strict=True):
        quote, number, short = parse_answer(output) or ("", 0, "")
        sources = [n for n, passage in enumerate(case.passages, start=1) if quote and quote in passage]
        exact.append(bool(sources))
        has_answer.append(bool(sources) and any(answer in quote for answer in case.answers))
        em.append(exact_match(short, case.answers))
        f1.append(best_f1(short, case.answers))
        if sources:
            cited.append(number in sources)
    return {
        "quote_exact": _mean(exact),
        "quote_has_answer": _mean(has_answer),
        "em": _mean(em),
        "f1": _mean(f1),
        "citation_correct": _mean(cited),
    }


def abstention_scores(cases: list[QuestionCase], outputs: list[str]) -> dict[str, float]:
    """Precision and recall of abstentions."""
    abstained = [output.strip().startswith(ABSTENTION) for output in outputs]
    num_unanswerable = sum(not c.answers for c in cases)
    right = sum(a and not c.answers for a, c in zip(abstained, cases, strict=True))
    return {
        "abstain_precision": right / sum(abstained) if any(abstained) else math.nan,
        "abstain_recall": right / num_unanswerable if num_unanswerable else math.nan,
    }


def follow_up_scores(path: Path, generate: Generate, count: int, seed: int) -> dict[str, float]:
    """Quotes that hold the answer, for standalone questions and for the same as follow-ups, and the difference in points."""
    if not path.exists():
        return {"followup_gap": math.nan}
    asked = follow_up_cases(path, count, seed)
    cases = [case for case, _ in asked]
    outputs = _answers(generate, cases), generate([dialogue for _, dialogue in asked], [c.passages for c in cases])
    alone, followed = (question_scores(cases, each)["quote_has_answer"] for each in outputs)
    return {"standalone_right": alone, "followup_right": followed, "followup_gap": 100 * (alone - followed)}


def grammar_scores(data_dir: Path, generate: Generate, num_sentences: int) -> dict[str, float]:
    """GLEU on JFLEG dev of the outputs and of the untouched source, and the edit rate on clean sentences."""
    sentences, clean = (
        jfleg_sentences(data_dir, num_sentences),
        clean_sentences(data_dir, min(NUM_CLEAN, num_sentences)),
    )
    outputs = generate([grammar_messages(sentence.text) for sentence in sentences])
    corrected, untouched = jfleg_gleu(sentences, outputs)
    kept = generate([grammar_messages(sentence) for sentence in clean])
    edits = sum(edit_distance(a.split(), b.split()) for a, b in zip(clean, kept, strict=True))
    edit_rate = edits / sum(len(s.split()) for s in clean)
    return {"gleu_jfleg_dev": corrected, "gleu_source": untouched, "edit_rate_clean": edit_rate}


def stdlib_score(generate: Generate, retrieve: Retrieve, count: int, seed: int) -> float:
    """Share of held-out standard-library names whose documentation's first sentence is quoted."""
    known = {first_doc_sentence(n, t) for n, t in stdlib_documents() if not is_held_out(n)}
    asked = [(n, first_doc_sentence(n, t)) for n, t in stdlib_documents() if is_held_out(n)]
    asked = [(name, quote) for name, quote in asked if quote and quote not in known]
    asked = random.Random(seed).sample(asked, min(count, len(asked)))
    questions = [f"What does {name} do?" for name, _ in asked]
    found = [retrieve(question) for question in questions]
    outputs = generate([question_messages(q, p) for q, p in zip(questions, found, strict=True)], found)
    parsed = [parse_answer(output) for output in outputs]
    return _mean([answer is not None and answer[0] == quote for answer, (_, quote) in zip(parsed, asked, strict=True)])


def documentation_score(generate: Generate, folder: Path, count: int, seed: int) -> float:
    """Share of questions about held-out documentation whose sentence is quoted, or that are refused where no passage answers.

    A question comes with passages that share its words. NaN without the folder.
    """
    if not folder.is_dir():
        return math.nan
    rng = random.Random(seed)
    asked = evaluation_questions(folder)
    asked = rng.sample(asked, min(count, len(asked)))
    shown = [rng.sample(passages, len(passages)) for q in asked for passages in [[q.passage, *q.others[:2]]]]
    prompts = [question_messages(q.question, passages) for q, passages in zip(asked, shown, strict=True)]
    outputs = generate(prompts, shown)
    return _mean([_is_right(q.quote, output) for q, output in zip(asked, outputs, strict=True)])


def _is_right(quote: str, output: str) -> bool:
    if not quote:
        return output.strip().startswith(ABSTENTION)
    answer = parse_answer(output)
    return answer is not None and quote in answer.quote


def perplexity_scores(target: Target, text_path: Path, num_chars: int) -> dict[str, float]:
    """Perplexity of WikiText-2 by word (its own, without the ends of lines) and by token of ours, in independent windows."""
    text = text_path.read_text(encoding="utf-8")[:num_chars]
    ids = target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    per_token = perplexity(target, ids, window_tokens=512)
    return {
        "perplexity_wikitext2": per_token ** (len(ids) / len(text.split())),
        "perplexity_wikitext2_per_token": per_token,
    }


def _mean(values: list[float] | list[bool]) -> float:
    """The mean; NaN without values."""
    return float(np.mean(values)) if len(values) else math.nan


def engine_generate(engine: Engine, tick: Tick) -> Generate:
    """Greedy decoding of whole conversations by the engine, with verbatim quotes; every message may be copied from."""
    tokenizer = engine.target.tokenizer
    prompts = PromptBuilder(tokenizer, engine.max_context_tokens)

    def generate(conversations: list[list[Message]], passages: Sequence[Sequence[str]] = ()) -> list[str]:
        cases = conversation_cases("target", conversations, prompts, MAX_NEW_TOKENS)
        params = SamplingParams(max_tokens=MAX_NEW_TOKENS)
        grammars = map(quote_grammar, passages) if passages else itertools.repeat("")
        requests = [
            Request(case.id, case.prompt_ids, params, case.sources, grammar=grammar)
            for case, grammar in zip(cases, grammars, strict=False)
        ]
        completions = engine.generate(requests)
        tick("conversations", len(requests), len(requests))
        return [str(tokenizer.decode(list(c.token_ids), skip_special_tokens=True)) for c in completions]

    return generate


def chat_scores(settings: Settings, data_dir: Path, count: int, tick: Tick) -> dict[str, float]:
    """Writes the pairs of answers to read, and counts the verdicts; NaN for a target without an adapter.

    Raises: InputError for a file that holds no verdicts, ModelError, SaveError.
    """
    requests = chat_requests(data_dir, count, settings.plan.seed)
    unadapted = settings.target.model_copy(update={"adapter": "none"})
    if not requests or target_folder(unadapted) == target_folder(settings.target):
        return {"chat_not_worse": math.nan}

    def answers(config: TargetConfig) -> list[str]:
        with load_engine(config, EngineConfig(), DraftingConfig()) as engine:
            return engine_generate(engine, tick)([[message("user", request)] for request in requests])

    pairs = shuffled_pairs(requests, (answers(settings.target), answers(unadapted)), settings.plan.seed)
    write_pairs(pairs, settings.cache_dir)
    return verdict_scores(pairs, settings.verdicts and settings.verdicts / "chat_verdicts.jsonl")


def run_target(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError without data, ModelError."""
    data_dir, memory = settings.require_data("squad, squad_open, jfleg and wikitext2"), PeakMemory()
    retriever = settings.retriever(stdlib_list(), tick)

    def retrieve(question: str) -> list[str]:
        return [passage.text for passage in retriever.retrieve([question], RAG_PASSAGES).passages[0]]

    num_questions, num_sentences = (QUICK_QUESTIONS, QUICK_QUESTIONS) if settings.quick else (500, 754)
    with load_engine(settings.target, EngineConfig(), DraftingConfig()) as engine:
        scores = evaluate_target(
            data_dir,
            generate=engine_generate(engine, tick),
            retrieve=retrieve,
            num_questions=settings.num_prompts or num_questions,
            num_sentences=settings.num_prompts or num_sentences,
            seed=settings.plan.seed,
        )
    if (text_path := data_dir / "wikitext2/test.txt").is_file():
        num_chars = 20_000 if settings.quick else 300_000
        scores |= perplexity_scores(Target.load(settings.target, _PERPLEXITY_SLOTS), text_path, num_chars)
    scores |= chat_scores(settings, data_dir, settings.num_prompts or num_questions, tick)
    bitwise = settings.target.exactness == "bitwise"  # Why: loading would have failed otherwise
    return Outcome({"label": "held-out data", "quality": scores, "bitwise": bitwise, "peak_pss_mb": memory.look()})


SUITE = Suite(
    "target",
    run_target,
    (Metric("bitwise", "the numerics self-test passed"), PEAK_MEMORY),
    tables=lambda result: nested(result, "quality"),
)
