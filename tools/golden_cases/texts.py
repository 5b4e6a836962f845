"""Every kind of tokenizer: IDs, bytes, spans, alignments, steps; tokenizers from files; tokenizers trained on text."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from golden import files_of
from tokenizer_folders import TEXTS, write_class
from tokenizer_kinds import BUILDERS, ENGLISH, LANGUAGES, random_texts, tokenizer_of

import embedlayer as el
from embedlayer import tokenization

FILES = {
    "BERT": ("Bert", {"vocab.txt", "tokenizer_config.json"}),
    "GPT-2": ("GPT2", {"vocab.json", "merges.txt", "tokenizer_config.json"}),
    "CLIP": ("CLIP", {"vocab.json", "merges.txt", "tokenizer_config.json"}),
    "Whisper": ("Whisper", {"vocab.json", "merges.txt", "tokenizer_config.json"}),
    **{
        name: (name, {"spiece.model", "tokenizer_config.json"})
        for name in ("T5", "Albert", "XLNet", "Llama", "Gemma", "Pegasus", "BigBird", "DebertaV2", "RemBert", "MBart")
    },
    "Nllb": ("Nllb", {"sentencepiece.bpe.model", "tokenizer_config.json"}),
    "XLMRoberta": ("XLMRoberta", {"sentencepiece.bpe.model", "tokenizer_config.json"}),
    "M2M100": ("M2M100", {"sentencepiece.bpe.model", "vocab.json", "tokenizer_config.json"}),
    "unknown": ("OfNobody", {"spiece.model", "tokenizer_config.json"}),
}
SAMPLE = [*TEXTS, *random_texts(100)]


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the cases of this area."""
    for name in BUILDERS:
        yield f"{name}, texts", partial(read, name)
        yield f"{name}, steps", partial(traced, name)
        for other in BUILDERS:
            yield f"{name} and {other}", partial(aligned, name, other)
    for name in FILES:
        yield f"files of {name}", partial(loaded, name)
    for kind in ("bpe", "wordpiece", "unigram", "word", "byte"):
        yield f"trained {kind}", partial(trained, kind)


def read(name: str) -> object:
    """Return the bytes and spans of the tokens of texts, and of all tokens."""
    tokenizer = tokenizer_of(name)
    of_tokens = tokenization.TokenBytes(tokenizer)
    size = tokenization.table_size(tokenizer)
    return {
        "size": size,
        "readings": repr([of_tokens.readings(token) for token in range(size)]),
        "compressed": tokenization.compressed_tokens(tokenizer),
        "kinds": repr(el.analysis.token_kinds(tokenizer, size)),
        "texts": [tokenization.token_spans(tokenizer, text) for text in SAMPLE],
        "batch": tokenization.token_spans(tokenizer, SAMPLE[:20], add_special_tokens=True, max_tokens=9),
    }


def traced(name: str) -> object:
    """Return the steps of a tokenizer for some texts."""
    return [tokenization.trace_tokens(tokenizer_of(name), text) for text in TEXTS]


def aligned(name: str, other: str) -> object:
    """Return which tokens of two tokenizers match, in the vocabulary and in texts."""
    one, two = tokenizer_of(name), tokenizer_of(other)
    alignments = [
        tokenization.align_tokens(*(tokenization.token_spans(each, text) for each in (one, two))) for text in SAMPLE[:9]
    ]
    comparison = tokenization.compare_tokenizers(one, two, ENGLISH)
    return {"matches": tokenization.match_tokenizers(one, two), "alignments": alignments, "comparison": comparison}


def loaded(name: str) -> object:
    """Return the tokenizer of the files of a class, and the IDs of texts."""
    kind, files = FILES[name]
    with tempfile.TemporaryDirectory() as folder:
        write_class(Path(folder), kind, files)
        tokenizer = el.load_tokenizer(folder)
    return {"file": tokenizer.to_str(), "ids": [each.ids for each in tokenizer.encode_batch([*TEXTS])]}


def trained(kind: str) -> object:
    """Return a tokenizer that was trained on some languages."""
    tokenizer = tokenization.train_tokenizer([ENGLISH, *LANGUAGES], kind, vocab_size=300)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        tokenization.save_tokenizer(tokenizer, Path(folder, "tokenizer.json"))
        return files_of(folder)
