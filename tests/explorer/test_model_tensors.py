"""The tensors of a model: their parts, their sizes, and rows of the table read inside the model and outside of it."""

import pytest
import torch
from explorer_requests import stored_answers
from safetensors.torch import load_file, save_file
from stream_models import stream_model
from tiny_models import build, quiet

from embedlayer import DecoderLM, DeltaEmbedding, QuantizedEmbedding, RotaryEmbedding, TokenEmbedding
from embedlayer.checkpoints import write_vectors
from embedlayer.opening import OpenedModel, open_model

BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 99}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 99, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "llama": ("LlamaForCausalLM", BERT),
    "tied llama": ("LlamaForCausalLM", {**BERT, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", BERT),
    "bert": ("BertForMaskedLM", BERT),
    "bart": ("BartForConditionalGeneration", {"vocab_size": 99, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
                                              "encoder_attention_heads": 2, "decoder_attention_heads": 2}),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2,
                                          "num_heads": 2}),
}  # fmt: skip
PARTS = {
    "gpt2": {"table", "position", "blocks", "norm"},
    "llama": {"table", "blocks", "norm", "head"},
    "tied llama": {"table", "blocks", "norm"},
    "qwen2": {"table", "blocks", "norm", "head"},
    "bert": {"table", "position", "input", "blocks", "head"},
    "bart": {"table", "position", "input", "blocks", "buffer"},
    "t5": {"table", "blocks", "norm", "other"},  # its positions are a bias on the scores
}


def saved(name, folder):
    """A small model of transformers, saved in a folder."""
    transformers = pytest.importorskip("transformers")
    class_name, sizes = MODELS[name]
    kind = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes))
    with quiet():
        model.save_pretrained(folder)
    return model


def counted(tensors):
    return sum(each["size"] for each in tensors if not each["is_copy"] and each["part"] != "buffer")


def check_rows(found, table):
    assert found["rows"]
    for row in found["rows"]:
        expected = table[row["token"]["id"]].detach().float()
        assert row["inside"].equal(expected)
        assert row["outside"].equal(expected)
        assert row["difference"] == 0.0


@pytest.fixture
def answer(ask):
    return lambda source, **params: ask(source, "tensors", **params)


@pytest.mark.parametrize("name", MODELS)
def test_tensors_of_a_checkpoint_are_all_its_parameters_each_counted_once(answer, name, tmp_path):
    model = saved(name, tmp_path)
    found = answer(open_model(tmp_path))
    assert found["is_file"]
    assert found["refused"] == ""
    tensors = found["tensors"]
    assert [each["name"] for each in tensors] == sorted(each["name"] for each in tensors)
    assert counted(tensors) == sum(each.numel() for each in model.parameters())
    assert {each["part"] for each in tensors} == PARTS[name]
    assert found["is_tied"] == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    [table] = [each for each in tensors if each["part"] == "table" and not each["is_copy"]]
    assert table["shape"] == [99, 16]
    check_rows(found, model.get_input_embeddings().weight)


def test_tensors_of_a_run_and_of_its_model_in_memory_are_the_same_but_for_the_file(answer, of_run):
    stored = answer(of_run)
    memory = answer(OpenedModel("memory", of_run.table, model=of_run.model))
    assert [stored["is_file"], memory["is_file"]] == [True, False]
    assert stored["tensors"] == memory["tensors"]
    parameters = sum(each.numel() for each in of_run.model.parameters())
    assert sum(each["size"] for each in stored["tensors"]) == parameters
    assert {each["part"] for each in stored["tensors"]} == {"table", "blocks", "norm"}
    check_rows(stored, of_run.table.weight)
    check_rows(memory, of_run.table.weight)


def test_the_final_norm_of_the_language_model_is_found_beside_a_vision_tower(answer, tmp_path):
    with quiet():
        build("qwen2_vl", "image-text")[1].save_pretrained(tmp_path)
    tensors = answer(open_model(tmp_path))["tensors"]
    assert [each["name"] for each in tensors if each["part"] == "norm"] == ["model.norm.weight"]


