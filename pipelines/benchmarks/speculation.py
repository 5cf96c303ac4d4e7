"""The suite `speculation`: how much faster drafts make decoding, by workload and by drafter, and whether any token differs.

Three kinds of rows, one request at a time unless the row says otherwise:

* workload: the default drafters beside plain decoding, transformers and llama.cpp, T = 0; beside plain decoding, T = 1
* batch:    eight requests side by side, prompts included
* drafters: each drafter alone and its useful combinations, beside plain decoding

With `--device stub` the rows are of the host alone: its processor time a step on a device of tables (`stub_device`).

Every row counts whether the tokens equal plain decoding's. Speed-ups are ratios of decode time, first to last token.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pipelines.benchmarks.cases.timing import (
    GENERATE,
    PLAIN,
    PROMPT_LOOKUP,
    SPECULATIVE,
    Case,
    Decoder,
    EngineDecoder,
    Timings,
    take_turns,
)
from pipelines.benchmarks.cases.workloads import (
    CHAT,
    GRAMMAR,
    PROSE,
    RAG,
    SPEC_BENCH_TASKS,
    chat_cases,
    grammar_cases,
    mixed_sentences,
    nothing_to_copy_cases,
    prose_cases,
    rag_cases,
    spec_bench_cases,
)
from pipelines.benchmarks.harness import Plot, Result, Row, Run, Suite, metrics_of
from pipelines.benchmarks.peers import LLAMA_TYPES, LOOKUP_TOKENS, peer_decoders
from ragspec.config import DatastoreConfig, DraftingConfig, EagleConfig, EngineConfig, HeadConfig
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.errors import ModelError
from ragspec.evaluation.stub_device import StubDevice, StubTarget, read_devices, stub_engine, stub_requests
from ragspec.rag.prompt import PromptBuilder
from ragspec.speculation import OFF, ON, Speculation

SIDE_BY_SIDE = 8
_SPEC_BENCH = "spec-bench "
_NOTHING, _IN_VAIN = "nothing to copy", "sources in vain"
_COPY, _DATASTORE = "copy", "copy + datastore"
_WORKLOADS = (RAG, GRAMMAR, CHAT, PROSE)
_BATCHED = (RAG, GRAMMAR, CHAT)
_STUB_SLOTS, _STUB_TOKENS = 65_536, 320
_LEAST_NOTHING_RUNS = 5
"""No difference is expected where nothing can be copied, and single runs scatter by several percent."""
_HEAD_SECTIONS = {"eagle": EagleConfig, "medusa": HeadConfig, "hydra": HeadConfig}


class Drafters(NamedTuple):
    """One engine's drafters, and the drafters that its requests name. `head`: the folder of a trained head."""

    loaded: tuple[str, ...]
    asked: tuple[str, ...]
    head: Path | None = None


def drafter_table(heads: Path | None) -> dict[str, Drafters]:
    """Every way to draft, by name. A drafter whose features cost all steps of its engine has an engine of its own."""
    table = {
        _COPY: Drafters((_COPY,), (_COPY,)),
        "lookahead": Drafters((_COPY, "lookahead"), ("lookahead",)),
        "copy + lookahead": Drafters((_COPY, "lookahead"), (_COPY, "lookahead")),
        _DATASTORE: Drafters((_COPY, "datastore"), (_COPY, "datastore")),
    }
    for folder in head_folders(heads):
        family = head_family(folder)
        table[folder.name] = Drafters((_COPY, family), (family,), folder)
        table[f"copy + {folder.name}"] = Drafters((_COPY, family), (_COPY, family), folder)
    return table


def head_folders(heads: Path | None) -> list[Path]:
    """The folders of trained heads. Raises: ModelError for a folder without any."""
    if heads is None:
        return []
    folders = [path.parent for path in sorted(heads.glob("*/config.json"))]
    if not folders:
        raise ModelError(f"--heads names a folder with heads, each in a folder of its name; {heads} has none")
    return folders


def head_family(folder: Path) -> str:
    """The drafter that reads a head's files. PosS and HASS are EAGLE heads."""
    found = (family for family in ("medusa", "hydra") if list(folder.glob(f"{family}_lm_head.*")))
    return next(found, "eagle")


