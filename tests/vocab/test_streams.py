"""Edits of one of K streams of codes: in tables, layers and models of transformers, live and in folders."""

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import cases, covering, some
from stream_models import STREAM_MODELS, stream_model
from tiny_models import quiet
from torch import Tensor, nn

import embedlayer as el
from embedlayer.tables import StreamTable
from embedlayer.vocab import (
    MeanInit,
    Receipt,
    add_tokens,
    edit_vocabulary,
    merge_rows,
    remove_tokens,
    train_only_rows,
)
from embedlayer.vocab.targets.stream_models import streams_of_model

EDITED = 2
"""The stream that is edited: neither the first nor the last."""

NAMES = [name for name in STREAM_MODELS if name not in ("musicgen, stereo", "musicgen, melody", "bark, fine, untied")]
SOME = ("musicgen", "moshi", "csm", "kyutai, tied", "bark, fine")
"""Rows in one table, a head of codes, one for each position of a depth decoder, text beside codes, and no head."""
EDITS: dict[str, dict[str, Any]] = {
    "add": {"add": 2},
    "remove": {"remove": [3, 7]},
    "reorder": {"order": "exchanged"},
    "remove and add": {"remove": [3], "add": 1},
}


WITH_MEANINGS = ("csm", "dia", "higgs", "kyutai")
"""Models whose configuration names codes of all streams behind those that the edits remove."""


def is_refused(name: str, edit: str, target: Any, **options: Any) -> bool:
    """Return whether an edit would move a code that a configuration names; it is then refused."""
    refused = name.startswith(WITH_MEANINGS) and "remove" in edit
    if refused:
        with pytest.raises(el.VocabularyError, match=r"names the code \d+ of every stream"):
            edit_vocabulary(target, stream=EDITED, **options)
    return refused


def options_of(edit: str, size: int) -> dict[str, Any]:
    """Return the options of an edit of a stream of so many codes."""
    options = dict(EDITS[edit])
    if "order" in options:
        options["order"] = [0, 2, 1, *range(3, size)]
    return options


def saved(model: Any, folder: Path) -> Path:
    with quiet():
        model.save_pretrained(folder)
    return folder


def opened(folder: Path) -> el.EmbeddingLayer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return el.load(folder)


def codes_of(layer: el.EmbeddingLayer) -> tuple[int, ...]:
    """Return the number of codes of each stream of a layer, without further rows."""
    assert layer.codes is not None
    return tuple(size - layer.codes.more_rows for size in layer.codes.table.sizes)


def random_codes(sizes: tuple[int, ...]) -> Tensor:
    torch.manual_seed(3)
    return torch.stack([torch.randint(0, size, (2, 9)) for size in sizes], -1)