def test_a_model_of_codes_alone_shows_no_rows(answer, tmp_path):
    with quiet():
        stream_model("musicgen").save_pretrained(tmp_path)
    found = answer(open_model(tmp_path))
    assert found["tensors"]
    assert found["rows"] == []


BUFFERS = {
    "gpt2": {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)},
    "tied llama": {
        "model.layers.0.mlp.gate.e_score_correction_bias": torch.ones(4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    },
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_of_old_files_and_copies_of_a_tied_table_are_listed_and_not_counted(answer, name, tmp_path):
    model = saved(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | BUFFERS[name]
    tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = answer(open_model(tmp_path))["tensors"]
    assert [each["name"] for each in found if each["is_copy"]] == ["lm_head.weight"]
    assert [each["name"] for each in found if each["part"] == "buffer"] == [
        each.replace(".0.", ".*.") for each in BUFFERS[name]
    ]
    assert counted(found) == sum(each.numel() for each in model.parameters())


def test_packed_rows_are_counted_in_bytes_and_decoded(answer, tmp_path):
    table = QuantizedEmbedding.from_table(TokenEmbedding(40, 32), bits=8)
    DecoderLM(table, RotaryEmbedding(8), num_layers=1, num_heads=4).save_pretrained(tmp_path)
    source = open_model(tmp_path)
    found = answer(source)
    assert found["unit"] == "bytes"
    assert sum(each["size"] for each in found["tensors"]) == sum(
        each.nbytes for each in source.model.state_dict().values()
    )
    assert all(row["difference"] == 0 for row in found["rows"])
    assert not found["is_file"], "the file has no rows, but codes"


def test_rows_that_are_several_tensors_are_not_read_from_one_of_them(answer, tmp_path):
    table = DeltaEmbedding(TokenEmbedding(40, 32), torch.arange(3))
    torch.nn.init.ones_(table.delta)
    DecoderLM(table, RotaryEmbedding(8), num_layers=1, num_heads=4).save_pretrained(tmp_path)
    found = answer(open_model(tmp_path))
    assert not found["is_file"]
    assert [row["difference"] for row in found["rows"]] == [0.0] * len(found["rows"])


def test_a_table_by_itself_has_no_list_and_says_why(answer, tmp_path):
    write_vectors(tmp_path / "three.txt", ["cat", "dog", "fish"], torch.randn(3, 4), format="word2vec")
    found = answer(open_model(tmp_path / "three.txt"))
    assert found["tensors"] == found["rows"] == []
    assert found["refused"] == "three.txt is a table by itself: the model that it belongs to is not here."


def test_the_list_of_gpt2_is_that_of_transformers(answer):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    found = answer(OpenedModel("any", TokenEmbedding(4, 2)), layer="gpt2")
    assert sum(each["size"] for each in found["tensors"]) == 124_439_808 == sum(p.numel() for p in model.parameters())
    expected = {name: list(each.shape) for name, each in model.transformer.named_parameters()}
    listed = {
        each["name"].replace("*", str(block)): each["shape"]
        for each in found["tensors"]
        for block in range(each["count"])
    }
    assert listed == expected
    assert found["is_tied"]
    assert found["rows"] == []


def test_the_tiny_layer_is_the_same_beside_every_source(answer, of_run, exported_run, tiny_choices):
    held = [request for request in stored_answers(exported_run) if request.startswith("tensors?")]
    assert held == ["tensors?source=0", "tensors?layer=tiny&source=0", "tensors?layer=gpt2&source=0"]
    found = answer(of_run, layer="tiny")
    assert {each["part"] for each in found["tensors"]} == {"table", "position", "blocks", "norm"}
    assert [row["token"]["text"] for row in found["rows"]] == tiny_choices["words"]
    assert all(row["difference"] == 0 for row in found["rows"])
