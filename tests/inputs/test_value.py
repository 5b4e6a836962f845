"""Value embeddings."""

import torch
import torch.nn.functional as F
from decoders import small
from torch import nn

from embedlayer import TokenEmbedding
from embedlayer.inputs import InjectionContext, ValueEmbedding, alternate_blocks


def test_attention_reads_its_values_plus_gated_rows() -> None:
    """Restated from nanochat's `CausalSelfAttention`: `v = v + gate * ve`, a gate for each head from 32 channels."""
    injection = ValueEmbedding(TokenEmbedding(50, 12, init_std=1.0), 2, blocks=[1], gate_channels=8)
    model = small(num_kv_heads=2, injections=[injection])
    nn.init.normal_(injection.gates["1"].weight)
    ids, x = torch.randint(1, 50, (2, 10)), torch.randn(2, 10, 24)
    attention = model.blocks[1].attention
    v = attention.value(x).view(2, 10, 2, 6)
    rows = injection.table.weight[ids].view(2, 10, 2, 6)
    gate = 2 * torch.sigmoid(x[..., :8] @ injection.gates["1"].weight.T)
    expected = v + gate.unsqueeze(-1) * rows
    looked_up = injection.look_up(x, InjectionContext(ids))
    torch.testing.assert_close(looked_up, rows.transpose(1, 2))
    for block, values in ((1, expected), (0, v)):
        found = injection.add_to_values(v.transpose(1, 2), x, looked_up, block)
        torch.testing.assert_close(found, values.transpose(1, 2))
    q, k = (each(x).unflatten(-1, (-1, 6)).transpose(1, 2) for each in (attention.query, attention.key))
    q, k = model.position.rotate(q, k, torch.arange(10))
    y = F.scaled_dot_product_attention(q, k, expected.transpose(1, 2), is_causal=True, enable_gqa=True)
    given = attention(
        x, model.position, torch.arange(10), None, None, lambda v, x: injection.add_to_values(v, x, looked_up, 1)
    )
    torch.testing.assert_close(given, attention.out(y.transpose(1, 2).flatten(-2)))


def test_gates_start_at_half_their_scale() -> None:
    injection = ValueEmbedding(TokenEmbedding(50, 12), 2, blocks=[0, 3], gate_scale=3.0)
    assert [*injection.gates] == ["0", "3"]
    assert all(not gate.weight.any() for gate in injection.gates.values())
    values, x, rows = torch.zeros(1, 2, 4, 6), torch.randn(1, 4, 48), torch.randn(1, 2, 4, 6)
    torch.testing.assert_close(injection.add_to_values(values, x, rows, 3), 1.5 * rows)
    assert injection.add_to_values(values, x, rows, 1) is values


def test_alternate_blocks_end_with_the_last() -> None:
    assert [alternate_blocks(count) for count in (1, 2, 5)] == [(0,), (1,), (0, 2, 4)]