def remapped(receipt: Receipt, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes after an edit of `EDITED`, and which positions keep their code there."""
    new = codes.clone()
    new[..., EDITED] = receipt.remap(codes[..., EDITED], replacement=0)
    return new, receipt.new_ids[codes[..., EDITED]] >= 0


def entries(config: Any) -> Any:
    """Return a configuration without what saving adds to it."""
    if not isinstance(config, dict):
        return config
    left_out = ("_name_or_path", "transformers_version", "dtype")
    return {key: entries(value) for key, value in config.items() if key not in left_out}


@pytest.mark.parametrize(("name", "edit"), some(covering(product(SOME, EDITS)), product(NAMES, EDITS)))
def test_a_folder_of_transformers_opens_after_the_edit(tmp_path, name, edit, unchecked) -> None:
    model = stream_model(name)
    old = saved(model, tmp_path / "old")
    before = opened(old)
    sizes = codes_of(before)
    options = options_of(edit, sizes[EDITED]) | {"out": tmp_path / "new"}
    if is_refused(name, edit, old, **options):
        return
    receipt = edit_vocabulary(old, stream=EDITED, **options)
    after = opened(tmp_path / "new")
    added = max(receipt.row_map.size - sizes[EDITED], 0)
    text = 0 if before.codes.text_stream is None else 1
    assert codes_of(after) == (*sizes[:text], *(size + added for size in sizes[text:]))
    codes = random_codes(sizes)
    new, kept = remapped(receipt, codes)
    assert torch.equal(before.codes.table(codes)[kept], after.codes.table(new)[kept])
    options = {"use_text_head": True} if name == "higgs" else {}
    with quiet():
        live = type(model).from_pretrained(tmp_path / "new", **options)
    assert live.state_dict().keys() == model.state_dict().keys()
    if before.codes.head is not None and name != "kyutai, tied":
        hidden = torch.randn(3, before.codes.head.embed_dim)
        for k, (theirs, ours) in enumerate(
            zip(before.codes.head(hidden), after.codes.head(hidden), strict=True), start=before.codes.head_stream
        ):
            ids = receipt.new_ids if k == EDITED else torch.arange(theirs.shape[-1])
            torch.testing.assert_close(ours[:, ids[ids >= 0]], theirs[:, ids >= 0])


@cases("name, edit", NAMES, EDITS)
def test_a_live_model_of_transformers_becomes_that_of_the_edited_folder_and_is_restored(
    tmp_path, name, edit, unchecked
) -> None:
    model = stream_model(name)
    old = saved(model, tmp_path / "old")
    state, config = {key: value.clone() for key, value in model.state_dict().items()}, model.config.to_dict()
    options = options_of(edit, codes_of(opened(old))[EDITED])
    if is_refused(name, edit, model, **options):
        assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
        return
    edit_vocabulary(old, out=tmp_path / "new", stream=EDITED, **options)
    receipt = edit_vocabulary(model, stream=EDITED, **options)
    arguments = {"use_text_head": True} if name == "higgs" else {}
    with quiet():
        expected = type(model).from_pretrained(tmp_path / "new", **arguments).eval()
    for key, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    for (key, module), (_, other) in zip(model.named_modules(), expected.named_modules(), strict=True):
        for size in ("vocab_size", "codebook_size", "num_embeddings", "out_features", "padding_idx"):
            assert getattr(module, size, None) == getattr(other, size, None), (key, size)
        for buffer, values in module.named_buffers(recurse=False):
            assert torch.equal(values, getattr(other, buffer)), (key, buffer)
    assert entries(model.config.to_dict()) == entries(expected.config.to_dict())
    receipt.undo(model)
    assert model.config.to_dict() == config
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())


@pytest.mark.parametrize(("name", "edit"), some(covering(product(SOME, EDITS)), product(NAMES, EDITS)))
def test_a_layer_and_its_saved_folder_are_edited_alike(tmp_path, name, edit, unchecked) -> None:
    layer = opened(saved(stream_model(name), tmp_path / "old"))
    layer.save_pretrained(tmp_path / "layer")
    sizes, state, config = codes_of(layer), {**layer.state_dict()}, layer.config
    options = options_of(edit, sizes[EDITED])
    receipt = edit_vocabulary(layer, stream=EDITED, **options)
    alike = layer.codes.depth_head is not None
    expected = list(sizes)
    expected[EDITED] = max(receipt.row_map.size, sizes[EDITED]) if alike else receipt.row_map.size
    if alike:
        expected = [expected[EDITED]] * len(sizes)
    assert codes_of(layer) == tuple(expected)
    codes = random_codes(sizes)
    new, kept = remapped(receipt, codes)
    layer.codes.table(new[kept])
    edit_vocabulary(tmp_path / "layer", out=tmp_path / "edited", stream=EDITED, **options)
    again = opened(tmp_path / "edited")
    assert {**again.config, "tensor_names": {}} == {**layer.config, "tensor_names": {}}
    assert again.tensor_names == layer.tensor_names
    assert all(torch.equal(again.state_dict()[key], value) for key, value in layer.state_dict().items())
    receipt.undo(layer)
    assert layer.config == {**config, "is_edited": True}
    assert all(torch.equal(layer.state_dict()[key], value) for key, value in state.items())


def test_only_the_edited_stream_of_a_table_changes_its_size() -> None:
    table = StreamTable(el.TokenEmbedding(24, 4), (7, 9, 8))
    rows = table.rows.weight.detach().clone()
    receipt = remove_tokens(table, [0, 4], stream=1)
    assert table.sizes == (7, 7, 8)
    assert table.rows.vocab_size == 22
    assert torch.equal(table.rows.weight[:7], rows[:7])
    assert torch.equal(table.rows.weight[14:], rows[16:])
    assert torch.equal(table.rows.weight[7:14], rows[torch.tensor([8, 9, 10, 12, 13, 14, 15])])
    assert table(torch.tensor([[6, 6, 7]])).shape == (1, 4)
    with pytest.raises(el.TokenIdError, match="token id 7 at row 0, column 0, stream 1"):
        table(torch.tensor([[6, 7, 7]]))
    receipt.undo(table)
    assert table.sizes == (7, 9, 8)
    assert torch.equal(table.rows.weight, rows)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_the_state_of_an_optimizer_moves_with_the_rows(kind) -> None:
    torch.manual_seed(0)
    table = StreamTable(el.TokenEmbedding(24, 4), (7, 9, 8))
    optimizer = kind(table.parameters(), lr=0.1)
    codes = random_codes((7, 9, 8))
    table(codes).square().sum().backward()
    optimizer.step()
    key = "exp_avg" if kind is torch.optim.AdamW else "sum"
    state = optimizer.state[table.rows.weight][key].clone()
    receipt = edit_vocabulary(table, remove=[2], add=1, stream=1, optimizer=optimizer)
    moved = optimizer.state[table.rows.weight][key]
    assert torch.equal(moved[:9], state[:9])
    assert torch.equal(moved[9:15], state[10:16])
    assert torch.equal(moved[16:], state[16:])
    assert torch.equal(moved[15], torch.zeros(4))
    receipt.undo(table, optimizer=optimizer)
    assert torch.equal(optimizer.state[table.rows.weight][key], state)
    edit_vocabulary(table, remove=[2], stream=1)
    table(random_codes((7, 8, 8))).sum().backward()
    with pytest.raises(el.StaleRowsError, match=r"moved the rows of rows\.weight"):
        optimizer.step()


def test_new_codes_are_initialised_from_their_own_stream() -> None:
    table = StreamTable(el.TokenEmbedding(24, 4), (7, 9, 8))
    add_tokens(table, 1, stream=1, init=MeanInit())
    torch.testing.assert_close(table.rows.weight[16], table.rows.weight[7:16].mean(0))


@pytest.mark.parametrize("name", some(("musicgen", "csm", "kyutai"), NAMES))
def test_rows_that_belong_to_no_code_are_the_mean_of_their_stream(name, unchecked) -> None:
    model = stream_model(name)
    before = streams_of_model(model)
    rows = {part.name: part.tensor.detach().clone() for part in before.rows}
    add_tokens(model, 2, stream=EDITED)
    for old, new in zip(before.rows, streams_of_model(model).rows, strict=True):
        for k in before.alike.intersection(old.streams) - {EDITED}:
            further = new.codes(new.tensor, k)[-2:]
            torch.testing.assert_close(further, old.codes(rows[old.name], k).mean(0, keepdim=True).expand_as(further))


def test_an_edit_that_fails_changes_nothing(monkeypatch) -> None:
    table = StreamTable(el.TokenEmbedding(24, 4), (7, 9, 8))
    rows = table.rows.weight.detach().clone()
    monkeypatch.setattr(StreamTable, "recompute_buffers", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        remove_tokens(table, [1], stream=0)
    monkeypatch.undo()
    assert table.rows.vocab_size == 24
    assert torch.equal(table.rows.weight, rows)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"stream": 3, "add": 1}, el.SizeError, r"Stream 3 is none of the 3 streams \(0\.\.2\)"),
    ({"stream": -1, "add": 1}, el.SizeError, "Stream -1 is none of"),
    ({"stream": 1, "add": 1, "pad_to_multiple_of": 8}, el.SizeError, "no tokenizer and no spare rows"),
    ({"stream": 1, "remove": [9]}, el.EmbedLayerError, "9"),
    ({"stream": 1, "add": ["new"]}, el.VocabularyError, "new"),
    ({"add": 1}, el.SizeError, "has 3 streams of codes, each with a vocabulary of its own: pass stream=0 to 2"),
])  # fmt: skip
def test_bad_edits_are_refused(options, error, message) -> None:
    table = StreamTable(el.TokenEmbedding(24, 4), (7, 9, 8))
    with pytest.raises(error, match=message):
        edit_vocabulary(table, **options)
    assert table.sizes == (7, 9, 8)


def test_modules_without_streams_or_with_several_sets_are_refused() -> None:
    with pytest.raises(el.SizeError, match="has no streams of codes: leave stream out"):
        remove_tokens(el.TokenEmbedding(8, 4), [1], stream=0)
    two = nn.ModuleList(StreamTable(el.TokenEmbedding(4, 2), (2, 2)) for _ in range(2))
    with pytest.raises(el.SizeError, match="has 2 sets of streams"):
        remove_tokens(two, [1], stream=0)
    quantised = StreamTable(el.QuantizedEmbedding.from_table(el.TokenEmbedding(8, 4), 8), (4, 4))
    with pytest.raises(el.SizeError, match="edit the streams before the rows are converted"):
        remove_tokens(quantised, [1], stream=0)


def test_a_code_that_a_configuration_names_for_all_streams_keeps_its_id(tmp_path, unchecked) -> None:
    model = stream_model("dia")
    folder = saved(model, tmp_path / "old")
    for target, options in ((model, {}), (folder, {"out": tmp_path / "new"})):
        with pytest.raises(el.VocabularyError, match="names the code 25 of every stream"):
            remove_tokens(target, [3], stream=1, **options)
    assert not (tmp_path / "new").exists()


def test_the_text_of_a_model_with_streams_is_edited_as_before(tmp_path, unchecked) -> None:
    layer = opened(saved(stream_model("csm"), tmp_path / "old"))
    codes = layer.codes.rows.weight.detach().clone()
    add_tokens(layer, 2)
    assert layer.table.vocab_size == 63
    assert torch.equal(layer.codes.rows.weight, codes)
    kyutai = opened(saved(stream_model("kyutai"), tmp_path / "kyutai"))
    add_tokens(kyutai, 2, stream=0)
    assert kyutai.codes.table.sizes == (63, 20, 20, 20, 20)
    assert kyutai.codes.head.sizes == [63]
    assert kyutai.codes.table.shared_padding_idx == 143
    with pytest.raises(el.SizeError, match="Stream 0 of .* is its text"):
        add_tokens(tmp_path / "kyutai", 2, stream=0, out=tmp_path / "new")


def loss_of(layer: Any) -> Tensor:
    """Return a loss of all rows and heads of a layer."""
    codes = layer.codes
    targets = random_codes(codes_of(layer))
    targets[0, :2, EDITED] = torch.tensor([1, 4])
    loss = codes.table(targets).square().mean()
    for head, first in ((codes.head, codes.head_stream), (codes.depth_head, codes.depth_stream)):
        if head is not None:
            torch.manual_seed(4)
            own = targets[..., first : first + head.num_streams]
            shape = (*own.shape, head.embed_dim) if head.hidden_per_stream else (*own.shape[:-1], head.embed_dim)
            loss = loss + head.loss(torch.randn(shape), own).loss
    return loss


@pytest.mark.parametrize("name", some(("musicgen", "csm", "kyutai, tied"), NAMES))
def test_only_the_rows_of_a_stream_are_trained_and_merged(tmp_path, name, unchecked) -> None:
    layer = opened(saved(stream_model(name), tmp_path / "old"))
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    before = loss_of(layer)
    parameters = {id(each) for each in layer.parameters()}
    train_only_rows(layer, [4, 1], stream=EDITED)
    torch.testing.assert_close(loss_of(layer), before)
    trained = [each for each in layer.parameters() if each.requires_grad]
    assert all(len(each) == 2 for each in trained)
    optimizer = torch.optim.SGD(trained, lr=1.0)
    loss_of(layer).backward()
    optimizer.step()
    after = loss_of(layer)
    merge_rows(layer)
    torch.testing.assert_close(loss_of(layer), after)
    assert {id(each) for each in layer.parameters()} == parameters
    assert layer.state_dict().keys() == state.keys()
    start = layer.codes.table.stream(EDITED).start
    changed = (layer.codes.rows.weight != state["codes.table.rows.weight"]).any(-1).nonzero().flatten().tolist()
    assert changed == [start + 1, start + 4]
    for key in ("codes.depth_head.output.weight",):
        if key in state:
            at = EDITED - layer.codes.depth_stream
            output = layer.codes.depth_head.output
            new, old = output.weight[at], state[key][at]
            new, old = (new.mT, old.mT) if output.transposed else (new, old)
            assert (new != old).any(-1).nonzero().flatten().tolist() == [1, 4]


@pytest.mark.parametrize(
    "name", some(("musicgen", "bark, fine"), [each for each in NAMES if each not in ("csm", "csm, untied", "moshi")])
)
def test_rows_of_a_stream_are_trained_in_a_live_model_which_gets_its_modules_back(tmp_path, name, unchecked) -> None:
    model = stream_model(name)
    modules, state = dict(model.named_modules()), {key: value.clone() for key, value in model.state_dict().items()}
    train_only_rows(model, [4, 1], stream=EDITED)
    trained = [each for each in model.parameters() if each.requires_grad]
    assert trained
    assert all(len(each) == 2 for each in trained)
    with torch.no_grad():
        for each in trained:
            each += 1.0
    with quiet():
        model.save_pretrained(tmp_path / "training")
    merge_rows(model)
    assert {name: id(each) for name, each in model.named_modules()} == {n: id(each) for n, each in modules.items()}
    changed = {
        key: (model.state_dict()[key] != value).any(-1).sum() for key, value in state.items() if value.dim() == 2
    }
    assert {int(count) for count in changed.values()} == {0, 2}
    of_file, merged = opened(tmp_path / "training"), opened(saved(model, tmp_path / "merged"))
    assert all(torch.equal(of_file.state_dict()[key], value) for key, value in merged.state_dict().items())


def test_rows_that_a_model_reads_in_its_own_way_are_not_trained_there(unchecked) -> None:
    for name in ("csm", "moshi"):
        model = stream_model(name)
        modules = dict(model.named_modules())
        with pytest.raises(el.SizeError, match="in a way of its own: train the rows of its layer"):
            train_only_rows(model, [1], stream=EDITED)
        assert dict(model.named_modules()) == modules
    with pytest.raises(el.TokenIdError, match="Code 33 is outside this stream of 32 codes"):
        train_only_rows(stream_model("moshi"), [33], stream=7)
    with pytest.raises(el.TokenIdError, match="Code 9 is outside this stream of 9 codes"):
        train_only_rows(nn.ModuleList([StreamTable(el.TokenEmbedding(24, 4), (7, 9, 8))]), [9], stream=1)


def test_added_codes_alone_are_trained(tmp_path, unchecked) -> None:
    layer = opened(saved(stream_model("dia"), tmp_path / "old"))
    receipt = add_tokens(layer, 2, stream=EDITED, train_only_new=True)
    assert [tuple(each.shape) for each in layer.parameters() if each.requires_grad] == [(2, 32), (2, 32)]
    with torch.no_grad():
        for each in layer.parameters():
            each.add_(float(each.requires_grad))
    receipt.undo(layer)
    assert layer.codes.table.sizes == (28, 28, 28)


def test_an_undo_that_is_refused_leaves_the_rows_of_the_stream_separate(tmp_path, unchecked) -> None:
    layer = opened(saved(stream_model("csm"), tmp_path / "old"))
    receipt = add_tokens(layer, 1, stream=EDITED, train_only_new=True)
    names = [name for name, each in layer.named_parameters() if each.requires_grad]
    assert len(names) == 2
    with torch.no_grad():
        layer.codes.rows.base.weight[layer.codes.table.stream(EDITED).start] += 1.0
    with pytest.raises(el.CheckpointError, match="rows that the edit kept|belongs to another result"):
        receipt.undo(layer)
    assert [name for name, each in layer.named_parameters() if each.requires_grad] == names
    merge_rows(layer)
    assert layer.codes.table.sizes == (22,) * 4
