"""Every command takes one configuration file, and names the faults of the file and of its model before anything loads."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import exit_code
from tiny_target import save_model

from pipelines.batch_grammar import app as batch_grammar
from ragspec.cli.options import index_folder
from ragspec.config import DraftingConfig, EngineConfig, PipelineConfig, TargetConfig, load_config, settings_of
from ragspec.core import Document
from ragspec.engine import target as target_module
from ragspec.engine.checkpoints import preflight
from ragspec.engine.checkpoints.preflight import check_files, check_memory, gguf_num_weights
from ragspec.engine.checkpoints.target_files import check_target
from ragspec.engine.loading import load_engine
from ragspec.errors import ConfigError, ModelError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def written(folder: Path, text: str) -> Path:
    (path := folder / "ragspec.yaml").write_text(text, encoding="utf-8")
    return path


# -- one configuration ----------------------------------------------------------------------------------------------------


def test_sections_of_other_commands_are_checked_and_left_out(tmp_path: Path) -> None:
    """`ask` refused the file that `serve` had taken: "service: Extra inputs are not permitted"."""
    loaded = settings_of(Path(__file__).with_name("whole.yaml"))
    assert type(loaded) is PipelineConfig and loaded.retriever.num_passages == 2
    for wrong, reason in (
        ("service: {prot: 1}", r"service\.prot.*did you mean 'port'"),
        ("service: {port: many}", r"service\.port"),
        ("topology: {num_replicas: -1}", r"topology\.num_replicas"),
        ("sevice: {}", "did you mean 'service'"),
        ("service: {limits: {key: {concurency: 1}}}", "did you mean 'concurrency'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_config(written(tmp_path, wrong))


def test_index_and_keys_come_from_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders named in the file had to be named again on the command line."""
    config = written(
        tmp_path, f"retriever: {{index_dir: {tmp_path / 'i'}}}\nservice: {{keys_file: {tmp_path / 'k'}}}\n"
    )
    assert index_folder(None, config) == tmp_path / "i"
    assert index_folder(tmp_path / "other", config) == tmp_path / "other"
    with pytest.raises(ConfigError, match="--index"):
        index_folder(None, None)
    assert exit_code("keys", "add", "--config", config, "--id", "a", "--json") == 0
    assert json.loads((tmp_path / "k").read_text())["keys"][0]["id"] == "a"
    assert exit_code("index", "list", "--config", config) == 1
    assert f"there is no index at {tmp_path / 'i'}" in " ".join(capsys.readouterr().err.split())


def test_a_job_takes_the_file_of_a_service_and_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch job refused `service:`, and had no --adapter."""
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "He go."}\n')
    call = ["--input", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]
    config = written(tmp_path, "service: {port: 1}\nchat: {}\n")
    settings = ["--config", str(config), "--adapter", str(tmp_path / "none")]
    with pytest.raises(SystemExit):
        batch_grammar(args=[*call, *settings], prog_name="job")
    assert f"{tmp_path / 'none'} is not an adapter's directory" in " ".join(capsys.readouterr().err.split())


# -- dtypes ---------------------------------------------------------------------------------------------------------------


def test_auto_is_a_type_before_anything_records_it() -> None:
    """A job's settings or a numerics id that name "auto" agree on two machines that compute differently."""
    on_cpu, on_gpu = TargetConfig(dtype="auto"), TargetConfig(dtype="auto", device="cuda")
    assert (on_cpu.dtype, on_gpu.dtype) == ("float32", "bfloat16")
    assert on_cpu == TargetConfig() and on_gpu.numerics_dtype == "bfloat16-cuda-cuda"
    assert TargetConfig().model_dump()["dtype"] == "float32" and TargetConfig(device="cuda").dtype == "float32"


def test_a_dtype_that_the_processor_lacks_falls_back_and_says_so_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The README's own YAML failed with "no packed bfloat16 product", and named no way out."""
    monkeypatch.setattr(target_module, "packing_available", lambda dtype: dtype == torch.float32)
    settings: dict[str, Any] = {"model": str(model), "quantization": "none", "cache_dir": str(tmp_path)}
    settings |= {"max_model_len": 64}
    config, engine_config = TargetConfig(**settings, dtype="bfloat16"), EngineConfig(max_kv_tokens=512)
    with load_engine(config, engine_config, DraftingConfig()) as engine:
        fallen, id_ = engine.target.config, engine.fingerprint
    with load_engine(TargetConfig(**settings), engine_config, DraftingConfig()) as engine:
        assert (fallen.dtype, fallen.numerics_dtype, id_) == ("float32", "float32", engine.fingerprint)
    assert sum("runs in float32" in record.message for record in caplog.records) == 1
    with pytest.raises(ModelError, match="replicas and ranks must compute alike: set"):
        load_engine(config, engine_config, DraftingConfig(), falls_back=False)


