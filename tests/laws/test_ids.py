"""Every table takes IDs of any shape, layout and integer type, in both directions, as `nn.Embedding` does."""

from contextlib import nullcontext
from unittest import mock

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from cases import CODE_PATHS
from covering import cases, looped, some
from kinds import EMBED_DIM, LAYERS, LOOKUP_TABLES, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE

from embedlayer import (
    DecoderLM,
    EmbedLayerError,
    LookupTable,
    OutputHead,
    RowAdamW,
    RowSparseEmbedding,
    ShapeError,
    SizeError,
    TokenEmbedding,
    TokenIdError,
    TransformerEmbedding,
)
from embedlayer.inputs.injection import AddedEmbedding, InjectionContext
from embedlayer.kernels import kernels_disabled
from embedlayer.kernels.kernel import Kernel

IDS = torch.tensor([[1, 7, 0, 49], [3, 7, 48, 2], [0, 1, 5, 49]])

SHAPES = {
    "matrix": IDS,
    "last column": IDS[:, -1:],
    "first column": IDS[:, 0],
    "expanded": IDS[:, 1:2].expand(3, 5),
    "transposed": IDS.T,
    "every second": IDS[:, ::2],
    "three dimensions": IDS.view(3, 2, 2),
    "scalar": torch.tensor(7),
    "no IDs": torch.zeros(0, dtype=torch.long),
    "empty sequences": torch.zeros(2, 0, dtype=torch.long),
    "no sequences": torch.zeros(0, 5, dtype=torch.long),
}


COMPILED_ALONE = {"dense", "int4", "delta"}
"""Compiled for IDs of every shape; tables of all kinds are compiled by `test_export` and by their own tests."""
HEADS_OF_PATHS, LAYERS_OF_PATHS = (
    {name.removeprefix(kind) for name in CODE_PATHS if name.startswith(kind)} for kind in ("head: ", "layer: ")
)
HEADS_COMPILED = {"untied, bias, softcap", "tied to factorised", "tied to int4, groups"}


def twin_of(name: str, table: LookupTable) -> LookupTable:
    """The same numbers in a table whose rows can be asked for with a gradient."""
    if name == "mapped, read-only":
        return table
    twin = TABLES["dense" if name in ("row-sparse", "mapped, trained") else name]()
    twin.load_state_dict(table.state_dict())
    return twin


def plain_look_up(table: LookupTable, ids: torch.Tensor) -> torch.Tensor:
    """The definition: `factor * rows[ids]`, where the padding row gets no gradient."""
    vectors = F.embedding(ids, table.rows(0, table.vocab_size), table.padding_idx)
    return vectors if table.factor is None else table.factor * vectors


