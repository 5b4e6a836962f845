"""Edits of a vocabulary: the public functions.

One call edits everything that has a row for each token: in a live module and its optimizer, or in a folder. See
`embedlayer.vocab.map` for the terms.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tokenizers import AddedToken, Tokenizer
from torch import nn
from torch.optim import Optimizer

from embedlayer.core.errors import EmbedLayerError, EmbedLayerWarning, SizeError, VocabularyError
from embedlayer.core.option_docs import show_options, unknown_option
from embedlayer.families.left_out_files import left_out_message
from embedlayer.tokenization.bytes import Token
from embedlayer.tokenization.comparison import match_tokenizers
from embedlayer.tokenization.ids import table_size
from embedlayer.tokenization.tokenizer_calls import as_tokenizer
from embedlayer.vocab.edit import EditRequest, TokenMap
from embedlayer.vocab.init.row_init import RowInit, SubwordMeanInit
from embedlayer.vocab.map import NEW
from embedlayer.vocab.new_tokens import AddedTokens
from embedlayer.vocab.receipt import Receipt
from embedlayer.vocab.row_training import train_only_rows
from embedlayer.vocab.special_tokens import tokenizer_with_roles
from embedlayer.vocab.targets.apply_rows import EditResult
from embedlayer.vocab.targets.folder import apply_to_files, edited_copy
from embedlayer.vocab.targets.live import apply_to_module
from embedlayer.vocab.token_selection import NumberedTokens, require_ids, select_tokens
from embedlayer.vocab.token_usage import Corpus, used_tokens
from embedlayer.vocab.tokenizer_edit import edit_tokenizer

Target = nn.Module | Path | str
"""A live module, or a folder or GGUF file."""


class EditOptions(TypedDict, total=False):
    """Keyword options that all edits accept.

    Attributes:
        init: How new rows are initialised. The default is `SubwordMeanInit()`: the mean of the rows of the subwords
            that encoded the new token's text before. Without a tokenizer that is the mean of all rows.
        init_head: How new rows of an untied head are initialised, from the head's own rows; the default is `init`.
        tokenizer: The tokenizer of a live module. Layers that `load` returned and folders have their own. It is not
            changed: `receipt.tokenizer` is the edited one, and `transformers_tokenizer(receipt.tokenizer, like=...)`
            is a tokenizer of transformers with the settings of the old one.
        optimizer: The optimizer of a live module, whose state is edited too.
        pad_to_multiple_of: The number of stored rows is rounded up to a multiple of this, as in `TokenEmbedding`; the
            default is the same multiple as before. Sharded tables have no padding rows.
        out: For a folder: path of the edited folder, which must not exist or must be empty. For a GGUF file: path of
            the edited file, which must not exist.
    """

    init: RowInit
    init_head: RowInit
    tokenizer: object
    optimizer: Optimizer | None
    pad_to_multiple_of: int | None
    out: Path | str | None


@show_options(EditOptions)
def edit_vocabulary(
    target: Target,
    *,
    add: AddedTokens | int = (),
    remove: Iterable[Token] = (),
    keep: Iterable[Token] | None = None,
    order: Sequence[Token] | None = None,
    merge: Mapping[Token, Token] | None = None,
    special: Iterable[str | AddedToken] = (),
    **options: Unpack[EditOptions],
) -> Receipt:
    """Edit the vocabulary of a live module in place, or of a folder or GGUF file into a new one.

    If anything fails, nothing changes.

    All tensors with a row for each token are edited together: the input table (dense, factorised, row-sparse, or stored
    codes such as quantised rows), the output head (tied stays tied), its bias, and the optimizer's state. Sizes, the
    padding token, the tokenizer and the token IDs in configurations are changed to match. Kept rows and their moments
    keep every bit; new rows start with the state that a new optimizer of the same class has for them. New rows of
    stored codes are quantised as their format does it. Parameters stay the same objects.

    Hashed n-grams (`NgramHash`) stay what they were: a kept token keeps its compressed ID, and with it all hashes and
    rows. A new token gets a compressed ID of its own, the next free one, also where its text differs from an old
    token's only in case or accents. The rows of an `NgramEmbedding` belong to hashes and do not move. A checkpoint or
    model of another library that hashes n-grams raises a `VocabularyError`.

    If tables are sharded over ranks (`embedlayer.distributed.sharded`, `fully_shard`), each rank edits its own rows.
    All ranks must make the same call. Random rows get the values of rank 0. Each rank has a receipt with its own
    dropped rows, and all ranks must call `receipt.undo`.

    Args:
        target: A table, a head, a layer, a model or any module that contains these; or a folder. A folder is one that
            `save_pretrained` wrote, a run (its checkpoint and corpus are edited too, and it can be resumed), or a
            checkpoint of a family that `load` reads, in one file or in shards (all other tensors keep every bit). Or a
            GGUF file: rows that are kept keep their bytes, unless rows are added to a type that `gguf` cannot write
            (`receipt.stored`), and the receipt is written as `OUT.receipt`. Files of a folder that hold values by token
            and cannot be edited, such as `optimizer.pt`, are left out with a warning.
        add: New tokens, which get the last IDs, as `edit_tokenizer` takes them; without a tokenizer, their number.
            Added tokens of the tokenizer that lack a row, because it was extended alone, get one too, also for `()`.
        remove: Tokens to remove, by text or ID.
        keep: Remove all tokens but these; not together with `remove`.
        order: All tokens of the result, in the order of their new IDs; without a tokenizer, the old ones only.
        merge: From each token to remove to the token that replaces it in stored IDs.
        special: New special tokens.
        **options: See `EditOptions`.

    Returns:
        The receipt: `receipt.remap(ids)` converts stored IDs, `receipt.undo(module)` undoes the edit of a live module,
        and `receipt.tokenizer` is the new tokenizer. The new folder contains the receipt as `vocabulary-1.receipt`, or
        with the next number.

    Raises:
        SizeError: An option is unknown, below 1, or not for this kind of target; no token would be left; the optimizer
            trains other parameters or does not show the state of new rows; nothing in `target` has a vocabulary that
            can be edited; or a rank would have no row of a sharded table.
        ShapeError: `init` computes too few rows, or is a `VectorsInit` with too many or with rows of another width.
        VocabularyError: A token is unknown, is named twice, exists already, or is needed by the tokenizer or a
            configuration; or arguments exclude each other; or the tokenizer is another model's; or the model has a
            `DraftHead`, hashed n-grams of another library, an `NgramHash` with multipliers too large for the IDs of new
            tokens in int64, an adapter of PEFT with values of tokens, or a tensor whose size follows the vocabulary and
            whose values for new tokens are not known.
        TokenizerError: `tokenizer` is no tokenizer, that of the folder is damaged, or a GGUF file cannot describe the
            new one.
        TokenIdError: The padding row would be dropped.
        StaleRowsError: The optimizer was not passed to an earlier edit.
        FileError: `target` does not exist or a process trains in it; or `out` is missing, not empty or cannot be
            written.
        CheckpointError: The folder or file is damaged, is a checkpoint of `torch.distributed.checkpoint`, has a
            compressed table of a model of transformers, a tensor that follows the vocabulary and whose values for new
            tokens are not known, or an adapter with values of tokens.
        MissingExtraError: A GGUF file needs the extra `gguf`.
        PeerError: Another rank raised an error, or requests another edit.

    Warns:
        EmbedLayerWarning: Files are left out; text with a new token is decoded differently than before; transformers
            opens the new tokenizer with another class; or a GGUF tensor is written in another type.

    Example:
        >>> model.table.vocab_size, model.head.tied
        (257, True)
        >>> receipt = edit_vocabulary(model, add=["cat", "mat"], tokenizer=tokenizer)
        >>> print(receipt)
        257 tokens -> 259 tokens, 257 rows -> 259 rows
          kept     257
          new      2: 'cat', 'mat'
          rows     2 from the mean of their subwords
        >>> receipt.tokenizer.encode("the cat").ids
        [116, 104, 101, 32, 257]
        >>> receipt.undo(model)
        >>> model.table.vocab_size
        257
    """

    def token_map(tokenizer: Tokenizer | None, rows: int) -> TokenMap:
        if tokenizer is not None:
            if isinstance(add, int):
                raise VocabularyError(f"With a tokenizer new tokens have names: pass a list of them, not {add}.")
            return _edited(tokenizer, add=add, remove=remove, keep=keep, order=order, merge=merge, special=special)
        require_ids([*special, *(() if isinstance(add, int) else add)])
        count = add if isinstance(add, int) else 0
        if count < 0:
            raise VocabularyError(f"{count} new tokens cannot be added: pass a number from 0.")
        _, sources, merged, _ = select_tokens(NumberedTokens(rows), remove=remove, keep=keep, order=order, merge=merge)
        return TokenMap((*sources, *[NEW] * count), rows, merged)

    return _edit(target, token_map, options)


@show_options(EditOptions)
def add_tokens(
    target: Target,
    tokens: AddedTokens | int,
    *,
    special: Iterable[str | AddedToken] = (),
    train_only_new: bool = False,
    **options: Unpack[EditOptions],
) -> Receipt:
    """Add tokens to a vocabulary: `edit_vocabulary(target, add=tokens)`.

    Args:
        target: A live module, which is changed in place, or a folder; see `edit_vocabulary`.
        tokens: The new tokens; without a tokenizer, their number.
        special: New special tokens.
        train_only_new: For a live module: train only the new rows, with `train_only_rows`. Build the optimizer
            afterwards, and call `merge_rows(target)` after training.
        **options: See `EditOptions`.

    Returns:
        The receipt of the edit.

    Raises:
        SizeError: With `train_only_new`, the rows of a table cannot be trained separately; nothing was changed.
    """
    if not train_only_new:
        return edit_vocabulary(target, add=tokens, special=special, **options)
    if not isinstance(target, nn.Module) or options.get("optimizer") is not None:
        raise SizeError("train_only_new needs a live module and no optimizer; for a folder use vocab add --train-on.")
    receipt = edit_vocabulary(target, add=tokens, special=special, **options)
    try:
        train_only_rows(target, receipt.added)
    except EmbedLayerError:
        receipt.undo(target)
        raise
    return receipt


@show_options(EditOptions)
def remove_tokens(target: Target, tokens: Iterable[Token], **options: Unpack[EditOptions]) -> Receipt:
    """Remove tokens from a vocabulary: `edit_vocabulary(target, remove=tokens)`.

    Args:
        target: A live module, which is changed in place, or a folder; see `edit_vocabulary`.
        tokens: The tokens to remove, by text or ID; by ID only without a tokenizer.
        **options: See `EditOptions`.

    Returns:
        The receipt of the edit.

    Raises:
        VocabularyError: A token is unknown, is named twice, or is needed by the tokenizer or a configuration. All other
            errors are those of `edit_vocabulary`.
    """
    return edit_vocabulary(target, remove=tokens, **options)


@show_options(EditOptions)
def trim_vocabulary(
    target: Target, corpus: Corpus, *, keep_special: bool = True, min_count: int = 1, **options: Unpack[EditOptions]
) -> Receipt:
    """Remove every token that a corpus does not need; the corpus is still encoded as the same tokens, with new IDs.

    Args:
        target: A live module, which is changed in place, or a folder; see `edit_vocabulary`.
        corpus: A `TokenCorpus`, texts (`str`), files and folders (`Path`), or a mixture of texts and paths.
            `used_tokens(tokenizer, corpus)` returns the old IDs that are kept.
        keep_special: Keep all special and added tokens.
        min_count: How often a token must occur to be kept. Above 1, rarer tokens are encoded as other tokens
            afterwards.
        **options: See `EditOptions`; the model must have a tokenizer, or it is passed as `tokenizer`.

    Returns:
        The receipt of the edit.

    Raises:
        VocabularyError: There is no tokenizer, or `used_tokens` raises it. All other errors are those of `used_tokens`
            and `edit_vocabulary`.
    """

    def token_map(tokenizer: Tokenizer | None, rows: int) -> TokenMap:
        tokenizer = _required(tokenizer)
        return _edited(tokenizer, keep=used_tokens(tokenizer, corpus, min_count=min_count, keep_special=keep_special))

    return _edit(target, token_map, options)


@show_options(EditOptions)
def transplant(
    target: Target, new_tokenizer: object, *, special: Mapping[str, str] | None = None, **options: Unpack[EditOptions]
) -> Receipt:
    """Change a model to another tokenizer: tokens of both keep their rows, and the other rows are initialised.

    Token IDs in configurations follow by role: `eos_token_id` becomes the ID of the new tokenizer's own end-of-text
    token. The roles are read from the new tokenizer's folder, or from a tokenizer of transformers; else they follow
    from the usual names. In a checkpoint, the files of the old tokenizer are removed. So is a chat template that
    contains tokens which the new tokenizer lacks. `AutoTokenizer` of the new folder returns the new tokenizer's IDs,
    except for families whose class has rules of its own; these give a warning.

    In an `NgramHash` tokens of both tokenizers keep their compressed IDs, and every other token gets one of its own:
    its n-grams are new. New tokens are not matched to old compressed IDs by their normal form. Engram's multipliers
    allow few new tokens, because the products must stay in int64; those of `NgramHash.for_rows` allow any vocabulary.

    Args:
        target: A live module, which is changed in place, or a folder; see `edit_vocabulary`.
        new_tokenizer: A `tokenizers.Tokenizer`, a fast tokenizer of transformers, or the path of its file or folder.
        special: Special tokens of the new tokenizer by role, such as `{"eos_token": "<|end|>"}`. They override the
            roles that were read.
        **options: See `EditOptions`; the model must have its old tokenizer, or it is passed as `tokenizer`.

    Returns:
        The receipt of the edit.

    Raises:
        VocabularyError: There is no old tokenizer, or a configuration names a padding token and the new tokenizer has
            none. All other errors are those of `edit_vocabulary`.
        TokenizerError: The new tokenizer is damaged or not known here, or `special` names no special token of it.
        FileError: The file of the new tokenizer does not exist or cannot be read.
        CheckpointError: A JSON file beside it is damaged.
        MissingExtraError: The new tokenizer needs the extra `spm` or `gguf`.

    Warns:
        EmbedLayerWarning: The end-of-text token is a guess, a chat template is left out, or `AutoTokenizer` returns
            other IDs.
    """
    new, roles = tokenizer_with_roles(new_tokenizer, special)

    def token_map(tokenizer: Tokenizer | None, rows: int) -> TokenMap:
        old = _required(tokenizer)
        sources = tuple(NEW if source is None else source for source in match_tokenizers(old, new))
        return TokenMap(sources, table_size(old), tokenizer=new, old_tokenizer=old, special_tokens=roles)

    return _edit(target, token_map, options)


def _edited(tokenizer: Tokenizer, **options: Any) -> TokenMap:
    """Edit a copy of a tokenizer; options and errors are those of `edit_tokenizer`."""
    edit = edit_tokenizer(tokenizer, **options)
    sources = tuple(NEW if source is None else source for source in edit.sources)
    old_size = table_size(tokenizer)
    return TokenMap(sources, old_size, edit.merged, edit.tokenizer, tokenizer, unreachable=edit.unreachable)


def _required(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return `tokenizer` unchanged; raise a `VocabularyError` if there is none."""
    if tokenizer is None:
        raise VocabularyError("There is no tokenizer here, and without one tokens have no texts: pass tokenizer=...")
    return tokenizer


