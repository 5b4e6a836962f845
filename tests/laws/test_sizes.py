"""Sizes follow the weight, whoever assigned it and however; so do bounds, logits and loss, from both ends."""

import copy
import pickle
from typing import Any

import pytest
import torch
from covering import looped
from kinds import EMBED_DIM, NUM_HEADS, POSITIONS, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE
from torch import nn

import embedlayer as el
from embedlayer.tables import DenseTable

DENSE = [name for name in TABLES if name.startswith("dense")] + ["row-sparse"]
STORED = {**{name: name for name in DENSE}, "factorised": "inner", "delta": "base"}


def assign(module: nn.Module, weight: torch.Tensor) -> None:
    module.weight = nn.Parameter(weight)


def assign_data(module: nn.Module, weight: torch.Tensor) -> None:
    module.weight.data = weight  # as transformers' resize_token_embeddings does


def put_into_parameters(module: nn.Module, weight: torch.Tensor) -> None:
    module._parameters["weight"] = nn.Parameter(weight)  # as accelerate does


WAYS = {"assigned": assign, "data": assign_data, "parameters": put_into_parameters}


def stored(table: nn.Module, name: str) -> DenseTable:
    return table if isinstance(table, DenseTable) else getattr(table, STORED[name])


def assert_sizes_agree(table: el.TokenTable, rows: int) -> None:
    assert (table.vocab_size, table.num_rows, table.embed_dim) == (rows, rows, EMBED_DIM)
    last = torch.tensor([[rows - 1]])
    assert table(last).shape == (1, 1, EMBED_DIM)
    with pytest.raises(el.TokenIdError, match=f"token id {rows} .* table of {rows} rows"):
        table(torch.tensor([[0, rows]]))


def assert_ends_agree(head: el.OutputHead, rows: int) -> None:
    assert (head.out_features, head.in_features) == (rows, EMBED_DIM)
    hidden, targets = torch.randn(5, EMBED_DIM), torch.randint(1, rows, (5,))
    logits = head(hidden)
    assert logits.shape == (5, rows)
    torch.testing.assert_close(head.loss(hidden, targets), nn.functional.cross_entropy(logits, targets))
    with pytest.raises(IndexError, match=str(rows)):
        head.loss(hidden, targets.index_fill(0, torch.tensor([2]), rows))


@looped("name, way, rows", STORED, WAYS, [80, 64, 37], pairs=["name, way"])
@torch.no_grad()
def test_a_table_has_the_sizes_of_its_weight(name, way, rows) -> None:
    table = TABLES[name]()
    rows = max(rows, 50) if name == "delta" else rows  # the rows that learn stay
    spare = name == "dense, spare rows" and rows == 64  # the size that it was built with
    WAYS[way](stored(table, name), torch.randn(rows, stored(table, name).embedding_dim))
    if spare:
        assert (table.vocab_size, table.num_rows) == (VOCAB_SIZE, rows)
        return
    assert_sizes_agree(table, rows)
    assert_sizes_agree(copy.deepcopy(table), rows)
    assert_sizes_agree(pickle.loads(pickle.dumps(table)), rows)
    if not table.row_sparse:
        assert_ends_agree(el.OutputHead(table), rows)


@pytest.mark.parametrize("rows", [80, 37])
@looped("name", [name for name, table in TIED_HEADS.items() if table in DENSE])
@torch.no_grad()
def test_a_tied_head_follows_its_table(name, rows) -> None:
    table = TABLES[TIED_HEADS[name]]()
    model = el.DecoderLM(table, POSITIONS["none"](), num_layers=1, num_heads=NUM_HEADS)
    alone = el.OutputHead(table)
    table.weight = nn.Parameter(torch.randn(rows, EMBED_DIM))
    for head in (alone, model.head):
        assert head.weight is table.weight
        assert_ends_agree(head, rows)
    ids = torch.tensor([[1, rows - 1]])
    assert model(ids).shape == (1, 2, rows)
    again = el.DecoderLM.from_config(model.config)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(ids), model(ids))


@pytest.mark.parametrize("way", WAYS)
@looped("name", UNTIED_HEADS)
@torch.no_grad()
def test_an_untied_head_has_the_sizes_of_its_weight(name, way) -> None:
    head = UNTIED_HEADS[name]()
    WAYS[way](head, torch.randn(80, EMBED_DIM))
    if head.bias is not None:
        with pytest.raises(el.SizeError, match="80 rows and a bias of 50"):
            head(torch.randn(2, EMBED_DIM))
        head.bias = nn.Parameter(torch.randn(80))
    assert_ends_agree(head, 80)


def test_a_table_that_grew_is_saved_and_read_back(tmp_path) -> None:
    for name in DENSE:
        table = TABLES[name]()
        table.weight = nn.Parameter(torch.randn(81, EMBED_DIM))
        table.save_pretrained(tmp_path / "saved")
        again = type(table).from_pretrained(tmp_path / "saved")
        assert (again.vocab_size, again.num_rows) == (81, 81)
        assert torch.equal(again.weight, table.weight)


def test_a_parameter_given_for_a_call_decides_its_bounds() -> None:
    table = TABLES["dense"]()
    rows = torch.randn(60, EMBED_DIM)
    found = torch.func.functional_call(table, {"weight": rows}, torch.tensor([[59]]))
    torch.testing.assert_close(found, table.scale * rows[59].view(1, 1, -1))
    with pytest.raises(el.TokenIdError, match="table of 50 rows"):
        table(torch.tensor([[59]]))


def test_a_weight_without_the_padding_row_is_refused() -> None:
    table = el.TokenEmbedding(10, 4, padding_idx=7)
    with pytest.raises(el.SizeError, match="7 rows has no padding token 7"):
        table.weight = nn.Parameter(torch.randn(7, 4))
    table.padding_idx = None
    table.weight = nn.Parameter(torch.randn(7, 4))
    assert table.vocab_size == 7


def test_the_weight_of_a_tied_head_is_assigned_at_its_table() -> None:
    table: Any = TABLES["dense"]()
    head = el.OutputHead(table)
    head.weight = table.weight  # the idiom of tying
    with pytest.raises(el.SizeError, match="This head is tied to its table"):
        head.weight = nn.Parameter(torch.randn(VOCAB_SIZE, EMBED_DIM))
    assert [name for name, _ in head.named_parameters()] == []
    untied = UNTIED_HEADS["untied"]()
    untied.weight = table.weight
    assert untied.weight is table.weight


def test_a_compiled_table_follows_its_weight(unchecked: None) -> None:
    table = TABLES["dense"]()
    compiled = torch.compile(table, backend="eager", fullgraph=True)
    assert compiled(torch.tensor([[49]])).shape == (1, 1, EMBED_DIM)
    table.weight = nn.Parameter(torch.randn(60, EMBED_DIM))
    torch.testing.assert_close(compiled(torch.tensor([[59]])), table(torch.tensor([[59]])))
    with pytest.raises(IndexError):
        compiled(torch.tensor([[60]]))


def test_a_resized_table_learns_and_an_old_optimizer_is_told() -> None:
    table = TABLES["row-sparse"]()
    optimizer = el.RowAdamW(table.parameters(), lr=0.1)
    table(torch.tensor([[3]])).sum().backward()
    optimizer.step()
    table.weight = nn.Parameter(torch.randn(60, EMBED_DIM))
    table(torch.tensor([[59]])).sum().backward()
    with pytest.raises(el.ShapeError, match="replaced after the optimizer was built"):
        optimizer.step()
