"""A folder states its tokenizer by a vocabulary and the files beside it: the IDs are those of the original class."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from covering import looped
from tokenizer_folders import (
    PAIRS,
    TEXTS,
    byte_pair,
    clip_pair,
    sentencepiece_model,
    word_pair,
    write_pair,
    write_words,
)
from tokenizers import AddedToken

from embedlayer.core.errors import TokenizerError
from embedlayer.families.tokenizers import BPE_CLASSES
from embedlayer.tokenization.read import load_tokenizer


def ids_of_transformers(name: str, folder: Path) -> Callable[[str], list[int]]:
    """The IDs of the original class, which reads the same folder."""
    transformers = pytest.importorskip("transformers")
    original: Any = getattr(transformers, f"{name}Tokenizer").from_pretrained(folder)
    if name == "Qwen3_5":  # of 5.24, does not read its files
        pair = byte_pair()
        original = type(original)(vocab=pair["vocab"], merges=[tuple(merge) for merge in pair["merges"]])
        original.add_tokens([AddedToken("<new>", normalized=True)])
    return lambda text: original.backend_tokenizer.encode(text).ids


MORE: dict[str, dict[str, object]] = {
    "GPT2": {"add_prefix_space": True, "add_bos_token": True, "tokenizer_class": "GPT2TokenizerFast"},
    "Roberta": {"mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True}, "add_prefix_space": True},
    "Qwen2": {
        "added_tokens_decoder": {
            "0": {"content": "<|endoftext|>", "normalized": False, "special": True},
            "365": {"content": "<new>", "lstrip": True, "rstrip": True, "normalized": False, "special": False},
        }
    },
}


@looped("name", sorted(set(BPE_CLASSES) - {"OPT"}))  # a class of transformers' older releases alone
def test_a_pair_is_read_by_the_rules_of_its_class(tmp_path: Path, name: str) -> None:
    for place, settings in enumerate([{}, MORE.get(name)]):
        if settings is None:
            continue
        folder = tmp_path / str(place)
        folder.mkdir()
        pair = PAIRS.get(name, byte_pair)()
        beside: dict[str, object] = {"tokenizer_config": {"tokenizer_class": f"{name}Tokenizer", **settings}}
        if "added_tokens_decoder" not in settings:
            tokens = ["<new>", *(["<|startoftranscript|>", "<|notimestamps|>"] if name == "Whisper" else [])]
            beside["added_tokens"] = {token: len(pair["vocab"]) + place for place, token in enumerate(tokens)}
        write_pair(folder, pair, beside)
        ours, theirs = load_tokenizer(folder), ids_of_transformers(name, folder)
        ends = ours.encode("").ids if name == "Blenderbot" else []  # </s>, which 5.24 leaves out
        for text in TEXTS:
            assert ours.encode(text).ids == [*theirs(text), *ends], text


def test_opt_has_the_special_tokens_of_its_configuration(tmp_path: Path) -> None:
    write_pair(tmp_path, byte_pair(), {"config": {"model_type": "opt"}})
    (tmp_path / "stated").mkdir()
    settings: dict[str, object] = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    settings |= {"pad_token": "<pad>", "add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"}
    write_pair(tmp_path / "stated", byte_pair(), {"tokenizer_config": settings})
    theirs = ids_of_transformers("GPT2", tmp_path / "stated")
    for text in TEXTS:
        assert load_tokenizer(tmp_path).encode(text).ids == theirs(text), text
        assert load_tokenizer(tmp_path / "stated").encode(text).ids == theirs(text), text


@pytest.mark.parametrize(("model_type", "name"), [("clip", "CLIP"), ("qwen3", "Qwen2"), ("roberta", "Roberta")])
def test_the_model_type_states_the_class(tmp_path: Path, model_type: str, name: str) -> None:
    write_pair(tmp_path, PAIRS.get(name, byte_pair)(), {"config": {"model_type": model_type}})
    theirs = ids_of_transformers(name, tmp_path)
    for text in TEXTS:
        assert load_tokenizer(tmp_path / "merges.txt").encode(text).ids == theirs(text), text


def test_a_pair_alone_is_gpt2s(tmp_path: Path) -> None:
    write_pair(tmp_path, byte_pair(), {"tokenizer_config": {"model_max_length": 1024}})
    theirs = ids_of_transformers("GPT2", tmp_path)
    for text in TEXTS[:-3]:
        assert load_tokenizer(tmp_path).encode(text).ids == theirs(text), text


@looped(
    "pair, beside, words",
    [
        (clip_pair, {}, r"entry '.*</w>', so it is not a vocabulary of GPT-2's kind"),
        (word_pair, {}, "not a vocabulary of GPT-2's kind.*Put the tokenizer_config.json or config.json"),
        (
            byte_pair,
            {"tokenizer_config": {"tokenizer_class": "OwnTokenizer"}},
            "OwnTokenizer, which has rules that are not known here.*encode text with the class itself",
        ),
        (byte_pair, {"config": {"model_type": "llama"}}, r"no file.*class \(model type llama\).*its tokenizer.json"),
        (
            word_pair,
            {"config": {"model_type": "xlm"}},
            "XLMTokenizer .model type xlm., which changes .*pass the token",
        ),
        (
            byte_pair,
            {"config": {"model_type": "starcoder2"}, "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}},
            "model type starcoder2 splits text by other rules, which only its tokenizer.json has",
        ),
        (byte_pair, {"tokenizer_config": {"add_prefix_space": 1}}, "sets add_prefix_space to 1, not true or false"),
        (byte_pair, {"added_tokens": {"<new>": 9000}}, "gives '<new>' the ID 9000, but after the tokens of vocab.json"),
    ],
)
def test_a_pair_whose_rules_are_not_known_is_refused(
    tmp_path: Path, pair: Callable[[], dict[str, Any]], beside: dict[str, object], words: str
) -> None:
    write_pair(tmp_path, pair(), beside)
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(tmp_path)


def test_a_folder_with_a_refused_tokenizer_opens_without_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    import embedlayer as el

    write_pair(tmp_path, byte_pair(), {"tokenizer_config": {"tokenizer_class": "OwnTokenizer"}})
    sizes = {"vocab_size": 365, "n_embd": 8, "n_positions": 4, "n_layer": 1, "n_head": 2, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    save_file({"wte.weight": torch.ones(365, 8), "wpe.weight": torch.ones(4, 8)}, tmp_path / "model.safetensors")
    with pytest.warns(el.EmbedLayerWarning, match="OwnTokenizer.*what needs text is refused"):
        opened = el.open_model(tmp_path)
    assert opened.table.weight.shape == (365, 8)
    assert opened.tokenizer is None
    assert "OwnTokenizer" in opened.no_tokenizer


@pytest.mark.parametrize("name", ["Bert", "MPNet"])
@looped(
    "settings",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
        {"do_lower_case": True, "strip_accents": False},
    ],
)
def test_a_vocab_txt_is_read_by_its_settings(tmp_path: Path, name: str, settings: dict[str, object]) -> None:
    write_words(tmp_path, {"tokenizer_class": f"{name}Tokenizer", **settings})
    size = len((tmp_path / "vocab.txt").read_bytes().decode().split("\n"))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": size}))
    ours, theirs = load_tokenizer(tmp_path), ids_of_transformers(name, tmp_path)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text), text


@looped(
    "settings, words",
    [
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "BertJapaneseTokenizer, which splits a text by rules of its"),
        (
            {"tokenizer_class": "OwnTokenizer"},
            "OwnTokenizer, which has rules that are not known here.*pass the token IDs",
        ),
        ({"do_basic_tokenize": False}, "sets do_basic_tokenize to false, which embedlayer does not read"),
        ({"unk_token": "<none>"}, "it has no <none>"),
    ],
)
def test_a_vocab_txt_of_other_rules_is_refused(tmp_path: Path, settings: dict[str, object], words: str) -> None:
    write_words(tmp_path, settings)
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "shift", "last", "starts", "ends"),
    [
        ("Nllb", "sentencepiece.bpe.model", 1, {"ace_Arab": 1, "eng_Latn": 47, "<mask>": 203}, "eng_Latn", "</s>"),
        ("XGLM", "sentencepiece.bpe.model", 1, {"<madeupword6>": 7}, "</s>", ""),
        ("Gemma", "tokenizer.model", 0, {}, "<bos>", ""),
    ],
)
def test_a_model_that_transformers_no_longer_reads(
    tmp_path: Path, name: str, file: str, shift: int, last: dict[str, int], starts: str, ends: str
) -> None:
    """5.24 gives NLLB's languages other IDs than the model has, and does not read the files of XGLM and Gemma.

    The IDs are those of their classes in 4.x: `fairseq_offset`, and the tokens behind the subwords.
    """
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / file).write_bytes(sentencepiece_model(name))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name.lower()}))
    ours, processor = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(str(tmp_path / file))
    assert {token: ours.token_to_id(token) - len(processor) for token in last} == last
    for text in TEXTS:
        if "<" not in text:
            ids = [3 if own == processor.unk_id() else own + shift for own in processor.encode(text)]
            around = [[ours.token_to_id(token)] if token else [] for token in (starts, ends)]
            assert ours.encode(text).ids == [*around[0], *ids, *around[1]], text


@looped(
    "file, settings, words",
    [
        ("sentencepiece.bpe.model", {}, "no file beside it states which one of XLMRoberta, MBart.*config.json of the"),
        ("spiece.model", {"tokenizer_class": "SiglipTokenizer"}, "SiglipTokenizer, which changes a text before"),
        ("spiece.model", {"tokenizer_class": "OwnTokenizer"}, "OwnTokenizer, which has rules that are not known here"),
        ("spiece.model", {"tokenizer_class": "GPT2Tokenizer"}, "GPT2Tokenizer, which does not read this file"),
        ("m.model", {"tokenizer_class": "MBartTokenizer", "src_lang": "xx"}, "no language 'xx', which src_lang"),
        (
            "m.model",
            {"tokenizer_class": "PegasusTokenizer", "offset": 7},
            "PegasusTokenizer, which is read with offset 103, not 7",
        ),
        ("m.model", {"added_tokens_decoder": {"9": {"content": "<new>"}}}, "gives '<new>' the ID 9, but after"),
    ],
)
def test_a_sentencepiece_model_of_other_rules_is_refused(
    tmp_path: Path, file: str, settings: dict[str, object], words: str
) -> None:
    (tmp_path / file).write_bytes(sentencepiece_model("XLMRoberta"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(tmp_path)