class Speculations(ExitStack):
    """The engines and prompts of one run, each made when a row first needs it."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self._engines: dict[tuple[tuple[str, ...], Path | None], Engine] = {}
        self._cases: dict[str, list[Case]] = {}

    def engine(self, drafters: tuple[str, ...] = (_COPY,), head: Path | None = None) -> Engine:
        """Raises: ModelError."""
        if (drafters, head) not in self._engines:
            drafting = DraftingConfig(drafters=drafters)
            if "datastore" in drafters:
                datastore = DatastoreConfig(index_dir=str(self._index_dir))
                drafting = drafting.model_copy(update={"datastore": datastore})
            if head is not None:
                section = _HEAD_SECTIONS[head_family(head)](path=str(head))
                drafting = drafting.model_copy(update={head_family(head): section})
            config = EngineConfig(max_num_seqs=SIDE_BY_SIDE)
            engine = load_engine(self.run.target, config, drafting, adaptive_threads=False)
            self.callback(engine.close)
            self._engines[drafters, head] = engine
        return self._engines[drafters, head]

    @cached_property
    def prompts(self) -> PromptBuilder:
        target = self.engine().target
        return PromptBuilder(target.tokenizer, target.max_context_tokens)

    @cached_property
    def _questions(self) -> Any:
        return self.run.questions(self.run.count(200, 2))

    @cached_property
    def _index_dir(self) -> Path:
        return self.run.store(self._questions.documents).index_dir

    @cached_property
    def peers(self) -> dict[str, Decoder]:
        """Greedy decoders of other programs on the same weights."""
        if not self.run.peers:
            return {}
        longest = max(len(case.prompt_ids) + case.max_tokens for name in _WORKLOADS for case in self.cases(name))
        return peer_decoders(self.run.target, self.engine(), self.run.cache_dir, longest + 2 * LOOKUP_TOKENS)

    def cases(self, workload: str) -> list[Case]:
        """Empty for a workload whose data is not there. Raises: InputError."""
        if workload not in self._cases:
            self._cases[workload] = self._read(workload)
        return self._cases[workload]

    def _read(self, workload: str) -> list[Case]:
        run, data = self.run, self.run.data_dir
        if workload == RAG:
            return list(rag_cases(self._questions.questions, run.retriever(self._questions.documents), self.prompts))
        if data is None:
            return []
        if workload == GRAMMAR:
            return list(grammar_cases(mixed_sentences(data, run.count(200, 3)), self.prompts))
        if workload == CHAT:
            return chat_cases(data, self.prompts, run.count(50, 2))
        if workload == PROSE:
            return list(prose_cases(data, self.prompts.tokenizer))[: run.count(20, 1)]
        path, task = data / "spec_bench" / "question.jsonl", workload.removeprefix(_SPEC_BENCH)
        plain = EngineDecoder(self.engine(), speculation=OFF, seed=run.seed, temperature=0.0)
        return spec_bench_cases(path, task, run.count(20, 1), self.prompts, lambda case: plain(case).text)

    def timed(
        self,
        stage: str,
        cases: Sequence[Case],
        drafters: Drafters | None = None,
        peers: Mapping[str, Decoder] | None = None,
        num_runs: int | None = None,
        **sampling: Any,
    ) -> Timings:
        """Plain and speculative decoding, and the peers, in turns. `drafters` None: the default configuration's."""
        engine = self.engine() if drafters is None else self.engine(drafters.loaded, drafters.head)
        speculation = ON if drafters is None else Speculation(drafters.asked)
        ways = {PLAIN: OFF, SPECULATIVE: speculation}
        decoders: dict[str, Decoder] = {
            name: EngineDecoder(engine, speculation=way, seed=self.run.seed, **sampling) for name, way in ways.items()
        }
        runs = num_runs or self.run.num_runs
        return Timings.measure(decoders | dict(peers or {}), cases, runs, self.run.tick, stage)


