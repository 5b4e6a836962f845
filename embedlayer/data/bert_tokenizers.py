"""Build tokenizers that normalise and split text as BERT does."""

import re
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def bert_tokenizer(vocabulary: dict[str, int], *, lowercase: bool) -> Tokenizer:
    """Return a WordPiece tokenizer that normalises and splits text as BERT does, without special tokens.

    Args:
        vocabulary: ID of each entry, `[UNK]` among them.
        lowercase: Whether text is lower-cased and accents are removed.
    """
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def wordpiece_tokenizer(vocabulary: dict[str, int], *, lowercase: bool) -> Tokenizer:
    """Return BERT's tokenizer for a vocabulary: a text is put between `[CLS]` and `[SEP]`.

    Args:
        vocabulary: ID of each entry, `[UNK]` among them.
        lowercase: Whether text is lower-cased and accents are removed.
    """
    tokenizer = bert_tokenizer(vocabulary, lowercase=lowercase)
    tokenizer.add_special_tokens([entry for entry in _SPECIALS if entry in vocabulary])
    if "[CLS]" in vocabulary and "[SEP]" in vocabulary:
        tokenizer.post_processor = processors.BertProcessing(
            ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
        )
    return tokenizer


def is_lowercased(vocabulary: Iterable[str]) -> bool:
    """Return whether no entry except the bracketed ones has an upper-case letter."""
    return not any(entry != entry.lower() for entry in vocabulary if not re.fullmatch(r"\[.*\]", entry))
