"""Scores of the reference target on held-out data.

Owns the choice of questions and the metrics; the text comes from a `generate` callable, so transformers, the engine or
a fake can be scored alike. `evaluate_target(target_dir, data_dir)` returns one flat dictionary of floats.
"""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragspec.training.grammar_metrics import edit_distance, gleu
from ragspec.training.sentences import normalise, split_sentences
from ragspec.training.stdlib_corpus import is_held_out, stdlib_documents
from ragspec.training.target_examples import first_doc_sentence
from ragspec.training.target_format import ABSTENTION, Message, grammar_messages, parse_answer, question_messages
from ragspec.training.target_sources import NUM_EVAL_ARTICLES, best_sentence, common_answer

Generate = Callable[[list[list[Message]]], list[str]]
Retrieve = Callable[[str], list[str]]

PASSAGE_WORDS = 120
NUM_DISTRACTORS = 2
MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class Case:
    """One question with its passages; `answers` is empty where the passages do not say."""

    question: str
    passages: list[str]
    gold: int
    answers: list[str]


def evaluate_target(
    target_dir: Path,
    data_dir: Path,
    *,
    generate: Generate | None = None,
    retrieve: Retrieve | None = None,
    num_questions: int = 500,
    num_sentences: int = 754,
    seed: int = 0,
) -> dict[str, float]:
    """Every score of the target suite; fractions lie in 0-1, GLEU in 0-100."""
    generate = generate or transformers_generate(target_dir)
    answerable, unanswerable = question_cases(data_dir, num_questions, seed)
    prompts = [question_messages(case.question, case.passages) for case in answerable + unanswerable]
    outputs = generate(prompts)
    answered, refused = outputs[: len(answerable)], outputs[len(answerable) :]
    scores = question_scores(answerable, answered)
    half = len(unanswerable)  # as many answerable as unanswerable questions, so that precision means something
    scores |= abstention_scores(answerable[:half] + unanswerable, answered[:half] + refused)
    scores |= grammar_scores(data_dir, generate, num_sentences)
    scores["stdlib_first_sentence"] = stdlib_score(generate, retrieve or lexical_retriever(), num_questions // 2, seed)
    scores |= perplexity_scores(target_dir, data_dir / "wikitext2/test.txt")
    return scores


def transformers_generate(target_dir: Path, batch_tokens: int = 12_000) -> Generate:
    """Greedy decoding with plain transformers, in batches of similar length."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()

    def generate(conversations: list[list[Message]]) -> list[str]:
        prompts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
        ids = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
        outputs = [""] * len(ids)
        for batch in _length_batches(ids, batch_tokens):
            inputs = tokenizer.pad({"input_ids": [ids[i] for i in batch]}, return_tensors="pt")
            with torch.inference_mode():
                generated = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
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


def question_cases(data_dir: Path, num_questions: int, seed: int) -> tuple[list[Case], list[Case]]:
    """Answerable and half as many unanswerable questions of the held-out SQuAD articles, gold passage + 2 others."""
    rng = random.Random(seed)
    articles = json.loads((data_dir / "squad/dev-v1.1.json").read_text())["data"][-NUM_EVAL_ARTICLES:]
    paragraphs = [(a["title"], normalise(p["context"]), p["qas"]) for a in articles for p in a["paragraphs"]]
    by_title: dict[str, list[str]] = {}
    for title, text, _ in paragraphs:
        by_title.setdefault(title, []).append(text)
    everything = [text for _, text, _ in paragraphs]

    def case(title: str, text: str, question: str, answers: list[str]) -> Case:
        near, far = (
            rng.choice([t for t in by_title[title] if t != text]),
            rng.choice([t for t in everything if t != text]),
        )
        passages = [passage_with(text, question, answers), _first_passage(near), _first_passage(far)]
        order = rng.sample(range(3), 3)
        return Case(question, [passages[i] for i in order], order.index(0) + 1, answers)

    asked = [(t, text, q["question"], [a["text"] for a in q["answers"]]) for t, text, qas in paragraphs for q in qas]
    titles = {text: title for title, text, _ in paragraphs}
    texts = {r["id"]: normalise(r["text"]) for r in _json_lines(data_dir / "squad_open/corpus.jsonl")}
    unasked = [
        (texts[r["gold"]], r["question"]) for r in _json_lines(data_dir / "squad_open/questions_unanswerable.jsonl")
    ]
    unasked = [(text, question) for text, question in unasked if text in titles]
    answerable = [case(*row) for row in rng.sample(asked, min(num_questions, len(asked)))]
    chosen = rng.sample(unasked, min(num_questions // 2, len(unasked)))
    return answerable, [case(titles[text], text, normalise(question), []) for text, question in chosen]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, path.read_text().splitlines())


def passage_with(text: str, question: str, answers: list[str]) -> str:
    """Whole sentences of at most 120 words, around the sentence that holds the answer."""
    sentences = split_sentences(text)
    index = best_sentence(question, common_answer(answers), sentences) if answers else 0
    first = last = index or 0
    while True:
        grown = [(a, b) for a, b in ((first - 1, last), (first, last + 1)) if a >= 0 and b < len(sentences)]
        grown = [(a, b) for a, b in grown if len(" ".join(sentences[a : b + 1]).split()) <= PASSAGE_WORDS]
        if not grown:
            return " ".join(sentences[first : last + 1])
        first, last = grown[-1] if (last - first) % 2 else grown[0]


def _first_passage(text: str) -> str:
    return passage_with(text, "", [])


def question_scores(cases: list[Case], outputs: list[str]) -> dict[str, float]:
    """Quotes, citations and short answers of answerable questions. EM and F1 as in SQuAD's own script."""
    exact, has_answer, em, f1, cited = [], [], [], [], []
    for case, output in zip(cases, outputs, strict=True):
        quote, number, short = parse_answer(output) or ("", 0, "")
        sources = [n for n, passage in enumerate(case.passages, start=1) if quote and quote in passage]
        exact.append(bool(sources))
        has_answer.append(bool(sources) and any(answer in quote for answer in case.answers))
        em.append(max(normalise_answer(short) == normalise_answer(a) for a in case.answers))
        f1.append(max(answer_f1(short, a) for a in case.answers))
        if sources:
            cited.append(number in sources)
    return {
        "quote_exact": _mean(exact),
        "quote_has_answer": _mean(has_answer),
        "em": _mean(em),
        "f1": _mean(f1),
        "citation_correct": _mean(cited),
    }


def abstention_scores(cases: list[Case], outputs: list[str]) -> dict[str, float]:
    """Precision and recall of saying that the passages do not say."""
    abstained = [output.strip().startswith(ABSTENTION) for output in outputs]
    right = sum(a and not c.answers for a, c in zip(abstained, cases, strict=True))
    return {
        "abstain_precision": right / max(1, sum(abstained)),
        "abstain_recall": right / max(1, sum(not c.answers for c in cases)),
    }


def normalise_answer(text: str) -> str:
    """Lower case, no punctuation, no articles (SQuAD's script)."""
    text = re.sub(r"[^\w\s]", "", text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def answer_f1(predicted: str, gold: str) -> float:
    """Harmonic mean of word precision and recall (SQuAD's script)."""
    p, g = normalise_answer(predicted).split(), normalise_answer(gold).split()
    common = sum((Counter(p) & Counter(g)).values())
    return 2 * common / (len(p) + len(g)) if common else 0.0


def grammar_scores(data_dir: Path, generate: Generate, num_sentences: int) -> dict[str, float]:
    """GLEU on JFLEG dev, of the outputs and of the untouched source, and how much of clean sentences is edited."""
    lines = {n: (data_dir / f"jfleg/dev.{n}").read_text().splitlines()[:num_sentences] for n in ("src", *_REFERENCES)}
    references = [[lines[name][i].split() for name in _REFERENCES] for i in range(len(lines["src"]))]
    sources = [line.split() for line in lines["src"]]
    outputs = [out.split() for out in generate([grammar_messages(line.strip()) for line in lines["src"]])]
    clean = clean_sentences(data_dir, 200)
    kept = generate([grammar_messages(sentence) for sentence in clean])
    edits = sum(edit_distance(a.split(), b.split()) for a, b in zip(clean, kept, strict=True))
    return {
        "gleu_jfleg_dev": gleu(sources, outputs, references),
        "gleu_source": gleu(sources, sources, references),
        "edit_rate_clean": edits / sum(len(s.split()) for s in clean),
    }


_REFERENCES = ("ref0", "ref1", "ref2", "ref3")


def clean_sentences(data_dir: Path, count: int) -> list[str]:
    """Sentences of 8-30 words of the held-out articles."""
    articles = json.loads((data_dir / "squad/dev-v1.1.json").read_text())["data"][-NUM_EVAL_ARTICLES:]
    sentences = [s for a in articles for p in a["paragraphs"] for s in split_sentences(normalise(p["context"]))]
    return random.Random(0).sample([s for s in sentences if 8 <= len(s.split()) <= 30 and s[-1] == "."], count)


def stdlib_score(generate: Generate, retrieve: Retrieve, count: int, seed: int) -> float:
    """Share of held-out standard-library names whose documentation's first sentence is quoted."""
    known = {first_doc_sentence(n, t) for n, t in stdlib_documents() if not is_held_out(n)}
    asked = [(n, first_doc_sentence(n, t)) for n, t in stdlib_documents() if is_held_out(n)]
    asked = [(name, quote) for name, quote in asked if quote and quote not in known]
    asked = random.Random(seed).sample(asked, min(count, len(asked)))
    questions = [f"What does {name} do?" for name, _ in asked]
    outputs = generate([question_messages(q, retrieve(q)) for q in questions])
    parsed = [parse_answer(output) for output in outputs]
    return _mean([answer is not None and answer[0] == quote for answer, (_, quote) in zip(parsed, asked, strict=True)])


def lexical_retriever(num_passages: int = 3) -> Retrieve:
    """BM25-like search over the standard library's documents; stands in where no index is given."""
    texts = [" ".join(text.split(" ")[:PASSAGE_WORDS]) for _, text in stdlib_documents()]
    bags = [Counter(re.findall(r"[a-z0-9]+", text.lower())) for text in texts]
    frequency = Counter(word for bag in bags for word in bag)

    def retrieve(question: str) -> list[str]:
        words = {w for w in re.findall(r"[a-z0-9]+", question.lower()) if w in frequency}
        weight = {w: math.log(len(bags) / frequency[w]) for w in words}
        scores = [
            sum(weight[w] * bag[w] / (bag[w] + 1.2) for w in words if w in bag) / (len(bag) + 30) ** 0.25
            for bag in bags
        ]
        return [texts[i] for i in sorted(range(len(bags)), key=lambda i: (-scores[i], i))[:num_passages]]

    return retrieve


def perplexity_scores(
    target_dir: Path, text_path: Path, max_chars: int = 300_000, window: int = 512
) -> dict[str, float]:
    """Perplexity of WikiText-2 by word (its own tokens) and by token of ours, in independent windows."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    text = text_path.read_text()[:max_chars]
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    ids = ids[: len(ids) // window * window].view(-1, window)
    total = 0.0
    for rows in torch.split(ids, 4):
        with torch.inference_mode():
            logits = model(input_ids=rows).logits[:, :-1]
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"))
    num_predicted = ids.shape[0] * (window - 1)
    words_per_token = len(text.split()) / len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    per_token = total / num_predicted
    return {
        "perplexity_wikitext2": math.exp(per_token / words_per_token),
        "perplexity_wikitext2_per_token": math.exp(per_token),
    }


def _mean(values: list[float] | list[bool]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
