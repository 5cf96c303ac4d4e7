"""Packed rows, the adapter's training and its files, on a tiny random Llama with made-up conversations."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_target import chat_tokenizer, tiny_config
from torch import Tensor
from training_parts import unbroken_and_resumed
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from ragspec.core import Message
from ragspec.errors import ConfigError
from ragspec.rag.wording import ABSTENTION, parse_answer, question_messages, quoted_answer
from ragspec.training.conversations import AnswerEncoder, Conversation, Encoded
from ragspec.training.reference.mixture import PackStream, Paragraph, Question, question_paragraphs
from ragspec.training.reference.trainer import (
    ALPHA,
    BLOCKS,
    CONFIG_FILE,
    FIRST_WEIGHT,
    NUM_QUERIES,
    RANK,
    WEIGHTS_FILE,
    AdapterPlan,
    AdapterTrainer,
    Row,
    adapter_parameters,
    collate,
)
from ragspec.training.trainer import SINGLE_WORKER

TOKENIZER = chat_tokenizer()
ENCODER = AnswerEncoder(TOKENIZER)
SENTENCES = ("The grey cat sat on the mat.", "A brown dog ran home to Berlin.", "It rained in 1977.")


def conversations(passages: list[str]) -> list[Conversation]:
    prompts = [question_messages(f"What about {n}?", passages) for n in range(len(passages))]
    answers = [Message("assistant", quoted_answer(text, n)) for n, text in enumerate(passages, 1)]
    return [Conversation([*prompt, answer]) for prompt, answer in zip(prompts, answers, strict=True)]


def encoded(passages: list[str]) -> list[Encoded]:
    return [ENCODER.encode(each) for each in conversations(passages)]


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(11)
    return LlamaForCausalLM(tiny_config(vocab_size=len(TOKENIZER), max_position_embeddings=2048)).eval()


def row_of(*groups: list[Encoded], length: int = 4_000) -> Row:
    row = Row(length)
    for group in groups:
        row.add(group)
    return row


def test_a_packed_conversation_reads_as_if_it_were_alone() -> None:
    """A mask that shows another conversation, or positions that jump, train a layout that is never served; padding that a token
    sees; or an answer's first token, which says whether the passages answer, lost among the others."""
    model, first, second = tiny_model(), encoded(list(SENTENCES)), encoded(["Nobody came."])
    texts, row = [*first, *second], row_of(first, second)
    batch, both = collate([row]), collate([row, row_of(second)])
    assert NUM_QUERIES < len(row.tokens) < sum(len(text.ids) for text in texts)
    model.config._attn_implementation = BLOCKS
    packed = model(**batch.inputs).logits[0]
    model.config._attn_implementation = "sdpa"
    learnt = batch.targets[0] >= 0
    alone: list[Tensor] = []
    for text in texts:
        logits = model(torch.tensor([text.ids])).logits[0]
        alone.append(logits[:-1][torch.tensor(text.weights[1:]) > 0])
    torch.testing.assert_close(packed[learnt], torch.cat(alone), rtol=1e-4, atol=1e-4)
    beside = model(**both.inputs).logits
    assert torch.isfinite(beside).all()
    torch.testing.assert_close(beside[1, both.targets[1] >= 0], alone[-1], rtol=1e-4, atol=1e-4)
    wanted = [token for text in texts for token, weight in zip(*text, strict=True) if weight]
    assert batch.targets[0][learnt].tolist() == wanted
    answers = [sum(weight > 0 for weight in text.weights) for text in texts]
    weights = [weight for count in answers for weight in (FIRST_WEIGHT, *(count - 1) * [1.0])]
    assert batch.weights[0][learnt].tolist() == weights


def test_what_does_not_fit_is_left_out_whole() -> None:
    """Half an answer, or a row longer than the model was told."""
    texts = encoded(list(SENTENCES))
    row = row_of(texts, texts, length=len(texts[0].ids) + 5)
    assert [token.id for token in row.tokens] == texts[0].ids


def draw_row(rng: random.Random) -> Row:
    row = Row(400)
    row.add(encoded(rng.sample(SENTENCES, 1)))
    return row


