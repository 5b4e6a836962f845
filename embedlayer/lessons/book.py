"""Names and argument orders of the book "Build a Large Language Model From Scratch", for code that follows it."""

from importlib.util import find_spec
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from embedlayer.core.errors import TokenizerError
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.windows import create_dataloader
from embedlayer.inputs.embedding import InputEmbedding, InputParts
from embedlayer.io.files import JsonObject
from embedlayer.positions.learned import LearnedPositionalEmbedding
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tokenization.ids import table_size
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.tokenization.tokenizer_config import TokenizerConfig
from embedlayer.tokenization.vocabulary_files import END_OF_TEXT, bpe_rules, bpe_tokenizer, byte_level_alphabet

GPT2_SIZE, GPT2_IDS = 50257, [11241, 7509]
"""Vocabulary size of GPT-2's tokenizer, and its IDs of " tokenizer"; they identify the tokenizer."""

GPT_CONFIG_124M: dict[str, Any] = {
    "vocab_size": 50257,
    "context_size": 256,
    "emb_dim": 768,
    "n_heads": 12,
    "n_layers": 12,
    "drop_rate": 0.1,
    "qkv_bias": False,
}
"""Sizes of GPT-2 small, named as in "Build a Large Language Model From Scratch", with a context of 256."""


class GPTEmbedding(InputEmbedding):
    """Input embedding of GPT-2: `tok_emb(ids) + pos_emb(positions)`, without scale and without dropout.

    Args:
        vocab_size: Number of tokens, V.
        emb_dim: Width of a row, D.
        context_size: Longest sequence.
        init_std: Standard deviation of the normal initialisation of both tables.

    Example:
        >>> GPTEmbedding(50257, 256, 4)(torch.tensor([[40, 367, 2885, 1464]])).shape
        torch.Size([1, 4, 256])

    Reference: Radford et al., GPT-2, 2019 (`wte`, `wpe`).
    """

    def __init__(self, vocab_size: int, emb_dim: int, context_size: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        self.tok_emb = TokenEmbedding(vocab_size, emb_dim, init_std=init_std)
        self.pos_emb = LearnedPositionalEmbedding(context_size, emb_dim, init_std=init_std)

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON."""
        return {
            "vocab_size": self.tok_emb.vocab_size,
            "emb_dim": self.tok_emb.embed_dim,
            "context_size": self.pos_emb.max_seq_len,
            "init_std": self.tok_emb.init_std,
        }

    @property
    def parts(self) -> InputParts:
        """Return the token table and the position table; the layer has no dropout."""
        return InputParts(self.tok_emb, self.pos_emb)


def create_dataloader_v1(
    txt: str | Path | TokenCorpus,
    batch_size: int = 4,
    max_length: int = 256,
    stride: int = 128,
    shuffle: bool = True,
    drop_last: bool = True,
    num_workers: int = 0,
    *,
    tokenizer: object = None,
    generator: torch.Generator | None = None,
) -> DataLoader[Any]:
    """Call `create_dataloader` with the argument order and the tokenizer of "Build a Large Language Model".

    Args:
        txt: A text itself as `str`, the `Path` of a text file, or a `TokenCorpus`.
        batch_size: Windows in a batch, B.
        max_length: Tokens in a window, T.
        stride: Tokens from the start of one window to the start of the next.
        shuffle: Whether each pass has a new random order.
        drop_last: Whether a last batch with fewer than `batch_size` windows is left out.
        num_workers: Number of processes that cut batches.
        tokenizer: A tokenizer, or the path of its files; see `load_tokenizer`. `None`: GPT-2's, from `encoder.json`
            and `vocab.bpe` (with any common prefix, as in `gpt2-encoder.json`) in the current directory, from Hugging
            Face's cache, or from `tiktoken`, which downloads it once. A `TokenCorpus` needs none.
        generator: Source of the random order; by default torch's global generator.

    Raises:
        TokenizerError: GPT-2's tokenizer is not found, `tiktoken` cannot download it, or the file found is another
            tokenizer; or the tokenizer cannot encode the text.
        TextError, SizeError: As for `create_dataloader`.
        FileError: A file of the text or of the tokenizer cannot be read.

    Example:
        >>> from embedlayer.tokenization.train import train_tokenizer
        >>> loader = create_dataloader_v1(
        ...     "I love dogs.", batch_size=2, max_length=4, stride=4, tokenizer=train_tokenizer((), kind="byte")
        ... )
        >>> next(iter(loader))[0].shape
        torch.Size([2, 4])

    Reference: Raschka, Build a large language model from scratch, 2024, chapter 2.
    """
    if not isinstance(txt, TokenCorpus):
        if tokenizer is None:
            tokenizer = _gpt2_tokenizer()
        elif isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer)
    return create_dataloader(
        txt,
        tokenizer,
        batch_size=batch_size,
        max_length=max_length,
        stride=stride,
        shuffle=shuffle,
        drop_last=drop_last,
        num_workers=num_workers,
        generator=generator,
    )


def _gpt2_tokenizer() -> Tokenizer:
    """Read GPT-2's tokenizer from `encoder.json` in the current directory, from Hugging Face's cache, or by tiktoken.

    Raises:
        TokenizerError: It is in none of these places, or the file there belongs to another tokenizer.
        FileError: The file cannot be read.
    """
    file = next((path for path in sorted(Path().glob("*encoder.json")) if path.is_file()), None)
    if file is None and find_spec("huggingface_hub") is not None:
        from huggingface_hub import try_to_load_from_cache

        paths = (try_to_load_from_cache(name, "tokenizer.json") for name in ("openai-community/gpt2", "gpt2"))
        file = next((Path(path) for path in paths if isinstance(path, str)), None)
    if file is not None:
        tokenizer = load_tokenizer(file)
        if table_size(tokenizer) != GPT2_SIZE or tokenizer.encode(" tokenizer").ids != GPT2_IDS:
            raise TokenizerError(f"{file} is not GPT-2's tokenizer: pass the one to use, tokenizer='{file}'.")
        return tokenizer
    if find_spec("tiktoken") is None:
        places = f"{Path().absolute()} has no encoder.json, Hugging Face's cache no openai-community/gpt2, and"
        advice = "pip install tiktoken, or pass its files: tokenizer='path/to/encoder.json'"
        raise TokenizerError(f"GPT-2's tokenizer was not found: {places} tiktoken is not installed.\n{advice}.")
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")  # downloads two files of OpenAI, and caches them
    except OSError as error:  # all exceptions of requests are
        failed = f"tiktoken could not download GPT-2's tokenizer ({type(error).__name__})"
        raise TokenizerError(f"{failed}: call tiktoken.get_encoding('gpt2') where there is a network.") from error
    return _tokenizer_of_ranks({token: encoding.encode_single_token(token) for token in encoding.token_byte_values()})


def _tokenizer_of_ranks(ranks: dict[bytes, int]) -> Tokenizer:
    """Return the tokenizer whose tokens have these ranks, which are also their IDs; it splits a text as GPT-2's does.

    The last merge of a token is of the two that remain when its bytes are merged by all lower ranks.
    """
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    merges = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, inf) for left, right in pairwise(parts)]
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(parts)

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {written(token): rank for token, rank in ranks.items()} | {END_OF_TEXT: len(ranks)}
    file, nothing_beside = Path("encoder.json"), TokenizerConfig(Path())
    rules = bpe_rules(vocabulary, file, nothing_beside)
    texts = [(written(left), written(right)) for left, right in merges]
    return bpe_tokenizer(vocabulary, texts, rules, nothing_beside, file)
