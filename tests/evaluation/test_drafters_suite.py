"""The suite `drafters` on a random target with random heads of several families, its headlines, and its command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from drafters_data import HIDDEN, save_heads, with_chat
from drafting.eagle_heads import random_head
from drafting.medusa_heads import hydra_tensors, medusa_tensors, save_hydra, save_medusa
from stand_ins import no_tick
from transformers import AutoTokenizer
from typer.testing import CliRunner

from pipelines import benchmark
from ragspec.errors import InputError, ModelError
from ragspec.evaluation.report import KEYS, Result
from ragspec.evaluation.suite import Settings, run_suite
from ragspec.evaluation.suites.drafters import prompts, suite
from ragspec.evaluation.suites.drafters.report import METRICS, headlines, merged_over_best, orders_of, tables
from ragspec.evaluation.suites.drafters.variants import COPY, NONE, eagle_head
from ragspec.speculation import AcceptanceRule

FAMILIES = ("eagle", "eagle3", "hydra", "medusa", "poss-2")


@pytest.fixture
def tiny(settings: Settings, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Short outputs, two prompts of everything, and random heads."""
    for module, limit in ((prompts, "CHAT_TOKENS"), (prompts, "PROSE_TOKENS"), (suite, "PROSE_TOKENS")):
        monkeypatch.setattr(module, limit, 12)
    assert settings.data_dir is not None
    data = with_chat(settings.data_dir, tmp_path / "data")
    (data / "eagle_eval").mkdir()
    for name in ("humaneval", "gsm8k", "alpaca", "sum", "qa"):
        rows = [{"question_id": i, "turns": [f"{name} {i}: what is it?"]} for i in range(3)]
        rows.append({"question_id": 9, "turns": ["too long " * 2000]})
        (data / "eagle_eval" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in reversed(rows)))
    folder, vocab = save_heads(tmp_path / "heads", tiny_dir), len(AutoTokenizer.from_pretrained(tiny_dir))
    random_head("eagle", folder / "poss-2", hidden=HIDDEN, vocab=vocab, num_layers=2, positions_per_layer=2)
    save_medusa(folder / "medusa", medusa_tensors(3, hidden=HIDDEN, vocab=vocab, with_output=False))
    save_hydra(folder / "hydra", hydra_tensors(3, hidden=HIDDEN, vocab=vocab))
    (folder / "notes").mkdir()
    return dataclasses.replace(settings, data_dir=data, heads=folder, num_prompts=2, quick=True)


@pytest.mark.parametrize("families", [("poss-2",), pytest.param(FAMILIES, marks=pytest.mark.slow)])
def test_every_head_is_measured_and_writes_what_plain_decoding_writes(
    tiny: Settings, tmp_path: Path, families: tuple[str, ...]
) -> None:
    """A head left out unsaid, a headline that is missing, or any token that differs."""
    assert tiny.heads is not None
    for name in set(FAMILIES) - set(families):
        (tiny.heads / name).rename(tmp_path / name)
    result = run_suite("heads", tiny, no_tick).result
    assert result["families"] == list(families) and result["identical"] is True
    missing = [metric.name for metric in METRICS if result[metric.name] is None]
    assert missing == ([] if families == FAMILIES else ["order_held"])
    assert all(row["identical"] is True for row in result["rows"] if row["variant"] != NONE)
    copies = [row for row in result["rows"] if row.get("part") == "copy"]
    assert {(row["variant"], row["task"], row["temperature"]) for row in copies} == {
        (name, task, temperature) for name in (NONE, COPY) for task in prompts.TASKS for temperature in (0.0, 1.0)
    }
    alone = [row for row in result["rows"] if "part" not in row]
    settings = {(row["variant"], row["task"], row["temperature"], row["nodes"]) for row in alone}
    wanted = {(name, task, 0.0, None) for name in families for task in ("prose", "MT-bench")}
    wanted |= {(name, "prose", t, 16) for name in families for t in (0.0, 1.0)}
    assert settings == wanted
    assert all(row["drafted_a_step"] > 0.5 for row in alone if row["nodes"] and row["task"] == "prose")
    batches = {(row["variant"], row["task"], row["batch"]) for row in result["rows"] if row.get("part") == "batch"}
    assert {(COPY, "rag", 1), (COPY, "prose", 4), (result["best_head"], "prose", 4)} <= batches
    assert result["orders"].keys() == ({"hydra over medusa"} if families == FAMILIES else set())
    assert result["t1_over_t0"].keys() == set(families)
    assert "copy" in tables(result)["copies and the fastest head: speed-up"]


@pytest.mark.slow
def test_the_whole_suite_has_all_tasks_chains_shapes_and_rules(tiny: Settings, tmp_path: Path) -> None:
    """A measure of the papers was lost when the suite was shortened, or a figure was empty."""
    assert tiny.heads is not None
    for name in FAMILIES[1:]:
        (tiny.heads / name).rename(tmp_path / name)
    plan = dataclasses.replace(tiny.plan, num_runs=1)
    outcome = run_suite("heads", dataclasses.replace(tiny, quick=False, plan=plan), no_tick)
    result = outcome.result
    assert result["identical"] is True
    shown = tables(result)
    speeds = shown["speed-up of decoding"]["eagle"]
    for task in ("MT-bench", "HumanEval", "GSM8K", "Alpaca", "CNN/DM", "NQ", "prose", "rag"):
        assert {f"{task}, T = 0", f"{task}, T = 1"} <= speeds.keys()
    assert {"depth 8", "width 1", "width 8"} <= shown["tokens a step by shape, prose, T = 0"]["eagle"].keys()
    assert "depth 1" in shown["n-alpha of chains, prose, T = 0"]["eagle"]
    assert "prose, 32" in shown["side by side, T = 0: speed-up, prompts included"]["eagle"]
    assert "rag, T = 1" in shown["output repeats itself, share"][NONE]
    conditions = ("coupled_t1_over_t0", "uncoupled_t1_over_t0")
    assert all(result["same_beginnings"]["eagle"][name] > 0.0 for name in conditions)
    fixed = [row for row in result["rows"] if row["nodes"] == 16 and row["shape"] == "tree" and "part" not in row]
    assert {(row["temperature"], row["coupled"]) for row in fixed} == {(0.0, True), (1.0, True), (1.0, False)}
    assert "iid" in shown["by acceptance rule, 16 nodes, prose, T = 1"]["acceptance_length"]
    assert result["acceptance_rules"].keys() == set(AcceptanceRule)
    assert all(row["acceptance_length"] >= 1.0 and row["logprob"] < 0.0 for row in result["acceptance_rules"].values())
    assert suite.SUITE.draw(outcome, "title").keys() == {"drafters_pos_acc", "drafters_batch"}


