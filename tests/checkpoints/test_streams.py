"""Checkpoints of models with K streams of codes: their layers equal the models, and are written back."""

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some
from stream_models import STREAM_MODELS, first_input, stream_model
from tiny_models import quiet
from torch import Tensor

import embedlayer as el

IDS = torch.tensor([[7, 52, 58, 9, 54, 59, 5], [58, 3, 52, 11, 13, 54, 2]])
"""Text tokens, among them placeholders of CSM and Higgs."""

TIED = {"csm": "backbone_model.embed_tokens.embed_audio_tokens.weight", "kyutai, tied": "lm_head.weight"}
TIED |= {"bark, fine": "lm_heads.0.weight"}
"""Name of a model -> second name of the rows of its codes."""


OTHER_NAMES = {"musicgen, stereo", "musicgen, melody", "kyutai", "bark, fine"}
"""Models that are read as another one of the list is, but for a number or an option."""


@pytest.fixture(scope="module", params=some(STREAM_MODELS.keys() - OTHER_NAMES, STREAM_MODELS))
def stored(request, tmp_path_factory) -> tuple[str, Any, el.EmbeddingLayer, Path]:
    """Name of a model, the model, its layer and their folder, which no test changes."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, folder = stream_model(request.param), tmp_path_factory.mktemp("model")
    return request.param, model, opened(model, folder), folder


@pytest.fixture
def case(stored, unchecked) -> tuple[str, Any, el.EmbeddingLayer, Path]:
    return stored


def opened(model: Any, folder: Path) -> el.EmbeddingLayer:
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        return el.load(folder)


def random_codes(layer: el.EmbeddingLayer) -> Tensor:
    """Return codes `(2, 7, K)` of all streams, among them the last of each."""
    assert layer.codes is not None
    torch.manual_seed(1)
    codes = torch.stack([torch.randint(0, size, (2, 7)) for size in layer.codes.table.sizes], -1)
    codes[0, 0] = torch.tensor(layer.codes.table.sizes) - 1
    return codes


def inputs_of(name: str, model: Any, layer: el.EmbeddingLayer) -> tuple[Tensor, Tensor]:
    """Return the input of the first block of a model, and that of the layer, for the same codes."""
    codes = random_codes(layer)
    kind = name.partition(",")[0]
    flat = codes.movedim(-1, 1).flatten(0, 1)  # (B K, T)
    if name == "musicgen, whole":
        model = model.decoder
    if kind == "musicgen":
        return first_input(model, model.model.decoder.layers, input_ids=flat), layer.input(codes)
    if kind == "moshi":
        K = model.num_codebooks
        sides = codes.movedim(-1, 1)
        theirs = first_input(
            model, model.decoder.model.layers, input_ids=IDS, moshi_audio_codes=sides[:, :K],
            user_audio_codes=sides[:, K:],
        )  # fmt: skip
        return theirs, layer.input(IDS, codes=codes)
    if kind == "csm":
        embeds = model.embed_text_tokens(IDS)
        is_code = (IDS == 58) | (IDS == 59)
        embeds[is_code] = model.backbone_model.embed_tokens(codes)[is_code]
        theirs = first_input(model, model.backbone_model.layers, inputs_embeds=embeds)
        return theirs, layer.input(IDS, codes=codes)
    if kind == "dia":
        theirs = first_input(model, model.model.decoder.layers, input_ids=IDS, decoder_input_ids=codes)
        return theirs, layer.decoder_input(codes)
    if kind == "higgs":
        is_code = (IDS == 52) | (IDS == 54)
        theirs = first_input(
            model, model.model.layers, input_ids=IDS, audio_input_ids=codes, audio_input_ids_mask=is_code
        )
        return theirs, layer.input(IDS, codes=codes)
    if kind == "kyutai":
        assert layer.codes is not None
        codes[1, 2, 1:] = layer.codes.table.shared_padding_idx or 0
        return first_input(model, model.model.layers, input_ids=codes), layer.input(codes)
    theirs = first_input(model, model.layers, codebook_idx=2, input_ids=codes)
    return theirs, layer.input(codes, streams=3)


def test_the_input_equals_that_of_the_model(case) -> None:
    name, model, layer, _ = case
    with torch.no_grad():
        theirs, ours = inputs_of(name, model, layer)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def heads_of(name: str, model: Any) -> list[Any]:
    """Return functions of hidden states whose results are the logits of each stream, as the model has them."""
    kind = name.partition(",")[0]
    if name == "musicgen, whole":
        model = model.decoder
    if kind == "csm":
        return [model.lm_head]
    if kind in ("dia", "higgs"):
        joint = model.logits_dense if kind == "dia" else model.audio_lm_head
        sizes = 28 if kind == "dia" else 26
        return [
            lambda x, k=k: joint(x).unflatten(-1, (-1, sizes))[..., k, :] for k in range(joint.out_features // sizes)
        ]
    return list(model.lm_heads) if kind in ("musicgen", "bark") else [model.lm_head]


def test_the_logits_of_each_stream_equal_those_of_the_model(case) -> None:
    name, model, layer, _ = case
    codes = layer.codes
    torch.manual_seed(2)
    hidden = torch.randn(2, 7, codes.table.embed_dim)
    with torch.no_grad():
        if name != "moshi":
            assert codes.head is not None
            theirs = [head(hidden) for head in heads_of(name, model)]
            assert len(theirs) == codes.head.num_streams
            for ours, of_model in zip(codes.head(hidden), theirs, strict=True):
                torch.testing.assert_close(ours, of_model, rtol=1e-6, atol=1e-6)
        assert (codes.depth_head is None) == (not hasattr(model, "depth_decoder"))
        if codes.depth_head is not None:
            count, width = codes.depth_head.num_streams, codes.depth_head.embed_dim
            states = torch.randn(2, count, width)
            depth = model.depth_decoder
            of_model = (
                depth.lm_heads(states) if name == "moshi" else depth.codebooks_head(states, torch.arange(1, count + 1))
            )
            torch.testing.assert_close(torch.stack(codes.depth_head(states), 1), of_model, rtol=1e-5, atol=1e-6)
        if layer.head is not None:
            head = model.decoder.lm_head if name == "moshi" else model.text_lm_head
            torch.testing.assert_close(layer.head(hidden), head(hidden), rtol=1e-6, atol=1e-6)


FINAL_NORMS = {"musicgen": "layer_norm", "bark": "layernorm_final", "csm": "backbone_model.norm", "dia": "decoder.norm"}
"""Kind of model -> end of the name of its final norm, if that is not `norm`."""


def test_the_final_norm_is_that_of_the_model(case) -> None:
    name, model, _, folder = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = el.load(folder, final_norm=True)
    end = FINAL_NORMS.get(name.partition(",")[0], "norm")
    first = {"moshi": "decoder.model", "musicgen, whole": "decoder.model.decoder", "musicgen": "model.decoder"}
    first |= {"kyutai": "model", "higgs": "model", "dia": "model"}
    place = first.get(name, first.get(name.partition(",")[0], ""))
    norm = model.get_submodule(f"{place}.{end}".lstrip("."))
    x = torch.randn(2, layer.codes.table.embed_dim)
    with torch.no_grad():
        torch.testing.assert_close(layer.final_norm(x), norm(x))


def test_a_saved_layer_opens_with_equal_bits(case, tmp_path) -> None:
    layer = case[2]
    layer.save_pretrained(tmp_path / "saved")
    again = el.load(tmp_path / "saved")
    assert again.codes.head is None or again.codes.head.tied == layer.codes.head.tied
    assert again.state_dict().keys() == layer.state_dict().keys()
    assert all(torch.equal(again.state_dict()[key], value) for key, value in layer.state_dict().items())
    assert again.config == layer.config


def test_trained_rows_are_written_into_the_checkpoint(case, tmp_path) -> None:
    name, model, layer, folder = case
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        layer.codes.rows.weight[layer.codes.table.stream(1).start] += 1.0
    receipt = layer.write_into(folder, tmp_path / "out")
    assert len(receipt.changed) == 1
    with quiet():
        options = {"use_text_head": True} if name == "higgs" else {}
        again = type(model).from_pretrained(tmp_path / "out", **options).state_dict()
    differing = {each for each, old in model.state_dict().items() if not torch.equal(again[each], old)}
    assert {*receipt.changed} <= differing <= {*receipt.changed, TIED.get(name, "")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = el.load(tmp_path / "out")
    assert torch.equal(read.codes.rows.weight, layer.codes.rows.weight)


def test_the_advice_about_a_table_alone_works(case) -> None:
    _, _, layer, folder = case
    tables = {name for key, (name, *_) in layer.tensor_names.items() if key.startswith(("table.", "codes.table."))}
    message = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            alone = el.load(folder, table_only=True)
        except el.CheckpointError as error:
            message = str(error)
        else:
            [read] = [name for name, *_ in alone.tensor_names.values()]
            assert read == layer.tensor_names["table.weight"][0]
            message = " ".join(str(each.message) for each in caught)
    named = re.findall(r"table_only='([^']+)'", message)
    assert named
    for name in named:
        assert el.load(folder, table_only=name).table.embed_dim
    assert {*named} & tables


def test_codes_are_refused_where_a_model_has_none(tmp_path) -> None:
    layer = el.EmbeddingLayer(el.TokenEmbedding(10, 4))
    ids = torch.tensor([[1, 2]])
    for wrong in ({"codes": ids[..., None]}, {"streams": 1}):
        with pytest.raises(el.SizeError):
            layer.input(ids, **wrong)
    with pytest.raises(el.SizeError):
        el.EmbeddingLayer(None)


WRONG: list[tuple[str, dict[str, object]]] = [("musicgen", {"num_codebooks": value}) for value in (3, 5, "4")]
WRONG += [("musicgen", {"vocab_size": 23})]
WRONG += [("dia", {"delay_pattern": value}) for value in ([0, 1], [0, 1, -1], "0, 1, 2", [0, 1, 2.0])]


def test_a_configuration_that_does_not_fit_the_streams_is_refused(tmp_path) -> None:
    for name, change in WRONG:
        with quiet():
            stream_model(name).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(el.CheckpointError):
            el.load(tmp_path)


@pytest.mark.parametrize("part", ["Semantic", "Coarse"])
def test_parts_of_bark_with_one_stream_equal_the_model(tmp_path, part, unchecked) -> None:
    transformers = pytest.importorskip("transformers")
    from tiny_models import randomise

    config = getattr(transformers, f"Bark{part}Config")(
        block_size=64, input_vocab_size=41, output_vocab_size=31, num_layers=1, num_heads=4, hidden_size=32
    )
    model = getattr(transformers, f"Bark{part}Model")(config).eval()
    randomise(model)
    layer = opened(model, tmp_path)
    ids, hidden = torch.tensor([[3, 40, 5]]), torch.randn(1, 3, 32)
    with torch.no_grad():
        torch.testing.assert_close(layer.input(ids), first_input(model, model.layers, input_ids=ids))
        torch.testing.assert_close(layer.head(hidden), model.lm_head(hidden))
