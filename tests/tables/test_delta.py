"""A frozen table and a few rows that learn."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from covering import some
from memory import Shapes
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_blocks import small_blocks
from torch import Tensor, nn

from embedlayer import (
    CheckpointError,
    DecoderLM,
    DeltaEmbedding,
    FactorizedEmbedding,
    FileError,
    OutputHead,
    QuantizedEmbedding,
    RotaryEmbedding,
    RowAdamW,
    RowSparseEmbedding,
    ShapeError,
    SizeError,
    TokenEmbedding,
    TokenIdError,
    TokenTable,
    TransformerEmbedding,
    param_groups,
)

IDS = [7, 2, 22]
BASES = {
    "dense": lambda: TokenEmbedding(23, 6, dtype=torch.float64, scale="sqrt_dim", init_std=1.0),
    "padded": lambda: TokenEmbedding(23, 6, dtype=torch.float64, padding_idx=3, pad_to_multiple_of=8, init_std=1.0),
    "factorised": lambda: FactorizedEmbedding(23, 6, 3, dtype=torch.float64, init_std=1.0),
    "row-sparse": lambda: RowSparseEmbedding(23, 6, dtype=torch.float64, init_std=1.0),
    "int8": lambda: QuantizedEmbedding.from_table(torch.randn(23, 6, dtype=torch.float64)),
    "int4": lambda: QuantizedEmbedding.from_table(torch.randn(23, 6, dtype=torch.float64), 4, group_size=2),
    "delta": lambda: DeltaEmbedding(TokenEmbedding(23, 6, dtype=torch.float64, init_std=1.0), [1, 7]),
}


def moved(base: TokenTable) -> DeltaEmbedding:
    """Rows that are no longer the base's."""
    return DeltaEmbedding(base, IDS, values=torch.randn(3, 6, dtype=torch.float64))


def by_definition(table: DeltaEmbedding) -> Tensor:
    """All rows as one differentiable matrix."""
    rows = table.base.rows(0, table.vocab_size).detach()
    return rows.index_copy(0, torch.tensor(table.token_ids), table.delta)


@pytest.fixture(params=list(BASES))
def table(request: pytest.FixtureRequest) -> Iterator[DeltaEmbedding]:
    with small_blocks(table_rows=5):
        yield moved(BASES[request.param]())


def test_values_are_given_in_the_order_of_the_tokens() -> None:
    values = torch.randn(3, 6, dtype=torch.float64)
    table = DeltaEmbedding(BASES["padded"](), torch.tensor(IDS), values=values)
    assert torch.equal(table(torch.tensor(IDS)), values)
    assert torch.equal(DeltaEmbedding.last(BASES["dense"](), 3, values=values).rows(20, 23), values)


def test_both_directions_equal_a_table_with_the_rows_written_in(table: DeltaEmbedding) -> None:
    rows = by_definition(table).detach()
    ids = torch.tensor([[2, 5, 22, 7], [7, 7, 0, 1]])
    hidden, targets = torch.randn(2, 4, 6, dtype=torch.float64), torch.tensor([[2, 5, 22, -100], [7, 0, 1, 19]])
    dense = TokenEmbedding.from_pretrained(rows, scale=table.scale)
    dense.padding_idx = table.padding_idx
    torch.testing.assert_close(table(ids), dense(ids), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(table(ids.int()), dense(ids), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(table.logits(hidden), dense.logits(hidden), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(table.token_log_probs(hidden, targets), dense.token_log_probs(hidden, targets))
    for start, stop in ((0, 23), (3, 6), (20, 23), (7, 8)):
        torch.testing.assert_close(table.rows(start, stop), rows[start:stop], rtol=1e-13, atol=1e-14)
    for options in ({}, {"softcap": 3.0, "logit_scale": 0.5}, {"label_smoothing": 0.1, "z_loss": 0.1}):
        torch.testing.assert_close(table.loss(hidden, targets, **options), dense.loss(hidden, targets, **options))


@pytest.mark.parametrize("table", some(["padded", "int8", "delta"], BASES), indirect=True)
def test_gradients_of_both_ends_reach_the_rows_and_nothing_else(table: DeltaEmbedding) -> None:
    ids = torch.tensor([[2, 5, 22, 7], [7, 7, 0, 1]])
    hidden = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[2, 5, 22, -100], [7, 0, 1, 19]])

    def of(delta: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        class Call(nn.Module):
            def forward(self) -> tuple[Tensor, ...]:
                return table(ids), table.logits(hidden), table.loss(hidden, targets[0, 1:2])

        call = Call()
        call.table = table
        return torch.func.functional_call(call, {"table.delta": delta})

    assert torch.autograd.gradcheck(of, (table.delta.detach().clone().requires_grad_(), hidden))
    both = table.loss(table(ids), targets)
    both.backward()
    rows = by_definition(table)
    factor = 1.0 if table.factor is None else table.factor
    logits = (factor * F.embedding(ids, rows)) @ rows.T
    if table.padding_idx is not None:
        logits = logits.index_fill(-1, torch.tensor([table.padding_idx]), 0.0)
    (expected,) = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), table.delta)
    torch.testing.assert_close(table.delta.grad, expected, rtol=1e-10, atol=1e-12)
    assert [name for name, part in table.named_parameters() if part.grad is not None] == ["delta"]
    assert [name for name, part in table.named_parameters() if part.requires_grad] == ["delta"]


