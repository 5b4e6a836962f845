"""Read llama2.c's `tokenizer.bin` as a `tokenizers.Tokenizer`.

The file has an int32, the length of the longest token, and for each token a float32 score, an int32 length and the
bytes of the token, little-endian. Token 1 starts a text; tokens 3 to 258 are the bytes 0 to 255.
"""

import math
import struct
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors

from embedlayer.core.errors import TokenizerError
from embedlayer.io.files import read_bytes
from embedlayer.tokenization.sentencepiece_files import bpe_of_scores

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def read_llama2c(path: Path) -> Tokenizer:
    """Read llama2.c's `tokenizer.bin` and return a tokenizer that gives the same IDs.

    Like llama2.c, it starts a text with `<s>` and puts a space before the text. Characters without a token become
    bytes. Then the two neighbours whose merged token has the best score are merged, until no merge is left. Decoding
    removes the added space. The special tokens are named `<unk>`, `<s>` and `</s>`; llama2.c stores the last two
    between line breaks.

    Raises:
        FileError: The file cannot be read.
        TokenizerError: The file is damaged, or another kind of file.
    """
    entries = _entries(path, read_bytes(path))
    merged = range(len(SPECIAL) + len(BYTES), len(entries))
    tokenizer = Tokenizer(bpe_of_scores(entries, merged, "<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return tokenizer


def _entries(path: Path, raw: bytes) -> list[tuple[str, float]]:
    """Parse the content of a `tokenizer.bin`, and return the token and the score of each ID, in order.

    Raises:
        TokenizerError: The content is damaged, or its first tokens are not those of llama2.c.
    """
    entries: list[tuple[str, float]] = []
    at = 4
    try:
        (longest,) = struct.unpack_from("<i", raw)
        while at < len(raw):
            score, length = struct.unpack_from("<fi", raw, at)
            token = raw[at + 8 : at + 8 + length]
            if not 0 <= length <= longest or len(token) != length or not math.isfinite(score):
                raise ValueError(f"token {len(entries)} has length {length} and score {score}")
            entries.append((token.strip(b"\n" if len(entries) in (1, 2) else b"").decode(), score))
            at += 8 + length
    except (struct.error, ValueError) as error:
        raise TokenizerError(f"{path} is not a whole tokenizer of llama2.c ({error}).") from error
    tokens = tuple(token for token, _ in entries)
    if tokens[: len(SPECIAL + BYTES)] != SPECIAL + BYTES or len(set(tokens)) != len(tokens):
        raise TokenizerError(
            f"{path} is not a tokenizer of llama2.c: its tokens should be <unk>, <s>, </s>, the 256 bytes, and then "
            f"subwords, each once."
        )
    return entries
