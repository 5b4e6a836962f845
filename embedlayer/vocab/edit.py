"""Edit a vocabulary: one call, and everything that has a row for each token moves with it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from tokenizers import AddedToken, Tokenizer
from torch import nn
from torch.optim import Optimizer

from embedlayer.data.tokenizer import as_tokenizer, missing_rows_message, table_size
from embedlayer.errors import EmbedLayerError, SizeError, VocabularyError
from embedlayer.vocab.change import Asked, Change, Token, change_of_ids, change_of_tokens
from embedlayer.vocab.folders import edit_folder
from embedlayer.vocab.live import edit_live
from embedlayer.vocab.new_rows import train_only_rows
from embedlayer.vocab.receipt import Receipt
from embedlayer.vocab.roles import tokenizer_with_roles
from embedlayer.vocab.rows import NEW
from embedlayer.vocab.starting_rows import StartingRows, SubwordMean
from embedlayer.vocab.transplant import match_tokenizers
from embedlayer.vocab.used_tokens import Corpus, used_tokens

Target = nn.Module | Path | str
"""A live module, or a folder."""


class EditOptions(TypedDict, total=False):
    """What all edits have in common.

    Attributes:
        init: What new rows start as; by default `SubwordMean()`, the mean of the pieces that wrote a new token before,
            which without a tokenizer is the mean of all rows.
        init_head: What they start as in a head with rows of its own; by default as `init` says, from the head's rows.
        tokenizer: The tokenizer of a live module; layers that `load` gave and folders have their own.
        optimizer: The optimizer of a live module: its state moves along.
        pad_to_multiple_of: Rows are stored up to this multiple, as in `TokenEmbedding`; by default as before. Divided
            tables have none.
        out: For a folder: where to write the edited one; it must not be there.
    """

    init: StartingRows
    init_head: StartingRows
    tokenizer: object
    optimizer: Optimizer | None
    pad_to_multiple_of: int | None
    out: Path | str | None


def edit_vocabulary(
    target: Target,
    *,
    add: Iterable[str | AddedToken] | int = (),
    remove: Iterable[Token] = (),
    keep: Iterable[Token] | None = None,
    reorder: Sequence[Token] | None = None,
    merge: Mapping[Token, Token] | None = None,
    special: Iterable[str | AddedToken] = (),
    **options: Unpack[EditOptions],
) -> Receipt:
    """Change the vocabulary of a live module, in place, or of a folder, into a new one: wholly or not at all.

    Everything that has a row for each token moves together: input table (dense, factorised, row-sparse), head (tied
    stays tied), its bias, padding row, rows without a token, tokenizer, IDs and sizes in configurations, and the
    optimizer's state, in which rows keep their moments and new ones start clean. Rows that stay are the same to the
    bit. Parameters stay the same objects.

    Of tables that are divided among processes (`embedlayer.distributed.sharded`) each process moves its own rows: all
    must make the same call, and all do it, or none. What is drawn is what rank 0 draws. Each has a receipt of its own,
    with the dropped rows that it had: `receipt.undo` is called by all, as many as edited.

    Args:
        target: A table, a head, a layer, a model or any module that contains ours; or a folder: what `save_pretrained`
            wrote, a run (its checkpoint and its text follow, and it can be resumed), or a checkpoint of a family that
            `load` reads, in one file or in shards (all other tensors stay the same to the bit).
        add: New tokens, which come last; without a tokenizer, how many.
        remove: Tokens to drop, by text or ID.
        keep: Drop all but these.
        reorder: All tokens of the result in the order wanted.
        merge: Old token to the token that stands for it from now on.
        special: New special tokens.
        **options: See `EditOptions`.

    Returns:
        What was done: `receipt.remap(ids)` carries stored IDs over, `receipt.undo(target)` puts everything back, and
        `receipt.tokenizer` is the new tokenizer. In a folder it is the file `vocabulary-1.receipt`.

    Raises:
        VocabularyError: An unknown token, one named twice or there already, one that the tokenizer or a configuration
            needs; or a tokenizer of another model.
        SizeError: The optimizer belongs to other parameters, or nothing here has a vocabulary that can be edited; or of
            a divided table a process would be left without a row.
        TokenIdError: The padding row would be gone.
        FileError: `out` cannot be written, or has something in it.
        CheckpointError: The folder is damaged, or one of `torch.distributed.checkpoint`.
        PeerError: Of a divided table: another process refused, or asks for another edit.

    Example:
        >>> model.table.vocab_size, model.head.tied
        (257, True)
        >>> receipt = edit_vocabulary(model, add=["cat", "mat"], tokenizer=tokenizer)
        >>> print(receipt)
        257 tokens -> 259 tokens, 257 rows -> 259 rows
          kept     257
          new      2: 'cat', 'mat'
        >>> receipt.tokenizer.encode("the cat").ids
        [116, 104, 101, 32, 257]
        >>> receipt.undo(model)
        >>> model.table.vocab_size
        257
    """

    def change(tokenizer: Tokenizer | None, size: int) -> Change:
        _check_size(tokenizer, size)
        if tokenizer is None:
            return change_of_ids(size, add=add, remove=remove, keep=keep, order=reorder, merge=merge, special=special)
        if isinstance(add, int):
            raise VocabularyError(f"With a tokenizer new tokens have names: give a list of them, not {add}.")
        return change_of_tokens(
            tokenizer, add=add, remove=remove, keep=keep, order=reorder, merge=merge, special=special
        )

    return _edit(target, change, options)


def add_tokens(
    target: Target,
    tokens: Iterable[str | AddedToken] | int,
    *,
    special: Iterable[str | AddedToken] = (),
    train_only_new: bool = False,
    **options: Unpack[EditOptions],
) -> Receipt:
    """`edit_vocabulary(target, add=tokens)`.

    Args:
        target: As in `edit_vocabulary`.
        tokens: The new tokens; without a tokenizer, how many.
        special: New special tokens.
        train_only_new: Of a live module: let only the new rows learn, as `train_only_rows` does. Build the optimizer
            afterwards, and call `merge_rows(target)` when they are trained.
        **options: See `EditOptions`.
    """
    if not train_only_new:
        return edit_vocabulary(target, add=tokens, special=special, **options)
    if not isinstance(target, nn.Module) or options.get("optimizer") is not None:
        raise SizeError(
            "train_only_new is for a live module, and its optimizer is built afterwards, of what then learns: leave "
            "out optimizer=..., and for a folder use embedlayer vocab add --train-on."
        )
    receipt = edit_vocabulary(target, add=tokens, special=special, **options)
    try:
        train_only_rows(target, receipt.added)
    except EmbedLayerError:
        receipt.undo(target)
        raise
    return receipt


def remove_tokens(target: Target, tokens: Iterable[Token], **options: Unpack[EditOptions]) -> Receipt:
    """`edit_vocabulary(target, remove=tokens)`."""
    return edit_vocabulary(target, remove=tokens, **options)


def trim_vocabulary(
    target: Target,
    corpus: Corpus,
    *,
    keep_special: bool = True,
    min_count: int = 1,
    **options: Unpack[EditOptions],
) -> Receipt:
    """Drop every token that a corpus does not need; its token IDs stay the same, remapped.

    Args:
        target: As in `edit_vocabulary`.
        corpus: A `TokenCorpus`, texts (`str`), files and folders (`Path`), or a mixture of texts and files. All of
            these keep the same tokens, `used_tokens(tokenizer, corpus)`.
        keep_special: Keep all special and added tokens.
        min_count: How often a token must occur to be kept. Above 1 rarer ones are read as other tokens from then on.
        **options: See `EditOptions`; a tokenizer is needed.

    Raises:
        VocabularyError: There is no tokenizer, or as for `used_tokens`. Else as `edit_vocabulary`.
    """

    def change(tokenizer: Tokenizer | None, size: int) -> Change:
        tokenizer = _needed(tokenizer, size)
        kept = used_tokens(tokenizer, corpus, min_count=min_count, keep_special=keep_special)
        return change_of_tokens(tokenizer, keep=kept)

    return _edit(target, change, options)


def transplant(
    target: Target,
    new_tokenizer: object,
    *,
    special: Mapping[str, str] | None = None,
    **options: Unpack[EditOptions],
) -> Receipt:
    """Move to another tokenizer: tokens that both have keep their rows, the others start from what they are made of.

    IDs in configurations follow by role: `eos_token_id` is that of the new tokenizer's own end-of-text token. Which
    token has which role is read from the tokenizer's folder or from a tokenizer of transformers, and else follows from
    the usual names. Of a checkpoint the files of the old tokenizer go, and a chat template that writes out tokens which
    the new one lacks; `AutoTokenizer` of the new folder gives the new tokenizer's IDs.

    Args:
        target: As in `edit_vocabulary`.
        new_tokenizer: The tokenizer to move to: a `tokenizers.Tokenizer`, a fast tokenizer of transformers, or the
            path of its file or folder.
        special: Its special tokens by role, such as `{"eos_token": "<|end|>"}`, where they are not stated or other
            ones are wanted.
        **options: See `EditOptions`; the old tokenizer is needed.

    Raises:
        VocabularyError: There is no old tokenizer, or a configuration names a token that pads and the new one has none.
            Else as `edit_vocabulary`.
        TokenizerError: The new tokenizer cannot be read, or `special` names no special token of it.
    """
    new, roles = tokenizer_with_roles(new_tokenizer, special)

    def change(tokenizer: Tokenizer | None, size: int) -> Change:
        old = _needed(tokenizer, size)
        sources = tuple(NEW if source is None else int(source) for source in match_tokenizers(old, new))
        return Change(sources, table_size(old), tokenizer=new, old_tokenizer=old, roles=roles)

    return _edit(target, change, options)


def _needed(tokenizer: Tokenizer | None, size: int) -> Tokenizer:
    if tokenizer is None:
        raise VocabularyError("There is no tokenizer here, and without one tokens have no texts: give tokenizer=...")
    _check_size(tokenizer, size)
    return tokenizer


def _check_size(tokenizer: Tokenizer | None, size: int) -> None:
    mismatch = None if tokenizer is None else missing_rows_message(tokenizer, size)
    if mismatch is not None:
        raise VocabularyError(mismatch)


def _edit(target: Target, change: Callable[[Tokenizer | None, int], Change], options: EditOptions) -> Receipt:
    tokenizer = options.get("tokenizer")
    tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
    multiple = options.get("pad_to_multiple_of")
    if multiple is not None and multiple < 1:
        raise SizeError(f"pad_to_multiple_of must be at least 1, not {multiple}.")
    init = options.get("init", SubwordMean())
    asked = Asked(change, init, options.get("init_head", init), multiple)
    optimizer, out = options.get("optimizer"), options.get("out")
    if isinstance(target, nn.Module):
        if out is not None:
            raise SizeError("A live module is changed in place: leave out=... for folders.")
        return edit_live(target, asked, tokenizer, optimizer)
    if optimizer is not None:
        raise SizeError("A folder has its optimizer's state in it: leave optimizer=... for live modules.")
    return edit_folder(target, out, asked, tokenizer)
