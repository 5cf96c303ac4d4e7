"""Each rank reads its part of the weights from the usual files, never more, and refuses what it cannot serve.

What a follower hears is every array of rank 0's step, for any shape of batch.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_process import Rank
from safetensors.torch import load_file, save_file
from tiny_target import save_model, written

from ragspec.config import TargetConfig
from ragspec.engine import rank_messages
from ragspec.engine.checkpoints.weights import load_shards, load_whole
from ragspec.engine.rank_messages import ForwardInput, MessageKind, receive, send, send_forward
from ragspec.engine.target import Target
from ragspec.errors import ModelError
from ragspec.numerics.attention import AttentionShape
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import KvPool, SequenceSlots
from ragspec.numerics.ranks import Ranks
from ragspec.numerics.sharding import weight_slice

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("loading") / "model", tie_word_embeddings=True)


def without_weights(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder / "copy", ignore=shutil.ignore_patterns("*.safetensors*")))


def assert_parts_of(path: Path, expected: Path, size: int = 2, dtype: torch.dtype = torch.float32) -> None:
    """The parts that ranks read from `path`, against cuts of the model that transformers loads from `expected`."""
    whole = load_whole(str(expected), dtype)
    for rank in range(size):
        part, parts = load_shards(str(path), dtype, Rank(rank, size))
        assert parts.num_parameters == sum(p.numel() for p in whole.parameters())
        found = dict(part.named_parameters(remove_duplicate=False))
        for name, tensor in whole.named_parameters(remove_duplicate=False):
            cut = weight_slice(name, tuple(tensor.shape), Rank(rank, size))
            if cut is None:
                assert torch.equal(found[name], tensor), name
                continue
            own = tensor.narrow(cut.dim, cut.start, cut.stop - cut.start)
            assert torch.equal(found[name].narrow(cut.dim, 0, cut.stop - cut.start), own), name
            rest = found[name].narrow(cut.dim, cut.stop - cut.start, cut.width - (cut.stop - cut.start))
            assert not rest.any(), name
            assert found[name].dtype == tensor.dtype
            assert torch.equal(parts.checkpoint.whole(name), tensor), name


def test_one_file(model: Path) -> None:
    """Columns of another rank, a row too few, padding that is not zero."""
    assert_parts_of(model, model)
    assert_parts_of(model, model, dtype=torch.bfloat16)


def test_several_files_with_an_index(model: Path, tmp_path: Path) -> None:
    """Only the first file of a large model was read."""
    load_whole(str(model), torch.float32).save_pretrained(tmp_path / "small files", max_shard_size="40KB")
    path = without_weights(model, tmp_path)
    for file in (tmp_path / "small files").glob("*.safetensors*"):
        shutil.copy(file, path)
    assert len(list(path.glob("*.safetensors"))) > 2
    assert_parts_of(path, model)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_torchs_own_format_and_a_model_saved_without_its_head(model: Path, tmp_path: Path, prefix: str) -> None:
    """A .bin that one rank loads could not be split; names without the prefix were missing tensors."""
    path = without_weights(model, tmp_path)
    tensors = load_file(model / "model.safetensors")
    torch.save(
        {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}, path / "pytorch_model.bin"
    )
    assert_parts_of(path, model)


def test_a_tensor_that_is_read_in_many_blocks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The border between two blocks of a large tensor: rows twice or not at all."""
    monkeypatch.setattr("ragspec.engine.checkpoints.weights._BLOCK_BYTES", 1000)
    assert_parts_of(model, model)