def make_trainer(total_tokens: int = 100_000, **changes: float) -> AdapterTrainer:
    plan = AdapterPlan(total_tokens=total_tokens, **{"peak_lr": 3e-3, **changes})  # type: ignore[arg-type]
    return AdapterTrainer(tiny_model(), draw_row, plan, SINGLE_WORKER)


def test_the_loss_falls_and_only_adapters_are_trained() -> None:
    """A frozen weight that moves is not in the exported files; or a decay that the option does not reach."""
    trainer = make_trainer(total_tokens=6_000)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters() if not weight.requires_grad}
    records = list(trainer.run())
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]
    after = dict(trainer.model.named_parameters())
    assert len(before) > 10 and all(torch.equal(weight, after[name]) for name, weight in before.items())
    falling = make_trainer(peak_lr=1.0, warmup_steps=1, decay_share=0.5)
    assert [falling.learning_rate(share) for share in (0.0, 0.5, 0.75, 1.0)] == [1.0, 1.0, 0.5, 0.02]


def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    """Optimizer state, averages or the place in the data lost at a kill."""
    unbroken, resumed = unbroken_and_resumed(make_trainer, tmp_path)
    ours, theirs = resumed.averaged_adapter(), unbroken.averaged_adapter()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_another_plan_may_continue_a_checkpoint_only_when_asked(tmp_path: Path) -> None:
    """A run with another rate that calls itself the old one; or a long run that cannot go on under a new recipe."""
    first = make_trainer()
    first.train_step()
    first.save(tmp_path / "checkpoint.safetensors")
    second = make_trainer(peak_lr=1e-4)
    with pytest.raises(ConfigError, match="peak_lr"):
        second.load(tmp_path / "checkpoint.safetensors")
    second.start_from(tmp_path / "checkpoint.safetensors")
    assert second.progress == first.progress


