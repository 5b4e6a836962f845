"""Saved models of transformers with a compressed table; tests/laws/test_model_jobs.py has families."""

import json
import shutil

import pytest
import torch
from commands import run
from decoders import gpt2

import embedlayer as el
from embedlayer.compress import compress_table, load_model, replace_table, save_model

IDS = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(0))


def small(**options: object) -> torch.nn.Module:
    model = gpt2(**options)
    return replace_table(model, compress_table(model.get_input_embeddings(), "int8"))


def test_look_ups_keep_their_scale_whatever_the_scale_of_the_table(unchecked) -> None:
    model = gpt2()
    scaled = el.TokenEmbedding.from_pretrained(model.get_input_embeddings().weight.detach(), scale=7.0)
    with torch.no_grad():
        expected = model(IDS).logits + 0
        for table in (scaled, compress_table(scaled, "rank=16"), compress_table(scaled, "int8")):
            torch.testing.assert_close(replace_table(model, table)(IDS).logits + 0, expected, rtol=0.05, atol=0.05)


def test_a_replaced_table_can_be_replaced_again_and_all_else_is_shared(unchecked) -> None:
    model, other = gpt2(), small()
    again = replace_table(replace_table(model, other.get_input_embeddings()), model.get_input_embeddings())
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.transformer.h is model.transformer.h
    assert again.lm_head.weight is model.get_input_embeddings().weight
    assert again.config is not model.config


@pytest.mark.parametrize("is_whole", [False, True])
def test_the_table_of_a_static_embedding_is_replaced_and_not_saved_as_another(is_whole, tmp_path, unchecked) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the recipes extra is not installed")
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    tokenizer = el.train_tokenizer("the otter ate a fish " * 20, vocab_size=270)
    static = StaticEmbedding(tokenizer, embedding_dim=16)
    model = el.patch(library.SentenceTransformer(modules=[static], device="cpu") if is_whole else static)
    table = compress_table(static.embedding.table, "int8")
    other = replace_table(model, table)
    features = static.preprocess(["the otter ate", "a fish"])
    with torch.no_grad():
        found, expected = (each(dict(features))["sentence_embedding"] for each in (other, model))
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
        assert torch.equal(found, el.tables.Bag(table)(features["input_ids"], features["offsets"]))
    for part in (other, *other.children()):
        for save in filter(None, (getattr(part, name, None) for name in ("save", "save_pretrained"))):
            if not isinstance(part, el.tables.Bag):
                with pytest.raises(el.CheckpointError, match=r"sentence-transformers cannot store a QuantizedEmb"):
                    save(str(tmp_path / "out"))
    with pytest.raises(el.CheckpointError, match=r"table\.save_pretrained\(folder"):
        save_model(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    again = replace_table(other, static.embedding.table)
    (tmp_path / "again").mkdir()
    again.save(str(tmp_path / "again"))
    with torch.no_grad():
        assert torch.equal(again(dict(features))["sentence_embedding"], expected)


def test_bags_of_several_tables_are_an_error(unchecked) -> None:
    model = torch.nn.Sequential(el.tables.Bag(el.TokenEmbedding(9, 4)), el.tables.Bag(el.TokenEmbedding(9, 4)))
    with pytest.raises(el.CheckpointError, match="several tables"):
        replace_table(model, el.TokenEmbedding(9, 4))


def test_what_does_not_fit_is_refused(unchecked) -> None:
    model = gpt2()
    with pytest.raises(el.SizeError, match="The table is 98 x 16, the model needs 99 x 16"):
        replace_table(model, el.TokenEmbedding(98, 16))
    el.unpatch(model)
    with pytest.raises(el.CheckpointError, match="embedlayer.patch"):
        replace_table(model, el.TokenEmbedding(99, 16))


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_has_each_tensor_once_and_is_read_back(tied, tmp_path, unchecked) -> None:
    from safetensors.torch import load_file

    model = small(tie_word_embeddings=tied)
    tokenizer = el.train_tokenizer("cat dog", kind="word")
    save_model(model, tmp_path / "out", tokenizer=tokenizer)
    stored = load_file(tmp_path / "out" / "model" / "blocks.safetensors")
    assert ("lm_head.weight" in stored) != tied
    assert not any("wte" in name for name in stored)
    again = load_model(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits + 0, model(IDS).logits + 0)
    assert el.open_model(tmp_path / "out").encode("dog cat") == tokenizer.encode("dog cat").ids
    with pytest.raises(el.FileError, match="is not empty"):
        save_model(model, tmp_path / "out")
    assert run("compress", tmp_path / "out", "--to", "int8", "-o", tmp_path / "smaller") == 0
    smaller = load_model(tmp_path / "smaller")
    assert isinstance(smaller.get_input_embeddings(), el.QuantizedEmbedding)
    with torch.no_grad():
        torch.testing.assert_close(smaller(IDS).logits + 0, model(IDS).logits + 0, atol=0.05, rtol=0.05)


def test_a_damaged_folder_is_refused(tmp_path, unchecked) -> None:
    from safetensors.torch import load_file, save_file

    save_model(small(), tmp_path / "out")
    rest = tmp_path / "out" / "model"
    tensors, config = load_file(rest / "blocks.safetensors"), json.loads((rest / "config.json").read_text())
    (rest / "config.json").write_text(json.dumps({**config, "architectures": ["Tokenizer"]}))
    with pytest.raises(el.CheckpointError, match="names no model class of transformers"):
        load_model(tmp_path / "out")
    (rest / "config.json").write_text(json.dumps(config))
    tensors.pop("transformer.ln_f.weight")
    save_file(tensors, rest / "blocks.safetensors")
    with pytest.raises(el.CheckpointError, match=r"lacks tensors of a GPT2LMHeadModel: .*transformer\.ln_f\.weight"):
        load_model(tmp_path / "out")
    shutil.rmtree(rest)
    with pytest.raises(el.CheckpointError, match="has no folder model"):
        load_model(tmp_path / "out")
