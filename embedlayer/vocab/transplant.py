"""Which entries of one tokenizer are which of another."""

from collections.abc import Iterable

from embedlayer.vocab.pieces import Pieces, Place
from embedlayer.vocab.roles import ALIKE, USUAL_NAMES
from embedlayer.vocab.starting_rows import NewToken

_ROLES = tuple(
    names[:1] + USUAL_NAMES.get(ALIKE.get(role, ""), ()) + names[1:]
    for role, names in USUAL_NAMES.items()
    if role not in ("cls_token", "sep_token")
)
"""What special tokens are for, by their usual names; GPT-2's one mark begins and ends a text."""


def match_tokenizers(old: object, new: object) -> tuple[int | None, ...]:
    """Return for each ID of the new tokenizer the old ID of the same token; `None` where the old one has no such token.

    The same is what stands for the same bytes, whatever the convention: GPT-2's `Ġdog`, SentencePiece's `▁dog` and
    BERT's `dog` are " dog", `Ċ` and `<0x0A>` a line feed. What continues a word (`##dog`) is never what starts one
    (`dog`), and what ends one (`dog</w>`) matches only where ends are marked too. Between two tokenizers of one
    convention entries of the same name come first. A special token is matched by name, or else by its role, with an old
    one that has no namesake.

    Example:
        >>> text = "I love dogs, I love cats"
        >>> old, new = train_tokenizer(text, kind="word"), train_tokenizer(text, vocab_size=270)
        >>> sources = match_tokenizers(old, new)
        >>> [(new.id_to_token(i), old.id_to_token(j)) for i, j in enumerate(sources) if j is not None]
        [('<|endoftext|>', '<|endoftext|>'), (',', ','), ('Ġlove', 'love')]
    """
    theirs, ours = Pieces(old), Pieces(new)
    namesakes = _namesakes(theirs, ours)
    by_role = _by_role(theirs, ours, set(namesakes.values()))
    found: list[int | None] = []
    for token_id in range(max(ours.entries, default=-1) + 1):
        match = namesakes.get(token_id, by_role.get(token_id))
        if match is None and token_id in ours.entries and token_id not in ours.special:
            place = ours.place(token_id)
            meanings = (theirs.by_meaning.get(meaning) for meaning in ours.meanings(token_id))
            match = next((i for i in meanings if i is not None and _same(theirs.place(i), place)), None)
        found.append(match)
    return tuple(found)


def spelled_by(old: object, new: object, ids: Iterable[int]) -> list[NewToken]:
    """Entries of the new tokenizer as the old one writes them: what their rows are made from where none matches.

    Example:
        >>> text = "I love dogs, I love cats"
        >>> old, new = train_tokenizer((), kind="byte"), train_tokenizer(text, vocab_size=270)
        >>> [token] = spelled_by(old, new, [new.token_to_id("Ġlove")])
        >>> token.text, bytes(token.pieces)
        ('Ġlove', b' love')
    """
    theirs, ours = Pieces(old), Pieces(new)
    return [NewToken(ours.entries[i], () if i in ours.special else theirs.spell(ours.meanings(i)[0])) for i in ids]


def _same(one: Place | None, other: Place | None) -> bool:
    return one == other or None in (one, other)


def _namesakes(old: Pieces, new: Pieces) -> dict[int, int]:
    """Entries of the same name, where a name means the same: in one convention, and for special tokens."""
    same = old.convention == new.convention
    return {
        token_id: old.vocabulary[name]
        for token_id, name in new.entries.items()
        if name in old.vocabulary
        and (same or token_id in new.added)
        and (old.vocabulary[name] in old.added) == (token_id in new.added)
    }


def _by_role(old: Pieces, new: Pieces, taken: set[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for names in _ROLES:
        candidates = [old.vocabulary[name] for name in names if old.vocabulary.get(name) in old.added]
        free = [token_id for token_id in candidates if token_id not in taken]
        for name in names:
            token_id = new.vocabulary.get(name)
            if token_id in new.added and free:
                found.setdefault(token_id, free[0])
    return found