def test_without_heads_copying_is_measured_and_said_to_be_alone(tiny: Settings) -> None:
    """A suite that cannot run before a head is trained; tables on stdout; a headline of a head that is not there."""
    options = ["--suite", "drafters", "--quick", "--num-prompts", "1", "--no-peers", "--data", str(tiny.data_dir)]
    done = CliRunner().invoke(benchmark.app, [*options, "--target", tiny.target.model])
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert set(KEYS) <= result.keys() and result["suite"] == "drafters" and result["identical"] is True
    assert {row["variant"] for row in result["rows"]} == {NONE, COPY}
    assert result["families"] == [] and result["missing"] and result["best_speedup_prose"] is None
    assert {metric.name for metric in METRICS} <= result.keys() and "speed-up of decoding" in done.stderr


def test_what_it_cannot_do_is_said(settings: Settings, tmp_path: Path) -> None:
    """A traceback minutes into a run; a wrong folder measured as if none were given."""
    with pytest.raises(InputError, match=r"question\.jsonl"):
        run_suite("drafters", settings, no_tick)
    with pytest.raises(ModelError, match="--heads names a folder"):
        run_suite("heads", dataclasses.replace(settings, heads=tmp_path), no_tick)


def test_spec_bench_takes_an_eagle_head(tiny: Settings, tmp_path: Path) -> None:
    """A folder of other families measured as if there were no head."""
    assert tiny.heads is not None
    assert eagle_head(tiny.heads) == tiny.heads / "eagle3" and eagle_head(None) is None
    for name in ("eagle", "eagle3", "poss-2"):
        (tiny.heads / name).rename(tmp_path / name)
    with pytest.raises(ModelError, match="no EAGLE head"):
        eagle_head(tiny.heads)


def fixed(name: str, length: float, *shares: float, task: str = "prose") -> Result:
    row: dict[str, Any] = {"variant": name, "task": task, "temperature": 0.0, "nodes": 16, "shape": "tree"}
    row |= {"coupled": True, "identical": True, "speedup": length / 2.0}
    return row | {"acceptance_length": length, "pos_acc": {"eagle": list(shares)}}


def test_orders_compare_the_papers_pairs_at_their_depths() -> None:
    """PosS compared with HASS by its first tokens, where the paper claims nothing, or a pair with a head that is not there."""
    rows = [fixed("hass", 3.0, 0.9, 0.8, 0.7, 0.4, 0.2), fixed("poss-2", 2.9, 0.8, 0.7, 0.6, 0.5, 0.4)]
    rows += [fixed("eagle2", 2.0), fixed("eagle2", 3.0, task="MT-bench"), fixed("hydra++", 2.0), fixed("medusa", 1.5)]
    found = orders_of([*rows, fixed("eagle2", 9.0) | {"temperature": 1.0}])
    assert found == {"hass over eagle2": pytest.approx(3.0 / 2.5), "poss over hass from depth 4": pytest.approx(1.5)}


def test_the_merged_tree_is_compared_with_its_better_part() -> None:
    """Compared with the worse part any merge wins."""
    speeds = {"copy": 2.0, "hass": 1.5, "copy + head": 2.1}
    rows = [
        {"part": "merged", "variant": name, "task": "rag", "temperature": 1.0, "speedup": s}
        for name, s in speeds.items()
    ]
    assert merged_over_best(rows) == {"rag, T = 1": pytest.approx(1.05)}


def test_headlines_come_from_their_own_rows() -> None:
    """A chain's or a batch's numbers under a head's name; "identical" that cannot be false; a zero where nothing was measured."""
    rows = [fixed("hass", 3.0), fixed("eagle3", 2.0), fixed("eagle3", 9.0) | {"shape": "chain"}]
    rows += [fixed(name, speed) | {"nodes": None} for name, speed in (("hass", 2.0), ("eagle3", 3.0))]
    rows += [
        fixed("copy", 9.0) | {"nodes": None, "part": "copy"},
        fixed("hass", 9.0) | {"nodes": None, "part": "batch"},
    ]
    found = headlines(rows, {"hass": {"coupled_t1_over_t0": 0.9}, "eagle3": {"coupled_t1_over_t0": 0.8}})
    assert (found["best_head"], found["best_speedup_prose"], found["best_acceptance_prose"]) == ("eagle3", 1.5, 3.0)
    assert found["t1_over_t0_min"] == 0.8 and found["identical"] is True
    assert headlines([*rows, fixed("hass", 1.0) | {"identical": False}], {})["identical"] is False
    nothing = headlines([fixed("none", 1.0) | {"identical": None, "part": "copy", "nodes": None}], {})
    assert {name for name, value in nothing.items() if value is not None} == {
        *("identical", "orders", "merged_over_best", "t1_over_t0")
    }