def test_no_step_makes_anything_of_the_size_of_the_table() -> None:
    base = TokenEmbedding(10_000, 64)
    table = DeltaEmbedding(base, range(0, 10_000, 500))
    optimizer = torch.optim.AdamW([part for part in table.parameters() if part.requires_grad], lr=0.1)
    ids = torch.randint(0, 10_000, (2, 8))
    before = base.weight.detach().clone()
    weight = base.weight.untyped_storage().data_ptr()
    with Shapes() as shapes, small_blocks(table_rows=1000):
        (table.loss(table(ids), ids) + table.logits(table(ids)).logsumexp(-1).mean()).backward()
        optimizer.step()
    views = {"slice.Tensor", "t.default"}  # of the table, which has 640,000 numbers
    assert shapes.largest(10_000 * 16 + 1) <= views
    assert base.weight.untyped_storage().data_ptr() == weight
    assert torch.equal(base.weight, before)
    assert all(part.shape in ((20, 64), ()) for state in optimizer.state.values() for part in state.values())


def test_tokens_of_which_no_row_can_learn_are_refused() -> None:
    base = BASES["padded"]()
    for token_ids, error in (([], SizeError), ([1, 5, 1], SizeError), ([3], SizeError), ([23], TokenIdError)):
        with pytest.raises(error):
            DeltaEmbedding(base, token_ids)
    with pytest.raises(TokenIdError):
        DeltaEmbedding.last(base, 24)
    with pytest.raises(ShapeError):
        DeltaEmbedding(base, IDS, values=torch.zeros(2, 6))
    assert base.weight.requires_grad  # nothing was changed


def test_merging_writes_the_rows_in_place() -> None:
    table = moved(BASES["padded"]())
    rows, weight = table.rows(0, 23).detach().clone(), table.base.weight
    merged = table.merge()
    assert merged.weight is weight
    assert torch.equal(merged.rows(0, 23), rows)
    assert torch.equal(table.rows(0, 23), rows)
    assert not merged.weight.requires_grad


@pytest.mark.parametrize("kind", ["factorised", "delta"])
def test_a_base_that_does_not_store_each_row_refuses_the_merge(kind) -> None:
    with pytest.raises(SizeError):
        moved(BASES[kind]()).merge()


