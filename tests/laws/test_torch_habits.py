"""What people write with `torch.nn.Embedding` works with a table, or is refused by a sentence that names the call."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from covering import looped
from kinds import EMBED_DIM, MAX_SEQ_LEN, NUM_HEADS, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE, dense
from torch import Tensor, fx, nn

import embedlayer as el

IDS = torch.tensor([[1, 2, 3], [7, 49, 0]])


def plain(**options: object) -> nn.Embedding:
    return nn.Embedding(VOCAB_SIZE, EMBED_DIM, padding_idx=0, **options)


TAKE_A_TABLE = {
    "TransformerEmbedding": lambda table: el.TransformerEmbedding(
        VOCAB_SIZE, EMBED_DIM, MAX_SEQ_LEN, dropout=0.0, table=table
    )(IDS),
    "DecoderLM": lambda table: el.DecoderLM(table, "rotary", num_layers=1)(IDS),
    "DeltaEmbedding": lambda table: el.DeltaEmbedding(table, [7, 48])(IDS),
    "DeltaEmbedding.last": lambda table: el.DeltaEmbedding.last(table, 2)(IDS),
    "QuantizedEmbedding.from_table": lambda table: el.QuantizedEmbedding.from_table(table, 4)(IDS),
    "FactorizedEmbedding.from_table": lambda table: el.FactorizedEmbedding.from_table(table, 8)(IDS),
    "compressed": lambda table: el.compress.compress_table(table, "int8")(IDS),
    "with_table": lambda table: el.compress.replace_table(el.DecoderLM(dense(), "none", num_layers=1), table)(IDS),
    "EmbeddingLayer": lambda table: el.EmbeddingLayer(table)(IDS),
    "compare": lambda table: [row.row_error for row in el.compress.compare_compression(table, ["int8"])],
    "health": lambda table: el.analysis.table_health(table).norms,
    "table_geometry": lambda table: el.analysis.table_geometry(table).spectrum,
}


@looped("name", TAKE_A_TABLE)
def test_a_plain_embedding_is_taken_wherever_a_table_is(name) -> None:
    embedding, results = plain(), []
    for table in (embedding, el.TokenEmbedding.from_embedding(embedding)):
        torch.manual_seed(1)
        results.append(TAKE_A_TABLE[name](table))
    torch.testing.assert_close(*results, equal_nan=True)


@looped("name", TAKE_A_TABLE)
def test_what_is_no_table_is_refused_by_name(name, unchecked) -> None:
    with pytest.raises(el.SizeError, match="A table is needed here; found Linear: pass a TokenEmbedding"):
        TAKE_A_TABLE[name](nn.Linear(EMBED_DIM, VOCAB_SIZE))


def test_a_head_is_not_tied_to_a_plain_embedding_whose_weight_may_be_replaced(unchecked) -> None:
    embedding = plain()
    with pytest.raises(el.SizeError, match=r"TokenEmbedding.from_embedding\(embedding\)"):
        el.OutputHead(embedding)
    table = el.TokenEmbedding.from_embedding(embedding)
    assert el.OutputHead(table).weight is embedding.weight


def test_a_vocabulary_edit_of_a_plain_embedding_names_the_conversion() -> None:
    for edit in (lambda module: el.vocab.add_tokens(module, 2), lambda module: el.vocab.train_only_rows(module, [3])):
        with pytest.raises(el.SizeError, match="Modules without a vocabulary"):
            edit(plain())


def test_vectors_of_a_plain_embedding_are_written(tmp_path) -> None:
    embedding = plain()
    el.checkpoints.write_vectors(
        tmp_path / "rows.bin", [f"w{index}" for index in range(VOCAB_SIZE)], embedding, "word2vec-binary"
    )
    assert torch.equal(el.checkpoints.read_vectors(tmp_path / "rows.bin", "word2vec-binary")[1], embedding.weight)


@pytest.mark.parametrize("sparse", [False, True])
def test_an_optimizer_goes_on_training_the_weight_of_an_embedding(sparse) -> None:
    embedding = plain(sparse=sparse)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    expected = embedding.weight.detach().clone()
    expected[IDS.flatten()] -= 0.5
    expected[0] = 0
    kind = el.RowSparseEmbedding if sparse else el.TokenEmbedding
    table = kind.from_embedding(embedding.eval())
    table(IDS).sum().backward()
    optimizer.step()
    torch.testing.assert_close(table.weight.detach(), expected)
    assert table.weight is embedding.weight
    assert (table.row_sparse, table.padding_idx, table.training) == (sparse, 0, False)
    assert torch.equal(table(IDS), embedding(IDS))
    table.reset_parameters()
    assert float(table.weight.detach().std()) == pytest.approx(1.0, abs=0.1)


class ScaledWordEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(ids)


def replaced_forward() -> nn.Embedding:
    embedding = plain()
    embedding.forward = lambda ids: embedding.weight[ids] + 1  # type: ignore[assignment]
    return embedding


@looped(
    "embedding, message",
    [
        (lambda: ScaledWordEmbedding(5, 2), r"ScaledWordEmbedding has its own forward"),
        (replaced_forward, "has its own forward"),
        (lambda: nn.utils.parametrizations.spectral_norm(plain()), "has its own forward"),
        (lambda: plain(max_norm=1.0), "max_norm=1.0 is not supported.*renorm"),
        (lambda: plain(scale_grad_by_freq=True), "scale_grad_by_freq=True is not supported"),
        (lambda: nn.EmbeddingBag(5, 2), "EmbeddingBag has its own forward"),
    ],
)
def test_an_embedding_that_means_something_else_is_refused(embedding, message, unchecked) -> None:
    with pytest.raises(el.SizeError, match=f"(?s){message}"):
        el.TokenEmbedding.from_embedding(embedding())


PADDED = {
    "TokenEmbedding": lambda padding_idx: el.TokenEmbedding(10, 4, padding_idx, pad_to_multiple_of=8),
    "FactorizedEmbedding": lambda padding_idx: el.FactorizedEmbedding(10, 4, 2, padding_idx=padding_idx),
    "QuantizedEmbedding": lambda padding_idx: el.QuantizedEmbedding(10, 4, padding_idx=padding_idx),
    "QuantizedEmbedding.from_table": lambda padding_idx: el.QuantizedEmbedding.from_table(
        torch.randn(10, 4), padding_idx=padding_idx
    ),
    "FactorizedEmbedding.from_table": lambda padding_idx: el.FactorizedEmbedding.from_table(
        torch.randn(10, 4), 2, padding_idx=padding_idx
    ),
    "TokenEmbedding.from_pretrained": lambda padding_idx: el.TokenEmbedding.from_pretrained(
        torch.randn(10, 4), padding_idx=padding_idx
    ),
    "OutputHead": lambda padding_idx: el.OutputHead(4, 10, padding_idx=padding_idx),
}


@looped("name", PADDED)
def test_a_negative_padding_index_counts_from_the_last_token_as_in_torch(name) -> None:
    module = PADDED[name](-3)
    assert module.padding_idx == nn.Embedding(10, 4, padding_idx=-3).padding_idx == 7
    if isinstance(module, el.TokenTable) and "from" not in name:
        assert not module.rows(7, 8).any()
        assert not module.logits(torch.randn(3, 4))[:, 7].any()


@looped(
    "source, error, message",
    [
        (torch.zeros(5, 3, dtype=torch.int8), el.ShapeError, "must be floats, not int8"),
        (np.zeros((5, 3), dtype=np.int64), el.ShapeError, "must be floats, not int64"),
        (np.array([["a"]], dtype=object), el.ShapeError, "must be floats, not object"),
        (np.zeros(5), el.ShapeError, r"must have shape \(V, D\), not \(5,\)"),
        ([[1.0, 2.0]], el.ShapeError, r"found list"),
        (nn.Embedding(5, 3), el.ShapeError, r"found Embedding"),
    ],
)
def test_what_is_no_rows_is_refused_with_the_remedy(source, error, message, unchecked) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        el.TokenEmbedding.from_pretrained(source)
    if isinstance(source, torch.Tensor | np.ndarray):
        for from_table in (el.QuantizedEmbedding.from_table, lambda rows: el.FactorizedEmbedding.from_table(rows, 1)):
            with pytest.raises(error, match=f"(?s){message}"):
                from_table(source)


def test_a_head_is_built_like_a_linear_layer() -> None:
    plain_head = nn.Linear(EMBED_DIM, VOCAB_SIZE, bias=False, dtype=torch.float64)
    for head in (
        el.OutputHead(EMBED_DIM, VOCAB_SIZE, bias=False, dtype=torch.float64),
        el.OutputHead(in_features=EMBED_DIM, out_features=VOCAB_SIZE, dtype=torch.float64),
        el.OutputHead(vocab_size=VOCAB_SIZE, embed_dim=EMBED_DIM, dtype=torch.float64),
    ):
        head.load_state_dict(plain_head.state_dict())
        hidden = torch.randn(2, 3, EMBED_DIM, dtype=torch.float64)
        assert torch.equal(head(hidden), plain_head(hidden))
    with pytest.raises(el.SizeError, match=r"in_features \(embed_dim\) was passed twice: 4 and 8"):
        el.OutputHead(8, vocab_size=3, embed_dim=4)


@looped(
    "position, message",
    [
        (lambda: el.RotaryEmbedding(8), "RotaryEmbedding has head_dim 8, the model has 6"),
        (lambda: el.AlibiBias(3), "AlibiBias has num_heads 3, the model has 4"),
        (lambda: el.RelativePositionBias(3), "RelativePositionBias has num_heads 3, the model has 4"),
        (lambda: el.LearnedPositionalEmbedding(9, 8), "LearnedPositionalEmbedding has embed_dim 8, the model has 24"),
        (lambda: el.SinusoidalPositionalEmbedding(9, 8), "embed_dim 8, the model has 24"),
        (lambda: nn.Embedding(9, EMBED_DIM), "is none of: learned"),
        (lambda: "axial", "'axial' is none of: learned"),
    ],
)
def test_a_position_of_other_sizes_is_refused_where_the_model_is_built(position, message, unchecked) -> None:
    with pytest.raises(el.SizeError, match=message):
        el.DecoderLM(dense(), position(), num_layers=1, num_heads=NUM_HEADS)


@looped("name", TABLES)
def test_the_layer_is_the_sum_of_its_two_embeddings_as_in_the_lesson(name) -> None:
    layer = el.TransformerEmbedding(VOCAB_SIZE, EMBED_DIM, MAX_SEQ_LEN, dropout=0.0, table=TABLES[name]())
    keys = set(layer.state_dict())
    expected = layer.token_embedding(IDS) * layer.scale + layer.position_embedding(torch.arange(3))
    torch.testing.assert_close(layer(IDS), expected)
    torch.testing.assert_close(layer.token_embedding(IDS), layer.table.rows(0, VOCAB_SIZE)[IDS])
    assert layer.position_embedding is layer.position
    assert set(layer.state_dict()) == keys


def test_what_is_assigned_under_the_lesson_s_names_is_never_lost() -> None:
    layer = el.TransformerEmbedding(VOCAB_SIZE, EMBED_DIM, MAX_SEQ_LEN)
    weight = nn.Parameter(torch.zeros(VOCAB_SIZE, EMBED_DIM))
    layer.token_embedding.weight = weight
    assert layer.table.weight is weight
    for name, attribute in (("token_embedding", "table"), ("position_embedding", "position")):
        with pytest.raises(el.SizeError, match=f"assign layer.{attribute} = "):
            setattr(layer, name, plain())


# Tools of torch


HIDDEN = torch.randn(2, 3, EMBED_DIM, generator=torch.Generator().manual_seed(0))
MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    **{name: (build, IDS) for name, build in TABLES.items()},
    **{name: (lambda table=table: el.OutputHead(TABLES[table]()), HIDDEN) for name, table in TIED_HEADS.items()},
    **{name: (build, HIDDEN) for name, build in UNTIED_HEADS.items()},
    **{f"bag of {name}": (lambda build=build: el.tables.Bag(build()), IDS) for name, build in TABLES.items()},
}


@looped("name", MODULES)
@torch.no_grad()
def test_a_call_by_keyword_is_that_by_place(name) -> None:
    build, value = MODULES[name]
    module = build().eval()
    assert torch.equal(module(input=value), module(value))


@looped("name", MODULES)
@torch.no_grad()
def test_a_module_is_a_leaf_of_a_symbolic_trace(unchecked: None, name) -> None:
    build, value = MODULES[name]
    model = nn.Sequential(build(), nn.Identity()).eval()
    traced = fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    assert torch.equal(traced(value), model(value))


def test_a_bag_is_traced_with_all_of_its_arguments(unchecked: None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = el.tables.Bag(el.TokenEmbedding(9, 4), mode="sum")

        def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
            return self.bag(input=ids, offsets=offsets, per_sample_weights=weights) * 2

    model, arguments = Model(), (torch.tensor([1, 2, 3, 8]), torch.tensor([0, 1]), torch.tensor([1.0, 2.0, 0.5, 0.0]))
    assert torch.equal(fx.symbolic_trace(model)(*arguments), model(*arguments))
    with pytest.raises(el.SizeError, match="a module that contains a TokenEmbedding"):
        fx.symbolic_trace(model.bag.table)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_a_bag_has_the_attributes_of_torch(padding_idx) -> None:
    theirs = nn.EmbeddingBag(9, 4, mode="sum", padding_idx=padding_idx)
    ours = el.tables.Bag.from_embedding_bag(theirs)
    for name in ("num_embeddings", "embedding_dim", "padding_idx", "mode", "include_last_offset", "weight"):
        assert getattr(ours, name) is getattr(theirs, name) or getattr(ours, name) == getattr(theirs, name), name


@looped("name", TABLES)
def test_tools_that_count_leaves_find_no_check_of_ids_in_a_table(name) -> None:
    """torchinfo takes a module without children for one that has parameters; the record of the check still moves."""
    table = TABLES[name]()
    assert not any(hasattr(each, "first_bad_index") for each in table.children())
    if name.startswith("dense"):
        assert not list(table.children())
    check = next((each for each in table.modules() if hasattr(each, "first_bad_index")), None)
    if check is not None:
        assert not any(each.training for each in table.eval().modules())
        assert table.to("meta") is table
        assert check.first_bad_index.is_meta