def test_the_written_adapter_is_the_trained_change(tmp_path: Path) -> None:
    """A wrong scale, a transposed matrix or a name that loaders skip in silence."""
    trainer, ids = make_trainer(), torch.arange(5, 25)[None]
    for _ in range(3):
        trainer.train_step()
    kept = [parameter.clone() for parameter in trainer.model.parameters()]
    with trainer.averaged_model() as model:
        expected = model(ids).logits
    assert all(torch.equal(a, b) for a, b in zip(kept, trainer.model.parameters(), strict=True))
    trainer.write_adapter(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
    tensors, merged = load_file(tmp_path / "adapter_model.safetensors"), tiny_model()
    with torch.no_grad():
        for name, weight in merged.named_parameters():
            stem = "base_model.model." + name.removesuffix(".weight")
            if f"{stem}.lora_A.weight" in tensors:
                a, b = tensors.pop(f"{stem}.lora_A.weight"), tensors.pop(f"{stem}.lora_B.weight")
                weight += ALPHA / RANK * (b.float() @ a.float())
    assert not tensors
    torch.testing.assert_close(merged(ids).logits, expected, rtol=0.02, atol=0.02)


def test_a_model_without_known_layers_is_refused() -> None:
    """A run of hours that trains nothing, for a base whose layers have other names."""
    plan = AdapterPlan(total_tokens=1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match="none of its layers is called q_proj"):
        AdapterTrainer(model, draw_row, plan, SINGLE_WORKER)


def test_a_run_begins_with_a_written_adapter(tmp_path: Path) -> None:
    """Weights that stay fresh, an average that is not the weights, or moments of another run."""
    first, second = make_trainer(), make_trainer()
    first.train_step()
    first.write_adapter(tmp_path)
    second.start_from(tmp_path)
    written = load_file(tmp_path / WEIGHTS_FILE)
    for tensors in (adapter_parameters(second.model), second.averaged_adapter()):
        assert tensors.keys() == written.keys()
        assert all(torch.equal(tensor, written[name].float()) for name, tensor in tensors.items())
    assert not second.optimizer.state and second.progress.step == 0
    kept = second.averaged_adapter()["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"].clone()
    second.train_step()
    assert not torch.equal(second.averaged_adapter()["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"], kept)


def test_another_adapter_is_refused_by_name(tmp_path: Path) -> None:
    """Weights that mean another change under this recipe's rank and scale; or layers stay fresh or are dropped in silence."""
    trainer = make_trainer()
    trainer.write_adapter(tmp_path)
    config, tensors = tmp_path / CONFIG_FILE, trainer.averaged_adapter()
    whole, (name, tensor) = json.loads(config.read_text()), next(iter(tensors.items()))
    kinds: list[tuple[dict[str, object], str]] = [
        ({"r": 16}, "its r is 16, and this run's is 32"),
        ({"lora_alpha": 32}, "its lora_alpha is 32"),
        ({"target_modules": ["q_proj"]}, "its target_modules is "),
        ({"use_rslora": True}, "its use_rslora is True"),
    ]
    for changes, reason in kinds:
        config.write_text(json.dumps(whole | changes))
        with pytest.raises(ConfigError, match=reason):
            trainer.start_from(tmp_path)
    config.write_text(json.dumps(whole))
    more, fewer = tensors | {"more": tensor.clone()}, {n: t for n, t in tensors.items() if n != name}
    for wrong, reason in ((tensors | {name: tensor[:16].clone()}, name), (more, "more"), (fewer, name)):
        save_file(wrong, tmp_path / WEIGHTS_FILE)
        with pytest.raises(ConfigError, match=f"{reason} is"):
            trainer.start_from(tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(ConfigError, match="cannot be read as an adapter"):
        trainer.start_from(tmp_path)


def test_quotes_lie_in_the_numbered_passage_and_missed_questions_abstain() -> None:
    """A quote that is nowhere in the prompt teaches the model to invent."""
    paragraphs = []
    for n in range(12):
        text = f"Mill {n} was built in {1800 + n}. It stood beside river {n} for years. Rain filled pond {n}."
        questions = [Question(f"When was mill {n} built?", f"Mill {n} was built in {1800 + n}.", str(1800 + n))]
        paragraphs.append(Paragraph(text, f"group{n // 4}", questions=questions, absent=[f"Who owned mill {n}?"]))
    stream, num_quotes, num_absent = PackStream(paragraphs), 0, 0
    for seed in range(60):
        pack = stream.draw(random.Random(seed))
        assert pack == stream.draw(random.Random(seed))
        for question, answer in pack.turns:
            parsed = parse_answer(answer)
            if parsed is None:
                assert answer == ABSTENTION
                num_absent += 1
            else:
                assert parsed.quote in pack.passages[parsed.passage - 1]
                assert parsed.short in parsed.quote and question.split()[3] in parsed.quote
                num_quotes += 1
    assert num_quotes > 60 and num_absent > 20


def test_held_out_articles_are_not_trained_on_from_any_file(tmp_path: Path) -> None:
    """A paragraph of an evaluation article that stands in another data set, under another title."""
    articles = []
    for n in range(48):
        asked = [{"question": f"Who lived in town {n}?", "answers": [{"text": f"Person{n}"}]}]
        context = f"A man named Person{n} lived in town {n}. He left it early."
        articles.append({"title": f"Town_{n}", "paragraphs": [{"context": context, "qas": asked}]})
    rows = [{"title": "Copy", "context": articles[45]["paragraphs"][0]["context"], "question": "Who?",
             "answers": [{"text": "Person45"}], "is_impossible": False},
            {"title": "Own", "context": "The hill is high. Snow lies there.", "question": "How high?", "answers": [],
             "is_impossible": True}]  # fmt: skip
    for name, lines in (("squad/dev-v1.1.json", [{"data": articles}]), ("qa_more/some.jsonl", rows),
                        ("squad_open/corpus.jsonl", []), ("squad_open/questions_unanswerable.jsonl", [])):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = question_paragraphs(tmp_path)
    assert len(found) == 37
    assert {p.text.split(".")[0][-2:].strip() for p in found[:36]} == {str(n) for n in range(36)}
    assert found[36].absent == ["How high?"] and not found[36].questions
    assert found[3].questions == [Question("Who lived in town 3?", "A man named Person3 lived in town 3.", "Person3")]
