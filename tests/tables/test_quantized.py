"""The quantised table."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from covering import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import Shapes
from torch import Tensor, nn

from embedlayer import (
    EmbedLayerError,
    FactorizedEmbedding,
    OutputHead,
    QuantizedEmbedding,
    RowSparseEmbedding,
    TokenEmbedding,
    TokenTable,
    load_tokenizer,
)

KINDS = [(8, None), (8, 5), (4, None), (4, 6)]


def parts_of(table: QuantizedEmbedding) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, steps and offsets of all numbers, `(V, D)`: of each group its codes are followed by step and offset."""
    bits, size, groups = table.row_format.bits, table.row_format.group_size, table.row_format.groups()
    stored = table.packed.view(table.vocab_size, groups, -1)
    codes, header = stored.split([-(-size * bits // 8), stored.shape[-1] - -(-size * bits // 8)], dim=-1)
    numbers = header.clone(memory_format=torch.contiguous_format).view(torch.float32 if bits == 8 else torch.float16)
    if bits == 4:  # the first of two numbers has the low bits
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)[..., :size]
    parts = codes.float(), numbers[..., :1].float().expand(-1, -1, size), numbers[..., 1:].float().expand(-1, -1, size)
    codes, step, offset = (each.flatten(1)[:, : table.embed_dim] for each in parts)
    return codes, step, offset


def plain_rows(table: QuantizedEmbedding) -> Tensor:
    codes, step, offset = parts_of(table)
    return (step * codes + offset) * (1 if table.row_scale is None else table.row_scale.unsqueeze(1))


def close(fast: Tensor, plain: Tensor) -> bool:
    """Equal but for the rounding of float32: a kernel may fuse the product and the sum."""
    return torch.allclose(fast.float(), plain.float(), rtol=4e-7, atol=4e-7 * plain.abs().max().item())


def error(rows: Tensor, table: TokenTable) -> float:
    return ((rows - table.rows(0, len(rows))).norm() / rows.norm()).item()


def steps(table: QuantizedEmbedding) -> Tensor:
    """The step of every number, `(V, D)`."""
    return parts_of(table)[1] * (1 if table.row_scale is None else table.row_scale.unsqueeze(1))


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize(("bits", "group_size"), KINDS)
@pytest.mark.parametrize("width", [1, 7, 16, 17])
def test_look_up_and_rows_are_the_plain_definition(bits, group_size, width) -> None:
    group_size = None if group_size is None or group_size > width else group_size
    table = QuantizedEmbedding.from_table(torch.randn(50, width), bits, group_size=group_size)
    plain = plain_rows(table)
    ids = torch.randint(0, 50, (3, 4, 5))
    assert close(table(ids), plain[ids])
    assert torch.equal(table(ids.int()), table(ids))
    assert torch.equal(table.rows(0, 50)[ids], table(ids))
    assert torch.equal(table.rows(10, 99), table.rows(10, 50))
    assert table.rows(7, 7).shape == (0, width)
    assert table(torch.empty(0, 4, dtype=torch.int64)).shape == (0, 4, width)


def test_what_is_stored_is_what_pytorchs_own_kernels_read() -> None:
    rows = torch.randn(30, 24)
    whole = QuantizedEmbedding.from_table(rows, 8, clip=False)
    assert close(torch.ops.quantized.embedding_bag_byte_unpack(whole.packed), plain_rows(whole))
    half = QuantizedEmbedding.from_table(rows, 4, clip=False)
    unpacked = torch.ops.quantized.embedding_bag_4bit_unpack(half.packed)
    assert close(half.row_scale.unsqueeze(1) * unpacked, plain_rows(half))


@pytest.mark.usefixtures("both_paths")
@settings(max_examples=60)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 40),
    bits=st.sampled_from([8, 4]),
    grouped=st.booleans(),
    symmetric=st.booleans(),
    exponent=st.integers(-30, 30),
    shift=st.sampled_from([0.0, 1.0, -20.0]),
    seed=st.integers(0, 99),
)
def test_unclipped_numbers_are_off_by_half_a_step_at_most(
    rows, width, bits, grouped, symmetric, exponent, shift, seed
) -> None:
    x = (torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) + shift) * 2.0**exponent
    group_size = 4 if grouped and width >= 4 else None
    table = QuantizedEmbedding.from_table(x, bits, group_size=group_size, symmetric=symmetric, clip=False)
    largest = x.abs().amax(dim=1, keepdim=True)
    rounding = largest * (2.0**-20 if bits == 8 else 2.0**-10 if symmetric else 2.0**-11)
    assert ((x - table.rows(0, rows)).abs() <= steps(table) / 2 + rounding).all()


