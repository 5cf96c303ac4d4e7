"""What stands first in the suite `drafters`, and its tables, from rows made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragspec.errors import ModelError
from ragspec.evaluation.report import Result, summary
from ragspec.evaluation.suites.drafters.report import (
    METRICS,
    NOTES,
    drafters_tables,
    free_running,
    headlines,
    merged_over_best,
)
from ragspec.evaluation.suites.drafters.variants import (
    COPY,
    DRAFTING,
    EAGLE1,
    EAGLE2,
    EAGLE3,
    MERGED,
    NONE,
    TREE_NODES,
    Heads,
    chain_setups,
    fixed_setups,
    tree_setups,
)
from ragspec.speculation import OFF, ON

BEGINNINGS = {
    EAGLE2: {"coupled_t1_over_t0": 0.7, "uncoupled_t1_over_t0": 0.5},
    EAGLE3: {"coupled_t1_over_t0": 0.9, "uncoupled_t1_over_t0": 0.6},
}


def row(variant: str, **changes: object) -> Result:
    """A tree on prose at T=0, one request at a time."""
    plain = variant == NONE
    known = {
        "variant": variant, "shape": None if plain else "tree", "nodes": None, "coupled": None if plain else True,
        "task": "prose", "temperature": 0.0, "batch": 1, "acceptance_length": 1.0 if plain else 2.0, "draft_ms": 0.5,
        "drafted_a_step": 4.0, "pos_acc": {} if plain else {"eagle": [0.6, 0.4]},
        "pos_reached": {} if plain else {"eagle": [60, 30]}, "n_alpha": None, "speedup": 1.0 if plain else 1.5,
        "speedup_end_to_end": 1.2, "tokens_per_s": 100.0, "prompts_included": False, "repeated_share": 0.1,
        "identical": True, "num_prompts": 2,
    }  # fmt: skip
    return known | changes


def grid() -> list[Result]:
    """All variants on questions, chat and prose at both temperatures, batches, fixed trees and a chain."""
    speeds = {NONE: 1.0, COPY: 1.4, EAGLE1: 1.1, EAGLE2: 1.3, EAGLE3: 1.6, MERGED: 2.0}
    rows = [
        row(name, task=task, temperature=temperature, speedup=speed)
        for name, speed in speeds.items()
        for task in ("rag", "chat", "prose")
        for temperature in (0.0, 1.0)
    ]
    rows += [
        row(name, batch=batch, speedup=10 * speed / batch, prompts_included=True)
        for name, speed in speeds.items()
        for batch in (1, 4)
    ]
    for name, factor in ((EAGLE2, 1.0), (EAGLE3, 1.5)):
        for temperature, coupled, length in ((0.0, True, 2.0), (1.0, True, 1.6), (1.0, False, 1.2)):
            length *= factor
            rows.append(row(name, nodes=16, temperature=temperature, coupled=coupled, acceptance_length=length))
    return [*rows, row(EAGLE3, shape="chain", nodes=16, speedup=9.0, acceptance_length=9.0)]


def whole_result(rows: list[Result]) -> Result:
    rules = {"chain": {"chain": 1.5, "tree": None}, "iid": {"chain": None, "tree": 1.75}}
    said = {"missing": [EAGLE1], "left_out": ["something"], "rows": rows}
    result = said | {"same_beginnings": BEGINNINGS, "acceptance_rules": rules}
    return result | headlines(rows, BEGINNINGS)


def test_headlines_come_from_their_own_rows() -> None:
    """Bug guarded: a chain's length, a batch's or a merged draft's speed under the name of a head's."""
    found = headlines(grid(), BEGINNINGS)
    assert (found["eagle_prose_acceptance_length"], found["eagle_prose_acceptance_length_of"]) == (3.0, EAGLE3)
    assert (found["eagle_prose_speedup"], found["eagle_prose_speedup_of"]) == (1.6, EAGLE3)
    assert (found["coupled_t1_over_t0"], found["uncoupled_t1_over_t0"]) == (0.9, 0.6)
    assert found["merged_over_best"] == pytest.approx(2.0 / 1.6)
    assert found["identical"] is True
    assert free_running(grid())[EAGLE2] == {"coupled_t1_over_t0": 0.8, "uncoupled_t1_over_t0": 0.6}


def test_merging_is_judged_where_it_is_worst() -> None:
    """Bug guarded: a mean that hides the task on which merging costs."""
    rows = grid()
    for one in rows:
        if (one["variant"], one["task"], one["temperature"]) == (COPY, "chat", 1.0):
            one["speedup"] = 2.5
    by_task = merged_over_best(rows)
    assert set(by_task) == {"rag, T = 0", "rag, T = 1", "chat, T = 0", "chat, T = 1"}
    assert min(by_task.values()) == by_task["chat, T = 1"] == pytest.approx(0.8)
    assert headlines(rows, BEGINNINGS)["merged_over_best"] == pytest.approx(0.8)


def test_one_row_that_differs_is_enough() -> None:
    """Bug guarded: "identical" that cannot be false; a plain row that was compared with nothing counted as different."""
    assert headlines([row(NONE, identical=None), row(COPY)], {})["identical"] is True
    assert headlines([row(NONE, identical=None), row(COPY, identical=False)], {})["identical"] is False


def test_what_was_not_measured_is_null() -> None:
    """Bug guarded: a traceback, or a zero, on a machine without heads."""
    found = headlines([row(NONE), row(COPY)], {})
    for key in {metric.name for metric in METRICS} - {"identical", "peak_pss_mb"}:
        assert found[key] is None, key
    assert found["merged_over_best_by_task"] == {} and found["free_running"] == {}


def test_tables_hold_every_variant_and_only_what_was_measured() -> None:
    """Bug guarded: a variant left out of a table; an empty table shown; chains among trees."""
    tables = drafters_tables(whole_result(grid()))
    assert list(tables["tokens a decode step"]) == [NONE, *DRAFTING]
    assert tables["speed-up of decoding"][EAGLE3]["prose, T = 0"] == 1.6, "not the chain's"
    assert tables["side by side, T = 0, prompts included: speed-up"][MERGED] == {"prose, 1": 20.0, "prose, 4": 5.0}
    assert tables["pos_acc, prose, T = 0, trees that pay"][EAGLE2] == {"depth 1": 0.6, "depth 2": 0.4}
    assert tables[f"pos_acc, prose, T = 1, {TREE_NODES} nodes"].keys() == {EAGLE2, EAGLE3}
    assert tables[f"tokens a decode step, {TREE_NODES} nodes"][EAGLE2]["prose, T = 1, uncoupled"] == 1.2
    assert tables["tokens a step by acceptance rule"]["tree"] == {"chain": None, "iid": 1.75}
    assert "output repeats itself, share" in tables
    few = drafters_tables(whole_result([row(NONE), row(COPY)]) | {"same_beginnings": {}, "acceptance_rules": None})
    assert all(any(table.values()) for table in few.values()) and "tokens a decode step, chains" not in few


def test_what_is_missing_and_left_out_is_said() -> None:
    """Bug guarded: a table without EAGLE-1 and no word about it."""
    said = summary(whole_result(grid()), METRICS, NOTES)
    assert ("missing", "", EAGLE1) in said and ("left_out", "", "something") in said
    assert {metric.name for metric in METRICS} <= {name for name, _, _ in said} | {"peak_pss_mb"}


def heads_in(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    return folder


def test_setups_cover_every_variant_whose_head_is_there(tmp_path: Path) -> None:
    """Bug guarded: a variant measured twice or never; EAGLE-1 and EAGLE-2 with the same tree."""
    both = Heads.find(heads_in(tmp_path / "both", "eagle", "eagle3"))
    assert both.missing == []
    assert sorted(name for setup in tree_setups(both) for name in setup.variants) == sorted(DRAFTING)
    trees = {name: setup for setup in tree_setups(both) for name in setup.variants}
    assert trees[EAGLE1].head_tree != trees[EAGLE2].head_tree and trees[EAGLE1].head == trees[EAGLE2].head
    assert trees[EAGLE3] is trees[MERGED] is trees[COPY], "those that are compared take turns in one engine"
    assert trees[MERGED].variants[MERGED] == ON != OFF
    assert {setup.fixed_nodes for setup in fixed_setups(both, True)} == {TREE_NODES}
    assert [[*setup.variants] for setup in fixed_setups(both, True)] == [[EAGLE2], [EAGLE3], [EAGLE1]]
    assert [setup.coupled for setup in fixed_setups(both, False)] == [False, False]
    assert {setup.shape for setup in chain_setups(both)} == {"chain"}


def test_a_head_that_is_missing_takes_its_variants_with_it(tmp_path: Path) -> None:
    """Bug guarded: copying gone with the head it was to be merged with."""
    only = Heads.find(heads_in(tmp_path / "one", "eagle"))
    assert only.missing == [EAGLE3, MERGED]
    assert [name for setup in tree_setups(only) for name in setup.variants] == [COPY, EAGLE1, EAGLE2]
    assert [name for setup in tree_setups(Heads()) for name in setup.variants] == [COPY]
    assert Heads().missing == [EAGLE1, EAGLE2, EAGLE3, MERGED] and chain_setups(Heads()) == []
    with pytest.raises(ModelError, match="neither"):
        Heads.find(tmp_path)
