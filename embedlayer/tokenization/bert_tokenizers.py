"""Build tokenizers that normalise and split text as BERT does."""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from embedlayer.core.errors import TokenizerError
from embedlayer.families.tokenizers import GENERIC_CLASSES, WORDPIECE_CLASSES, WordPieceRules
from embedlayer.tokenization.tokenizer_config import TokenizerConfig, add_configured_tokens


def bert_tokenizer(
    vocabulary: dict[str, int],
    *,
    lowercase: bool,
    unknown: str = "[UNK]",
    strip_accents: bool | None = None,
    splits_chinese: bool = True,
) -> Tokenizer:
    """Return a WordPiece tokenizer that normalises and splits text as BERT does, without special tokens.

    With `splits_chinese` each Chinese character is a word. With `strip_accents=None` accents are removed where text is
    lower-cased, as in BERT.
    """
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token=unknown, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=splits_chinese
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def wordpiece_tokenizer(vocabulary: dict[str, int], config: TokenizerConfig, file: Path) -> Tokenizer:
    """Return the tokenizer of a `vocab.txt`: BERT's, by the settings that the files beside it state.

    Without `do_lower_case`, text is lower-cased if a file names the class, which is the default of BERT's classes. If
    no file names one, it is lower-cased if no entry except the bracketed ones has an upper-case letter.
    """
    is_known = config.kind is None or config.kind in (*WORDPIECE_CLASSES, *GENERIC_CLASSES)
    if not is_known:
        raise config.refuse_class(file)
    rules = WORDPIECE_CLASSES.get(config.kind or "", WordPieceRules())
    unknown = config.role("unk_token", rules.roles) or "[UNK]"
    if unknown not in vocabulary:
        raise TokenizerError(f"{file} is not a BERT vocabulary: it has no {unknown}.")
    if not config.setting("do_basic_tokenize", True):
        raise TokenizerError(f"{config.folder} sets do_basic_tokenize to false: put the model's tokenizer.json there.")
    strips = config.settings.get("strip_accents")
    tokenizer = bert_tokenizer(
        vocabulary,
        lowercase=config.setting("do_lower_case", config.names_class or is_lowercased(vocabulary)),
        unknown=unknown,
        strip_accents=None if strips is None else config.setting("strip_accents", False),
        splits_chinese=config.setting("tokenize_chinese_chars", True),
    )
    add_configured_tokens(tokenizer, config, rules.roles, file=file, lstrip=rules.lstrip)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    start, end = (config.role(role, rules.roles) for role in ("cls_token", "sep_token"))
    if start in ids and end in ids:
        pairs = (str(end), ids[str(end)]), (str(start), ids[str(start)])
        tokenizer.post_processor = (
            processors.RobertaProcessing(*pairs, trim_offsets=False, add_prefix_space=False)
            if rules.doubles_separator
            else processors.BertProcessing(*pairs)
        )
    return tokenizer


def is_lowercased(vocabulary: Iterable[str]) -> bool:
    """Return whether no entry except the bracketed ones has an upper-case letter."""
    return not any(entry != entry.lower() for entry in vocabulary if not re.fullmatch(r"\[.*\]", entry))