@pytest.mark.usefixtures("both_paths")
@settings(max_examples=15)
@given(width=st.integers(2, 60), seed=st.integers(0, 99), spread=st.sampled_from([0.0, 1.0, 3.0]))
def test_more_bits_smaller_groups_and_clipping_never_make_it_worse(width, seed, spread) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, width, generator=generator) * torch.exp(spread * torch.randn(8, width, generator=generator))
    errors = {
        (bits, clip): error(x, QuantizedEmbedding.from_table(x, bits, clip=clip))
        for bits in (8, 4)
        for clip in (False, True)
    }
    assert errors[8, False] < errors[4, False]
    assert errors[8, True] < errors[4, True]
    rounding = torch.finfo(torch.float32).eps  # of two values both are kept, but for it
    assert errors[4, True] <= errors[4, False] * (1 + 1e-5) + rounding
    assert errors[8, True] <= errors[8, False] * (1 + 1e-5) + rounding


@pytest.mark.usefixtures("both_paths")
@cases("kind, symmetric", KINDS, [False, True])
def test_constant_and_zero_rows_are_exact_at_any_size(kind, symmetric) -> None:
    bits, group_size = kind
    values = torch.tensor([0.0, 0.1, -1e-30, 1e38, -12345.678, 1e-37])
    table = QuantizedEmbedding.from_table(
        values.unsqueeze(1).expand(-1, 16), bits, group_size=group_size, symmetric=symmetric
    )
    found = table.rows(0, 6)
    assert found[0].eq(0).all()
    if symmetric:
        assert torch.allclose(found, values.unsqueeze(1).expand(-1, 16), rtol=1e-3, atol=1e-40)
    else:
        assert torch.equal(found, values.unsqueeze(1).expand(-1, 16))


@pytest.mark.usefixtures("both_paths")
def test_a_symmetric_table_has_zero_among_its_levels_and_keeps_signs() -> None:
    x = torch.randn(20, 32)
    x[:, 3] = 0
    for bits in (8, 4):
        one, other = (QuantizedEmbedding.from_table(rows, bits, symmetric=True).rows(0, 20) for rows in (x, -x))
        assert torch.equal(one, -other)
        assert one[:, 3].eq(0).all()


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("source", [FactorizedEmbedding(40, 16, 4), RowSparseEmbedding(40, 16)])
def test_tables_of_any_kind_are_quantised(source) -> None:
    rows = source.rows(0, 40).detach()
    assert torch.equal(
        QuantizedEmbedding.from_table(source).packed, QuantizedEmbedding.from_table(rows.contiguous()).packed
    )
    again = QuantizedEmbedding.from_table(QuantizedEmbedding.from_table(source, clip=False), clip=False)
    assert error(rows, again) < 0.01


@pytest.mark.usefixtures("both_paths")
@cases("dtype, kind", [torch.float32, torch.bfloat16, torch.float16], KINDS)
def test_vectors_come_out_in_the_type_asked_for_and_nothing_stored_is_rounded(dtype, kind) -> None:
    bits, group_size = kind
    table = QuantizedEmbedding.from_table(torch.randn(300, 16), bits, group_size=group_size)
    before, rows = {name: tensor.clone() for name, tensor in table.state_dict().items()}, table.rows(0, 300)
    table.to(dtype)
    assert table.dtype == table(torch.tensor([1, 2])).dtype == table.logits(torch.randn(2, 16).to(dtype)).dtype == dtype
    assert torch.equal(table.rows(0, 300), rows.to(dtype))
    assert all(torch.equal(tensor, before[name]) for name, tensor in table.state_dict().items())
    assert torch.equal(table.float().rows(0, 300), rows)
    source = TokenEmbedding(9, 16, dtype=dtype)
    assert QuantizedEmbedding.from_table(source, bits).dtype == dtype


@pytest.mark.usefixtures("both_paths")
def test_gradients_to_the_hidden_state_are_exact_to_the_second_order() -> None:
    table = QuantizedEmbedding.from_table(torch.randn(11, 6), 4, group_size=4).double()
    hidden = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(table.raw_logits, hidden)
    assert torch.autograd.gradgradcheck(table.raw_logits, hidden)
    targets = torch.tensor([1, 5, 10])
    assert torch.autograd.gradcheck(lambda x: table.loss(x, targets), hidden)


