"""Folders that state a tokenizer by a small vocabulary and the files beside it, as models have them."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import ENGLISH, LANGUAGES, clip_bpe
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from embedlayer.families.tokenizers import BPE_CLASSES
from embedlayer.tokenization import train_tokenizer

TEXTS = (
    *LANGUAGES,
    "I'M sure it's John's; WE'LL see 12345 cats",
    "\n\nx  two   spaces\t\ttab\r\n  \n end  ",
    "Tie\u0302\u0301ng Vie\u0323\u0302t, tiếng Việt, cafe\u0301",
    "한국어 \u1112\u1161\u11ab\u1100\u1173\u11af, ﾊﾟｿｺﾝ ｶﾞｷﾞ ＡＢＣ１２",
    "বাংলা ভাষা কো, தமிழ் கொ, ไทย ภาษา, हिन्दी",
    "Ἑλλάς ἄνθρωπος α\u0313\u0301, עברית שָׁלוֹם",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️ a▁b ▁c",
    "\x00a\x1f b\u200bc\u00a0d\ufeffe\u2028f",
    "``quoted'' text, 1,000 or 2,000,000 dogs, 12, 9,9,9 and 2024, 1,000,",
    "before <|endoftext|> after</s> <pad>x<unk> [SEP] <new> end <NEW>",
    "",
    " ",
)
BYTE_SPECIALS = ("<|endoftext|>", "<s>", "</s>", "<pad>", "<unk>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")


@cache
def byte_pair() -> dict[str, Any]:
    return parts(train_tokenizer([ENGLISH, *LANGUAGES], "bpe", vocab_size=600, special_tokens=BYTE_SPECIALS))


def parts(tokenizer: Tokenizer) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": model["merges"]}


@cache
def word_pair() -> dict[str, Any]:
    built = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    built.normalizer = normalizers.BertNormalizer(lowercase=False)
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, end_of_word_suffix="</w>", special_tokens=specials, show_progress=False
    )
    built.train_from_iterator([ENGLISH, *LANGUAGES], trainer)
    return parts(built)


@cache
def clip_pair() -> dict[str, Any]:
    pair = parts(clip_bpe())
    return {**pair, "vocab": {**pair["vocab"], "<|startoftext|>": len(pair["vocab"])}}


def write_pair(folder: Path, pair: dict[str, Any], beside: dict[str, object]) -> None:
    (folder / "vocab.json").write_text(json.dumps(pair["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in pair["merges"]))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def write_words(folder: Path, settings: dict[str, object]) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    words += ["[QUESTION]", "<cls>", "<sep>"]
    letters = set("".join(TEXTS)) - set(" \n\r\t\x00")
    pieces = sorted({piece for text in TEXTS for piece in text.split() if "<" not in piece} | letters)
    lower = [piece.lower() for piece in pieces if len(piece) < 9 and "<" not in piece]
    entries = dict.fromkeys([*words, *pieces, "cafe", "viet", "tieng", *lower, *(f"##{each}" for each in lower)])
    (folder / "vocab.txt").write_bytes("\n".join(entry for entry in entries if entry.isprintable()).encode())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


_T5: dict[str, object] = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
_ALBERT: dict[str, object] = {
    "pad_id": 0,
    "unk_id": 1,
    "bos_id": -1,
    "eos_id": -1,
    "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
}
_BPE: dict[str, object] = {"model_type": "bpe"}
_BYTES: dict[str, object] = {
    **_BPE,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
OPTIONS: dict[str, dict[str, object]] = {
    **dict.fromkeys(("T5", "MT5", "Udop", "VideoPrism", "Lasr", "Pegasus"), _T5),
    **dict.fromkeys(("Albert", "FNet", "RemBert"), _ALBERT),
    **dict.fromkeys(("Nllb", "M2M100", "SeamlessM4T", "Reformer"), _BPE),
    **dict.fromkeys(("Llama", "CodeLlama"), _BYTES),
    "XLNet": {"control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]},
    "BertGeneration": {"control_symbols": ["<pad>", "<::::>"]},
    "BigBird": {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"]},
    "DebertaV2": {
        "pad_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 3,
        "pad_piece": "[PAD]",
        "bos_piece": "[CLS]",
        "eos_piece": "[SEP]",
        "unk_piece": "[UNK]",
    },
    "Gemma": {
        **_BYTES,
        "add_dummy_prefix": False,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
    },
}
"""Class -> options of the trainer that give a model its special subwords; the others have the trainer's own."""


def sentencepiece_model(name: str) -> bytes:
    """A small model as the class has it: the special subwords and the kind of the model."""
    return trained(json.dumps(OPTIONS.get(name, {})))


@cache
def trained(stated: str) -> bytes:
    options, model = json.loads(stated), io.BytesIO()
    pytest.importorskip("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter([*ENGLISH.splitlines()[:20], *(text for text in TEXTS if "\x00" not in text)]),
        model_writer=model,
        vocab_size=540 if "byte_fallback" in options else 260,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


MORE_ROLES = {"Whisper": ("<|startoftranscript|>", "<|notimestamps|>")}
PAIRS = {"CLIP": clip_pair, "OpenAIGPT": word_pair, "Herbert": word_pair}


def write_class(folder: Path, name: str, files: set[str], settings: dict[str, object] | None = None) -> None:
    """Write the vocabulary files of a tokenizer class, without a `tokenizer.json`, and the name of the class."""
    stated = {"tokenizer_class": f"{name}Tokenizer", **(settings or {})}
    for file in files:
        if file.endswith((".model", ".spm")):
            (folder / file).write_bytes(sentencepiece_model(name))
        elif file == "vocab.txt":
            write_words(folder, stated)
        elif file == "entity_vocab.json":
            (folder / file).write_text(json.dumps({"[UNK]": 0, "[PAD]": 1, "[MASK]": 2, "[MASK2]": 3}))
        elif file not in ("vocab.json", "merges.txt", "tokenizer_config.json", "tokenizer.json"):
            (folder / file).write_text("{}")
    if {"vocab.json", "merges.txt"} <= files:
        pair = PAIRS.get(name, byte_pair)()
        specials = [*(BPE_CLASSES[name].roles.values() if name in BPE_CLASSES else ()), *MORE_ROLES.get(name, ())]
        places = {token: place for place, token in enumerate(dict.fromkeys([*pair["vocab"], *specials]))}
        write_pair(folder, {**pair, "vocab": places}, {})
    elif "vocab.json" in files:
        sentencepiece = pytest.importorskip("sentencepiece")
        processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(name))
        subwords = [processor.id_to_piece(i) for i in reversed(range(3, len(processor)))]
        entries = ["<s>", "<pad>", "</s>", "<unk>", "<unused>", *subwords, "madeupword0000"]
        (folder / "vocab.json").write_text(json.dumps({entry: place for place, entry in enumerate(entries)}))
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