def run_speculation(run: Run) -> Iterator[Row]:
    """Raises: InputError, ModelError, SaveError."""
    if run.device == "stub":
        yield from _host_rows(run)
        return
    with Speculations(run) as bench:
        tasks = () if run.quick else SPEC_BENCH_TASKS  # more prompts than five minutes allow
        workloads = [*_WORKLOADS, *(_SPEC_BENCH + task for task in tasks)]
        for workload in workloads if run.data_dir else [RAG]:
            for temperature in (0.0, 1.0):
                measure = partial(_workload_row, bench, workload, temperature)
                yield run.row(f"{workload}, T={temperature:g}", measure)
        for workload in _BATCHED if run.data_dir else [RAG]:
            yield run.row(f"{workload}, {SIDE_BY_SIDE} side by side", partial(_batch_row, bench, workload))
        for name in (_NOTHING, _IN_VAIN):
            yield run.row(name, partial(_nothing_row, bench, name))
        for name, drafters in drafter_table(run.heads).items():
            for workload in _drafted_workloads(run, drafters):
                yield run.row(f"{name}: {workload}", partial(_drafter_row, bench, name, drafters, workload))


def _host_rows(run: Run) -> Iterator[Row]:
    """A row for each stub device, share of copyable tokens, temperature and number of sequences."""
    devices = list(read_devices().items())[: 1 if run.quick else None]
    kinds = [(0.0, 0.0), (0.0, 1.0), (0.5, 0.0), (0.9, 0.0), (0.9, 1.0)]
    lengths = [_STUB_TOKENS * eighth // 8 for eighth in range(1, 9)]
    for name, device in devices:
        for copyable, temperature in kinds:
            for count in (1, 32) if run.quick else (1, 8, 32, 64):
                row = f"{name}, {copyable:.0%} copyable, T={temperature:g}, {count} side by side"
                yield run.row(row, partial(_host_row, run, device, copyable, temperature, count, [_STUB_TOKENS]))
        for copyable in (0.0,) if run.quick else (0.0, 0.9):
            count = 8 if run.quick else 64
            row = f"{name}, {copyable:.0%} copyable, T=0, mixed lengths, {count} side by side"
            yield run.row(row, partial(_host_row, run, device, copyable, 0.0, count, lengths))


def _host_row(run: Run, device: StubDevice, copyable: float, temperature: float, count: int, lengths: list[int]) -> Row:
    """Processor milliseconds a step that the device waits for the host; tokens a second of modelled time, on over off.

    Requests of one length are a batch, of which the steps count in which all sequences decode. Of mixed lengths there are
    four times as many requests, which follow one another through a full prefix cache, and all steps count.
    """
    is_mixed = len(lengths) > 1
    num_requests, num_slots = (4 * count, _STUB_SLOTS // 2) if is_mixed else (count, _STUB_SLOTS)
    target = StubTarget(device, copyable, num_slots)
    config = EngineConfig(max_kv_tokens=num_slots, max_num_batched_tokens=2048, max_num_seqs=64)
    runs: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    outputs, clock = list[list[tuple[int, ...]]](), target.clock
    with stub_engine(target, config) as engine:
        # Compiles, and fills the cache
        engine.generate(stub_requests(num_requests, lengths, temperature, speculation=True))
        gc.collect()
        gc.freeze()  # as `ragspec serve` does: a full collection in a timed run trebles its host time
        for number in range(run.num_runs):
            for speculation, taken in runs.items():
                salt = f"{number} {speculation} " if is_mixed else ""
                clock.clear(None if is_mixed else count)
                done = engine.generate(stub_requests(num_requests, lengths, temperature, speculation, salt))
                outputs.append([completion.token_ids for completion in done])
                num_tokens = sum(map(len, outputs[-1])) if is_mixed else clock.num_tokens
                nodes = sum(c.stats.num_drafted for c in done) / sum(c.stats.num_steps for c in done)
                seconds = clock.host_s + clock.device_s
                taken.append((seconds / num_tokens, clock.host_s / clock.num_steps, nodes))
    (off_s, off_host_s, _), (on_s, on_host_s, nodes) = (min(taken) for taken in runs.values())
    return {
        "side_by_side": count,
        "temperature": temperature,
        "identical": all(output == outputs[0] for output in outputs),
        "host_ms": 1e3 * on_host_s,
        "plain_host_ms": 1e3 * off_host_s,
        "nodes_a_tree": nodes,
        "on_over_off": off_s / on_s,
    }


def _drafted_workloads(run: Run, drafters: Drafters) -> list[str]:
    """Drafters without a network are measured where copies find something, heads on prose too."""
    if run.data_dir is None:
        return [RAG]
    wide = [RAG, CHAT, PROSE, *(_SPEC_BENCH + task for task in SPEC_BENCH_TASKS)]
    return [RAG, CHAT] if run.quick else wide if drafters.head or "lookahead" in drafters.asked else [RAG, CHAT]


def _workload_row(bench: Speculations, workload: str, temperature: float) -> Row:
    peers = bench.peers if workload in _WORKLOADS and not temperature else {}
    cases = bench.cases(workload)
    timings = bench.timed(workload, cases, peers=peers, temperature=temperature)
    row = _pair_row(workload, temperature, cases, timings)
    if workload not in _WORKLOADS or temperature:
        return row
    ratio, llama = timings.ratio, [name for name in timings.runs if name.startswith("llama.cpp")]
    return row | {
        "speedup_vs_generate": ratio(GENERATE, SPECULATIVE),
        "speedup_vs_prompt_lookup": ratio(PROMPT_LOOKUP, SPECULATIVE),
        "plain_vs_generate": ratio(GENERATE, PLAIN),
        "agrees_with_generate": timings.agreement(GENERATE, SPECULATIVE),
        "vs_llama_best": timings.rate_ratio(SPECULATIVE, llama),
        "plain_vs_llama_q8": timings.rate_ratio(PLAIN, ["llama.cpp Q8_0"]),
        "plain_vs_llama_bf16": timings.rate_ratio(PLAIN, ["llama.cpp BF16"]),
        "prefill_vs_llama_best": timings.first_token_ratio(PLAIN, [f"llama.cpp {type_}" for type_ in LLAMA_TYPES]),
    }


def _pair_row(workload: str, temperature: float, cases: Sequence[Case], timings: Timings) -> Row:
    return {
        "workload": workload,
        "temperature": temperature,
        "num_prompts": len(cases),
        "identical": timings.identical(SPECULATIVE),
        "tokens_per_s": timings.tokens_per_s(SPECULATIVE),
        "plain_tokens_per_s": timings.tokens_per_s(PLAIN),
        "acceptance_length": timings.acceptance_length(SPECULATIVE),
        "speedup_vs_plain": timings.ratio(PLAIN, SPECULATIVE),
        "speedup_end_to_end": timings.ratio(PLAIN, SPECULATIVE, end_to_end=True),
    }


def _batch_row(bench: Speculations, workload: str) -> Row:
    """All cases at once: tokens a second with prompts, medians of the runs."""
    run, cases = bench.run, bench.cases(workload)
    decoders = {
        name: EngineDecoder(bench.engine(), speculation=way, seed=run.seed, temperature=0.0)
        for name, way in ((SPECULATIVE, ON), (PLAIN, OFF))
    }
    # Why three runs at least: reading the prompts takes most of the time and varies by more than drafts change
    together = {name: decode.together for name, decode in decoders.items()}
    taken = take_turns(together, [cases], max(3, run.num_runs), run.tick, f"{workload}, side by side")
    batches = {name: [batch for (batch,) in table] for name, table in taken.items()}
    fast, plain = ([batch.tokens_per_s for batch in batches[name]] for name in (SPECULATIVE, PLAIN))
    alone = [decoders[PLAIN](case).token_ids for case in cases]
    every = [batch for table in batches.values() for batch in table]
    return {
        "workload": workload,
        "side_by_side": SIDE_BY_SIDE,
        "num_prompts": len(cases),
        "identical": all([one.token_ids for one in batch.runs] == alone for batch in every),
        "tokens_per_s": median(fast),
        "plain_tokens_per_s": median(plain),
        "speedup_vs_plain": median(a / b for a, b in zip(fast, plain, strict=True)),
    }


def _nothing_row(bench: Speculations, name: str) -> Row:
    """Random prompts at T = 1, without sources or with unrelated ones, where drafts cannot pay: the ratio 1 means no loss."""
    run, target = bench.run, bench.engine().target
    count, num_runs = (2, 3) if run.quick else (12, max(_LEAST_NOTHING_RUNS, run.num_runs))
    sources = [case.sources for case in bench.cases(RAG)] if name == _IN_VAIN else [()]
    cases = nothing_to_copy_cases(target.vocab_size, target.max_context_tokens, count, run.seed, sources)
    timings = bench.timed(name, cases, num_runs=num_runs, temperature=1.0, ignore_eos=True)
    return _pair_row(name, 1.0, cases, timings)


def _drafter_row(bench: Speculations, name: str, drafters: Drafters, workload: str) -> Row:
    cases = bench.cases(workload)[: bench.run.count(20, 2)]
    timings = bench.timed(f"{name}: {workload}", cases, drafters, temperature=0.0, ignore_eos=workload == PROSE)
    return {"drafters": name} | _pair_row(workload, 0.0, cases, timings)


def summarise(rows: Sequence[Row]) -> Result:
    """The figures of the workload rag under their plain names, of other workloads with a prefix."""
    named = {row["row"]: row for row in rows}
    kinds = ("T=0", "T=1", f"{SIDE_BY_SIDE} side by side")
    greedy, sampled, batch = (named.get(f"{RAG}, {kind}", {}) for kind in kinds)
    at_zero, at_one = greedy.get("speedup_vs_plain"), sampled.get("speedup_vs_plain")
    left_out = {"row", "commit", "workload", "temperature", "identical", "vs_llama_best"}
    result = {key: value for key, value in greedy.items() if key not in left_out}
    result |= {
        "identical": all(row["identical"] for row in rows if "identical" in row),
        "speedup_vs_plain_t1": at_one,
        "acceptance_length_t1": sampled.get("acceptance_length"),
        "t1_over_t0": at_one / at_zero if at_one and at_zero else None,
        "batch8_tokens_per_s": batch.get("tokens_per_s"),
        "batch8_plain_tokens_per_s": batch.get("plain_tokens_per_s"),
        "batch8_speedup_vs_plain": batch.get("speedup_vs_plain"),
        "nothing_to_copy": named.get(_NOTHING, {}).get("speedup_vs_plain"),
        "sources_in_vain": named.get(_IN_VAIN, {}).get("speedup_vs_plain"),
        "rag_vs_llama_best": greedy.get("vs_llama_best"),
        "grammar_vs_llama_best": named.get(f"{GRAMMAR}, T=0", {}).get("vs_llama_best"),
    }
    for workload in (GRAMMAR, CHAT):
        result[f"{workload}_speedup_vs_plain"] = named.get(f"{workload}, T=0", {}).get("speedup_vs_plain")
    for key, share in (("stub_nothing_to_copy", " 0%"), ("stub_copies", " 90%")):
        ratios = [row["on_over_off"] for row in rows if f"{share} copyable" in row["row"]]
        result |= {key: min(ratios)} if ratios else {}
    return result | _spec_bench(rows)


def _spec_bench(rows: Sequence[Row]) -> Result:
    """The default drafters over the best single drafter by task, and the slowest cell of any single drafter."""
    default = {row["workload"]: row["speedup_vs_plain"] for row in rows if row["row"].endswith(", T=0")}
    singles: dict[str, list[float]] = {}
    for row in rows:
        if "drafters" in row and " + " not in row["drafters"] and row["speedup_vs_plain"]:
            singles.setdefault(row["workload"], []).append(row["speedup_vs_plain"])
    over_best = [default[task] / max(own) for task, own in singles.items() if default.get(task)]
    if not over_best:
        return {}
    return {
        "default_over_best_single_min": min(over_best),
        "default_over_best_single_median": median(over_best),
        "worst_single_over_off": min(value for own in singles.values() for value in own),
    }


PLOT = Plot(
    "workload",
    {"speedup_vs_plain": "decode time without drafts over with", "speedup_vs_generate": "transformers over ours"},
    lambda row: row.get("temperature") == 0.0 and "speedup_vs_generate" in row,
)
SUITE = Suite("speculation", run_speculation, summarise, metrics_of("speculation"), PLOT)
