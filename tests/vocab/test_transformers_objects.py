"""An edited tokenizer as one of transformers; `laws/test_transformers_folder.py` has its IDs for every kind."""

import pytest
from tokenizer_kinds import tokenizer_of

import embedlayer as el


def test_a_chat_template_with_a_removed_token_is_left_out_with_a_warning() -> None:
    transformers = pytest.importorskip("transformers")
    templates = {"default": "<|call|>{{ messages }}", "plain": "{{ messages }}"}
    base = el.vocab.edit_tokenizer(tokenizer_of("word"), special=["<|call|>"]).tokenizer
    old = transformers.PreTrainedTokenizerFast(tokenizer_object=base, unk_token="<unk>", chat_template=templates)
    edit = el.vocab.edit_tokenizer(old, remove=["<|call|>"])
    with pytest.warns(el.EmbedLayerWarning, match=r"A chat template is left out: it contains <\|call\|>"):
        new = el.vocab.transformers_tokenizer(edit.tokenizer, like=old)
    assert new.chat_template == {"plain": "{{ messages }}"}


def test_after_a_change_to_another_tokenizer_roles_are_its_own() -> None:
    transformers = pytest.importorskip("transformers")
    old = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("WordPiece"), unk_token="[UNK]")
    new = tokenizer_of("SentencePiece BPE with byte fallback")
    theirs = el.vocab.transformers_tokenizer(new, like=old)
    assert (theirs.bos_token, theirs.eos_token, theirs.unk_token) == ("<s>", "</s>", "<unk>")
    theirs = el.vocab.transformers_tokenizer(new, like=old, special={"eos_token": "<s>"})
    assert (theirs.bos_token, theirs.eos_token) == (None, "<s>")


def test_a_tokenizer_that_is_not_one_of_transformers_is_refused() -> None:
    with pytest.raises(el.TokenizerError, match="fast tokenizer of transformers"):
        el.vocab.transformers_tokenizer(tokenizer_of("word"), like=tokenizer_of("word"))