def test_an_adapter_loads_onto_its_base_bit_for_bit(tmp_path: Path) -> None:
    table = moved(BASES["factorised"]())
    base = copy.deepcopy(table.base)
    table.save_adapter(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1500
    again = DeltaEmbedding.from_pretrained(tmp_path, base=base)
    assert again.token_ids == table.token_ids
    assert again.delta.requires_grad
    assert torch.equal(again.rows(0, 23), table.rows(0, 23))
    table.save_adapter(tmp_path)  # over the old one


@pytest.mark.parametrize(
    "other",
    [
        lambda base: base.requires_grad_(False).weight[9, 2].add_(1e-6) is None or base,
        lambda base: base.float(),
        *(lambda base, sizes=sizes: TokenEmbedding(*sizes, dtype=torch.float64) for sizes in ((24, 6), (23, 8))),
        lambda base: FactorizedEmbedding(23, 6, 3, dtype=torch.float64),
    ],
)
def test_an_adapter_refuses_another_base(tmp_path: Path, other) -> None:
    table = moved(BASES["dense"]())
    table.save_adapter(tmp_path)
    with pytest.raises(CheckpointError):
        DeltaEmbedding.from_pretrained(tmp_path, base=other(copy.deepcopy(table.base)))


def test_a_damaged_adapter_says_so(tmp_path: Path) -> None:
    table = moved(BASES["dense"]())
    with pytest.raises(FileError):
        DeltaEmbedding.from_pretrained(tmp_path, base=table.base)
    table.save_adapter(tmp_path)
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    tensors = load_file(weights)
    with safe_open(weights, "pt") as file:
        metadata = file.metadata()
    save_file({name: rows[:2].clone() for name, rows in tensors.items()}, weights, metadata)
    with pytest.raises(CheckpointError):
        DeltaEmbedding.from_pretrained(tmp_path, base=table.base)
    save_file(tensors, weights, dict.fromkeys(metadata, "5"))
    with pytest.raises(CheckpointError):
        DeltaEmbedding.from_pretrained(tmp_path, base=table.base)
    config.write_text('{"format_version": 1}')
    with pytest.raises(CheckpointError):
        DeltaEmbedding.from_pretrained(tmp_path, base=table.base)


def test_a_base_is_known_by_its_stored_numbers_whatever_the_chunks(tmp_path: Path, monkeypatch) -> None:
    table = DeltaEmbedding(TokenEmbedding(23, 6, dtype=torch.bfloat16), IDS)
    table.save_adapter(tmp_path)
    monkeypatch.setattr("embedlayer.io.safetensors_files.CHUNK_BYTES", 14)
    again = DeltaEmbedding.from_pretrained(tmp_path, base=copy.deepcopy(table.base))
    assert torch.equal(again.delta, table.delta)
    with pytest.raises(CheckpointError):
        DeltaEmbedding.from_pretrained(tmp_path, base=copy.deepcopy(table.base).half())


def test_it_stands_at_both_ends_of_a_model(tmp_path: Path) -> None:
    base = TokenEmbedding(50, 16, scale="sqrt_dim")
    table = DeltaEmbedding.last(base, 4)
    model = DecoderLM(table, RotaryEmbedding(4), num_layers=1, num_heads=4).requires_grad_(False)
    table.delta.requires_grad_(True)
    assert [(group["name"], len(group["params"])) for group in param_groups(model)] == [("tables", 1)]
    ids = torch.tensor([[46, 1, 47, 2, 48, 3, 49, 4]])
    model.save_pretrained(tmp_path)
    again = DecoderLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids), model(ids))
    assert isinstance(again.head.table, DeltaEmbedding)
    layer = TransformerEmbedding(50, 16, 8, table=table, dropout=0.0)
    torch.testing.assert_close(layer(ids), table(ids) + layer.position.stored(8))


def test_a_tied_head_has_no_gradient_of_the_size_of_the_table() -> None:
    table = DeltaEmbedding.last(TokenEmbedding(50, 16, padding_idx=0), 4)
    head = OutputHead(table, softcap=30.0, bias=True)
    head.loss(torch.randn(6, 16), torch.randint(1, 50, (6,))).backward()
    assert table.delta.grad.shape == (4, 16)
    assert table.base.weight.grad is None
    assert head.bias.grad is not None


def test_a_lazy_table_is_brought_up_to_date_before_its_rows_are_taken() -> None:
    base = RowSparseEmbedding(23, 6)
    optimizer = RowAdamW([base.weight], lr=0.1)
    for ids in ([1, 2], [3], [4], [2]):
        base(torch.tensor(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    table = DeltaEmbedding(base, [1, 2])
    rows = base.rows(0, 23).clone()
    table(torch.tensor([1, 2, 3])).sum().backward()
    assert torch.equal(table.rows(0, 23), rows)
    assert torch.equal(table(torch.arange(23)), rows)


def test_float32_rows_learn_over_a_bfloat16_base() -> None:
    base = TokenEmbedding(23, 6, dtype=torch.bfloat16)
    table = DeltaEmbedding(base, IDS, dtype=torch.float32)
    ids = torch.tensor([[2, 5, 7]])
    assert table.delta.dtype == torch.float32
    assert table(ids).dtype == table.logits(table(ids)).dtype == table.rows(0, 9).dtype == torch.bfloat16
    table.loss(table(ids), ids).backward()
    assert table.delta.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        moved(TokenEmbedding(23, 6).double()).float().logits(torch.randn(2, 6))
