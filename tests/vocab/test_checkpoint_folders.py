"""Checkpoint folders of other makes: real tokenizers, small models, transformers as the judge."""

import argparse
import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_cases import compressed_case
from tiny_models import build, model_types, quiet
from vocab_models import close

import embedlayer as el


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture
def small_gpt2(tmp_path) -> Path:
    """A checkpoint with every file that names tokens; its special ones are 400 and 401."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "old"
    ids = {"eos_token_id": [400, 401], "bos_token_id": 400}
    with quiet():
        GPT2LMHeadModel(
            GPT2Config(vocab_size=402, n_embd=16, n_layer=1, n_head=2, n_positions=64, **ids)
        ).save_pretrained(folder)
    base = el.train_tokenizer(inspect.getsource(argparse)[:20_000], vocab_size=400, special_tokens=())
    base.model.save(str(folder))  # vocab.json and merges.txt
    tokenizer = el.vocab.edit_tokenizer(base, special=["<|endoftext|>", "<|end|>"]).tokenizer
    tokenizer.save(str(folder / "tokenizer.json"))
    specials = {"pad_token": "<|endoftext|>", "eos_token": "<|end|>"}
    generation = {"suppress_tokens": [5, 380, 7], "bad_words_ids": [[380], [40, 8]]}
    decoder = {"400": {"content": "<|endoftext|>", "special": True}, "401": {"content": "<|end|>", "special": True}}
    files = {
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": decoder, **specials},
        "special_tokens_map.json": specials,
        "added_tokens.json": {"<|endoftext|>": 400, "<|end|>": 401},
        "generation_config.json": {"eos_token_id": [400, 0], **generation, "top_k": 5},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def test_every_file_that_names_tokens_follows(small_gpt2, tmp_path) -> None:
    from transformers import AutoTokenizer, GPT2LMHeadModel

    out = tmp_path / "new"
    receipt = el.vocab.edit_vocabulary(small_gpt2, remove=[380], add=[" otterly"], special=["<|user|>"], out=out)
    end = 400 - len(receipt.dropped)
    seven, forty, eight, five = receipt.remap(torch.tensor([7, 40, 8, 5])).tolist()

    def read(name: str) -> dict:
        return json.loads((out / name).read_text())

    named = {"suppress_tokens": [five, seven], "bad_words_ids": [[forty, eight]]}
    assert read("generation_config.json") == {"eos_token_id": [end, 0], **named, "top_k": 5}
    config = read("config.json")
    assert (config["eos_token_id"], config["bos_token_id"]) == ([end, end + 1], end)
    assert config["vocab_size"] == receipt.row_map.size == end + 4
    added = {"<|endoftext|>": end, "<|end|>": end + 1, " otterly": end + 2, "<|user|>": end + 3}
    assert read("added_tokens.json") == added
    decoder = read("tokenizer_config.json")["added_tokens_decoder"]
    assert {token["content"]: int(key) for key, token in decoder.items()} == added
    assert not (out / "vocab.json").exists()
    assert not (out / "merges.txt").exists()
    with quiet():
        before, after = (GPT2LMHeadModel.from_pretrained(folder).eval() for folder in (small_gpt2, out))
        theirs = AutoTokenizer.from_pretrained(out)
    ids, kept = torch.tensor([[40, 8, 400]]), receipt.row_map.sources >= 0
    close(after(receipt.remap(ids)).logits[..., kept], before(ids).logits[..., receipt.row_map.sources[kept]])
    text = "An otterly fine day.<|endoftext|>"
    assert theirs(text)["input_ids"] == receipt.tokenizer.encode(text).ids


def test_a_folder_without_tokenizer_config_gets_one(small_gpt2, tmp_path) -> None:
    (small_gpt2 / "tokenizer_config.json").unlink()
    el.vocab.add_tokens(small_gpt2, [" otterly"], out=tmp_path / "new")
    config = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|end|>"


def test_ids_whose_order_the_model_reads_stay_where_they_are(small_gpt2, tmp_path) -> None:
    config = json.loads((small_gpt2 / "config.json").read_text())
    (small_gpt2 / "config.json").write_text(json.dumps({**config, "vocabulary_map": {"<image>": 350}}))
    el.vocab.remove_tokens(small_gpt2, [380], out=tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocabulary_map"] == {"<image>": 350}
    with pytest.raises(el.VocabularyError, match="vocabulary_map"):
        el.vocab.remove_tokens(small_gpt2, [340], out=tmp_path / "none")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_token_that_a_configuration_names_cannot_be_removed(file, small_gpt2, tmp_path) -> None:
    for name in ("config.json", "generation_config.json"):
        content = json.loads((small_gpt2 / name).read_text())
        (small_gpt2 / name).write_text(json.dumps({**content, "eos_token_id": [400, 401] if name == file else 400}))
    with pytest.raises(el.VocabularyError, match=f"'<.end.>'.*{file}"):
        el.vocab.remove_tokens(small_gpt2, ["<|end|>"], out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*"))


def plain(folder: Path, tensors: dict[str, torch.Tensor], family: str = "gpt2") -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    sizes = {"vocab_size": 20, "hidden_size": 4, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": family, **sizes}))
    return folder


def test_rows_are_moved_in_the_type_that_each_tensor_is_stored_in(tmp_path) -> None:
    table, head = torch.randn(20, 4).bfloat16(), torch.randn(20, 4)
    plain(tmp_path / "old", {"model.embed_tokens.weight": table, "lm_head.weight": head}, "llama")
    el.vocab.edit_vocabulary(tmp_path / "old", remove=[3], out=tmp_path / "new")
    kept = [token for token in range(20) if token != 3]
    after = tensors_of(tmp_path / "new")
    assert torch.equal(after["model.embed_tokens.weight"], table[kept])
    assert torch.equal(after["lm_head.weight"], head[kept])


def test_llama2_c_in_metas_layout_still_generates_its_text(shared_data, tmp_path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    shutil.copy(shared_data / "models" / "stories260K.safetensors", folder)
    shutil.copy(shared_data / "models" / "tok512.bin", folder)
    model, tokenizer = el.load_llama(folder), el.load_tokenizer(folder)
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    receipt = el.vocab.trim_vocabulary(folder, text, out=tmp_path / "new")
    small, trimmed = el.load_llama(tmp_path / "new"), el.load_tokenizer(tmp_path / "new")
    assert small.table.vocab_size < 400
    ids = torch.tensor(tokenizer.encode(text).ids)
    assert trimmed.encode(text).ids == receipt.remap(ids).tolist()
    close(small(receipt.remap(ids)), model(ids)[:, receipt.row_map.sources])


def test_a_tensor_of_as_many_rows_that_is_not_known_is_named(tmp_path) -> None:
    tensors = {"wte.weight": torch.randn(20, 4), "wpe.weight": torch.randn(8, 4), "prior.weight": torch.randn(20)}
    with pytest.warns(el.EmbedLayerWarning, match="prior.weight has 20 rows"):
        el.vocab.remove_tokens(plain(tmp_path / "old", tensors), [3], out=tmp_path / "new")


def test_of_an_unknown_family_a_table_without_a_head_is_edited(tmp_path) -> None:
    rows = torch.randn(20, 4)
    tensors = {"embed_tokens.weight": rows, "lm_head.weight": rows.clone(), "block.weight": torch.randn(4, 4)}
    with (
        pytest.warns(el.EmbedLayerWarning, match=r"only its table, embed_tokens\.weight"),
        pytest.warns(el.EmbedLayerWarning, match="bos_token_id"),
    ):
        el.vocab.remove_tokens(plain(tmp_path / "old", tensors, "novel"), [3], out=tmp_path / "new")
    after = tensors_of(tmp_path / "new")
    assert torch.equal(after["embed_tokens.weight"], rows[[token for token in range(20) if token != 3]])
    assert torch.equal(after["lm_head.weight"], after["embed_tokens.weight"])


@pytest.mark.parametrize("shape", [(20, 4), (4, 20), (20,)])
def test_of_an_unknown_family_nothing_that_may_belong_to_tokens_is_left_as_it_is(tmp_path, shape) -> None:
    tensors = {"embed_tokens.weight": torch.randn(20, 4), "other.weight": torch.randn(shape)}
    folder = plain(tmp_path / "old", tensors, "novel")
    with pytest.raises(el.CheckpointError, match=r"other\.weight"):
        el.vocab.remove_tokens(folder, [3], out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_of_an_unknown_family_the_padding_token_keeps_its_id(tmp_path) -> None:
    folder = plain(tmp_path / "old", {"embed_tokens.weight": torch.randn(20, 4)}, "novel")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 9}))
    with pytest.warns(el.EmbedLayerWarning), pytest.raises(el.VocabularyError, match="positions"):
        el.vocab.remove_tokens(folder, [3], out=tmp_path / "new")


@pytest.mark.parametrize("place", ["model.embed_tokens.weight", "lm_head.weight"])
def test_an_edit_refuses_codes_as_load_does(place, tmp_path) -> None:
    """Also where the class of transformers names the tensors, which says nothing about what their numbers mean."""
    with quiet():
        build("llama", "causal", {"tie_word_embeddings": False})[1].save_pretrained(tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    for stated, dtype in (
        (None, torch.int8),
        (None, torch.float8_e4m3fn),
        ({"quant_method": "foreign"}, torch.uint8),
        ({"quant_method": "fp8"}, torch.float8_e4m3fn),
    ):
        settings = {} if stated is None else {"quantization_config": stated}
        (tmp_path / "config.json").write_text(json.dumps(config | settings))
        scale = {} if stated is None else {f"{place}_scale": torch.tensor([0.01])}
        codes = {place: torch.ones_like(tensors[place]).to(dtype)}
        save_file(tensors | scale | codes, tmp_path / "model.safetensors")
        with pytest.raises(el.CheckpointError, match=place) as refused:
            el.load(tmp_path)
        reason = str(refused.value).removesuffix(refused.value.advice).strip()
        with pytest.raises(el.CheckpointError) as caught:
            el.vocab.edit_vocabulary(tmp_path, add=["new"], remove=[5], out=tmp_path / "new")
        assert str(caught.value).startswith(reason)
        assert not (tmp_path / "new").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("size", "is_edited"), [(120, False), (131, True)])
def test_a_table_and_a_head_of_two_sizes_are_not_edited(size, is_edited, tmp_path) -> None:
    """`tests/laws/test_edited_families.py` has all types of models."""
    if "inkling_text" not in model_types("causal"):
        pytest.skip("the installed transformers has no inkling_text")
    _, model = build("inkling_text", "causal", {"unpadded_vocab_size": size})
    with quiet():
        model.save_pretrained(tmp_path / "old")
        if not is_edited:
            with pytest.raises(el.EmbedLayerError, match="share a vocabulary"):
                el.vocab.add_tokens(tmp_path / "old", 3, out=tmp_path / "new")
            return
        el.vocab.add_tokens(tmp_path / "old", 3, out=tmp_path / "new")
        again = type(model).from_pretrained(tmp_path / "new")
    ids = torch.tensor([[5, 133, 40]])
    assert again(input_ids=ids).logits.shape[-1] == el.load(tmp_path / "new").table.vocab_size == 134


@pytest.mark.parametrize(
    "name", ["model.layers.1.engram.value_proj.weight", "model.ngram_embeddings.embedders.3.weight"]
)
def test_a_checkpoint_with_hashed_ngrams_is_refused(tmp_path, name) -> None:
    tensors = {"model.embed_tokens.weight": torch.randn(20, 4), name: torch.zeros(7, 2)}
    folder = plain(tmp_path / "old", tensors, "llama")
    with pytest.raises(el.VocabularyError, match=name):
        el.vocab.remove_tokens(folder, [3], out=tmp_path / "new")


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ({"tokenizer_class": "GPT2Tokenizer"}, {"model_type": "gpt2"}),
        ({"tokenizer_class": "GPT2Tokenizer", "unk_token": "<unk>"}, {"model_type": "gpt2", "pad_token_id": 2}),
        (FAST, {"model_type": "gpt2", "eos_token_id": 1}),
        ({"eos_token": "</s>", **FAST}, {"model_type": "llama", "bos_token_id": 2}),
        ({"tokenizer_class": "LlamaTokenizer"}, {"model_type": "llama", "pad_token_id": 4}),
        ({"tokenizer_class": "Qwen2Tokenizer"}, {"model_type": "qwen2", "bos_token_id": 0}),
        ({}, {"model_type": "gpt_neox", "bos_token_id": 0, "pad_token_id": 4}),
    ],
)
def test_a_role_that_the_old_tokenizer_lacks_is_not_given_to_the_new_one(settings, model, tmp_path, unchecked) -> None:
    from transformers import AutoTokenizer

    specials = ["<|endoftext|>", "</s>", "<s>", "<unk>", "<pad>"]
    tokenizer = el.train_tokenizer("a small dog " * 20, vocab_size=280, special_tokens=specials)
    size = tokenizer.get_vocab_size()
    name = {"gpt2": "wte", "gpt_neox": "gpt_neox.embed_in"}.get(model["model_type"], "model.embed_tokens")
    folder = plain(tmp_path / "old", {f"{name}.weight": torch.randn(size, 4), "wpe.weight": torch.randn(8, 4)})
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    sizes = {"vocab_size": size, "hidden_size": 4, "num_attention_heads": 2, "partial_rotary_factor": 1.0}
    config = sizes | {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True} | model
    (folder / "config.json").write_text(json.dumps(config))
    el.vocab.edit_vocabulary(folder, special=["<new>"], out=tmp_path / "new")
    opened = AutoTokenizer.from_pretrained(tmp_path / "new")
    edited = {role: str(token) for role, token in opened.special_tokens_map.items()}
    before = {role: str(token) for role, token in AutoTokenizer.from_pretrained(folder).special_tokens_map.items()}
    assert edited == {role: token for role, token in before.items() if token in specials}  # <|padding|> has no row


# A family without a record, whose class of transformers says which tensors have rows of tokens

OF_CLASS = ("ultrabert.embed_tokens", "cls")


def saved(folder: Path, model_type: str, kind: str) -> dict[str, torch.Tensor]:
    with quiet():
        build(model_type, kind)[1].save_pretrained(folder)
    return tensors_of(folder)


@pytest.mark.parametrize("stored", ["floating point", "codes", "codes, also in the blocks"])
def test_the_class_says_which_tensors_have_rows_of_tokens(stored, tmp_path, unchecked) -> None:
    tensors = saved(tmp_path / "old", "ultrabert", "masked")
    names = [f"{module}.weight" for module in OF_CLASS] if "codes" in stored else []
    names += [name for name in tensors if "layers" in name and tensors[name].dim() == 2] if "blocks" in stored else []
    for name in names:
        rows, module = tensors.pop(name), name.removesuffix(".weight")
        case = compressed_case(rows, "pack-quantized", num_bits=8, strategy="group", group_size=rows.shape[1])
        tensors |= {f"{module}.{rest}": tensor.clone() for rest, tensor in case.tensors.items()}
    save_file(tensors, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    el.vocab.edit_vocabulary(tmp_path / "old", remove=[97], add=3, out=tmp_path / "new")
    edited, kept = tensors_of(tmp_path / "new"), [token for token in range(131) if token != 97]
    assert edited.keys() == tensors.keys()
    for name, tensor in tensors.items():
        of_tokens = name.startswith(OF_CLASS) and not name.endswith("shape")
        if of_tokens:
            assert len(edited[name]) == 133
            assert torch.equal(edited[name][:130], tensor[kept])
        elif not name.startswith(OF_CLASS):
            assert torch.equal(edited[name], tensor)


@pytest.mark.parametrize("damage", ["missing tensor", "another tensor of as many rows", "no class", "two tensors"])
def test_nothing_is_known_of_a_folder_that_is_not_as_its_class(damage, tmp_path, unchecked) -> None:
    kind = ("molmo2_text", "text encoder") if damage == "two tensors" else ("ultrabert", "masked")
    tensors = saved(tmp_path / "old", *kind)
    if damage == "missing tensor":
        del tensors[next(name for name in tensors if "norm" in name)]
    elif damage == "another tensor of as many rows":
        tensors["other"] = torch.zeros(131)
    elif damage == "no class":
        path = tmp_path / "old" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["NoSuchModel"]}))
    save_file(tensors, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    with pytest.raises(el.CheckpointError):
        el.vocab.add_tokens(tmp_path / "old", 3, out=tmp_path / "new")
