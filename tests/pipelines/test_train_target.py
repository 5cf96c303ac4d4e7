"""The adapter's training as a command: probes, refusals, and several workers through Ray Train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file
from tiny_target import chat_tokenizer, save_model

from pipelines import train_target
from pipelines.train.training_run import is_probed
from ragspec.config import DEFAULT_TARGET
from ragspec.training.reference.trainer import AdapterPlan

ROOT = Path(__file__).resolve().parents[2]


def test_probes_stand_at_even_shares_however_often_a_run_is_taken_up() -> None:
    """A run that was lengthened when it was taken up was never probed again."""
    due = [step for step in range(1, 101) if is_probed(8, step, (step - 1) / 100, step / 100)]
    assert due == [1, 13, 25, 38, 50, 63, 75, 88, 100]
    lengthened = [step for step in range(101, 201) if is_probed(8, step, (step - 1) / 200, step / 200)]
    assert lengthened == [125, 150, 175, 200]
    assert not is_probed(0, 1, 0.0, 1.0)


@pytest.mark.parametrize(("data", "reason"), [("none", "error: there is no data directory"), (".", r"no config\.json")])
def test_missing_data_or_a_missing_target_end_in_one_line(
    data: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback, from the depths of transformers or after the run's folder was made."""
    options = ["--target", str(tmp_path), "--data", str(tmp_path / data), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["train_target", *options])
    with pytest.raises(SystemExit, match=reason):
        train_target.main()
    assert not (tmp_path / "out").exists()


def test_options_reach_the_plan(tmp_path: Path) -> None:
    """An option that is left behind trains with another rate, and a relative path is another folder for Ray's workers."""
    options = f"--data {tmp_path} --out {tmp_path} --continue-from runs/a --decay-share 0.6 --tokens 7 --rows 3 --peak-rate 0.1"
    options += " --documentation rows.jsonl --chats 9"
    run = train_target.run_of(train_target.parser().parse_args(f"{options} --probes 0 --minutes 2 --seed 5".split()))
    assert (run.data_dir, run.out, run.continue_from) == (tmp_path, tmp_path, Path("runs/a").absolute())
    assert (run.documentation, run.num_chats) == (Path("rows.jsonl").absolute(), 9)
    plan = AdapterPlan(total_tokens=7, minutes=2.0, seed=5, rows_per_step=3, peak_lr=0.1, decay_share=0.6)
    assert (run.plan, run.num_probes, run.target) == (plan, 0, DEFAULT_TARGET)
    with pytest.raises(SystemExit):
        train_target.parser().parse_args(f"{options} --decay-share 1.5".split())


@pytest.mark.slow
@pytest.mark.ray
def test_two_workers_write_the_same_adapter_twice(local_ray: None, training_data: Path, tmp_path: Path) -> None:
    """A worker that draws from the clock, a second writer, or questions between the steps that change them."""
    target = save_model("llama", tmp_path / "target", vocab_size=330, max_position_embeddings=2048)
    chat_tokenizer().save_pretrained(target)
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    adapters = []
    for out, probes in ((tmp_path / "first", 1), (tmp_path / "second", 0)):
        options = f"--target {target} --data {training_data} --out {out} --tokens 5000 --seed 3 --workers 2 --chats 40"
        options += f" --probes {probes}"
        command = [sys.executable, "-m", "pipelines.train_target", *options.split()]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=800)
        assert (out / "curves.png").stat().st_size > 1000
        assert json.loads((out / "adapter/adapter_config.json").read_text())["r"] == 32
        adapters.append(load_file(out / "adapter/adapter_model.safetensors"))
    assert all(torch.equal(tensor, adapters[1][name]) for name, tensor in adapters[0].items())
