"""Two tokenizers: which tokens of one are the same as tokens of the other."""

from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.ids import EQUIVALENT, USUAL_NAMES, end_of_text_id

_NAMES_BY_ROLE = tuple(
    names[:1] + USUAL_NAMES.get(EQUIVALENT.get(role, ""), ()) + names[1:]
    for role, names in USUAL_NAMES.items()
    if role not in ("cls_token", "sep_token")
)
"""The usual names of the special token of each role; GPT-2's single one begins and ends a text."""


def match_tokenizers(old: object, new: object) -> tuple[int | None, ...]:
    """Return for each ID of the new tokenizer the old tokenizer's ID of the same token, or `None`.

    Two tokens are the same if they encode the same bytes of a text, however a tokenizer writes them. GPT-2's `Ġdog`,
    SentencePiece's `▁dog` and BERT's `dog` all encode " dog"; `Ċ` and `<0x0A>` encode a line feed.

    - A token that continues a word (`##dog`) never matches one that starts a word (`dog`).
    - A token that ends a word (`dog</w>`) matches only in a tokenizer that also marks the ends of words.
    - If both tokenizers write spaces in the same way, tokens with equal names match first. Added tokens with equal
      names and other bytes, such as LLaMA's `<x>` with its space, match if no token has the same bytes.
    - A special token matches the one with the same name, special or not, or else the one with the same role. The end
      of a text comes first, and is the token that `end_of_text_id` finds: GPT-2's `<|endoftext|>` matches `</s>` and
      not `<s>`.

    Args:
        old: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        new: The same, for the new tokenizer.

    Raises:
        TokenizerError: An argument is no tokenizer.

    Example:
        >>> text = "I love dogs, I love cats"
        >>> old, new = train_tokenizer(text, kind="word"), train_tokenizer(text, vocab_size=270)
        >>> sources = match_tokenizers(old, new)
        >>> [(new.id_to_token(i), old.id_to_token(j)) for i, j in enumerate(sources) if j is not None]
        [('<|endoftext|>', '<|endoftext|>'), (',', ','), ('Ġlove', 'love')]
    """
    theirs, ours = TokenBytes(old), TokenBytes(new)
    same = theirs.convention == ours.convention or {theirs.convention, ours.convention} == {"word", "wordpiece"}
    common = {token_id: theirs.vocabulary[name] for token_id, name in ours.entries.items() if name in theirs.vocabulary}
    # A token that one tokenizer lists as special always matches its name: there are files in which `<start_of_turn>` is
    # an ordinary entry. Otherwise added tokens match only added tokens, and if the tokenizers write spaces in different
    # ways, only added tokens match by name.
    by_name = {
        token_id: old_id
        for token_id, old_id in common.items()
        if token_id in ours.special
        or old_id in theirs.special
        or ((same or token_id in ours.added) and (old_id in theirs.added) == (token_id in ours.added))
    }
    matches = _equal_roles(theirs, ours, set(by_name.values())) | by_name
    respelled = {i for i in by_name.keys() & ours.added if ours.readings(i) != theirs.readings(by_name[i])}
    for token_id in ours.entries.keys() - ours.special - (matches.keys() - respelled):
        position = ours.word_position(token_id)
        for old_id in (theirs.by_bytes.get(readings) for readings in ours.readings(token_id)):
            if old_id is not None and (position is None or theirs.word_position(old_id) in (None, position)):
                matches[token_id] = old_id
                break
    return tuple(matches.get(token_id) for token_id in range(max(ours.entries, default=-1) + 1))


def common_tokens(old: object, new: object) -> list[tuple[int, int]]:
    """Return the tokens that two tokenizers have in common, one to one: old ID and new ID of each, by new ID.

    These are the matches of `match_tokenizers`, with at most one new token for each old one. Of several new tokens that
    match one old token, a token with the same name wins, then one that is no byte-fallback token (`A` before `<0x41>`),
    then the lowest ID. If both tokenizers have byte-fallback tokens, these match only each other. Of an edited
    tokenizer and its original, each old token therefore matches itself, and a new token matches none.
    """
    theirs, ours = TokenBytes(old), TokenBytes(new)
    have_bytes = {"sentencepiece"} == {theirs.convention, ours.convention} and theirs.single_bytes and ours.single_bytes
    chosen: dict[int, tuple[tuple[bool, bool], int]] = {}
    for token_id, source in enumerate(match_tokenizers(old, new)):
        if source is None or not ours.entries[token_id]:
            continue
        is_byte = ours.is_byte(token_id)
        if have_bytes and is_byte != theirs.is_byte(source):
            continue
        rank = (ours.entries[token_id] != theirs.entries[source], is_byte)
        if source not in chosen or rank < chosen[source][0]:
            chosen[source] = rank, token_id
    return sorted(((source, token_id) for source, (_, token_id) in chosen.items()), key=lambda pair: pair[1])


def _equal_roles(old: TokenBytes, new: TokenBytes, taken: set[int]) -> dict[int, int]:
    """Return the old ID of each new ID of a token without text that has the same role, such as the end of a text.

    The usual names state the role of a token: `</s>` and `<|endoftext|>` both end a text. Old IDs in `taken` are not
    matched again. Several new tokens of one role get the same old ID.
    """
    ends = end_of_text_id(new.tokenizer), end_of_text_id(old.tokenizer)
    matches: dict[int, int] = {}
    if ends[0] in new.special and ends[1] in old.special and ends[1] not in taken:
        matches[ends[0]] = ends[1]
    for names in _NAMES_BY_ROLE:
        candidates = [old.vocabulary[name] for name in names if old.vocabulary.get(name) in old.special]
        free = [token_id for token_id in candidates if token_id not in taken]
        for name in names:
            token_id = new.vocabulary.get(name)
            if token_id in new.special and free:
                matches.setdefault(token_id, free[0])
    return matches
