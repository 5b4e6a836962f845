"""Loading: what is found, what is read, and what is refused."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import VARIANTS, quiet

import embedlayer as el

V, D = 20, 8
GPT2 = {"model_type": "gpt2", "vocab_size": V, "n_embd": D, "n_positions": 16, "n_head": 2}


def write(folder: Path, config: dict | None, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def gpt2() -> dict[str, torch.Tensor]:
    return {"wte__weight": torch.randn(V, D), "wpe__weight": torch.randn(16, D), "h__0__attn": torch.randn(500)}


def test_only_the_tensors_of_the_layer_are_read(tmp_path, gpt2) -> None:
    layer = el.load(write(tmp_path, GPT2, **gpt2))
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") + 8
    assert layer.load_record.bytes_read == header + (V + 16) * D * 4
    assert {tensor.name for tensor in layer.load_record.tensors} == {"wte.weight", "wpe.weight"}


def test_of_a_sharded_checkpoint_only_the_shards_of_the_layer_are_needed(tmp_path) -> None:
    _, model = VARIANTS["LLaMA 2"].build()
    with quiet():
        model.save_pretrained(tmp_path, max_shard_size="12KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {index["model.embed_tokens.weight"], index["lm_head.weight"]}
    for file in set(index.values()) - needed:
        (tmp_path / file).unlink()
    assert len(needed) < len(set(index.values()))
    layer = el.load(tmp_path)
    assert torch.equal(layer.table.weight, model.model.embed_tokens.weight)
    assert torch.equal(layer.head.weight, model.lm_head.weight)
    (tmp_path / index["lm_head.weight"]).unlink()
    with pytest.raises(el.CheckpointError, match="lacks its shard"):
        el.load(tmp_path)


def test_the_type_is_the_tables_or_the_one_that_is_asked_for(tmp_path, gpt2) -> None:
    gpt2["wte__weight"] = gpt2["wte__weight"].bfloat16()
    folder = write(tmp_path, GPT2, **gpt2)
    assert {parameter.dtype for parameter in el.load(folder).parameters()} == {torch.bfloat16}
    layer = el.load(folder, dtype=torch.float64)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float64}
    assert torch.equal(layer.table.weight, gpt2["wte__weight"].double())
    layer.save_pretrained(tmp_path / "saved")
    assert el.EmbeddingLayer.from_pretrained(tmp_path / "saved").table.weight.dtype == torch.float64
    assert el.load(tmp_path / "saved", dtype=torch.float16).table.weight.dtype == torch.float16


def test_an_unknown_family_is_refused_with_the_nearest_known_types(tmp_path) -> None:
    rows, head = torch.randn(V, D), torch.randn(V, D)
    folder = write(tmp_path, {"model_type": "gpt22"}, model__tok_embeddings__weight=rows, model__output__weight=head)
    nearest = r"config\.json: model_type 'gpt22' is not known \(nearest known: 'gpt2'.*table_only=True\)\.$"
    with pytest.raises(el.CheckpointError, match=nearest):
        el.load(folder)
    layer = el.load(folder, table_only=True)
    assert torch.equal(layer.table.weight, rows)
    assert layer.head is None
    assert type(layer.position) is el.Position
    assert (layer.recipe, layer.table.scale) == ((), None)
    assert torch.equal(layer.input(torch.arange(V)), rows)
    report = layer.report()
    assert (report.family, report.table_only, report.head) == ("unknown", True, None)
    assert "note: Only the table was read, and found by its name" in str(report)


def test_a_family_of_newer_transformers_is_refused_with_its_version(tmp_path, gpt2) -> None:
    for version, is_newer in (("5.24.1", False), ("4.1", False), ("5.25.0.dev0", True), ("6.0.0", True), ("", False)):
        folder = write(tmp_path, {"model_type": "gpt9", "transformers_version": version}, **gpt2)
        with pytest.raises(el.CheckpointError, match="nearest known") as caught:
            el.load(folder)
        assert (f"written by transformers {version}" in str(caught.value)) == is_newer


def test_only_the_table_of_a_known_family_is_read_by_its_record(tmp_path, gpt2) -> None:
    folder = write(
        tmp_path, GPT2 | {"pad_token_id": 3}, wte__weight=gpt2["wte__weight"].index_fill(0, torch.tensor(3), 0)
    )
    with pytest.raises(el.CheckpointError, match="no table of positions"):
        el.load(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = el.load(folder, table_only=True)
    assert (layer.family, layer.head, layer.table.padding_idx) == ("gpt2", None, 3)
    layer.save_pretrained(tmp_path / "saved")
    again = el.load(tmp_path / "saved")
    assert torch.equal(again.table.weight, layer.table.weight)
    assert again.head is None


def test_only_the_table_of_a_saved_layer_is_kept(tmp_path, gpt2) -> None:
    layer = el.load(write(tmp_path, GPT2, **gpt2))
    layer.save_pretrained(tmp_path / "saved")
    alone = el.load(tmp_path / "saved", table_only=True)
    assert torch.equal(alone.table.weight, layer.table.weight)
    assert (alone.head, alone.recipe, alone.load_record.table_only) == (None, (), True)


def test_two_tables_of_an_unknown_family_are_not_guessed_between(tmp_path) -> None:
    tables = {f"{side}__embed_tokens__weight": torch.randn(V, D) for side in ("encoder", "decoder")}
    with pytest.raises(el.CheckpointError, match=r"several tables called embed_tokens\.weight: decoder.*encoder"):
        el.load(write(tmp_path, {"model_type": "novel"}, **tables), table_only=True)
    small = {"audio__embed_tokens__weight": torch.randn(V - 1, D), "text__embed_tokens__weight": torch.randn(V, D)}
    layer = el.load(write(tmp_path, {"model_type": "novel", "vocab_size": V}, **small), table_only=True)
    assert layer.tensor_names == {"table.weight": ("text.embed_tokens.weight",)}


LLAMA = {"model_type": "llama", "vocab_size": V, "hidden_size": D, "num_attention_heads": 2, "num_hidden_layers": 1}


def test_a_head_is_tied_by_what_is_stored(tmp_path) -> None:
    rows, other = torch.randn(V, D), torch.randn(V, D)
    tied = LLAMA | {"tie_word_embeddings": True}
    name = "model__embed_tokens__weight"
    assert el.load(write(tmp_path, tied, **{name: rows})).head.tied
    assert el.load(write(tmp_path, LLAMA, **{name: rows})).head is None

    layer = el.load(write(tmp_path, tied, **{name: rows}, lm_head__weight=rows.clone()))
    assert layer.head.tied
    assert layer.tensor_names["table.weight"] == ("model.embed_tokens.weight", "lm_head.weight")
    assert not el.load(write(tmp_path, LLAMA, **{name: rows}, lm_head__weight=rows.clone())).head.tied

    with pytest.warns(el.EmbedLayerWarning, match="hold other numbers: the head is read as untied"):
        layer = el.load(write(tmp_path, tied, **{name: rows}, lm_head__weight=other))
    assert torch.equal(layer.head.weight, other)

    alone = {"lm_head__weight": other, "model__embed_positions__weight": rows}
    layer = el.load(write(tmp_path, tied, **alone))  # the one that is there serves both ends
    assert layer.head.tied
    assert torch.equal(layer.table.weight, other)
    for only in (False, True):
        with pytest.raises(
            el.CheckpointError, match=r"transformer\.wte\.weight has the shape of the head lm_head\.weight"
        ):
            el.load(write(tmp_path, tied, **alone, transformer__wte__weight=rows.clone()), table_only=only)


def test_names_from_tensorflow_and_older_files_are_found(tmp_path) -> None:
    config = {"model_type": "bert", "vocab_size": V, "hidden_size": D}
    norm = {"embeddings__LayerNorm__gamma": torch.randn(D), "embeddings__LayerNorm__beta": torch.randn(D)}
    rows = {f"embeddings__{part}_embeddings__weight": torch.randn(V, D) for part in ("word", "position", "token_type")}
    layer = el.load(write(tmp_path, config, **norm, **rows))
    assert torch.equal(layer.norm.weight, norm["embeddings__LayerNorm__gamma"])
    assert layer.norm.eps == 1e-12
    config = {"model_type": "gpt_neox", "vocab_size": V, "hidden_size": D, "num_attention_heads": 2, "rotary_pct": 0.5}
    rows = {"gpt_neox__embed_in__weight": torch.randn(V, D), "embed_out__weight": torch.randn(V, D)}
    layer = el.load(write(tmp_path, config, **rows))
    assert torch.equal(layer.head.weight, rows["embed_out__weight"])
    assert layer.position.rotary_dim == 2


def test_a_model_of_several_parts_is_read_by_its_text_configuration(tmp_path) -> None:
    text = LLAMA | {"model_type": "gemma3_text", "head_dim": 4, "layer_types": ["full_attention"], "rope_theta": 1e6}
    text |= {"rope_local_base_freq": 1e4}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 99}}
    layer = el.load(write(tmp_path, config, language_model__model__embed_tokens__weight=torch.randn(V, D)))
    assert layer.family == "gemma3"
    assert layer.head.tied
    assert layer.position.base == 1e6


def test_tensors_and_configuration_must_agree(tmp_path, gpt2) -> None:
    """`tests/laws/test_checkpoint_damage.py` has every tensor and every size of each family."""
    for changes, named in (
        ({"vocab_size": 0}, "is empty"),
        ({"model_type": "mpt", "n_embd": None, "n_head": None}, "num_attention_heads"),
        ({"model_type": "gptj", "rotary_dim": 3}, " 3 "),
        ({"model_type": "gptj", "rotary_dim": 10**9}, "rotary_dim"),
    ):
        rows = {"wte__weight": torch.empty(0, D)} if named == "is empty" else {}
        with pytest.raises(el.CheckpointError, match=named):
            el.load(write(tmp_path, GPT2 | changes, **(gpt2 | rows)))


def test_rows_that_are_no_numbers_are_counted(tmp_path, gpt2) -> None:
    gpt2["wte__weight"][3, 1] = torch.nan
    gpt2["wte__weight"][5] = torch.inf
    with pytest.warns(el.EmbedLayerWarning, match="2 of 20 rows of the table hold NaN or infinity"):
        layer = el.load(write(tmp_path, GPT2, **gpt2))
    assert layer.report().nonfinite_rows == {"table": 2}
    assert "2 rows of the table contain NaN" in str(layer.report())


PUBLISHED = {  # how the published configurations say it, with smaller sizes
    "gpt-j-6b": {"model_type": "gptj", "n_embd": 64, "n_head": 2, "n_layer": 1, "rotary": True, "rotary_dim": 8},
    "Qwen2.5-7B": LLAMA | {"model_type": "qwen2", "rope_theta": 1e6, "use_mrope": False, "use_sliding_window": False},
    "Llama-2-7b": LLAMA | {"rope_scaling": None},
    "pythia": LLAMA | {"model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25, "hidden_size": 64},
    "falcon-7b": LLAMA | {"model_type": "falcon", "alibi": False, "multi_query": True},
    "c4ai-command-r": LLAMA | {"model_type": "cohere", "logit_scale": 0.0625},
    "gemma-3-4b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 64,
            "num_hidden_layers": 7,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_configurations_leave_out_is_what_transformers_takes(tmp_path, name) -> None:
    from transformers import AutoConfig

    config = PUBLISHED[name]
    text = config.get("text_config", config)
    table = {"gptj": "wte", "gpt_neox": "embed_in", "falcon": "word_embeddings"}.get(
        config["model_type"], "embed_tokens"
    )
    rows = torch.randn(V, text.get("hidden_size", text.get("n_embd")))
    layer = el.load(write(tmp_path, config, **{f"{table}__weight": rows}))
    with quiet():
        peer = AutoConfig.for_model(**text)
    stated = getattr(peer, "rope_parameters", None) or {"rope_theta": 10000.0}
    kinds = [kind for kind in stated if kind.endswith("attention")]
    for kind in kinds or [None]:
        theirs = stated[kind] if kind else stated
        ours = layer.position_of(kind)
        assert ours.base == theirs["rope_theta"]
        assert (ours.scaling is None) == ("factor" not in theirs)
        share = peer.rotary_dim / 32 if name == "gpt-j-6b" else theirs.get("partial_rotary_factor", 1)
        head_dim = getattr(peer, "head_dim", None) or peer.hidden_size // peer.num_attention_heads
        assert (ours.head_dim, ours.rotary_dim) == (head_dim, int(head_dim * share))


def test_the_tokenizer_is_read_when_it_is_asked_for(tmp_path, gpt2) -> None:
    folder = write(tmp_path, GPT2, **gpt2)
    assert el.load(folder).tokenizer is None
    assert el.load(folder).report().tokenizer is None
    (folder / "tokenizer.json").write_text("{}")
    layer = el.load(folder)  # a damaged tokenizer is nobody's business until it is used
    with pytest.raises(el.TokenizerError):
        _ = layer.tokenizer
    assert "tokenizer.json" in layer.report().tokenizer


def test_the_tokenizer_is_saved_with_the_layer(tmp_path) -> None:
    config = GPT2 | {"vocab_size": 257}
    folder = write(tmp_path, config, wte__weight=torch.randn(257, D), wpe__weight=torch.randn(16, D))
    el.train_tokenizer((), "byte").save(str(folder / "tokenizer.json"))
    el.load(folder).save_pretrained(tmp_path / "saved")
    again = el.load(tmp_path / "saved")
    assert again.tokenizer.encode("Hi").ids == [72, 105]
    assert again.report().source == str(tmp_path / "saved")
    assert again.report().tensors


def test_a_static_embedding_equals_sentence_transformers(tmp_path) -> None:
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    peer = StaticEmbedding(el.train_tokenizer((), "byte"), embedding_dim=D)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.StaticEmbedding"}]
    for path in ("", ".", "0_StaticEmbedding"):
        folder = tmp_path / f"model{path}"
        (folder / path).mkdir(parents=True)
        (folder / "modules.json").write_text(json.dumps([modules[0] | {"path": path}]))
        peer.save(str(folder / path))
        layer = el.load(folder)
        assert (layer.family, layer.head) == ("static_embedding", None)
        ids = torch.tensor(layer.tokenizer.encode("cats and dogs").ids)
        features = {"input_ids": ids, "offsets": torch.tensor([0])}
        assert torch.allclose(layer.input(ids).mean(0), peer(features)["sentence_embedding"][0], atol=1e-7)


def test_model2vec_is_folded_as_sentence_transformers_folds_it(tmp_path) -> None:
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    rows, mapping, weights = torch.randn(30, D), torch.randint(0, 30, (257,)), torch.rand(257).double()
    config = {"model_type": "model2vec", "hidden_dim": D, "normalize": True}
    for stored in ({}, {"mapping": mapping}, {"weights": weights}, {"mapping": mapping, "weights": weights}):
        table = rows if "mapping" in stored else torch.randn(257, D)
        folder = write(tmp_path / "_".join(["model", *stored]), config, embeddings=table, **stored)
        el.train_tokenizer((), "byte").save(str(folder / "tokenizer.json"))
        layer = el.load(folder)
        peer = StaticEmbedding.load(str(folder))
        assert layer.family == "model2vec"
        assert (layer.table.weight - peer.embedding.weight).abs().max() < 1e-6
    with pytest.raises(el.CheckpointError, match="write_into"):
        layer.write_into(folder, tmp_path / "out")
    el.vocab.write_into(layer.table, el.load_tokenizer(folder), folder, tmp_path / "out")
    assert (el.load(tmp_path / "out").table.weight - layer.table.weight).abs().max() < 1e-6
    for wrong in ({"mapping": mapping + 30}, {"weights": weights}):
        with pytest.raises(el.CheckpointError):
            el.load(write(folder, config, embeddings=rows, **wrong))


def test_t5_1_1_is_scaled_as_transformers_reads_it_back(tmp_path) -> None:
    from transformers import T5ForConditionalGeneration

    for name in ("T5", "T5 1.1"):
        with quiet():
            VARIANTS[name].build()[1].save_pretrained(tmp_path / name)
            config = json.loads((tmp_path / name / "config.json").read_text())
            if name == "T5 1.1":  # as the published files say it
                del config["scale_decoder_outputs"]
                config["tie_word_embeddings"] = False
                (tmp_path / name / "config.json").write_text(json.dumps(config))
            model = T5ForConditionalGeneration.from_pretrained(tmp_path / name)
        layer = el.load(tmp_path / name)
        assert layer.head.logit_scale == (64**-0.5 if model.config.scale_decoder_outputs else 1.0)
        assert layer.head.tied == (model.lm_head.weight is model.shared.weight)
        assert torch.equal(layer.head.weight, model.lm_head.weight)


def test_a_type_that_rows_cannot_have_is_refused(tmp_path, gpt2) -> None:
    with pytest.raises(el.SizeError, match=r"not torch\.int8"):
        el.load(write(tmp_path, GPT2, **gpt2), dtype=torch.int8)
