"""Packs of questions over one reading of their passages: what each token sees, predicts and is guided to."""

import random

import torch
from real_data import DATA, needs_data

from ragspec.training.grammar_errors import GrammarErrors
from ragspec.training.reference import training_attention
from ragspec.training.reference.batches import ANSWER_WEIGHT, CHOICE_WEIGHT, EDIT_WEIGHT, ExampleEncoder
from ragspec.training.reference.examples import Example, Lengths
from ragspec.training.reference.guidance import Guidance, Guide, Guided
from ragspec.training.reference.initialisation.model import SIZES, build_target
from ragspec.training.reference.packs import Pack, PackStream, Turn
from ragspec.training.reference.rows import RowEncoder
from ragspec.training.reference.sources import Sources
from ragspec.training.reference.steps import as_batch, draw_rows
from ragspec.training.reference.text_format import (
    ABSTENTION,
    GRAMMAR_REQUEST,
    USER,
    message,
    parse_answer,
    question_messages,
)
from ragspec.training.reference.token_row import Row
from ragspec.training.reference.tokenizer import token_pieces, train_tokenizer

PASSAGES = ["The mill is old. Ann built it in 1874.", "The river is deep. Bob owns the old bridge near Lyon."]
PACK = Pack(
    PASSAGES,
    [
        Turn("Who built the mill?", "Ann built it in 1874.", 1, "1874"),
        Turn("What is in Peru?"),
        Turn("Who owns the bridge?", "Bob owns the old bridge near Lyon.", 2, "Lyon"),
    ],
)
OPENING = Pack(["Normans\nAnn built it in 1874. It fell."], [Turn("Who built it?", "Ann built it in 1874.", 1, "Ann")])
TOKENIZER = train_tokenizer(
    [*PASSAGES, "Bob met Ann there, and Ann met Bob.", *(turn.request for turn in PACK.turns), ABSTENTION] * 20, 512
)
ENCODER = RowEncoder(ExampleEncoder(TOKENIZER))


def row_of(pack: Pack = PACK, max_tokens: int = 400) -> Row:
    return ENCODER.pack_row(pack, max_tokens, random.Random(0))


def test_a_turn_reads_as_the_prompt_that_serving_builds() -> None:
    """Packed turns that differ in a token or a position from a single question train for a prompt nobody sends."""
    row = row_of()
    for segment, turn in enumerate(PACK.turns, start=1):
        ids = [id for id, own in zip(row.ids, row.segments, strict=True) if own in (0, segment)]
        places = [place for place, own in zip(row.positions, row.segments, strict=True) if own in (0, segment)]
        messages = [*question_messages(turn.request, PASSAGES), message("assistant", turn.answer)]
        text = TOKENIZER.apply_chat_template(messages, tokenize=False)
        assert ids == TOKENIZER(text, add_special_tokens=False)["input_ids"]
        assert places == list(range(len(ids)))


def test_a_packed_turn_is_computed_as_if_it_were_alone() -> None:
    """A mask that lets one turn see another's answer: it learns to copy that instead of reading the passages."""
    model = build_target(SIZES["tiny"], token_pieces(TOKENIZER)).eval()
    model.set_attn_implementation(training_attention.register())
    together = as_batch([row_of()])
    alone = as_batch([row_of(Pack(PASSAGES, PACK.turns[2:]))])
    with torch.inference_mode():
        hidden = [
            model.model(input_ids=b.ids, position_ids=b.places, guidance=Guidance(b.bias)).last_hidden_state[0]
            for b in (together, alone)
        ]
    last = [index for index, segment in enumerate(row_of().segments) if segment == 3]
    first = row_of(Pack(PASSAGES, PACK.turns[2:])).segments.index(1)
    assert torch.allclose(hidden[0][last], hidden[1][first : first + len(last)], atol=1e-4)