@pytest.mark.usefixtures("both_paths")
def test_neither_logits_nor_loss_ever_hold_the_dense_table() -> None:
    table, kept = QuantizedEmbedding.from_table(torch.randn(40_000, 16), 4), []
    hidden = torch.randn(3, 16, requires_grad=True)

    def pack(x: Tensor) -> Tensor:
        kept.append(x.untyped_storage().nbytes())
        return x

    with Shapes() as shapes:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            table.logits(hidden).square().sum().backward()
        table.loss(hidden, torch.tensor([1, 2, 3])).backward()
    assert sum(kept) < 40_000 * 16 * 4
    assert not shapes.largest(2**19 + 1)  # numbers


def test_tied_there_is_one_storage_and_one_key() -> None:
    table = QuantizedEmbedding.from_table(torch.randn(30, 16), 4)
    model = nn.ModuleDict({"table": table, "head": OutputHead(table)})
    assert set(model.state_dict()) == {"table.packed", "table.row_scale"}
    assert table.nbytes == 30 * (8 + 4 + 4)
    assert not list(model.parameters())


@pytest.mark.usefixtures("both_paths")
def test_under_autocast_the_products_are_taken_in_its_type() -> None:
    table = QuantizedEmbedding.from_table(torch.randn(30, 16))
    hidden = torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        logits = table.logits(hidden)
    assert logits.dtype == torch.bfloat16
    expected = F.linear(hidden.bfloat16(), table.rows(0, 30).bfloat16())
    assert torch.allclose(logits, expected, atol=0.05)
    logits.float().sum().backward()
    assert hidden.grad.dtype == torch.float32


REFUSED: list[Callable[[], object]] = [
    *(lambda options=options: QuantizedEmbedding(9, 16, **options) for options in ({"bits": 3}, {"layout": "q8_0"},
      {"bits": 4, "group_size": 5}, {"group_size": 17}, {"dtype": torch.int8})),
    lambda: QuantizedEmbedding(0, 16),
    lambda: QuantizedEmbedding.from_table(torch.randn(9)),
    lambda: QuantizedEmbedding(9, 16).requires_grad_(),
    lambda: QuantizedEmbedding(9, 16).logits(torch.randn(2, 16).double()),
    lambda: QuantizedEmbedding(9, 16).logits(torch.randn(2, 15)),
    *(lambda value=value: QuantizedEmbedding.from_table(torch.full((9, 4), value, dtype=torch.float64))
      for value in (float("nan"), float("inf"), -float("inf"), 1e300)),
]  # fmt: skip


def test_what_cannot_be_is_refused(unchecked) -> None:
    for make in REFUSED:
        with pytest.raises(EmbedLayerError):
            make()
    assert QuantizedEmbedding(9, 16).requires_grad_(False) is not None


def story(folder: Path) -> str:
    """The text that the model's authors drew from it."""
    text = (folder / "models" / "stories260K.md").read_text()
    return "Once upon a time" + text.split("Once upon a time")[2].split("\n```")[0]


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize(("bits", "most"), [(8, 0.952), (4, 0.972)])
def test_a_trained_tied_model_still_predicts_its_text(shared_data, bits, most) -> None:
    from embedlayer import DecoderLM, load_llama

    model = load_llama(shared_data / "models" / "stories260K.safetensors")
    tokenizer = load_tokenizer(shared_data / "models" / "tok512.bin")
    ids = torch.tensor(tokenizer.encode(story(shared_data)).ids)
    ids = ids if ids[0] == 1 else torch.cat([torch.tensor([1]), ids])
    quantised = DecoderLM(QuantizedEmbedding.from_table(model.table, bits), model.position, **model.sizes).eval()
    rest = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("table.")}
    assert not quantised.load_state_dict(rest, strict=False).unexpected_keys
    with torch.no_grad():
        assert model.loss(ids[:-1], ids[1:]).item() == pytest.approx(0.949, abs=5e-4)
        assert quantised.loss(ids[:-1], ids[1:]).item() <= most


@pytest.mark.usefixtures("both_paths")
def test_one_row_is_read_for_one_id(monkeypatch) -> None:
    """No look-up touches the rows that it was not asked for: these hold what would be NaN."""
    table = QuantizedEmbedding.from_table(torch.randn(50, 16))
    good = table.rows(7, 8)
    table.packed[:7] = table.packed[8:] = 255
    assert torch.equal(table(torch.tensor([7])), good)
    assert table(torch.tensor([8])).isnan().any()
