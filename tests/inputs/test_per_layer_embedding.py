"""Per-layer embeddings in a decoder."""

import torch
from decoders import small

from embedlayer import TokenEmbedding
from embedlayer.inputs import PerLayerEmbedding, PerLayerInputs


def test_each_block_is_followed_by_the_addend_of_its_own_columns() -> None:
    injection = PerLayerEmbedding(PerLayerInputs(TokenEmbedding(50, 2 * 6, init_std=1.0), 24, 2))
    model, ids = small(injections=[injection]), torch.randint(1, 50, (2, 10))
    outputs: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, inputs, output: outputs.append(output))
    states = list(model.hidden_states(ids))
    inputs = injection.inputs(ids, states[0])
    for number, output in enumerate(outputs):
        added = injection.residuals[number](output, inputs[..., number, :])
        torch.testing.assert_close(states[number + 1], output + added)


def test_it_takes_a_table_as_the_other_injections_do() -> None:
    table = TokenEmbedding(50, 2 * 6)
    injection = PerLayerEmbedding(table, 24, num_layers=2)
    assert injection.inputs.table is table
    model, ids = small(injections=[injection]), torch.randint(1, 50, (2, 10))
    again = type(model).from_config(model.config)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(ids), model(ids))