def test_heads_are_guided_to_where_the_text_says() -> None:
    """Off by one token, copying is trained to repeat the token before."""
    row = row_of()
    pointed = [(row.ids[at + 1], row.ids[key]) for at, keys in row.looks[Guide.POINT] for key in keys]
    assert len(pointed) == 4 and all(following == said for following, said in pointed)
    copies = [look for guide in (Guide.COPY, Guide.CHOOSE, Guide.FORK) for look in row.looks[guide]]
    copied = [(row.ids[at + 1], row.ids[key]) for at, keys in copies for key in keys]
    assert len(copied) > 12 and all(following == source for following, source in copied)
    answers = [TOKENIZER(turn.quote)["input_ids"] for turn in PACK.turns if turn.passage]
    shorts = [TOKENIZER(f" {turn.short_answer}")["input_ids"] for turn in PACK.turns if turn.passage]
    assert len(copied) == sum(map(len, answers + shorts + shorts)) - 2 * len(shorts)
    assert len(row.looks[Guide.CHOOSE]) == len(answers)
    unspelt = [row.ids[key] for _, keys in row.looks[Guide.SPELL] for key in keys]
    assert len(unspelt) >= len(answers) and set(unspelt) == {ENCODER.encoder.assistant_id}
    asking = {TOKENIZER.decode(row.ids[key]).strip() for _, keys in row.looks[Guide.ASK] for key in keys}
    assert asking == {"Who", "built", "owns"}
    labels = {int(TOKENIZER.decode(row.ids[key])) for _, [key] in row.looks[Guide.LABEL]}
    assert labels == {1, 2}
    starts = {TOKENIZER.decode(row.ids[key]).strip()[:1] for _, [key] in row.looks[Guide.START]}
    assert starts == {"T", "A", "B"}
    matched = {TOKENIZER.decode(row.ids[at]).strip() for at, _ in row.looks[Guide.MATCH]}
    assert {"built", "bridge"} <= matched and "Peru" not in matched


def test_a_title_is_no_part_of_a_sentence_and_an_opening_word_is_another_token() -> None:
    """Sentences known by the title they all begin with; a short answer pointed at in a token it cannot begin with."""
    row = row_of(OPENING)
    starts = {TOKENIZER.decode(row.ids[key]).strip()[:1] for _, [key] in row.looks[Guide.START]}
    assert starts == {"N", "A", "I"}
    assert TOKENIZER("Ann")["input_ids"] != TOKENIZER(" Ann")["input_ids"] and not row.looks[Guide.POINT]


def test_where_a_quote_could_go_on_otherwise_is_a_choice() -> None:
    """Forks learnt like any other copy, and drowned by them: a quote that turns off at a pair of words seen twice."""
    row = row_of(Pack(["Then Bob met Ann. Then Bob met Bob."], [Turn("Who met?", "Then Bob met Bob.", 1)]))
    forks = [TOKENIZER.decode(row.ids[at - 1 : at + 2]) for at, _ in row.looks[Guide.FORK]]
    assert forks == [" Bob met Bob"]
    assert [row.weights[at + 1] for at, _ in row.looks[Guide.FORK]] == [CHOICE_WEIGHT]


def test_what_is_kept_of_a_sentence_is_copied_from_it() -> None:
    """A correction guided past the mistake: the wrong word is copied, too."""
    wrong, right = "Ann build it in 1874.", "Ann built it in 1874."
    example = Example([message("user", GRAMMAR_REQUEST + wrong), message("assistant", right)])
    row = ENCODER.loose_row(iter([example] + [Example([message("user", "x " * 900)])] * 3), 200, random.Random(0))
    assert all(row.ids[at + 1] == row.ids[key] for at, [key] in row.looks[Guide.COPY])
    request = len(TOKENIZER(USER + GRAMMAR_REQUEST.rstrip())["input_ids"])
    assert all(key >= request for _, [key] in row.looks[Guide.COPY])
    copied = TOKENIZER.decode([row.ids[at + 1] for at, _ in row.looks[Guide.COPY]])
    assert "Ann" in copied and "1874." in copied and "built" not in copied
    opens = row.ids.index(ENCODER.encoder.assistant_id)
    assert row.looks[Guide.EDIT] and all(keys == [opens] for _, keys in row.looks[Guide.EDIT])
    assert not {at for at, _ in row.looks[Guide.EDIT]} & {at for at, _ in row.looks[Guide.COPY]}
    edited = [id for id, weight in zip(row.ids, row.weights, strict=True) if weight == EDIT_WEIGHT]
    assert "built" in TOKENIZER.decode(edited) and "Ann" not in TOKENIZER.decode(edited)


def test_a_misspelt_word_is_shown_to_whoever_writes_it_right() -> None:
    """The head that spells guided to a word beside, or to a part of one: what is spelt alike is then another word."""
    wrong, right = "Ann biult itt in 1874, near Lyonn.", "Ann built it in 1874, near Lyon."
    example = Example([message("user", GRAMMAR_REQUEST + wrong), message("assistant", right)])
    row = ENCODER.loose_row(iter([example] + [Example([message("user", "x " * 900)])] * 3), 200, random.Random(0))
    shown: dict[str, str] = {}
    for at, keys in row.looks[Guide.SPELL]:
        source = TOKENIZER.decode([row.ids[key] for key in keys]).strip()
        shown[source] = shown.get(source, "") + TOKENIZER.decode(row.ids[at + 1]).strip()
    assert shown == {"Ann": "Ann", "biult": "built", "itt": "it", "in": "in", "near": "near", "Lyonn": "Lyon"}
    assert len({keys[0] for _, keys in row.looks[Guide.WORD]}) == len(shown)
    assert all(0 <= at - key < 6 for at, [key] in row.looks[Guide.WORD])


