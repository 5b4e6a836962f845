"""Tokenizer classes with a language or a task: the edited folder honours both, or a warning names what is lost."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build, quiet

import embedlayer as el

LETTERS = [chr(code) for code in range(97, 123)]
SCORES = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]


def mbart() -> Any:
    from transformers import MBartTokenizer

    return MBartTokenizer(vocab=SCORES, src_lang="en_XX")


def mbart50() -> Any:
    from transformers import MBart50Tokenizer

    return MBart50Tokenizer(vocab=SCORES, src_lang="en_XX")


def nllb() -> Any:
    from transformers import NllbTokenizer

    names = ["<s>", "<pad>", "</s>", "<unk>", "▁", *LETTERS, "▁d", "og", "▁dog"]
    merges = [("▁", "d"), ("o", "g"), ("▁d", "og")]
    return NllbTokenizer(vocab={name: number for number, name in enumerate(names)}, merges=merges)


def whisper() -> Any:
    from tokenizers import pre_tokenizers
    from transformers import WhisperTokenizer
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    tokenizer = WhisperTokenizer(vocab={name: number for number, name in enumerate(names)}, merges=[])
    marks = ["startoftranscript", *LANGUAGES, "translate", "transcribe", "notimestamps"]
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{mark}|>" for mark in marks]})
    tokenizer.set_prefix_tokens(language="english", task="transcribe")
    return tokenizer


KINDS = {
    "MBart": (mbart, "mbart", {"src_lang": "fr_XX"}, ["fr_XX"]),
    "MBart50": (mbart50, "mbart", {"src_lang": "fr_XX"}, ["fr_XX"]),
    "Nllb": (nllb, "m2m_100", {"src_lang": "fra_Latn"}, ["fra_Latn"]),
    "Whisper": (whisper, "whisper", {"language": "french", "task": "translate"}, ["<|fr|>", "<|translate|>"]),
}


def whisper_model(sizes: dict[str, Any]) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "num_mel_bins": 4, "max_target_positions": 16}
    ids = {"pad_token_id": 256, "bos_token_id": 256, "eos_token_id": 256, "decoder_start_token_id": 257}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **layers, **widths, **ids))


def saved(kind: str, folder: Path) -> Path:
    make, model_type, _, _ = KINDS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = make()
        tokenizer.save_pretrained(folder)
    with quiet():
        sizes = {"vocab_size": len(tokenizer), "tie_word_embeddings": True}
        model = whisper_model(sizes) if kind == "Whisper" else build(model_type, "seq2seq", sizes)[1]
        model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_folder_gives_the_new_ids_and_honours_the_language(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    _, _, settings, names = KINDS[kind]
    folder = saved(kind, tmp_path / "old")
    receipt = el.vocab.edit_vocabulary(folder, special=["<new>"], out=tmp_path / "new")
    tokenizer = receipt.tokenizer
    assert tokenizer is not None
    text = "a dog <new>"
    assert AutoTokenizer.from_pretrained(tmp_path / "new")(text)["input_ids"] == tokenizer.encode(text).ids
    opened = AutoTokenizer.from_pretrained(tmp_path / "new", **settings)
    before = AutoTokenizer.from_pretrained(folder, **settings)
    tokens = opened.convert_ids_to_tokens(opened(text)["input_ids"])
    assert [token for token in tokens if token in names] == names
    assert opened("a dog")["input_ids"] == receipt.remap(torch.tensor(before("a dog")["input_ids"])).tolist()
    roles = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    assert [getattr(opened, role) for role in roles] == [getattr(before, role) for role in roles]


def test_a_removed_language_is_gone(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    receipt = el.vocab.edit_vocabulary(saved("MBart50", tmp_path / "old"), remove=["fr_XX"], out=tmp_path / "new")
    assert receipt.tokenizer is not None
    opened = AutoTokenizer.from_pretrained(tmp_path / "new", src_lang="de_DE")
    assert opened.get_vocab() == receipt.tokenizer.get_vocab()
    assert opened("a")["input_ids"][0] == receipt.tokenizer.token_to_id("de_DE")


def test_whisper_counts_its_languages_so_a_removed_one_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(el.EmbedLayerWarning, match="WhisperTokenizer, does not give .* ignores language, task"):
        el.vocab.edit_vocabulary(saved("Whisper", tmp_path / "old"), remove=["<|de|>"], out=tmp_path / "new")


def test_a_class_that_does_not_give_the_ids_is_named_with_its_settings(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = saved("Nllb", tmp_path / "old")
    settings = folder / "tokenizer_config.json"
    config = json.loads(settings.read_text()) | {"tokenizer_class": "M2M100Tokenizer"}  # which reads other files
    settings.write_text(json.dumps(config))
    with pytest.warns(el.EmbedLayerWarning, match=r"M2M100Tokenizer, does not give .* ignores src_lang, tgt_lang"):
        receipt = el.vocab.edit_vocabulary(folder, special=["<new>"], out=tmp_path / "new")
    assert receipt.tokenizer is not None
    ids = AutoTokenizer.from_pretrained(tmp_path / "new")("a dog <new>")["input_ids"]
    assert ids == receipt.tokenizer.encode("a dog <new>").ids
