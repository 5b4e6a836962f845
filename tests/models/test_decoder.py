"""The small decoder."""

import copy

import pytest
import torch
from covering import cases
from decoders import small
from kinds import POSITIONS

from embedlayer import (
    CheckpointError,
    DecoderLM,
    FactorizedEmbedding,
    OutputHead,
    QuantizedEmbedding,
    SizeError,
    TokenEmbedding,
)
from embedlayer.compress import replace_table
from embedlayer.vocab import edit_vocabulary


@pytest.mark.parametrize("position", POSITIONS)
def test_a_logit_depends_on_its_own_text_so_far_alone(position) -> None:
    model = small(position)
    ids = torch.randint(1, 50, (2, 10))
    logits, changed = model(ids), ids.clone()
    changed[:, 6:] = torch.randint(1, 50, (2, 4))
    assert torch.allclose(logits[:, :6], model(changed)[:, :6], atol=1e-6)
    assert not torch.allclose(logits[:, 6:], model(changed)[:, 6:], atol=1e-6)
    assert torch.allclose(model(ids[0]), logits[0], atol=1e-6)

    first, second = torch.tensor([5, 6, 7]), torch.tensor([8, 9])
    padded = model(torch.tensor([[0, 0, 5, 6, 7]]), attention_mask=torch.tensor([[0, 0, 1, 1, 1]]))
    assert torch.isfinite(padded).all()
    assert torch.allclose(padded[0, 2:], model(first), atol=1e-5)
    packed = model(torch.tensor([[5, 6, 7, 8, 9]]), attention_mask=torch.tensor([[1, 1, 1, 2, 2]]))
    assert torch.allclose(packed[0], torch.cat([model(first), model(second)]), atol=1e-5)

    seen: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, inputs, output: seen.extend([inputs[0], output]))
    states = list(model.hidden_states(ids))  # the inputs and outputs of the blocks
    assert len(states) == 3
    assert all(torch.equal(a, b) for a, b in zip([states[0], states[1], *states[1:]], seen, strict=True))
    assert torch.equal(model.norm(states[-1]), model.hidden(ids))
    for state, single in zip(states, model.hidden_states(ids[0]), strict=True):
        torch.testing.assert_close(single, state[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", ["rotary", "alibi"])
def test_relative_schemes_do_not_see_an_offset(position) -> None:
    model = small(position)
    ids = torch.randint(1, 50, (1, 8))
    assert torch.allclose(model(ids), model(ids, positions=torch.arange(100, 108)), atol=1e-5)


def test_without_positions_the_last_token_sees_its_past_as_a_set() -> None:
    model = small("none", num_layers=1)
    ids = torch.randint(1, 50, (1, 8))
    shuffled = ids.clone()
    shuffled[:, :7] = ids[:, torch.randperm(7)]
    assert torch.allclose(model(ids)[:, -1], model(shuffled)[:, -1], atol=1e-6)


def test_fewer_key_heads_equal_repeated_ones() -> None:
    grouped = small(num_kv_heads=2)
    full = small()
    state = dict(grouped.state_dict())
    for name, tensor in state.items():
        if ".key." in name or ".value." in name:
            state[name] = tensor.unflatten(0, (2, 6)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    ids = torch.randint(1, 50, (2, 10))
    assert torch.allclose(full(ids), grouped(ids), atol=1e-6)


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = small()
    ids = torch.randint(1, 50, (2, 11))
    logits = model(ids[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert torch.allclose(model.loss(ids[:, :-1], ids[:, 1:]), expected)


@cases("position, tied", POSITIONS, [True, False])
def test_what_was_saved_is_read_back_bit_for_bit(tmp_path, position, tied) -> None:
    head = None if tied else OutputHead(vocab_size=50, embed_dim=24, bias=True, softcap=20.0)
    model = small(position, head=head)
    model.save_pretrained(tmp_path)
    again = DecoderLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(1, 50, (2, 10))
    assert torch.equal(again(ids), model(ids))
    assert again.config == model.config
    assert again.head.tied == tied
    assert (again.head.weight is again.table.weight) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_the_options_of_the_products_of_a_head_are_saved_and_used_everywhere(tmp_path, tied) -> None:
    head = OutputHead(24, 50, head_dtype="float32", batch_invariant=True, init_std=1.0)
    table = TokenEmbedding(50, 24, init_std=1.0)
    head = OutputHead(table, head_dtype=torch.float32, batch_invariant=True) if tied else head
    model = small(table=table, head=head).bfloat16()
    ids = torch.randint(0, 50, (2, 7))
    with torch.no_grad():
        logits, outputs = model(ids), model(input_ids=ids, labels=ids)
        exact = model.hidden(ids).double() @ model.head.weight.double().T
        assert logits.dtype == outputs.logits.dtype == outputs.loss.dtype == torch.float32
        torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
        expected = torch.nn.functional.cross_entropy(exact[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        torch.testing.assert_close(outputs.loss.double(), expected, rtol=1e-6, atol=1e-6)
        model.save_pretrained(tmp_path)
        again = DecoderLM.from_pretrained(tmp_path).eval()
        assert (again.head.head_dtype, again.head.batch_invariant, again.head.tied) == (torch.float32, True, tied)
        assert torch.equal(again(ids), logits)
        compressed = replace_table(model, QuantizedEmbedding.from_table(model.table, 8))
        assert (compressed.head.head_dtype, compressed.head.batch_invariant) == (torch.float32, True)
        assert compressed(ids).dtype == torch.float32
        edit_vocabulary(model, remove=[7])
        assert (model.head.head_dtype, model.head.batch_invariant) == (torch.float32, True)
        assert model(ids.clamp(max=48)).dtype == torch.float32


def test_a_factorised_table_ties_too(tmp_path) -> None:
    model = small(table=FactorizedEmbedding(50, 24, 6))
    ids = torch.randint(1, 50, (2, 10))
    model.save_pretrained(tmp_path)
    assert torch.equal(DecoderLM.from_pretrained(tmp_path).eval()(ids), model(ids))
    assert copy.deepcopy(model).head.own_table is not model.table


def test_every_parameter_gets_a_gradient() -> None:
    model = small("learned", table=TokenEmbedding(50, 24)).train()
    model.loss(torch.arange(16)[None], torch.arange(1, 17)[None]).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_sizes_that_do_not_fit_are_refused() -> None:
    wrong = {"num_heads": 5}, {"num_kv_heads": 3}, {"head": OutputHead(vocab_size=51, embed_dim=24)}
    for options in wrong:
        with pytest.raises(SizeError):
            small(**options)


def test_a_damaged_folder_is_refused(tmp_path) -> None:
    small().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text()
    for old, new in {'"num_layers": 2': '"num_layers": 3', '"num_layers"': '"layers"', "version": "edition"}.items():
        config.write_text(text.replace(old, new))
        with pytest.raises(CheckpointError):
            DecoderLM.from_pretrained(tmp_path)
    config.write_text(text)
    with pytest.raises(CheckpointError):
        TokenEmbedding.from_pretrained(tmp_path)
