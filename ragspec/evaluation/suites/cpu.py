"""The suite `cpu`: this engine beside transformers and llama.cpp on the same weights, and what its steps cost.

Answers from passages, corrections of sentences of 20 to 40 words, dialogues and free prose, decoded greedily by all programs in
turns (`GenerationSuite`); then one-row and 16-row steps, perplexity of the served weights beside float, and steps beside a busy
loop. llama.cpp decodes Q8_0 and bf16 files of the very weights that the engine serves, plainly and with its prompt lookup.

Ratios against other programs are of tokens a second, since quantised weights may write other tokens. `peers` shows how far the
outputs agree, and the share of answers whose quote is verbatim.

    >>> run_suite("cpu", settings, tick).result["rag_vs_llama_best"]
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from ragspec.config import EngineConfig, TargetConfig
from ragspec.drafting.cost_model import CostTable
from ragspec.engine.engine import Engine
from ragspec.engine.measurements import forward_s
from ragspec.engine.target import Target
from ragspec.evaluation.cases import Case, conversation_cases, grammar_cases, rag_cases
from ragspec.evaluation.datasets import LONG, grammar_list
from ragspec.evaluation.metrics import perplexity, quote_is_exact
from ragspec.evaluation.peers import (
    LLAMA_INSTALL,
    LLAMA_TYPES,
    LOOKUP_TOKENS,
    LlamaDecoder,
    llama_files,
    llama_installed,
    load_peer,
    transformers_decoders,
)
from ragspec.evaluation.report import Metric, Result, Table, at_least, at_most, equal_to, nested, transposed
from ragspec.evaluation.suite import Outcome, Settings, Suite, engine_over, open_engine
from ragspec.evaluation.suites import generation_report
from ragspec.evaluation.suites.backends.models import SHAPES, random_target
from ragspec.evaluation.suites.chat_pairs import chat_requests
from ragspec.evaluation.suites.generation import GenerationSuite
from ragspec.evaluation.suites.target_cases import follow_up_cases
from ragspec.evaluation.timing import PLAIN, SPECULATIVE, Decoder, EngineDecoder, Tick, Timings, take_turns
from ragspec.numerics.threads import num_processors, run_in_thread
from ragspec.rag.prompt import PromptBuilder
from ragspec.training.conversations import message

RAG, GRAMMAR, CHAT, PROSE = "rag", LONG, "chat", "prose"
CHAT_TOKENS = 64
LLAMA_LOOKUPS = (0, 2, LOOKUP_TOKENS)
"""Tokens that llama.cpp's prompt lookup drafts: none, its documentation's advice for CPUs (not in quick runs), its default."""
_MOST_MESSAGES = 6
"""Of a dialogue, its instruction included: two earlier questions with their passages make about 1,000 tokens."""
STEP_CONTEXT, TREE_ROWS = 500, 16
ONE_BILLION = SHAPES[1]
_PERPLEXITY_WINDOW = 512
_KV_SLOTS = 4096
_STEPS_A_TURN = 5
_BUSY_TOKENS = 96


class _Plan(NamedTuple):
    """Prompts of each list, turns of timed steps, characters of each text."""

    num_prompts: int
    num_turns: int
    num_chars: int


def run_cpu(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError without data, InputError, ModelError, SaveError."""
    data_dir = settings.require_data("squad, squad_open, jfleg and pie_errorify")
    plan = _Plan(2, 7, 6_000) if settings.quick else _Plan(10, 40, 100_000)
    plan = plan._replace(num_prompts=settings.num_prompts or plan.num_prompts)
    repetitions = replace(settings.plan, num_nothing=0) if settings.quick else settings.plan
    engine, bitwise = open_engine(settings.target)
    with engine:
        cases = cpu_cases(settings, engine, plan.num_prompts, tick)
        num_context = max(len(case.prompt_ids) + case.max_tokens for case in cases) + 2 * LOOKUP_TOKENS
        peers, steppers = _peers(settings, engine, max(num_context, STEP_CONTEXT + TREE_ROWS))
        steps = step_times(engine, steppers, plan.num_turns, tick)
        measured = GenerationSuite(engine, cases, repetitions, peers=peers, tick=tick).measure()
    busy = busy_over_quiet(engine.target, settings.plan.num_runs, settings.plan.seed)
    tick("beside a busy loop", 1, 1)
    ratios = perplexity_ratios(settings.target, data_dir, plan.num_chars)
    tick("perplexity", 1, 1)
    result = measured.result | {"label": "RAG, grammar, chat and prose", "bitwise": bitwise}
    result |= {"steps": steps, "perplexity_ratios": ratios, "peers": peer_table(measured.greedy, cases)}
    if not settings.quick:
        result["steps_1b"] = run_in_thread(
            partial(one_billion_steps, settings.target, plan.num_turns), num_processors()
        )
        tick("steps of 1 B parameters", 1, 1)
    result |= _headline(measured.greedy, cases, result) | {"busy_over_quiet": busy}
    if not llama_installed():
        result["missing"] = f"llama.cpp did not run: {LLAMA_INSTALL} installs llama-cpp-python"
    return Outcome(result, measured)


