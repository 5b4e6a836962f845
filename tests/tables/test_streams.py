"""K streams in one table: equal to K added modules."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import STREAM_IDS, STREAM_TABLES
from stream_models import first_input, stream_model
from torch import Tensor, nn

from embedlayer import ShapeError, SizeError, TokenIdError
from embedlayer.tables import StreamTable, TokenEmbedding

SIZES, WIDTH = (9, 5, 12), 8


def modules(dtype: torch.dtype = torch.float32, **options: object) -> list[nn.Embedding]:
    return [nn.Embedding(size, WIDTH, dtype=dtype, **options) for size in SIZES]


def ids_of(*shape: int) -> Tensor:
    return torch.stack([torch.randint(size, shape) for size in SIZES], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("streams", [None, 1, 2])
def test_it_equals_k_added_modules(dtype: torch.dtype, streams: int | None) -> None:
    tables, ids = modules(dtype), ids_of(4, 7)
    tables[1].padding_idx = 3
    table = StreamTable.from_tables(tables)
    out = table(ids, streams=streams)
    expected = sum(each(ids[..., k]) for k, each in enumerate(tables[:streams]))
    assert torch.equal(out, expected)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    expected.backward(cotangent)
    for k, each in enumerate(tables):
        rows, grad = table.stream(k), torch.zeros_like(each.weight) if each.weight.grad is None else each.weight.grad
        tolerance = {} if dtype.itemsize > 2 else {"rtol": 0.02, "atol": 0.02}  # torch rounds each sum to 16 bits
        torch.testing.assert_close(table.rows.weight.grad[rows.start : rows.stop], grad, **tolerance)


def input_of(name: str, model: Any) -> tuple[StreamTable, list[nn.Embedding], Callable[[Tensor], Tensor]]:
    """Return a table of the streams of a model, its modules with their rows, and what the model computes of IDs.

    Where positions are added to the sum, they are 0.
    """
    kind = name.partition(",")[0]
    if kind == "musicgen":
        decoder = model.model.decoder
        decoder.embed_positions.weights.zero_()
        parts = list(decoder.embed_tokens)
        return (
            StreamTable.from_tables(parts),
            parts,
            lambda ids: first_input(model, decoder.layers, input_ids=ids.movedim(-1, 1).flatten(0, 1)),
        )
    if kind == "moshi":
        parts, count = [*model.embed_tokens, model.decoder.model.embed_tokens], model.num_codebooks
        return StreamTable.from_tables(parts), parts, lambda ids: first_input(
            *(model, model.decoder.model.layers), input_ids=ids[..., -1],
            moshi_audio_codes=ids[..., :count].mT, user_audio_codes=ids[..., count:-1].mT,
        )  # fmt: skip
    if kind == "bark":
        nn.init.zeros_(model.position_embeds_layer.weight)
        parts = list(model.input_embeds_layers)
        return (
            StreamTable.from_tables(parts),
            parts,
            lambda ids: first_input(model, model.layers, codebook_idx=2, input_ids=ids),
        )
    layer = {
        "csm": lambda: model.backbone_model.embed_tokens,
        "dia": lambda: model.model.decoder.embeddings,
        "higgs": lambda: model.model.embed_audio_tokens,
        "kyutai": lambda: model.model.embed_tokens,
    }[kind]()
    (rows,) = (each for each in layer.modules() if isinstance(each, nn.Embedding))
    if kind == "kyutai":
        sizes = [model.config.vocab_size, *[model.config.codebook_vocab_size] * model.config.num_codebooks]
        return StreamTable(rows, sizes, shared_padding_idx=rows.padding_idx), [rows], layer
    count = model.config.decoder_config.num_channels if kind == "dia" else model.config.num_codebooks
    return StreamTable.of_equal_sizes(rows, count), [rows], layer


@pytest.mark.parametrize(
    "name", ["musicgen", "musicgen, stereo", "moshi", "csm", "dia", "higgs", "kyutai", "bark, fine"]
)
def test_the_input_and_its_gradients_equal_those_of_transformers(name: str, unchecked: None) -> None:
    pytest.importorskip("transformers")
    model = stream_model(name)
    table, parts, embed = input_of(name, model)
    ids = torch.stack([torch.randint(size, (2, 9)) for size in table.sizes], -1)
    ids[0, 0] = torch.tensor(table.sizes) - 1
    if table.shared_padding_idx is not None:
        ids[0, 3:, 1:] = table.shared_padding_idx
    theirs, ours = embed(ids), table(ids, streams=3 if name.startswith("bark") else None)
    if name.startswith(("musicgen", "moshi")):  # added in order
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    cotangent, tolerance = torch.randn_like(ours), {"rtol": 1e-6, "atol": 1e-6}
    by_part = torch.autograd.grad(theirs, [each.weight for each in parts], cotangent, materialize_grads=True)
    by_table = torch.autograd.grad(ours, table.rows.weight, cotangent)[0]
    torch.testing.assert_close(by_table, torch.cat(by_part), **tolerance)


def test_a_shared_padding_row_is_not_shifted() -> None:
    rows = nn.Embedding(sum(SIZES) + 1, WIDTH, padding_idx=sum(SIZES))
    nn.init.normal_(rows.weight)
    table = StreamTable(rows, SIZES, shared_padding_idx=26)
    ids = torch.tensor([[1, 26, 11], [26, 26, 26]])
    expected = rows(torch.tensor([[1, 26, 25], [26, 26, 26]]))
    assert torch.equal(table(ids), expected[:, 0] + expected[:, 1] + expected[:, 2])
    assert torch.equal(table.look_up(ids[:, 1], 1), expected[:, 1])


def test_an_id_outside_its_own_stream_is_named_with_stream_row_and_column() -> None:
    table, ids = StreamTable.from_tables(modules()), torch.zeros(2, 4, 3, dtype=torch.long)
    ids[1, 2, 1] = 5
    message = "token id 5 at row 1, column 2, stream 1, is outside this stream of 5 rows"
    with pytest.raises(TokenIdError, match=message):
        table(ids)
    with pytest.raises(TokenIdError, match=message):
        table.look_up(ids[..., 1], 1)


REFUSED: list[tuple[Callable[[], object], type[Exception]]] = [
    (lambda: StreamTable.from_tables(modules())(torch.zeros(2, 4).long()), ShapeError),
    (lambda: StreamTable.from_tables(modules())(torch.zeros(2, 3)), ShapeError),
    (lambda: StreamTable.from_tables(modules())(ids_of(2), streams=4), SizeError),
    (lambda: StreamTable.from_tables(modules()).stream(3), SizeError),
    (lambda: StreamTable(TokenEmbedding(20, WIDTH), (9, 5)), SizeError),
    (lambda: StreamTable.of_equal_sizes(TokenEmbedding(20, WIDTH), 3), SizeError),
    (lambda: StreamTable(TokenEmbedding(20, WIDTH), ()), SizeError),
    (lambda: StreamTable(TokenEmbedding(15, WIDTH), (9, 5), shared_padding_idx=3), SizeError),
    (lambda: StreamTable.from_tables([nn.Embedding(3, 4), nn.Embedding(3, 5)]), SizeError),
    (lambda: StreamTable.from_tables([nn.Embedding(3, 4), nn.Embedding(3, 4).requires_grad_(False)]), SizeError),
    (lambda: StreamTable.from_tables([nn.Embedding(3, 4, 0), nn.Embedding(3, 4), nn.Embedding(3, 4, 0)]), SizeError),
]


def test_bad_input_is_refused(unchecked: None) -> None:
    for call, error in REFUSED:
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("name", STREAM_TABLES)
def test_copies_saves_and_casts_compute_the_same(name: str, tmp_path: Path) -> None:
    table = STREAM_TABLES[name]().eval()
    expected = table(STREAM_IDS)
    copies = [copy.deepcopy(table), pickle.loads(pickle.dumps(table))]
    table.save_pretrained(tmp_path)
    for each in (*copies, StreamTable.from_pretrained(tmp_path)):
        assert torch.equal(each(STREAM_IDS), expected)
        assert each.config == table.config
    cast = table.bfloat16()
    assert cast.offsets.dtype == torch.int64
    torch.testing.assert_close(cast(STREAM_IDS).float(), expected, rtol=0.05, atol=0.2)