def test_missing_and_misshapen_tensors_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    """A rank served zeros for a tensor that is not there."""
    path, tensors = without_weights(model, tmp_path), load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelError, match="has no weights"):
        load_shards(str(path), torch.float32, Rank(0, 2))
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp\.up_proj\.weight has the shape \(87, 64\), the model needs \(88, 64\)"
    ):
        load_shards(str(path), torch.float32, Rank(0, 2))
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"lacks 1 of the model's tensors, the first is model\.layers\.1\.mlp\.up_proj"
    ):
        load_shards(str(path), torch.float32, Rank(0, 2))
    (path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ModelError, match="cannot load the target"):
        load_shards(str(path), torch.float32, Rank(0, 2))
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "away.safetensors")})
    )
    with pytest.raises(ModelError, match=r"lacks away\.safetensors"):
        load_shards(str(path), torch.float32, Rank(0, 2))


def test_a_pickle_with_code_is_not_run(model: Path, tmp_path: Path) -> None:
    """A .bin whose unpickling runs what its author wrote."""
    path, mark = without_weights(model, tmp_path), tmp_path / "mark"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (mark,))

    torch.save({"model.norm.weight": Evil()}, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load the target"):
        load_shards(str(path), torch.float32, Rank(0, 2))
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_families_that_cannot_be_split_are_refused(kind: str, tmp_path: Path) -> None:
    """A model whose own forward runs around known parts gave every rank a part of the hidden states."""
    config = TargetConfig(model=str(save_model(kind, tmp_path / kind)))
    with pytest.raises(ModelError, match="cannot be split over several ranks: only Llama, Mistral, Qwen2 and Qwen3"):
        Target.load(config, 64, Rank(0, 2))


_PEAK = """
import sys, resource
from pathlib import Path
from ragspec.config import TargetConfig
from ragspec.engine.target import Target
from ragspec.numerics.ranks import Ranks

def peak():
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM")).split()[1]) * 1024

class Rank(Ranks):
    rank, size = int(sys.argv[2]), int(sys.argv[3])

def load(model):
    Target.load(TargetConfig(model=model, backend=sys.argv[5], quantization="none"), 64, Rank())

load(sys.argv[4])  # imports, pools and whatever else is not weights
before = peak()
load(sys.argv[1])
print(peak() - before)
"""


def peak_bytes(model: Path, rank: int, size: int, small: Path, backend: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(model), str(rank), str(size), str(small), backend],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    return int(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    """A rank read everything and then cut; a column of a mapped file brought all of the file into memory."""
    shape = {"num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 16_000}
    model = save_model("llama", tmp_path / "large", hidden_size=1024, intermediate_size=3072, **shape)
    small = save_model("llama", tmp_path / "small", num_attention_heads=16, num_key_value_heads=4, hidden_size=128)
    size = (model / "model.safetensors").stat().st_size
    assert size > 280e6
    for suffix, backend in (("safetensors", "cpu"), ("safetensors", "torch"), ("bin", "cpu")):
        if suffix == "bin":
            torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
            (model / "model.safetensors").unlink()
        whole = peak_bytes(model, 0, 1, small, backend)
        part = peak_bytes(model, 3, 4, small, backend)
        assert part < 0.65 * size < whole, f"{suffix}, {backend}: {part / 1e6:.0f} MB of {size / 1e6:.0f} MB"


class Line(Ranks):
    """Keeps what is said until it is heard; a listener must ask for just as many words as were said."""

    def __init__(self) -> None:
        self.said: list[torch.Tensor] = []
        self.hears = False

    def broadcast(self, words: torch.Tensor) -> None:
        if self.hears:
            words.copy_(self.said.pop(0))
        else:
            self.said.append(words.clone())


def heard(line: Line) -> rank_messages.Message:
    line.hears = True
    message = receive(line)
    assert not line.said
    return message


def assert_arrives(step: ForwardInput) -> int:
    """Number of broadcasts that it took."""
    line = Line()
    send_forward(line, step, num_threads=3)
    num_broadcasts = len(line.said)
    kind, num_threads, found = heard(line)
    assert (kind, num_threads) == (MessageKind.FORWARD, 3)
    assert np.array_equal(found.token_ids, step.token_ids)
    assert np.array_equal(found.logit_rows, step.logit_rows)
    assert list(found.taps) == list(step.taps)
    for name, values in step.metadata._asdict().items():
        got = getattr(found.metadata, name)
        assert got.dtype == values.dtype == np.int32, name
        assert got.shape == values.shape and np.array_equal(got, values), name
        assert got.flags.c_contiguous
    return num_broadcasts


def random_parents(draw: np.random.Generator, num_nodes: int) -> list[int]:
    return [-1, *(int(draw.integers(0, node)) for node in range(1, num_nodes))]


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_any_step_arrives_whole(seed: int, num_sequences: int, longest: int) -> None:
    """A context that shares a prefix, whose slots are no run, or an empty tree came out as another one."""
    draw = np.random.default_rng(seed)
    pool = KvPool([AttentionShape(1, 1, 16, 1.0)], 4096)
    sequences = [SequenceSlots(pool) for _ in range(num_sequences)]
    for sequence in sequences[1::2]:
        if sequences[0].length:
            sequence.share(sequences[0].slots[: int(draw.integers(1, sequences[0].length + 1))])
        slots, index = sequence.reserve(longest)
        chosen = sorted(draw.choice(longest, int(draw.integers(1, longest + 1)), replace=False).tolist())
        sequence.keep(slots, index, chosen)
    scheduled = []
    for sequence in sequences:
        num_known, parents = int(draw.integers(1, longest + 1)), random_parents(draw, int(draw.integers(1, 12)))
        scheduled.append(ScheduledSequence(sequence, [0] * (num_known + len(parents) - 1), parents))
    rows = Batch(scheduled).metadata
    num_rows = len(rows.slots)
    wanted = np.flatnonzero(draw.random(num_rows) < 0.3).astype(np.int32)
    assert_arrives(
        ForwardInput(draw.integers(0, 9999, num_rows).astype(np.int32), rows, wanted, (2, 0)[: num_rows % 3])
    )


@pytest.mark.parametrize(("num_tokens", "num_broadcasts"), [(1, 1), (64, 1), (2000, 2)])
def test_a_decode_step_is_one_broadcast(num_tokens: int, num_broadcasts: int) -> None:
    """Two broadcasts a token, or a long prompt cut off at the end of the first."""
    slots = written(KvPool([AttentionShape(1, 1, 16, 1.0)], 4096), 1500)
    tokens = np.arange(num_tokens, dtype=np.int32)
    batch = Batch([ScheduledSequence(slots, tokens)])
    assert assert_arrives(ForwardInput(tokens, batch.metadata, tokens[-1:])) == num_broadcasts


@pytest.mark.parametrize("kind", [MessageKind.HEARTBEAT, MessageKind.STOP])
def test_a_message_without_a_step(kind: MessageKind) -> None:
    """A beat read as a step without rows."""
    line = Line()
    send(line, kind)
    assert heard(line) == (kind, 0, None)


@pytest.mark.parametrize("size", [2000, rank_messages._CAPACITY, rank_messages._CAPACITY + 1])
def test_the_edge_of_the_first_broadcast(size: int) -> None:
    """The word that just fits, or just does not, was lost."""
    slots = SequenceSlots(KvPool([AttentionShape(1, 1, 16, 1.0)], 8192))
    batch = Batch([ScheduledSequence(slots, [0, 0])])
    line = Line()
    send_forward(line, ForwardInput(np.zeros(2, np.int32), batch.metadata, np.empty(0, np.int32)), 1)
    num_head_words = 2 + rank_messages._NUM_SECTIONS
    spare = rank_messages._CAPACITY - int(np.sum(line.said[0].numpy()[2:num_head_words])) - num_head_words
    wanted = np.arange(spare + size - rank_messages._CAPACITY, dtype=np.int32)
    num_broadcasts = assert_arrives(ForwardInput(np.zeros(2, np.int32), batch.metadata, wanted))
    assert num_broadcasts == (2 if size > rank_messages._CAPACITY else 1)
