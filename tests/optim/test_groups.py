"""What decays and what does not."""

import torch

from embedlayer import (
    DecoderLM,
    FactorizedEmbedding,
    LearnedPositionalEmbedding,
    OutputHead,
    RotaryEmbedding,
    TokenEmbedding,
    param_groups,
)


def test_tables_positions_and_norms_do_not_decay_and_every_parameter_stands_once() -> None:
    head = OutputHead(vocab_size=50, embed_dim=24, bias=True)
    model = DecoderLM(FactorizedEmbedding(50, 24, 6), LearnedPositionalEmbedding(16, 24), head, num_layers=1)
    groups = {group["name"]: group for group in param_groups(model, weight_decay=0.3)}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "tables": 0.0,
        "positions": 0.0,
        "norms": 0.0,
        "matrices": 0.3,
    }
    assert set(groups["tables"]["params"]) == set(model.table.parameters())
    assert groups["positions"]["params"] == [model.position.weight]
    assert head.weight in set(groups["matrices"]["params"])
    assert head.bias in set(groups["norms"]["params"])
    everything = [parameter for group in groups.values() for parameter in group["params"]]
    assert len(everything) == len(set(everything))
    assert set(everything) == set(model.parameters())


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = DecoderLM(TokenEmbedding(50, 24), RotaryEmbedding(6), num_layers=1)
    model.table.weight.requires_grad_(False)
    assert [group["name"] for group in param_groups(model)] == ["norms", "matrices"]
    torch.optim.AdamW(param_groups(model))
