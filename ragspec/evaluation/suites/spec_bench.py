"""The suite `spec_bench`: the 480 questions of Spec-Bench by every drafter that needs no training, and by a head if there is one.

At T = 0 all questions are decoded plainly and by each drafter alone; 20 a task also by the useful pairs, and at T = 1. The ways
to decode take turns at every question. Each finished question is a line of a file in the cache folder, named by a hash of target,
settings and code: a run that was stopped goes on after the last line.

Follow-up questions about the articles of one index show what the datastore drafts beyond the retrieved passages, and what copies
are worth to a target of which half of the weights stays on disk. With a head, `ragspec.evaluation.suites.drift` measures what it
gains from learning while it serves.

    >>> run_suite("spec_bench", settings, tick).result["default_over_best_single_min"]

Source: Xia et al. 2024 (arXiv 2401.07851). Speed-ups are means over questions of the ratio of decode times, as in the survey.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from ragspec import drafting
from ragspec.config import DatastoreConfig, DraftingConfig, EagleConfig, EngineConfig
from ragspec.core import CopySource, Message, SourceKind
from ragspec.disk import make_folder, saving
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.evaluation import timing
from ragspec.evaluation.cases import Case, rag_cases
from ragspec.evaluation.datasets import json_rows
from ragspec.evaluation.report import Figures, Metric, Result, Table, at_least, equal_to, new_figure, transposed
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.suites.drafters.variants import eagle_head
from ragspec.evaluation.suites.drift import NUM_PROBES, NUM_REQUESTS, Drift, gsm8k_prompts, measure_drift
from ragspec.evaluation.timing import EngineDecoder, Tick, TimedGeneration
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.retriever import Retriever
from ragspec.speculation import OFF, Speculation

TOKENS = 128
A_TASK = 20
"""Questions a task of the pairs and of T = 1."""
TASKS = ("multi-turn", "translation", "summarization", "qa", "math_reasoning", "rag")
FOLLOW_UP = "follow-up"
PLAIN, DEFAULT = "plain", "default"
PLAIN_FROM_DISK, COPY_FROM_DISK = "plain, half on disk", "copy, half on disk"
PUBLISHED = {"copy": 1.66, "eagle": 2.10, "recycling": 2.22, "lookahead": 1.34, "datastore": 1.48}
"""Overall speed-ups of the survey's board for Vicuna-7B on an A100: PLD, EAGLE, Token Recycling, Lookahead, REST."""

_KV_TOKENS = 8192

Rows = Sequence[dict[str, Any]]


class Way(NamedTuple):
    """How to decode: the engine by its drafters, and the drafters that a request names. `from_disk`: half of the weights are."""

    engine: tuple[str, ...]
    drafters: tuple[str, ...]
    from_disk: bool = False

    @property
    def speculation(self) -> Speculation:
        return Speculation(self.drafters) if self.drafters else OFF


class Unit(NamedTuple):
    """A question: what a row of the file holds. `turns`: of the user; empty for a follow-up, which is a case already."""

    id: str
    task: str
    temperature: float
    turns: tuple[str, ...]
    ways: tuple[str, ...]
    case: Case | None = None


def ways_of(head: Path | None) -> dict[str, Way]:
    """Every way by name. Why an engine for each drafter: the features that one reads cost all steps of its engine."""
    singles = ["copy", "recycling", "lookahead", *(["eagle"] if head else [])]
    ways = {PLAIN: Way(("copy",), ())}
    ways |= {name: Way(("copy",) if name == "copy" else ("copy", name), (name,)) for name in singles}
    ways |= {f"copy + {name}": Way(("copy", name), ("copy", name)) for name in (*singles[1:], "datastore")}
    ways |= {PLAIN_FROM_DISK: Way(("copy",), (), True), COPY_FROM_DISK: Way(("copy",), ("copy",), True)}
    return ways


def default_way(head: Path | None) -> str:
    """The way of the default configuration, with a head if there is one."""
    return "copy + eagle" if head else "copy"


def read_questions(path: Path, a_task: int | None) -> list[tuple[str, str, tuple[str, ...]]]:
    """(id, task, turns) of at most so many questions a task. Raises: InputError."""
    found: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {task: [] for task in TASKS}
    for _, row in json_rows(path):
        task = row["category"] if row["category"] in TASKS else TASKS[0]
        found[task].append((str(row["question_id"]), task, tuple(row["turns"])))
    return [each for questions in found.values() for each in questions[:a_task]]