def _headline(greedy: Timings, cases: list[Case], result: Result) -> Result:
    llama = [name for name in greedy.runs if name.startswith("llama.cpp")]
    plain = {type_: _llama_name(type_, 0) for type_ in LLAMA_TYPES}
    part = {name: greedy.of([i for i, case in enumerate(cases) if case.part == name]) for name in (RAG, GRAMMAR)}
    own = result["steps"]["ragspec"]
    return {
        "plain_vs_llama_q8": greedy.rate_ratio(PLAIN, [plain["Q8_0"]]),
        "plain_vs_llama_bf16": greedy.rate_ratio(PLAIN, [plain["BF16"]]),
        "step16_over_step1": own[f"{TREE_ROWS} rows, ms"] / own["1 row, ms"],
        "rag_vs_llama_best": part[RAG].rate_ratio(SPECULATIVE, llama),
        "grammar_vs_llama_best": part[GRAMMAR].rate_ratio(SPECULATIVE, llama),
        "prefill_vs_llama_best": greedy.prompt_ratio(PLAIN, [*plain.values()]),
        "batch8_on_off": result["batch8_speedup_vs_plain"],
        "step_over_roofline": own["1 row, ms"] / result["roofline"]["fastest_step_ms"],
        "perplexity_ratio": max(result["perplexity_ratios"].values(), default=None),
    }


def cpu_cases(settings: Settings, engine: Engine, count: int, tick: Tick) -> list[Case]:
    """`count` prompts of each list. Without the data of dialogues or requests their list is empty. Raises: InputError."""
    listed, seed = settings.questions(count), settings.plan.seed
    data_dir = settings.require_data("the lists")
    prompts = PromptBuilder(engine.target.tokenizer, engine.target.max_context_tokens)
    sentences = [sentence for sentence in grammar_list(data_dir, count) if sentence.part == LONG]
    canard = data_dir / "canard/dev.json"
    found = [messages for _, messages in follow_up_cases(canard, 20 * count, seed)] if canard.exists() else []
    dialogues = [messages for messages in found if len(messages) <= _MOST_MESSAGES][:count]
    requests = [[message("user", request)] for request in chat_requests(data_dir, count, seed)]
    return [
        *rag_cases(listed.questions, settings.retriever(listed, tick), prompts),
        *grammar_cases(sentences, prompts),
        *conversation_cases(CHAT, dialogues, prompts, CHAT_TOKENS),
        *conversation_cases(PROSE, requests, prompts, CHAT_TOKENS),
    ]


Stepper = Callable[[int, int], float]
"""Seconds of one forward of so many rows after so many tokens, in the engine's thread."""