def _edit(target: Target, token_map: Callable[[Tokenizer | None, int], TokenMap], options: EditOptions) -> Receipt:
    """Apply an edit to a live module in place, or write the edited copy of a folder to `options["out"]`."""
    if (message := unknown_option(options, EditOptions, "An edit of the vocabulary")) is not None:
        raise SizeError(message)
    tokenizer, multiple = options.get("tokenizer"), options.get("pad_to_multiple_of")
    if multiple is not None and multiple < 1:
        raise SizeError(f"pad_to_multiple_of must be at least 1, not {multiple}.")
    init = options.get("init", SubwordMeanInit())
    for name, given in (("init", init), ("init_head", options.get("init_head", init))):
        if not isinstance(given, RowInit):
            raise SizeError(f"{name} is an initialisation such as embedlayer.vocab.MeanInit(), not {given!r}.")
    tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
    source = None if isinstance(target, nn.Module) else Path(target)
    request = EditRequest(token_map, init, options.get("init_head", init), tokenizer, multiple, source)
    optimizer, out = options.get("optimizer"), options.get("out")
    if isinstance(target, nn.Module):
        if out is not None:
            raise SizeError("A live module is changed in place: pass out=... for folders only.")
        live = apply_to_module(target, request.resolve, optimizer)
        return Receipt.of(EditResult(live.edit), live)
    if optimizer is not None:
        raise SizeError("A folder contains the state of its optimizer: pass optimizer=... for live modules only.")
    path = Path(target)
    with edited_copy(path, out) as (partial, receipt_file):
        result = apply_to_files(path, partial, request.resolve)
        if result.left_out:
            warnings.warn(left_out_message(result.left_out), EmbedLayerWarning, stacklevel=3)
        receipt = Receipt.of(result)
        receipt.save(receipt_file)
    return receipt