def gradients(table: LookupTable, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
    learned = {name: parameter for name, parameter in table.named_parameters() if parameter.requires_grad}
    weights = torch.linspace(-1, 1, vectors.shape[-1])
    found = torch.autograd.grad((vectors * weights).sum(), list(learned.values()), allow_unused=True)
    return {
        name: torch.zeros_like(learned[name]) if grad is None else grad.to_dense()
        for name, grad in zip(learned, found, strict=True)
    }


@looped("name, dtype", LOOKUP_TABLES, [torch.int64, torch.int32])
def test_a_look_up_equals_the_rows_for_ids_of_every_shape_layout_and_type(name, dtype) -> None:
    table = LOOKUP_TABLES[name]()
    twin = twin_of(name, table)
    for shape, ids in SHAPES.items():
        ids = ids.to(dtype) if ids.is_contiguous() else ids.int() if dtype == torch.int32 else ids
        found, expected = table(ids), plain_look_up(twin, ids)
        assert found.shape == (*ids.shape, EMBED_DIM)
        torch.testing.assert_close(found, expected, msg=lambda text, shape=shape: f"{shape}: {text}")
        if found.requires_grad:
            torch.testing.assert_close(gradients(table, found), gradients(twin, expected))


@looped("frozen, kernels", [False, True], [False, True])
def test_rows_with_pending_updates_are_those_of_the_dense_run_for_ids_of_every_shape(frozen, kernels):
    with nullcontext() if kernels else kernels_disabled():
        for shape, ids in SHAPES.items():
            tables = [kind(VOCAB_SIZE, EMBED_DIM, 0) for kind in (TokenEmbedding, RowSparseEmbedding)]
            tables[1].load_state_dict(tables[0].state_dict())
            kinds = (torch.optim.AdamW, RowAdamW)
            optimizers = [kind(table.parameters(), lr=1e-2) for kind, table in zip(kinds, tables, strict=True)]
            for step in (torch.arange(VOCAB_SIZE), *torch.arange(6).split(2)):
                for table, optimizer in zip(tables, optimizers, strict=True):
                    optimizer.zero_grad()
                    table(step).square().sum().backward()
                    optimizer.step()
            dense, sparse = (table.requires_grad_(not frozen) for table in tables)
            expected, found = dense(ids), sparse(ids)
            torch.testing.assert_close(found, expected, msg=lambda text, shape=shape: f"{shape}: {text}")
            if not frozen:
                torch.testing.assert_close(gradients(sparse, found), gradients(dense, expected))


@pytest.mark.parametrize("name", some(COMPILED_ALONE, LOOKUP_TABLES))
def test_a_compiled_look_up_is_the_eager_one_for_ids_of_every_shape(unchecked: None, name, pytestconfig) -> None:
    table = LOOKUP_TABLES[name]()
    shapes = SHAPES if pytestconfig.getoption("--all") else ("expanded", "scalar", "empty sequences")
    ids = [*(SHAPES[shape] for shape in shapes), IDS.int().T]

    def look_up() -> torch.Tensor:
        return torch.cat([table(part).flatten(0, -2) if part.dim() else table(part)[None] for part in ids])

    with torch.set_grad_enabled(not table.row_sparse):  # with gradients its look-up is in no graph
        expected, found = look_up(), torch.compile(look_up, fullgraph=True, backend="aot_eager")()
    torch.testing.assert_close(found, expected)
    if expected.requires_grad:
        torch.testing.assert_close(gradients(table, found), gradients(table, expected))


@looped("name", LOOKUP_TABLES)
def test_lists_arrays_numbers_and_encodings_are_the_tensor_that_they_hold(name) -> None:
    table = LOOKUP_TABLES[name]()
    numpy = IDS.numpy()
    for given in (IDS.tolist(), tuple(IDS.tolist()), numpy, numpy.astype("uint16"), numpy[:, ::-1][:, ::-1]):
        assert torch.equal(table(given), table(IDS))
    assert torch.equal(table(7), table(torch.tensor(7)))
    assert table([]).shape == (0, EMBED_DIM)
    vocabulary = {word: number for number, word in enumerate("abcdefgh")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    assert torch.equal(table(tokenizer.encode("c a b")), table([2, 0, 1]))
    assert torch.equal(table(tokenizer.encode_batch(["c a b", "h f e"])), table([[2, 0, 1], [7, 5, 4]]))
    with pytest.raises(ShapeError, match="must have one length"):
        table(tokenizer.encode_batch(["c a b", "h f"]))


LOOK_UPS = {
    "table": lambda table, ids: table(ids),
    "look_up": lambda table, ids: table.look_up(ids),
    "summed": lambda table, ids: table.summed(ids),
    "without scale": lambda table, ids: input_embedding(table).token_embedding(ids),
    "input embedding": lambda table, ids: input_embedding(table)(ids),
    "with dropout": lambda table, ids: TransformerEmbedding(VOCAB_SIZE, EMBED_DIM, 8, dropout=0.5, table=table)(ids),
    "with dropout, where no kernel can start": mock.patch.object(Kernel, "run", return_value=False)(
        lambda table, ids, _: LOOK_UPS["with dropout"](table, ids)
    ),
    "trace": lambda table, ids: list(input_embedding(table).trace(ids)),
    "injection": lambda table, ids: AddedEmbedding(table).look_up(None, InjectionContext(ids)),
    "compiled": lambda table, ids: torch.compile(table, fullgraph=not table.row_sparse, backend="eager")(ids),
}


def input_embedding(table: LookupTable) -> TransformerEmbedding:
    return TransformerEmbedding(VOCAB_SIZE, EMBED_DIM, 8, dropout=0.0, table=table)


@cases("name, way", LOOKUP_TABLES, LOOK_UPS)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it of row-sparse vectors
def test_an_id_outside_the_vocabulary_is_an_error_on_every_way_to_a_row(unchecked: None, name, way) -> None:
    table = LOOKUP_TABLES[name]()
    for bad in (VOCAB_SIZE, -1):
        for grad in (True, False):
            error = pytest.raises(TokenIdError, match=rf"{bad} at row 1, column 0 .* of 50 ")
            with torch.set_grad_enabled(grad), error:
                LOOK_UPS[way](table, torch.tensor([[1, 2], [bad, 3]]))
    if way != "compiled":  # where an error that depends on a dtype is one of Dynamo, which has ours in its text
        with pytest.raises(ShapeError, match="int64 or int32"):
            LOOK_UPS[way](table, torch.ones(2, 3))


@looped("name", some(LAYERS_OF_PATHS, LAYERS))
def test_a_layer_takes_sequences_of_every_layout_and_what_holds_them(name) -> None:
    layer = LAYERS[name]().eval()
    for shape, ids in SHAPES.items():
        if ids.dim():
            found = layer(ids)
            assert found.shape[:-1] == ids.shape
            expected = layer(ids.clone(memory_format=torch.contiguous_format))
            torch.testing.assert_close(found, expected, msg=lambda text, shape=shape: f"{shape}: {text}")
    assert torch.equal(layer(IDS.tolist()), layer(IDS))
    assert torch.equal(layer(IDS[0].numpy()), layer(IDS[0]))
    with pytest.raises(ShapeError, match=r"shape \(\.\.\., T\), not \(\)"):
        layer(torch.tensor(7))


@looped("name", some(HEADS_OF_PATHS, [*UNTIED_HEADS, *TIED_HEADS]))
def test_logits_and_loss_take_hidden_states_of_every_layout(name) -> None:
    head = UNTIED_HEADS[name]() if name in UNTIED_HEADS else OutputHead(TABLES[TIED_HEADS[name]]())
    whole = torch.randn(EMBED_DIM, 4, 3).permute(2, 1, 0)
    for hidden in (whole, whole[:, -1:], whole[:, 0], whole[:, 1:2].expand(3, 5, EMBED_DIM), whole[0, 0], whole[:0]):
        logits = head(hidden)
        assert logits.shape == (*hidden.shape[:-1], VOCAB_SIZE)
        torch.testing.assert_close(logits, head(hidden.contiguous()))
        targets = torch.randint(1, VOCAB_SIZE, (*hidden.shape[:-1], 2))[..., 0]
        expected = F.cross_entropy(logits.reshape(-1, VOCAB_SIZE), targets.reshape(-1), reduction="sum")
        torch.testing.assert_close(head.loss(hidden, targets, reduction="sum"), expected)
        torch.testing.assert_close(head.loss(hidden, targets.int(), reduction="sum"), expected)


@pytest.mark.parametrize("name", some(HEADS_COMPILED, [*UNTIED_HEADS, *TIED_HEADS]))
def test_compiled_logits_of_strided_hidden_states_are_the_eager_ones(unchecked: None, name, pytestconfig) -> None:
    head = UNTIED_HEADS[name]() if name in UNTIED_HEADS else OutputHead(TABLES[TIED_HEADS[name]]())
    whole = torch.randn(EMBED_DIM, 4, 3).permute(2, 1, 0)
    parts = [whole[:, 1:2].expand(3, 5, EMBED_DIM), whole[0, 0]]
    if pytestconfig.getoption("--all"):
        parts += [whole, whole[:, -1:]]
    compiled = torch.compile(lambda: [head(hidden) for hidden in parts], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(), [head(hidden) for hidden in parts])


@looped("name", [*UNTIED_HEADS, *TIED_HEADS])
def test_hidden_states_of_another_width_are_refused_in_one_sentence(unchecked: None, name) -> None:
    head = UNTIED_HEADS[name]() if name in UNTIED_HEADS else OutputHead(TABLES[TIED_HEADS[name]]())
    hidden, targets = torch.randn(2, 3, 7), torch.zeros(2, 3, dtype=torch.long)
    for call in (lambda: head(hidden), lambda: head.loss(hidden, targets)):
        with pytest.raises(ShapeError, match=rf"hidden \(2, 3, 7\).*width {EMBED_DIM}") as error:
            call()
        assert "\n" not in str(error.value)
    assert issubclass(ShapeError, EmbedLayerError)


@looped("name", some(LAYERS_OF_PATHS, LAYERS))
def test_vectors_can_be_given_in_place_of_ids(name) -> None:
    layer = LAYERS[name]().eval()
    table = layer.tok_emb if name == "GPTEmbedding" else layer.table
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 2, 2], [1, 1, 1, 1]])
    for ids in (IDS, IDS[0]):
        torch.testing.assert_close(layer(inputs_embeds=table(ids)), layer(ids))
    torch.testing.assert_close(
        layer(inputs_embeds=table(IDS), attention_mask=mask, positions=IDS % 3),
        layer(IDS, attention_mask=mask, positions=IDS % 3),
    )
    torch.testing.assert_close(layer(inputs_embeds=table(IDS), attention_mask=mask), layer(IDS, attention_mask=mask))
    if isinstance(layer, DecoderLM):
        torch.testing.assert_close(layer.loss(None, IDS, inputs_embeds=table(IDS)), layer.loss(IDS, IDS))
    for wrong in ({}, {"ids": IDS, "inputs_embeds": table(IDS)}):
        with pytest.raises(SizeError, match="Give token IDs or inputs_embeds, exactly one of them"):
            layer(**wrong)
    with pytest.raises(ShapeError, match=rf"inputs_embeds must have shape \(\.\.\., T, {EMBED_DIM}\).*not \(3, 4, 7\)"):
        layer(inputs_embeds=torch.randn(3, 4, 7))