def _peers(settings: Settings, engine: Engine, num_context: int) -> tuple[dict[str, Decoder], dict[str, Stepper]]:
    """Every program's decoders, and those that can be stepped."""
    steppers: dict[str, Stepper] = {"ragspec": partial(_tree_s, engine.target)}
    if not settings.peers:
        return {}, steppers
    model = load_peer(settings.target)
    peers: dict[str, Decoder] = {**transformers_decoders(model, engine)}
    if llama_installed():
        for type_, path in llama_files(model, settings.cache_dir / "llama_cpp").items():
            for lookup in LLAMA_LOOKUPS[:: 2 if settings.quick else 1]:
                decoder = LlamaDecoder(path, engine, num_context, lookup)
                peers[_llama_name(type_, lookup)] = decoder
            steppers[f"llama.cpp {type_}"] = decoder.step_s  # Why the last: it returns the logits of all rows, as ours
    return peers, steppers


def _llama_name(type_: str, lookup: int) -> str:
    return f"llama.cpp {type_}" + (f", prompt lookup of {lookup}" if lookup else "")


def _tree_s(target: Target, num_rows: int, context: int) -> float:
    return forward_s(target, num_rows, context, range(-1, num_rows - 1))


def step_times(engine: Engine, steppers: Mapping[str, Stepper], num_turns: int, tick: Tick) -> dict[str, Result]:
    """Milliseconds of a step of one row and of a tree's rows, medians of turns of several steps each.

    Why several: threads of the program before keep a processor busy for a moment after their last product.
    """

    def turn(step_s: Stepper, num_rows: int) -> float:
        taken: list[float] = []
        context = min(STEP_CONTEXT, (engine.max_context_tokens - TREE_ROWS) // 2)
        engine.between_steps(lambda: taken.extend(step_s(num_rows, context) for _ in range(_STEPS_A_TURN)))
        return 1e3 * median(taken[1:])

    units = {"1 row, ms": 1, f"{TREE_ROWS} rows, ms": TREE_ROWS}
    contenders = {name: partial(turn, step_s) for name, step_s in steppers.items()}
    runs = take_turns(contenders, [*units.values()], num_turns, tick, "steps")
    return {
        name: {unit: median(run[i] for run in table) for i, unit in enumerate(units)} for name, table in runs.items()
    }


def one_billion_steps(config: TargetConfig, num_turns: int) -> dict[str, Result]:
    """Milliseconds of a step over a Llama of 1 B parameters with random weights, quantised as the target and not."""
    found: dict[str, Result] = {}
    for quantization in ("int8", "none"):
        random = config.model_copy(update={"model": "", "adapter": "none", "quantization": quantization})
        target = random_target(ONE_BILLION, random)
        for rows in (1, TREE_ROWS):
            taken = [_tree_s(target, rows, STEP_CONTEXT) for _ in range(num_turns + 1)]
            found.setdefault(f"{ONE_BILLION.name}, {quantization}", {})[f"{rows} rows, ms"] = 1e3 * median(taken[1:])
    return found


def peer_table(greedy: Timings, cases: list[Case]) -> dict[str, Result]:
    """By program: tokens a second in each list, the share of our tokens before the first difference, verbatim quotes."""
    parts = {part: [i for i, case in enumerate(cases) if case.part == part] for part in (RAG, GRAMMAR, CHAT, PROSE)}
    rows: dict[str, Result] = {}
    for name, tables in greedy.runs.items():
        rates = {f"{part}, tokens/s": greedy.of(own).rate(name) for part, own in parts.items() if own}
        quotes = [quote_is_exact(tables[0][i].text, cases[i].passages) for i in parts[RAG] if tables[0][i].text]
        rows[name] = rates | {"same tokens": greedy.shared_tokens(SPECULATIVE, name)}
        rows[name]["verbatim quotes"] = mean(quotes) if quotes else None
    return rows


def busy_over_quiet(target: Target, num_runs: int, seed: int) -> float:
    """Seconds of plain decoding beside a busy loop over those without, in turns; threads adapt, as they are served.

    Close the target's engine before: a fresh pool replaces its pool.
    """
    num_prompt = min(STEP_CONTEXT, target.max_context_tokens - _BUSY_TOKENS - 1)
    case = Case("busy", "busy", tuple(i % target.vocab_size for i in range(num_prompt)), (), _BUSY_TOKENS)
    costs = CostTable({1: [1.0]}, rows=(1,))
    ratios = []
    with engine_over(Engine, target, EngineConfig(max_kv_tokens=_KV_SLOTS), costs) as engine:
        decode = EngineDecoder(engine, speculation=False, seed=seed, ignore_eos=True)
        decode(case)
        for _ in range(num_runs):
            quiet_s = decode(case).decode_s
            with _busy_loop():
                ratios.append(decode(case).decode_s / quiet_s)
    return median(ratios)


@contextlib.contextmanager
def _busy_loop() -> Iterator[None]:
    """A process that keeps one processor busy."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def perplexity_ratios(config: TargetConfig, data_dir: Path, num_chars: int) -> dict[str, float]:
    """Perplexity of int8 weights over that of float, by text: WikiText-2 and Python code. Empty for float weights."""
    if not config.is_int8:
        return {}
    texts = {"code": Path(argparse.__file__).read_text(encoding="utf-8")[:num_chars]}
    if (path := data_dir / "wikitext2/test.txt").is_file():
        texts["WikiText-2"] = path.read_text(encoding="utf-8")[:num_chars]

    def measured(quantization: str) -> dict[str, float]:
        target = Target.load(config.model_copy(update={"quantization": quantization}), 2 * _PERPLEXITY_WINDOW)
        tokens = {name: target.tokenizer(t, add_special_tokens=False, verbose=False) for name, t in texts.items()}
        return {name: perplexity(target, each["input_ids"], _PERPLEXITY_WINDOW) for name, each in tokens.items()}

    found, exact = (run_in_thread(partial(measured, name), num_processors()) for name in ("int8", "none"))
    return {name: found[name] / exact[name] for name in texts}


def cpu_tables(result: Result) -> dict[str, Table]:
    parts = {"programs, greedy": "peers", "steps": "steps", "steps of 1 B parameters": "steps_1b"}
    rows = {title: transposed(result[key]) for title, key in parts.items() if key in result}
    return rows | nested(result, "perplexity_ratios") | generation_report.generation_tables(result)


_AGAINST = "tokens a second after the first step's, T=0, one request, over llama.cpp's"
METRICS = (
    Metric("identical", "every output token equal: speculation on and off, T=0, T=1, top-p, alone and in batches of 8",
           equal_to(True)),
    Metric("plain_vs_llama_q8", f"plain: {_AGAINST} with Q8_0 weights", at_least(1.0)),
    Metric("plain_vs_llama_bf16", f"plain: {_AGAINST} with bf16 weights", at_least(1.2)),
    Metric("step16_over_step1", "a forward of 16 rows over one of a single row, 500 tokens of context", at_most(1.6)),
    Metric("rag_vs_llama_best", f"answers, speculative: {_AGAINST} best of plain and prompt lookup", at_least(3.0)),
    Metric("grammar_vs_llama_best", f"corrections of 20 to 40 words, the same: {_AGAINST} best", at_least(6.0)),
    Metric("prefill_vs_llama_best", "time to the first token, llama.cpp's best over ours", at_least(1.2)),
    Metric("batch8_on_off", "tokens a second of eight requests side by side, speculation on over off", at_least(1.0)),
    Metric("step_over_roofline", "a one-row step over the time to read the weights", at_most(1.35)),
    Metric("perplexity_ratio", "perplexity of int8 weights over float, the worse of two texts", at_most(1.01)),
    Metric("busy_over_quiet", "plain decoding beside a busy loop over quiet, threads adapting", at_most(2.5)),
    *(metric for metric in generation_report.METRICS if metric.name != "identical"),
)  # fmt: skip
SUITE = Suite("cpu", run_cpu, METRICS, ("missing",), cpu_tables, generation_report.draw_generation)
