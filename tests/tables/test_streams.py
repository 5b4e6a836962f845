"""K streams in one table: equal to K added modules."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_paths import on_branch
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


def test_bad_input_is_refused(unchecked: None) -> None:
    table = StreamTable.from_tables(modules())
    with pytest.raises(ShapeError, match=r"IDs of 3 streams are \(..., 3\), the streams last; found \(2, 4\)"):
        table(torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ShapeError, match="must be int64 or int32"):
        table(torch.zeros(2, 3))
    with pytest.raises(SizeError, match=r"streams=4 is none of 1..3"):
        table(ids_of(2), streams=4)
    with pytest.raises(SizeError, match="Stream 3 is none of the 3 streams"):
        table.stream(3)
    with pytest.raises(SizeError, match="need a table of 14 rows; found 20"):
        StreamTable(TokenEmbedding(20, WIDTH), (9, 5))
    with pytest.raises(SizeError, match="3 streams of equal sizes do not divide a table of 20 rows"):
        StreamTable.of_equal_sizes(TokenEmbedding(20, WIDTH), 3)
    with pytest.raises(SizeError, match="at least one stream"):
        StreamTable(TokenEmbedding(20, WIDTH), ())
    with pytest.raises(SizeError, match="The shared padding row is the last one, 14; found 3"):
        StreamTable(TokenEmbedding(15, WIDTH), (9, 5), shared_padding_idx=3)
    with pytest.raises(SizeError, match="one embed_dim; found 4 in stream 0 and 5 in 1"):
        StreamTable.from_tables([nn.Embedding(3, 4), nn.Embedding(3, 5)])
    frozen = nn.Embedding(3, 4).requires_grad_(False)
    with pytest.raises(SizeError, match=r"one weight\.requires_grad; found True in stream 0 and False in 2"):
        StreamTable.from_tables([nn.Embedding(3, 4), nn.Embedding(3, 4), frozen])
    with pytest.raises(SizeError, match="2 of these 3 have one each"):
        StreamTable.from_tables([nn.Embedding(3, 4, padding_idx=0), nn.Embedding(3, 4), nn.Embedding(3, 4, 0)])


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


@pytest.mark.parametrize("name", STREAM_TABLES)
def test_the_sum_is_that_of_the_streams_looked_up_alone(name: str) -> None:
    table = STREAM_TABLES[name]()
    assert table.num_streams == 4
    for count in (None, 1, 3):
        first, *others = (table.look_up(STREAM_IDS[..., k], k) for k in range(count or 4))
        torch.testing.assert_close(table(STREAM_IDS, streams=count), sum(others, first))
    rows = table.stream(2)
    scale = 1 if table.rows.factor is None else table.rows.factor
    torch.testing.assert_close(
        table.look_up(torch.arange(len(rows)), 2), scale * table.rows.rows(rows.start, rows.stop)
    )


@pytest.mark.parametrize("branch", ["cuda", "triton"])
def test_on_an_accelerator_a_bad_id_of_a_stream_is_recorded_and_adds_nothing(branch: str) -> None:
    table = StreamTable(TokenEmbedding(26, WIDTH), SIZES)
    ids = torch.tensor([[3, 5, 11], [8, 1, -1]])

    def check() -> None:
        rows, sums = table.rows.weight.detach(), table(ids)
        torch.testing.assert_close(sums, torch.stack([rows[3] + rows[25], rows[8] + rows[10]]))
        sums.sum().backward()
        assert table.rows.weight.grad.sum(1).nonzero().flatten().tolist() == [3, 8, 10, 25]
        assert not table.look_up(ids[:, 1], 1)[0].any()
        with pytest.raises(TokenIdError, match="token id 5 at row 0, column 0, stream 1"):
            table.check()

    on_branch(branch, check)