def units_of(settings: Settings, head: Path | None) -> list[Unit]:
    """All questions without the follow-ups. Raises: ConfigError, InputError."""
    path = settings.require_data("spec_bench and squad") / "spec_bench" / "question.jsonl"
    all_ways = tuple(name for name, way in ways_of(head).items() if "datastore" not in way.engine and not way.from_disk)
    singles = tuple(name for name in all_ways if " + " not in name or name == default_way(head))
    few = settings.num_prompts or (2 if settings.quick else A_TASK)
    whole = few if settings.quick or settings.num_prompts else None
    chosen = {each[0] for each in read_questions(path, few)}
    at_zero = [
        Unit(id_, task, 0.0, turns, all_ways if id_ in chosen else singles)
        for id_, task, turns in read_questions(path, whole)
    ]
    at_one = [Unit(id_, task, 1.0, turns, all_ways) for id_, task, turns in read_questions(path, few)]
    return at_zero + at_one


class SpecBench(contextlib.ExitStack):
    """The engines, which are loaded when first needed, and the file of rows."""

    def __init__(self, settings: Settings, head: Path | None, index_dir: str) -> None:
        super().__init__()
        self._settings, self._head, self._index_dir = settings, head, index_dir
        self._ways, self._engines = ways_of(head), dict[tuple[tuple[str, ...], bool], Engine]()
        parts = (settings.target.model_dump_json(), str(head), str(settings.plan.seed), str(TOKENS), _code_digest())
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        self.path = settings.cache_dir / "spec_bench" / f"{name}.jsonl"

    def engine(self, drafters: tuple[str, ...], from_disk: bool = False) -> Engine:
        if (drafters, from_disk) not in self._engines:
            target = self._settings.target
            if from_disk:
                num_bytes = self.engine(drafters).target.num_parameters  # a weight is a byte
                target = target.model_copy(update={"max_weight_bytes": num_bytes // 2})
            settings = DraftingConfig(
                drafters=drafters,
                eagle=EagleConfig(path=str(self._head) if self._head and "eagle" in drafters else ""),
                datastore=DatastoreConfig(index_dir=self._index_dir),
            )
            config = EngineConfig(max_running=1, max_kv_tokens=_KV_TOKENS, prefix_cache=False, adaptive_threads=False)
            self._engines[drafters, from_disk] = engine = load_engine(target, config, settings)
            self.callback(engine.close)
        return self._engines[drafters, from_disk]

    @functools.cached_property
    def prompts(self) -> PromptBuilder:
        target = self.engine(self._ways[PLAIN].engine).target
        return PromptBuilder(target.tokenizer, target.max_context_tokens)

    def rows(self, units: Sequence[Unit], tick: Tick) -> list[dict[str, Any]]:
        """One row a question: those of the file, then the others, each written when it is known. Raises: SaveError."""
        with saving(self.path):
            make_folder(self.path.parent)
            known = {(row["id"], row["temperature"]): row for row in _whole_lines(self.path)}
            found = []
            for number, unit in enumerate(units, 1):
                row = known.get((unit.id, unit.temperature))
                if row is None or not set(unit.ways) <= row["ways"].keys():
                    row = self._measured(unit)
                    with open(self.path, "a", encoding="utf-8") as file:
                        file.write("\n" + json.dumps(row))  # Why first: the line before may have been cut off
                found.append(row)
                tick("questions", number, len(units))
        return found

    def _measured(self, unit: Unit) -> dict[str, Any]:
        decoders = {name: self._decoder(name, unit.temperature) for name in unit.ways}
        runs: dict[str, list[TimedGeneration]] = {name: [] for name in unit.ways}
        said: list[Message] = []
        for number, turn in enumerate(unit.turns or ("",)):
            said.append(Message("user", turn))
            case = unit.case or _case(f"{unit.id}-{number}", said, self.prompts)
            for name, decode in decoders.items():
                runs[name].append(decode(case))
            said.append(Message("assistant", runs[PLAIN][-1].text.strip() or "."))
        ways = {name: _counts(own, runs[PLAIN]) for name, own in runs.items()}
        return {"id": unit.id, "task": unit.task, "temperature": unit.temperature, "ways": ways}

    def _decoder(self, name: str, temperature: float) -> EngineDecoder:
        way = self._ways[name]
        return EngineDecoder(
            self.engine(way.engine, way.from_disk),
            speculation=way.speculation,
            seed=self._settings.plan.seed,
            # Why a tenant for each: what one way has learned from a question would tell another way the answer
            salt=f"{name}, T = {temperature:g}",
            temperature=temperature,
        )


def _case(name: str, said: Sequence[Message], prompts: PromptBuilder) -> Case:
    ids = prompts.build(said, (), TOKENS).prompt_ids
    sources = tuple(CopySource(SourceKind.HISTORY, message.content) for message in said)
    return Case(name, "spec_bench", ids, sources, TOKENS)


def _counts(own: Sequence[TimedGeneration], plain: Sequence[TimedGeneration]) -> dict[str, Any]:
    """Of all turns. `seconds`: of decoding (`TimedGeneration.decoding_s`)."""
    return {
        "seconds": sum(run.decoding_s for run in own),
        "first_s": sum(run.first_s for run in own),
        "prompt_draft_s": sum(run.stats.prompt_draft_s for run in own),
        "tokens": sum(len(run.token_ids) for run in own),
        "steps": sum(run.num_steps for run in own),
        "accepted": sum(run.stats.num_accepted for run in own),
        "identical": [run.token_ids for run in own] == [run.token_ids for run in plain],
    }


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of the file but for a line that was cut off."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _code_digest() -> str:
    digest, root = hashlib.sha256(), Path(drafting.__file__).parents[1]
    for folder in ("drafting", "engine", "numerics", "verification"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    for name in (__file__, timing.__file__):
        digest.update(Path(name).read_bytes())
    return digest.hexdigest()


def speedups(rows: Rows) -> dict[str, dict[str, float]]:
    """By way and task: the mean over questions of plain seconds over the way's, where tokens are the same."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for name, own in row["ways"].items():
            if name != PLAIN and own["identical"] and own["seconds"] > 0:
                ratio = row["ways"][PLAIN]["seconds"] / own["seconds"]
                found.setdefault(name, {}).setdefault(row["task"], []).append(ratio)
    return {name: {task: mean(ratios) for task, ratios in tasks.items()} for name, tasks in found.items()}


def acceptance_lengths(rows: Rows) -> dict[str, dict[str, float]]:
    """By way and task: tokens a step, pooled over questions, the prompt's step counted."""
    pooled: dict[str, dict[str, tuple[int, int]]] = {}
    for row in rows:
        for name, own in row["ways"].items():
            tokens, steps = pooled.setdefault(name, {}).get(row["task"], (0, 0))
            pooled[name][row["task"]] = tokens + own["tokens"], steps + own["steps"]
    return {name: {task: tokens / steps for task, (tokens, steps) in tasks.items()} for name, tasks in pooled.items()}


def headlines(rows: Rows, head: Path | None) -> Result:
    """The keys of the result that stand first."""
    at_zero = speedups([row for row in rows if row["temperature"] == 0.0 and row["task"] != FOLLOW_UP])
    singles = {name: tasks for name, tasks in at_zero.items() if " + " not in name}
    default = at_zero[default_way(head)]
    over_best = [default[task] / max(own[task] for own in singles.values()) for task in default]
    follow_ups = [row["ways"] for row in rows if row["task"] == FOLLOW_UP]
    extra = sum(ways["copy + datastore"]["accepted"] - ways["copy"]["accepted"] for ways in follow_ups)
    return {
        "identical": all(own["identical"] for row in rows for own in row["ways"].values()),
        "default_over_best_single_min": min(over_best),
        "default_over_best_single_median": median(over_best),
        "worst_single_over_off": min(value for own in singles.values() for value in own.values()),
        "datastore_extra": extra / max(1, sum(ways["copy"]["tokens"] for ways in follow_ups)) if follow_ups else None,
        "larger_than_memory_speedup": _from_disk(follow_ups),
    }


def _from_disk(follow_ups: Sequence[Mapping[str, Any]]) -> float | None:
    """The median of plain seconds over those with copies, half of the weights on disk."""
    found = [ways for ways in follow_ups if COPY_FROM_DISK in ways]
    ratios = [ways[PLAIN_FROM_DISK]["seconds"] / ways[COPY_FROM_DISK]["seconds"] for ways in found]
    return median(ratios) if ratios else None


def run_spec_bench(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError without data, InputError, ModelError, SaveError."""
    head = eagle_head(settings.heads)
    units = units_of(settings, head)
    few = settings.num_prompts or (4 if settings.quick else 3 * A_TASK)
    listed, encoder = settings.questions(few), Encoder.load(settings.encoder)
    store = settings.store(listed.documents, encoder, tick)
    with SpecBench(settings, head, str(store.index_dir)) as bench:
        retriever = Retriever(encoder, store, follow=False)
        found = rag_cases(listed.questions[:few], retriever, bench.prompts)
        cases = [replace(case, max_tokens=TOKENS) for case in found]
        ways: tuple[str, ...] = (PLAIN, "copy", "copy + datastore")
        if settings.target.is_int8 and settings.target.backend_name == "cpu":
            ways += (PLAIN_FROM_DISK, COPY_FROM_DISK)
        units += [Unit(f"{FOLLOW_UP}-{case.id}", FOLLOW_UP, 0.0, (), ways, case) for case in cases]
        rows = bench.rows(units, tick)
        drift = _drift(settings, head, bench.prompts, tick) if head and head.name == "eagle3" else None
    result = {"label": "Spec-Bench", "num_prompts": len(rows), "num_runs": 1, "default": default_way(head)}
    tables = {
        f"{title}, T = {temperature:g}": table([row for row in rows if row["temperature"] == temperature])
        for temperature in (0.0, 1.0)
        for title, table in (("speed-up", speedups), ("tokens a step", acceptance_lengths))
    }
    keys = headlines(rows, head) | {"osd_gain": drift and drift.gain}
    identical = {"identical": keys["identical"] and (drift is None or drift.identical)}
    missing = "" if drift else "osd_gain: it takes an EAGLE-3 head in --heads"
    return Outcome(keys | identical | result | {"tables": tables, "missing": missing})


def _drift(settings: Settings, head: Path, prompts: PromptBuilder, tick: Tick) -> Drift:
    """Raises: ModelError, InputError."""
    few = settings.num_prompts or (NUM_PROBES if settings.quick else NUM_REQUESTS)
    path = settings.require_data("gsm8k") / "gsm8k" / "train.jsonl"
    asked = gsm8k_prompts(path, NUM_PROBES + few, prompts)
    return measure_drift(settings.target, EagleConfig(path=str(head)), asked[NUM_PROBES:], asked[:NUM_PROBES], tick)


def spec_bench_tables(result: Result) -> dict[str, Table]:
    """Tasks as columns, then the order of the survey's board beside ours."""
    tables: dict[str, Table] = {title: transposed(table) for title, table in result["tables"].items()}
    ours = {name: mean(tasks.values()) for name, tasks in _on_board(result["tables"]["speed-up, T = 0"]).items()}
    order = dict(sorted(ours.items(), key=lambda each: -each[1]))
    tables["overall speed-up"] = {"here": order, "Vicuna-7B, A100": {name: PUBLISHED.get(name) for name in order}}
    return tables


def _on_board(ways: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {name: own for name, tasks in ways.items() if (own := {t: tasks[t] for t in TASKS if t in tasks})}


def draw(outcome: Outcome, title: str) -> Figures:
    """Bars of each way's speed-up, by task, as in the survey's figure."""
    ways = _on_board(outcome.result["tables"]["speed-up, T = 0"])
    figure, axes = new_figure(10, 4, f"T = 0, {title}")
    width = 0.8 / max(1, len(ways))
    for number, (name, tasks) in enumerate(ways.items()):
        places = [TASKS.index(task) + number * width for task in tasks]
        axes.bar(places, list(tasks.values()), width, label=name)
    axes.set_xticks([place + 0.4 for place in range(len(TASKS))], TASKS)
    axes.axhline(1.0, linewidth=0.8, color="black")
    axes.set_ylabel("speed-up of decoding")
    axes.legend(frameon=False, ncols=4)
    return {"spec_bench": figure}


def _metrics() -> Iterable[Metric]:
    yield Metric("identical", "every output token equal to plain decoding's", equal_to(True))
    yield Metric("default_over_best_single_min", "default over the best single drafter, worst task", at_least(1.0))
    yield Metric("default_over_best_single_median", "the same, median over tasks")
    yield Metric("worst_single_over_off", "each drafter alone over plain decoding, worst task", at_least(0.97))
    yield Metric("datastore_extra", "tokens drafted right beyond the retrieved passages, share of the output")
    yield Metric("osd_gain", "acceptance on another topic after a head has learned from it, over before", at_least(1.2))


SUITE = Suite(
    "spec_bench", run_spec_bench, tuple(_metrics()), ("missing",), spec_bench_tables, draw, options=("heads",)
)
