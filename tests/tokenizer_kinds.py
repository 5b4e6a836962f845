"""Every kind of tokenizer, small: the laws in `tests/laws` on tokenizers are run over these.

A new kind is tested by adding it here. All are trained on `ENGLISH`.
"""

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from embedlayer.tokenization.train import train_tokenizer

ENGLISH = (
    "In the beginning there was a small dog. The small dog loved other small dogs, and they loved it back!\n"
    "Don't ask why (nobody knows): dogs love, lovingly, and beginners begin again; 12 dogs in 2024.\n"
) * 20
LANGUAGES = (
    "The dogs ask why they loved.",
    "Der Hund läuft über die Straße, natürlich!",
    "Cet été, le garçon naïf a mangé à l'hôtel.",
    "吾輩は猫である。名前はまだ無い。",
    "Привет, собака! Как дела?",
    "مرحبا بالعالم",
    "🙂👩‍💻 \x07 \u0301 ½™",
)
BYTE_FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_bpe(text: str = ENGLISH) -> Tokenizer:
    """Build what a LLaMA-2 tokenizer.json holds: BPE over `▁`, with the 256 bytes as entries."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator([text], trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    vocabulary = {entry: place for place, entry in enumerate(["<unk>", "<s>", "</s>", *BYTE_FALLBACK, *learned])}
    merges = [tuple(pair) for pair in model["merges"]]
    built = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    built.normalizer = trained.normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    built.decoder = decoders.Sequence(steps)
    built.add_special_tokens(["<unk>", "<s>", "</s>"])
    return built


def clip_bpe() -> Tokenizer:
    """Build a byte-level BPE whose entries mark the end of a word, with an unknown token, as CLIP's."""
    built = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=" ", behavior="removed"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        end_of_word_suffix="</w>",
        initial_alphabet=letters,
        special_tokens=["<|endoftext|>", *(f"{letter}</w>" for letter in letters)],
        show_progress=False,
    )
    built.train_from_iterator([ENGLISH], trainer)
    data = json.loads(built.to_str())
    data["added_tokens"] = data["added_tokens"][:1]
    return Tokenizer.from_str(json.dumps(data))


def letters_bpe() -> Tokenizer:
    """Build a BPE over characters without bytes and without an unknown token."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    built.train_from_iterator(
        [ENGLISH, *LANGUAGES], trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], show_progress=False)
    )
    return built


BUILDERS = {
    "byte-level BPE": lambda: train_tokenizer(ENGLISH, "bpe", vocab_size=400),
    "bytes": lambda: train_tokenizer((), "byte"),
    "byte-level BPE with </w>": clip_bpe,
    "SentencePiece BPE with byte fallback": sentencepiece_bpe,
    "character BPE": letters_bpe,
    "Unigram": lambda: train_tokenizer(ENGLISH, "unigram", vocab_size=200),
    "WordPiece": lambda: train_tokenizer(ENGLISH, "wordpiece", vocab_size=200),
    "word": lambda: train_tokenizer(ENGLISH, "word", vocab_size=200),
}
WRITE_ANY_TEXT = ("byte-level BPE", "bytes", "byte-level BPE with </w>", "SentencePiece BPE with byte fallback")
"""Those that have a token for each byte."""


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Return the tokenizer of a kind, built once."""
    return BUILDERS[kind]()
