"""The search of layers: it finds the best set of a known function with few evaluations, and its command says which to keep."""

import json
import random
from pathlib import Path

import pytest
from tiny_target import save_model
from typer.testing import CliRunner

from pipelines import search_layers
from pipelines.search_layers import Layers, search


def test_few_evaluations_find_a_better_set_than_chance() -> None:
    """A search that tries sets at random, tries one twice, or loses the best one."""
    wanted, count = {0, 3, 4, 8, 11, 13}, 16
    tried: list[Layers] = []

    def value(keep: Layers) -> float:
        tried.append(keep)
        return 1.0 - len(wanted ^ set(keep)) / count

    found = search(count, value, 60, seed=1)
    assert len(tried) == len(set(tried)) == len(found) == 60 and all(tried)
    assert found[0].value == max(each.value for each in found)
    rng = random.Random(1)
    chance = [tuple(n for n in range(count) if rng.random() < 0.5) for _ in range(60)]
    assert found[0].value > max(map(value, chance)) and found[0].value >= 1.0 - 1 / count


def test_all_sets_of_few_layers_are_tried_once() -> None:
    """A search that never ends where there are fewer sets than evaluations."""
    found = search(3, lambda keep: len(keep), 50, seed=0)
    assert len(found) == 7 and found[0].keep == (0, 1, 2)


@pytest.mark.slow
def test_the_command_prints_layers_that_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that the setting refuses, or tokens a step that no engine reaches."""
    folder = save_model("llama", tmp_path / "model", num_hidden_layers=3, max_position_embeddings=512)
    monkeypatch.setattr(search_layers, "_KV_TOKENS", 2048)
    options = ["--target", str(folder), "--evaluations", "7", "--prompts", "2", "--tokens", "12", "--depth", "2"]
    done = CliRunner().invoke(search_layers.app, options)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["num_layers"] == 3 and result["num_evaluations"] == 7
    assert result["keep"] and set(result["keep"]) <= {0, 1, 2}
    assert 1.0 <= result["acceptance_length"] <= 3.0 and result["early_exit"] in ([0], [0, 1])