def test_words_that_were_left_out_show_no_other() -> None:
    """Every word behind a missing one guided to its neighbour."""
    example = Example(
        [message("user", GRAMMAR_REQUEST + "Ann old mill."), message("assistant", "Ann owns the old mill.")]
    )
    row = ENCODER.loose_row(iter([example] + [Example([message("user", "x " * 900)])] * 3), 200, random.Random(0))
    looks = row.looks[Guide.SPELL]
    assert looks and all(row.ids[at + 1] in [row.ids[key] for key in keys] for at, keys in looks)


def test_answers_alone_carry_full_loss_and_no_turn_predicts_the_next() -> None:
    """The last token of a turn that learns to open somebody else's question."""
    batch = as_batch([row_of()])
    kept = batch.weights > 0
    flat = batch.ids.flatten()
    assert torch.equal(flat[batch.positions[kept] + 1], batch.targets[kept])
    row = row_of()
    assert all(row.segments[p] == row.segments[p + 1] for p in batch.positions[kept].tolist())
    num_answers = sum(len(TOKENIZER(turn.answer)["input_ids"]) + 1 for turn in PACK.turns)
    assert int((batch.weights >= ANSWER_WEIGHT).sum()) == num_answers
    shorts = [len(TOKENIZER(f" {turn.short_answer}")["input_ids"]) + 1 for turn in PACK.turns if turn.passage]
    num_choices = len(PACK.turns) + len(shorts) + sum(shorts)
    assert int((batch.weights == CHOICE_WEIGHT).sum()) == num_choices


def test_a_guided_head_is_worth_nothing_only_where_it_looks_right() -> None:
    """A loss that falls without the head looking anywhere."""
    query = torch.zeros(1, 4, 3, 8)
    key = torch.zeros(1, 4, 3, 8)
    query[0, 0, 2], key[0, 0, 1] = 10.0, 10.0
    bias = torch.full((1, 3, 3), -30_000.0).triu(1)
    losses = {}
    for right in (0, 1):
        keys = torch.zeros(1, 3, dtype=torch.bool)
        keys[0, right] = True
        guidance = Guidance(bias, [Guided(Guide.COPY, 0, torch.tensor([2]), keys)])
        guidance.observe(Guide.COPY.layer, query, key)
        guidance.observe(Guide.COPY.layer + 1, query, key)
        losses[right] = float(guidance.losses[Guide.COPY])
    assert losses[1] < 1e-3 and losses[0] > 100


def test_an_even_guide_wants_all_of_its_keys() -> None:
    """A misspelt word known by one of its tokens alone."""
    bias, keys = torch.zeros(1, 4, 4), torch.tensor([[True, True, False, False]])
    losses = []
    for scores in ([8.0, 8.0, 0.0, 0.0], [8.0, 0.0, 0.0, 0.0]):
        query, key = torch.zeros(1, 4, 4, 1), torch.zeros(1, 4, 4, 1)
        query[0, Guide.SPELL.head, 3], key[0, Guide.SPELL.head, :, 0] = 1.0, torch.tensor(scores)
        guidance = Guidance(bias, [Guided(Guide.SPELL, 0, torch.tensor([3]), keys)])
        guidance.observe(Guide.SPELL.layer, query, key)
        losses.append(float(guidance.losses[Guide.SPELL]))
    assert abs(losses[0]) < 1e-2 and losses[1] > 3


@needs_data
def test_every_quote_of_a_pack_is_in_its_numbered_passage(sources: Sources) -> None:
    """Turns whose quote is nowhere in the prompt teach the model to invent."""
    stream = PackStream(sources, GrammarErrors(DATA), Lengths(3, (25, 80), 120), seed=1)
    num_turns = num_absent = 0
    for _ in range(150):
        pack = stream.draw_pack()
        for turn in pack.turns:
            parsed = parse_answer(turn.answer)
            num_turns += 1
            if parsed is None:
                num_absent += 1
                assert turn.answer == ABSTENTION
            else:
                assert parsed[0] in pack.passages[parsed[1] - 1] and parsed[2] in parsed[0]
    assert num_turns > 500 and 0.05 < num_absent / num_turns < 0.35


@needs_data
def test_a_step_depends_on_its_seed_alone(sources: Sources) -> None:
    """Resume relies on it: step n's data must not depend on the steps before."""
    errors = GrammarErrors(DATA)
    first, second = (
        draw_rows(PackStream(sources, errors, Lengths(3, (25, 80), 120), 7), ENCODER, 512, 2_048, 1_024)
        for _ in range(2)
    )
    assert all(
        torch.equal(a.ids, b.ids) and torch.equal(a.weights, b.weights) for a, b in zip(first, second, strict=True)
    )
    assert all(batch.ids.shape[1] <= 512 for batch in first)