def test_a_job_records_the_type_that_computes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A job.json that says bfloat16 for texts of float32, which a machine with bfloat16 would then go on with."""
    monkeypatch.setattr(target_module, "packing_available", lambda dtype: dtype == torch.float32)
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "He go."}\n')
    text = "{{model: {}, cache_dir: {}, quantization: none, dtype: {}}}"
    out = tmp_path / "out"

    def correct(dtype: str) -> None:
        config = written(tmp_path, f"target: {text.format(model, tmp_path / 'targets', dtype)}\n")
        call = ["--input", str(tmp_path / "in.jsonl"), "--out", str(out), "--config", str(config), "--max-tokens", "4"]
        with pytest.raises(SystemExit) as end:
            batch_grammar(args=call, prog_name="job")
        assert not end.value.code

    correct("bfloat16")
    assert json.loads((out / "job.json").read_text())["target"]["dtype"] == "float32"
    correct("float32")
    correct("auto")
    assert sum("runs in float32" in record.message for record in caplog.records) == 1


# -- models ---------------------------------------------------------------------------------------------------------------


def gguf_file(path: Path, num_tensors: int = 1, size: int = 10) -> Path:
    """A GGUF file of one vector, or without tensors, with every kind of metadata."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    entries = [
        string("a.name") + struct.pack("<I", 8) + string("tiny"),
        string("a.flag") + struct.pack("<IB", 7, 1),
        string("a.scores") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
        string("a.tokens") + struct.pack("<IIQ", 9, 8, 2) + string("x") + string("yz"),
    ]
    tensor = string("w") + struct.pack("<IQQIQ", 2, size, 2, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(entries))
    path.write_bytes(head + b"".join(entries) + tensor * num_tensors)
    return path


def test_files_that_are_no_model_are_told_by_their_header(tmp_path: Path) -> None:
    """A GGUF file of a vocabulary alone was converted for a minute, then failed inside transformers."""
    with pytest.raises(ModelError, match="holds a vocabulary alone, without weights"):
        check_files(str(gguf_file(tmp_path / "vocab.gguf", num_tensors=0)))
    (tmp_path / "text.gguf").write_bytes(b"no model")
    with pytest.raises(ModelError, match="is no GGUF file"):
        check_files(str(tmp_path / "text.gguf"))
    assert gguf_num_weights(gguf_file(tmp_path / "tiny.gguf")) == 20
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-30])
    with pytest.raises(ModelError, match="damaged"):
        gguf_num_weights(tmp_path / "cut.gguf")


def test_a_model_that_memory_cannot_hold_names_both_numbers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system ended the process minutes later, without a word."""
    free = preflight.free_bytes()
    assert free is None or free > 0
    large = gguf_file(tmp_path / "large.gguf", size=10**12)
    with pytest.raises(ModelError, match=r"2,000,000,000,000 weights need 2,000,000,000,000 bytes, 1 each, and [\d,]+"):
        check_target(TargetConfig(model=str(large)))
    check_target(TargetConfig(model=str(model)))
    monkeypatch.setattr(preflight, "free_bytes", lambda: 100)
    with pytest.raises(ModelError, match="4 each, and 100 bytes are free"):
        check_memory(str(model), 4)


def test_a_missing_name_is_one_short_look_and_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ten lines "Retrying" and 46 seconds, then a traceback's last line."""
    import httpx2
    import huggingface_hub
    from huggingface_hub import constants

    looks: list[float] = []

    def look(url: str, *, timeout: float) -> None:
        looks.append(timeout)
        raise httpx2.ConnectError("no route to host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", look)
    with pytest.raises(ModelError, match=r"no folder or file here.*does not answer.*nearest known names: Qwen3-0\.6B"):
        check_files("Qwen/Qwen3-0.6")
    assert looks == [2.0]
    with pytest.raises(ModelError, match=r"there is no file .*nearest known names: Qwen2\.5-0\.5B-Instruct"):
        check_files(str(tmp_path / "qwen2.5-0.5b-instrct.gguf"))
    with pytest.raises(ModelError, match="there is no folder models/mine/new"):
        check_files("models/mine/new")
    assert len(looks) == 1


def test_a_model_without_a_chat_template_is_told(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A base model answered in rambling text, and nothing said why."""
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(settings))
    with load_engine(
        TargetConfig(model=str(plain), cache_dir=str(tmp_path), max_model_len=64),
        EngineConfig(max_kv_tokens=512),
        DraftingConfig(),
    ):
        assert any("has no chat template" in record.message for record in caplog.records)


# -- doctor ---------------------------------------------------------------------------------------------------------------


def test_the_doctor_is_short_by_default_and_takes_the_configuration(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two minutes of self-test; "oneDNN's packed matrix product: float32 yes, bfloat16 no" told nobody what to do."""
    from letter_encoder import LetterEncoder

    from ragspec.config import IndexConfig
    from ragspec.retrieval.encoder import Encoder, EncoderIdentity
    from ragspec.retrieval.retriever import build_index

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    encoder = LetterEncoder()
    monkeypatch.setattr(Encoder, "load", lambda config: encoder)
    monkeypatch.setattr(encoder, "max_batch_size", 32, raising=False)
    assert isinstance(encoder.identity, EncoderIdentity)
    build_index([Document("d", "It rained. It was wet.")], tmp_path / "index", encoder, IndexConfig())
    monkeypatch.setattr("ragspec.numerics.linear.packing_available", lambda dtype: dtype == torch.float32)
    config = written(
        tmp_path,
        f"target: {{model: {model}, cache_dir: {tmp_path / 'targets'}}}\nretriever: {{index_dir: {tmp_path / 'index'}}}\n",
    )

    def checks(*options: str) -> dict[str, dict[str, str]]:
        assert exit_code("doctor", "--config", config, "--json", *options) == 0
        found: dict[str, dict[str, str]] = json.loads(capsys.readouterr().out)["checks"]
        return found

    first = checks()
    assert "1 documents" in first["index"]["detail"]
    assert "bfloat16: no; large models run in int8" in first["products"]["detail"]
    assert "the first start prepares them" in first["target"]["detail"]
    assert "whole bitwise self-test passed" in checks("--full")["target"]["detail"]
    assert "short bitwise self-test passed" in checks()["target"]["detail"]
