"""The texts that a user names, as the corpus of a run: built, linked, or mixed; and tokenizers trained on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embedlayer.cli.printing import say
from embedlayer.core.errors import TextError, TokenizerError
from embedlayer.core.formatting import command_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from embedlayer.data.corpus import TokenCorpus
    from embedlayer.data.mixture import TokenMixture
    from embedlayer.data.readers.documents import Reader

TOKENIZER_BYTES = 200_000_000


@dataclass(frozen=True)
class CorpusOptions:
    """How the corpus of a run is built: with a tokenizer that is read or trained on the texts, and from which fields.

    Attributes:
        tokenizer_from: File or folder of a tokenizer; `None` to use that of a built corpus, or to train one.
        kind: Kind of a trained tokenizer; see `train_tokenizer`.
        vocab_size: Number of tokens of a trained tokenizer.
        text_field: Name of the field of a row that is the document; `None`: `text`.
        dtype: Type of the numbers in files of token IDs without a header.
    """

    tokenizer_from: Path | None
    kind: str
    vocab_size: int
    text_field: str | None
    dtype: str | None


def prepare_corpus(
    sources: Sequence[str | Path],
    weights: Sequence[float] | None,
    target: Path,
    options: CorpusOptions,
    *,
    quiet: bool,
) -> "tuple[TokenCorpus | TokenMixture, Tokenizer]":
    """Build or link the corpus of a new run, or the corpora of a mixture."""
    from embedlayer.data.corpus_files import is_corpus

    if weights is not None:
        return _build_mixture(sources, weights, target, options, quiet)
    ready = [Path(source) for source in sources if is_corpus(Path(source))]
    if ready and len(sources) > 1:
        raise TextError(f"{ready[0]} is a corpus, and a run reads one: build one of all texts, or mix with --weights.")
    if ready:
        return _link_corpus(ready[0], target, options.tokenizer_from)
    return _build_corpus(sources, target, options, quiet)


def _build_corpus(
    sources: Sequence[str | Path],
    target: Path,
    options: CorpusOptions,
    quiet: bool,
) -> "tuple[TokenCorpus, Tokenizer]":
    """Train or read a tokenizer, and build the corpus of token IDs."""
    from embedlayer.data.corpus import TokenCorpus
    from embedlayer.data.readers.documents import RowOptions
    from embedlayer.data.readers.sources import find_sources
    from embedlayer.data.readers.token_files import find_token_files, map_token_files
    from embedlayer.data.text_files import saved_standard_input
    from embedlayer.tokenization.read import load_tokenizer

    if find_token_files(sources, options.dtype):
        tokenizer = named_tokenizer(options.tokenizer_from)
        return map_token_files(sources, tokenizer, target, dtype=options.dtype), tokenizer
    with saved_standard_input(sources, target.parent) as readable:
        readers = find_sources(readable, RowOptions(options.text_field, options.tokenizer_from))
        if options.tokenizer_from is not None:
            tokenizer = load_tokenizer(options.tokenizer_from)
        else:
            tokenizer = learn_tokenizer([readers], options.kind, options.vocab_size, quiet=quiet)
        say("Turning the text into token IDs", quiet)
        corpus = TokenCorpus.build(
            readable, tokenizer, target, text_field=options.text_field, chat_template=options.tokenizer_from
        )
        return corpus, tokenizer


def _build_mixture(
    sources: Sequence[str | Path],
    weights: Sequence[float],
    target: Path,
    options: CorpusOptions,
    quiet: bool,
) -> "tuple[TokenMixture, Tokenizer]":
    """Build a corpus of each source in the folders `target/0`, `target/1`, ..., or link those that are built."""
    from embedlayer.data.corpus import TokenCorpus
    from embedlayer.data.corpus_files import is_corpus
    from embedlayer.data.mixture import TokenMixture
    from embedlayer.data.readers.documents import RowOptions
    from embedlayer.data.readers.sources import readers_of, require_rows
    from embedlayer.data.readers.token_files import find_token_files, is_text, map_token_files
    from embedlayer.data.text_files import saved_standard_input

    built = next((Path(source) for source in sources if is_corpus(Path(source))), None)
    template = options.tokenizer_from or built
    dtypes = [options.dtype if Path(source).is_file() and not is_text(Path(source)) else None for source in sources]
    with saved_standard_input(sources, target.parent) as readable:
        ready = [Path(source) for source in readable if is_corpus(Path(source))]
        ids = [find_token_files([source], dtype) for source, dtype in zip(readable, dtypes, strict=True)]
        rows = RowOptions(options.text_field, template)
        texts = [
            [] if found or Path(source) in ready else readers_of([source], rows)
            for source, found in zip(readable, ids, strict=True)
        ]
        require_rows([reader for readers in texts for reader in readers], rows)
        for folder in ready[1:]:
            if TokenCorpus.open(folder).tokenizer_fingerprint != TokenCorpus.open(ready[0]).tokenizer_fingerprint:
                raise TokenizerError(
                    f"{ready[0]} and {folder} were built with different tokenizers, and a mixture has one. Build both "
                    f"with the same: {command_line('corpus', 'build', 'FILE', '--tokenizer', ready[0], '-o', 'NEW')}"
                )
        if ready:
            tokenizer = _tokenizer_for(ready[0], options.tokenizer_from)
        elif options.tokenizer_from is not None or any(ids):
            tokenizer = named_tokenizer(options.tokenizer_from)
        else:
            tokenizer = learn_tokenizer(texts, options.kind, options.vocab_size, weights=weights, quiet=quiet)
        say("Turning the texts into token IDs", quiet)
        target.mkdir()
        corpora = []
        for number, (source, readers, dtype) in enumerate(zip(readable, texts, dtypes, strict=True)):
            folder = target / str(number)
            if Path(source) in ready:
                corpora.append(_link_corpus(Path(source), folder, options.tokenizer_from)[0])
            elif ids[number]:
                corpora.append(map_token_files([source], tokenizer, folder, dtype=dtype))
            else:
                field = options.text_field if any(reader.has_rows for reader in readers) else None
                corpora.append(TokenCorpus.build([source], tokenizer, folder, text_field=field, chat_template=template))
    return TokenMixture(zip(corpora, weights, strict=True)), tokenizer


def named_tokenizer(path: Path | None) -> "Tokenizer":
    """Read the tokenizer that the user names, such as that of files of token IDs."""
    from embedlayer.tokenization.read import load_tokenizer

    if path is None:
        raise TokenizerError(
            "Files of token IDs do not name their tokenizer: --tokenizer FILE, for train --tokenizer-from FILE."
        )
    return load_tokenizer(path)


def learn_tokenizer(
    texts: "Sequence[Sequence[Reader]]", kind: str, vocab_size: int, *, weights: Sequence[float] = (1.0,), quiet: bool
) -> "Tokenizer":
    """Train a tokenizer on texts; of long texts, only about the first `TOKENIZER_BYTES` bytes are read."""
    from embedlayer.tokenization.train import train_tokenizer

    say(f"Training a {kind} tokenizer of {vocab_size:,} tokens", quiet)
    chunks = (
        chunk
        for corpus, weight in zip(texts, weights, strict=True)
        for chunk in _at_most(
            round(TOKENIZER_BYTES * weight / sum(weights)), (part for reader in corpus for part in reader.texts())
        )
    )
    return train_tokenizer(chunks, kind, vocab_size=vocab_size)  # type: ignore[arg-type]


def _link_corpus(ready: Path, target: Path, tokenizer_from: Path | None) -> "tuple[TokenCorpus, Tokenizer]":
    """Open the corpus in the folder `ready`, and let the run use it through a symbolic link."""
    from embedlayer.data.corpus import TokenCorpus
    from embedlayer.tokenization.tokenizer_calls import fingerprint

    corpus = TokenCorpus.open(ready)
    tokenizer = _tokenizer_for(ready, tokenizer_from)
    if fingerprint(tokenizer) != corpus.tokenizer_fingerprint:
        raise TokenizerError(f"The corpus {ready} was built with another tokenizer. Leave --tokenizer-from out.")
    target.symlink_to(ready.resolve(), target_is_directory=True)
    return corpus, tokenizer


def _tokenizer_for(corpus: Path, tokenizer_from: Path | None) -> "Tokenizer":
    """Read the tokenizer that the user requested, or the one in the folder of a corpus."""
    from embedlayer.data.corpus_files import TOKENIZER
    from embedlayer.tokenization.read import load_tokenizer

    if tokenizer_from is None and not (corpus / TOKENIZER).exists():
        raise TokenizerError(
            f"The corpus {corpus} has no {TOKENIZER}. Pass the tokenizer that it was built with: --tokenizer-from FILE"
        )
    return load_tokenizer(tokenizer_from or corpus / TOKENIZER)


def _at_most(size: int, chunks: Iterator[str]) -> Iterator[str]:
    """Yield whole chunks until they have at least `size` bytes of UTF-8 together."""
    for chunk in chunks:
        yield chunk
        size -= len(chunk.encode())
        if size <= 0:
            return
