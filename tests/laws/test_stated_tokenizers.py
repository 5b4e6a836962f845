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


@looped("name", [*MORE, "Qwen3_5"])
def test_a_pair_is_read_by_the_rules_of_its_class(tmp_path: Path, name: str) -> None:
    settings, pair = MORE.get(name, {}), PAIRS.get(name, byte_pair)()
    beside: dict[str, object] = {"tokenizer_config": {"tokenizer_class": f"{name}Tokenizer", **settings}}
    if "added_tokens_decoder" not in settings:
        beside["added_tokens"] = {"<new>": len(pair["vocab"])}
    write_pair(tmp_path, pair, beside)
    ours, theirs = load_tokenizer(tmp_path), ids_of_transformers(name, tmp_path)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text), text


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


UNKNOWN_RULES: list[tuple[Callable[[], dict[str, Any]], dict[str, object]]] = [
    (clip_pair, {}),  # not a vocabulary of GPT-2's kind
    (word_pair, {}),
    (byte_pair, {"tokenizer_config": {"tokenizer_class": "OwnTokenizer"}}),
    (byte_pair, {"config": {"model_type": "llama"}}),
    (word_pair, {"config": {"model_type": "xlm"}}),
    (byte_pair, {"config": {"model_type": "starcoder2"}, "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}}),
    (byte_pair, {"tokenizer_config": {"add_prefix_space": 1}}),
    (byte_pair, {"added_tokens": {"<new>": 9000}}),
]


@looped("pair, beside", UNKNOWN_RULES)
def test_a_pair_whose_rules_are_not_known_is_refused(tmp_path: Path, pair, beside) -> None:
    write_pair(tmp_path, pair(), beside)
    with pytest.raises(TokenizerError):
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


OTHER_RULES: list[dict[str, object]] = [
    {"tokenizer_class": "BertJapaneseTokenizer"},
    {"tokenizer_class": "OwnTokenizer"},
    {"do_basic_tokenize": False},
    {"unk_token": "<none>"},
]


@looped("settings", OTHER_RULES)
def test_a_vocab_txt_of_other_rules_is_refused(tmp_path: Path, settings: dict[str, object]) -> None:
    write_words(tmp_path, settings)
    with pytest.raises(TokenizerError):
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


REFUSED_MODELS: list[tuple[str, dict[str, object]]] = [
    ("sentencepiece.bpe.model", {}),  # which no file beside it states the class of
    ("spiece.model", {"tokenizer_class": "SiglipTokenizer"}),
    ("spiece.model", {"tokenizer_class": "OwnTokenizer"}),
    ("spiece.model", {"tokenizer_class": "GPT2Tokenizer"}),
    ("m.model", {"tokenizer_class": "MBartTokenizer", "src_lang": "xx"}),
    ("m.model", {"tokenizer_class": "PegasusTokenizer", "offset": 7}),
    ("m.model", {"added_tokens_decoder": {"9": {"content": "<new>"}}}),
]


@looped("file, settings", REFUSED_MODELS)
def test_a_sentencepiece_model_of_other_rules_is_refused(tmp_path: Path, file: str, settings) -> None:
    (tmp_path / file).write_bytes(sentencepiece_model("XLMRoberta"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path)
