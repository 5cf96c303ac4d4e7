"""The trainable heads compute what the papers' equations say, at every draft step, under the published names."""

from typing import Any

import pytest
import torch
from drafting.eagle_heads import random_head
from drafting.eagle_reference import draft_outputs, head_logits, head_outputs

from ragspec.drafting.eagle.layout import EagleFamily, HeadCheckpoint
from ragspec.drafting.eagle.network import EagleHead
from ragspec.drafting.heads.learning import Inputs, Objective

HEADS: dict[str, dict[str, Any]] = {
    **{family: {"family": family} for family in EagleFamily},
    "PosS-1": {"family": "eagle", "num_layers": 3, "positions_per_layer": 1},
    "PosS-2": {"family": "eagle", "num_layers": 2, "positions_per_layer": 2},
    "biases": {"family": "eagle", "fc_bias": True, "qkv_bias": True, "output_bias": True},
    "norms": {
        "family": "eagle3",
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "qk_norm": True,
    },
    "yarn": {"family": "eagle3", "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
}
NUM_TOKENS, NUM_STEPS = 9, 4


def head_of(checkpoint: HeadCheckpoint) -> EagleHead:
    head = EagleHead(checkpoint.config)
    head.load_state_dict({name: t for name, t in checkpoint.tensors.items() if name != "embed_tokens.weight"})
    return head


@pytest.fixture(params=HEADS)
def checkpoint(request: pytest.FixtureRequest) -> HeadCheckpoint:
    return random_head(**HEADS[request.param])


def text_of(checkpoint: HeadCheckpoint) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """A random embedding table, tokens, and features."""
    config, rng = checkpoint.config, torch.Generator().manual_seed(3)
    embed = torch.randn(config.vocab_size, config.hidden_size, generator=rng)
    tokens = torch.randint(config.vocab_size, (NUM_TOKENS,), generator=rng).tolist()
    return embed, tokens, torch.randn(NUM_TOKENS, config.num_features, generator=rng)


def test_every_step_equals_the_equations(checkpoint: HeadCheckpoint) -> None:
    """A wrong order in a concatenation, a norm too many or a shifted rotation trains, and fails only when served; so does a
    training-time test whose mask shows a row more, less or later keys than it will have when it drafts."""
    embed, tokens, features = text_of(checkpoint)
    head, pairs = head_of(checkpoint), torch.tensor([[5, 0, 3]])
    states = head.unroll(embed[tokens][None], features[None], pairs, Objective(NUM_STEPS))[:, 0]
    first = head_outputs(checkpoint, embed, tokens, features)[pairs[0]]
    torch.testing.assert_close(states[0], head.output(first.float()))
    output = torch.randn(checkpoint.config.vocab_size, checkpoint.config.hidden_size)
    logits = head.logits(states[0], lambda state: state @ output.T)
    torch.testing.assert_close(logits, head_logits(checkpoint, first, output).float())
    for row, pair in enumerate(pairs[0].tolist()):
        drafted = tokens[pair + 2 : pair + 1 + NUM_STEPS]
        expected = draft_outputs(checkpoint, embed, tokens[: pair + 2], features[: pair + 1], drafted)
        torch.testing.assert_close(states[1 : 1 + len(drafted), row], head.output(expected.float()))


def test_texts_of_a_batch_do_not_touch(checkpoint: HeadCheckpoint) -> None:
    """A row that attends into its neighbour, or into the padding behind a shorter text."""
    embed, tokens, features = text_of(checkpoint)
    head, pairs = head_of(checkpoint), torch.tensor([[2, 1]])
    alone = head.unroll(embed[tokens][None, :6], features[None, :6], pairs, Objective(3))
    ids = torch.tensor([tokens[::-1], [*tokens[:6], 0, 0, 0]])
    padded = torch.cat([features[:6], features[6:] * 50])
    both = head.unroll(embed[ids], torch.stack([features.flip(0), padded]), pairs.expand(2, -1), Objective(3))
    torch.testing.assert_close(both[:, 1], alone[:, 0])


def test_a_detached_step_gets_no_gradient_of_later_steps(checkpoint: HeadCheckpoint) -> None:
    """HASS's and PosS's steps learnt through the steps behind them, which is another training, and takes more memory."""
    embed, tokens, features = text_of(checkpoint)
    head, gradients, states = head_of(checkpoint), [], []
    for is_detached in (True, False):
        objective = Objective(3, is_detached=is_detached)
        states.append(head.unroll(embed[tokens][None], features[None], torch.tensor([[4]]), objective))
        gradients += torch.autograd.grad(states[-1][2].sum(), head.fc.weight)
    assert torch.allclose(*states) and not torch.allclose(*gradients)


@pytest.mark.parametrize("inputs", [Inputs.TOKEN, Inputs.FEATURE, Inputs.UNSHIFTED])
def test_an_ablated_head_does_not_see_what_it_must_not(checkpoint: HeadCheckpoint, inputs: Inputs) -> None:
    """An ablation that still sees the other half, or the token one ahead, which is the paper's point, measures nothing."""
    embed, tokens, features = text_of(checkpoint)
    embedded, hidden = embed[tokens], features.clone()
    if inputs is Inputs.TOKEN:
        hidden += torch.randn(features.shape)
    else:
        embedded = embedded.index_add(0, torch.tensor([5]), torch.randn(1, embed.shape[1]))
    head, pairs = head_of(checkpoint), torch.tensor([[4]])
    for objective, is_same in ((Objective(1, inputs=inputs), True), (Objective(1), False)):
        seen = [
            head.unroll(e[None], f[None], pairs, objective) for e, f in ((embed[tokens], features), (embedded, hidden))
        ]
        assert torch.equal(*seen) == is_same
