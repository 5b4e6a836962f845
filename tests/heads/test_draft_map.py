"""A draft vocabulary is chosen, written and read as other tools do; and the tokens that two tokenizers share."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import cases, some
from kinds import TABLES, VOCAB_SIZE
from safetensors.torch import load_file, save_file
from tokenizer_kinds import BUILDERS, bytes_of, real_tokenizers, tokenizer_of
from tokenizers import Tokenizer, models

import embedlayer as el
from embedlayer.core import CheckpointError, ShapeError, SizeError, TokenIdError, TokenizerError
from embedlayer.heads import DraftHead, DraftMap, eagle_tensors, frequent_tokens, load_draft_tokens, save_draft_tokens
from embedlayer.losses import ForwardKL, JensenShannon, ReverseKL, divergence
from embedlayer.tokenization import match_tokenizers, table_size
from embedlayer.tokenization.ids import end_of_text_id

TOKENS = [0, 3, 7, 20, 48, 49]
UNSORTED = [48, 3, 0, 49, 20, 7]


def read_as_sglang(d2t: torch.Tensor) -> list[int]:
    """`load_weights` of SGLang's llama_eagle3.py."""
    return (d2t + torch.arange(d2t.shape[0])).tolist()


def read_token_map_as_sglang(path: Path) -> list[int]:
    """`load_token_map` of SGLang's spec_utils.py, for a local file."""
    hot_token_id = torch.load(path, weights_only=True)
    return torch.tensor(hot_token_id, dtype=torch.int64).tolist()


def test_files_of_eagle_3_are_read_by_the_tools_as_the_same_map(tmp_path: Path) -> None:
    path = tmp_path / "draft.safetensors"
    save_draft_tokens(path, TOKENS, VOCAB_SIZE)
    tensors = load_file(path)
    assert {name: (each.dtype, each.shape) for name, each in tensors.items()} == {
        "d2t": (torch.int64, (6,)),
        "t2d": (torch.bool, (VOCAB_SIZE,)),
    }
    assert read_as_sglang(tensors["d2t"]) == TOKENS
    used_tokens = sorted(UNSORTED)  # `scandata` of EAGLE's cnets.py
    assert tensors["d2t"].tolist() == [used_tokens[i] - i for i in range(len(used_tokens))]
    assert tensors["t2d"].tolist() == [i in used_tokens for i in range(VOCAB_SIZE)]
    logits, drafts = torch.randn(4, len(TOKENS)), torch.full((4, VOCAB_SIZE), -math.inf)
    drafts[:, torch.arange(len(TOKENS)) + tensors["d2t"]] = logits  # `compute_logits` of vLLM's llama_eagle3.py
    draft = DraftHead(TABLES["dense"](), TOKENS)
    assert drafts.argmax(-1).tolist() == draft.to_tokens(logits.argmax(-1)).tolist()
    assert load_draft_tokens(path) == tuple(TOKENS)


def test_a_list_of_fr_spec_is_read_by_sglang_in_any_order_and_refused_here(tmp_path: Path) -> None:
    path = tmp_path / "freq_6.pt"
    save_draft_tokens(path, torch.tensor(UNSORTED), VOCAB_SIZE)
    assert read_token_map_as_sglang(path) == UNSORTED
    with pytest.raises(el.CheckpointError, match=r"freq_6.pt is a pickle"):
        load_draft_tokens(path)
    assert DraftHead(TABLES["dense"](), torch.load(path, weights_only=True)).token_ids == tuple(UNSORTED)
    with pytest.raises(el.SizeError, match="3 at place 1 follows 48"):
        save_draft_tokens(tmp_path / "draft.safetensors", UNSORTED, VOCAB_SIZE)
    with pytest.raises(el.CheckpointError, match="draft.json has an unknown suffix"):
        save_draft_tokens(tmp_path / "draft.json", UNSORTED, VOCAB_SIZE)
    assert [file.name for file in tmp_path.iterdir()] == ["freq_6.pt"]


def test_a_checkpoint_of_a_draft_model_is_read_also_with_a_prefix_and_without_t2d(tmp_path: Path) -> None:
    tensors = eagle_tensors(TOKENS, VOCAB_SIZE)
    others = {"lm_head.weight": torch.zeros(6, 2), "fc.weight": torch.zeros(2, 6)}
    save_file({f"model.{name}": each for name, each in tensors.items()} | others, tmp_path / "model.safetensors")
    assert load_draft_tokens(tmp_path) == tuple(TOKENS)
    save_file({"d2t": torch.tensor(UNSORTED) - torch.arange(6)}, tmp_path / "inference.safetensors")
    assert load_draft_tokens(tmp_path / "inference.safetensors") == tuple(UNSORTED)


GOOD = eagle_tensors(TOKENS, VOCAB_SIZE)


DAMAGED = [
    ({"lm_head.weight": torch.zeros(6, 2)}, "no tensor 'd2t'"),
    ({"d2t": GOOD["d2t"], "draft.d2t": GOOD["d2t"] + 0}, "2 tensors d2t, draft.d2t"),
    ({**GOOD, "d2t": torch.tensor(TOKENS)}, "ascending i"),
    ({**GOOD, "d2t": torch.zeros(6, dtype=torch.long)}, "ascending i"),
    ({"d2t": GOOD["d2t"].float()}, r"must be int64 or int32 \(N,\), not torch.float32"),
    ({**GOOD, "t2d": GOOD["t2d"].long()}, r"must be bool \(V,\), not torch.int64"),
    ({"d2t": torch.tensor([5, 4])}, "Token 5 is at places 0 and 1"),
    ({"d2t": torch.tensor([-1, 4])}, "token id -1 at place 0"),
    ({"d2t": torch.zeros(0, dtype=torch.long)}, "token_ids is empty"),
]


def test_tensors_that_describe_no_vocabulary_are_refused(tmp_path: Path) -> None:
    for tensors, message in DAMAGED:
        save_file(tensors, tmp_path / "draft.safetensors")
        with pytest.raises(el.CheckpointError, match=message):
            load_draft_tokens(tmp_path / "draft.safetensors")


def test_a_missing_file_and_a_pickled_checkpoint_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(el.FileError, match="no folder or file"):
        load_draft_tokens(tmp_path / "none.safetensors")
    torch.save(GOOD, tmp_path / "pytorch_model.bin")
    with pytest.raises(el.CheckpointError, match="pytorch_model.bin is a pickle"):
        load_draft_tokens(tmp_path)


def test_the_most_frequent_tokens_are_those_that_speculators_chooses() -> None:
    """`build_vocab_mappings_from_distribution` of vllm-project/speculators."""
    corpus = el.TokenCorpus.from_text("the cat sat on the mat", el.train_tokenizer("", kind="byte"))
    counts = corpus.counts(corpus.vocab_size)
    frequencies = {token: int(count) for token, count in enumerate(counts) if count}
    for number in (1, 5, 30):
        chosen = sorted(frequencies, key=lambda token: (-frequencies[token], token))[:number]
        chosen += [token for token in range(number) if token not in set(chosen)][: number - len(chosen)]
        assert frequent_tokens(corpus, number) == tuple(sorted(chosen))
        assert frequent_tokens(torch.from_numpy(counts), number) == tuple(sorted(chosen))
    assert frequent_tokens(corpus, 3, include=[256]) == tuple(sorted([256, *frequent_tokens(corpus, 2)]))


NO_CHOICE: list[tuple[Any, int, list[int], type[Exception], str]] = [
    ([1, 2], 0, [], el.SizeError, "at most 2, not 0"),
    ([1, 2], 3, [], el.SizeError, "at most 2, not 3"),
    ([1, 2, 3], 1, [0, 1], el.SizeError, "at least 2 .include."),
    ([1, 2], 1, [2], el.TokenIdError, "token id 2 of include"),
    ([[1, 2]], 1, [], el.ShapeError, "a number for each token"),
]


def test_a_choice_that_cannot_be_made_is_refused() -> None:
    for counts, number, include, error, message in NO_CHOICE:
        with pytest.raises(error, match=message):
            frequent_tokens(counts, number, include=include)


PAIRS = [
    ("gpt2", "llama2", 18208),
    ("llama2", "gpt2", 18208),
    ("t5", "gpt2", 18867),
    ("bert", "gpt2", 22023),
    ("llama2", "phi-3", 31999),
    ("phi-3", "llama2", 31999),
    ("tok512", "t5", 197),
]
"""Draft, target, and how many tokens they share."""


@pytest.fixture(scope="module")
def real(shared_data):
    pytest.importorskip("sentencepiece", reason="the spm extra is not installed")
    return real_tokenizers(shared_data).__getitem__


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """Return the ID of the token for text that has none, as tokenizer.json states it."""
    model = json.loads(tokenizer.to_str())["model"]
    name = model.get("unk_token")
    return model.get("unk_id") if name is None else tokenizer.token_to_id(name)


def check(shared: DraftMap, draft: Tokenizer, target: Tokenizer) -> None:
    """Check every pair: equal bytes, each token once, the ends together, no unknown token; and that none is missing."""
    ours, theirs = bytes_of(draft), bytes_of(target)
    pairs = dict(zip(shared.draft_ids.tolist(), shared.target_ids.tolist(), strict=True))
    assert len({*pairs.values()}) == len(pairs)
    assert sorted(pairs) == shared.draft_ids.tolist()
    ends = end_of_text_id(draft), end_of_text_id(target)
    if None not in ends:
        assert pairs.pop(ends[0]) == ends[1]
    assert unknown_id(draft) not in pairs
    assert unknown_id(target) not in pairs.values()
    for token, other in pairs.items():
        if token in ours.special or other in theirs.special:
            assert ours.entries[token] == theirs.entries[other]
        else:
            assert ours.readings(token)[0] == theirs.readings(other)[0]
    if ours.suffix != theirs.suffix:
        return  # a token that ends a word is the same as no other one
    one, two = (
        {each.readings(i)[0]: i for i in sorted(each.entries, key=each.is_byte, reverse=True) if i not in each.special}
        for each in (ours, theirs)
    )
    paired = {ours.readings(i)[0] for i in pairs}
    unknown = {unknown_id(draft), unknown_id(target)}
    missing = {key for key in one.keys() & two.keys() - paired if not unknown & {one[key], two[key]}}
    assert not missing


@cases("draft, target", BUILDERS, BUILDERS)
def test_pairs_have_equal_bytes_and_none_is_missing(draft, target) -> None:
    check(DraftMap.between(tokenizer_of(draft), tokenizer_of(target)), tokenizer_of(draft), tokenizer_of(target))


def test_the_unknown_token_of_one_is_not_paired_with_its_text_in_the_other() -> None:
    draft = Tokenizer(models.WordLevel({"<unk>": 0, "cat": 1}, unk_token="<unk>"))
    draft.add_special_tokens(["<unk>"])
    target = Tokenizer(models.WordLevel({"cat": 0, "<unk>": 1}, unk_token="other"))
    assert DraftMap.between(draft, target).draft_ids.tolist() == [1]
    assert DraftMap.between(target, draft).draft_ids.tolist() == [0]


@pytest.mark.parametrize(
    ("draft", "target", "pairs"),
    some(PAIRS[5:], PAIRS),
)
def test_real_pairs(real, shared_data, draft, target, pairs) -> None:
    shared = DraftMap.between(real(draft), real(target))
    check(shared, real(draft), real(target))
    with (shared_data / "text/enwiki-plain.txt").open(encoding="utf-8") as file:
        ids = torch.tensor(real(draft).encode(file.read(20_000)).ids)
    sources = match_tokenizers(real(target), real(draft))
    matched = torch.tensor([source is not None for source in sources])[ids].double().mean()
    assert shared.coverage(ids) >= float(matched) - 0.005
    assert len(shared.draft_ids) == pairs


def test_ids_are_mapped_in_both_directions_and_bad_ones_are_refused() -> None:
    shared = DraftMap.between(tokenizer_of("bytes"), tokenizer_of("byte-level BPE"))
    ids = torch.arange(257).view(1, -1)
    assert torch.equal(shared.to_draft(shared.to_target(ids)), ids)
    assert shared.to_draft(torch.arange(shared.target_size)).eq(-1).sum() == shared.target_size - 257
    assert shared.coverage(ids[:, :0]) == 0.0
    assert shared.coverage(ids) == 1.0
    for bad in ([257], [-1]):
        with pytest.raises(TokenIdError, match=r"0\.\.256"):
            shared.to_target(torch.tensor(bad))


def test_a_file_keeps_the_pairs_and_knows_its_tokenizers(tmp_path, unchecked) -> None:
    draft, target = tokenizer_of("bytes"), tokenizer_of("Unigram")
    shared, path = DraftMap.between(draft, target), tmp_path / "map.safetensors"
    shared.save(path)
    again = DraftMap.load(path, draft=draft, target=target)
    assert torch.equal(again.draft_ids, shared.draft_ids)
    assert torch.equal(again.target_ids, shared.target_ids)
    assert replace(again, draft_ids=shared.draft_ids, target_ids=shared.target_ids).__dict__ == shared.__dict__
    with pytest.raises(TokenizerError, match="another target tokenizer"):
        DraftMap.load(path, draft, draft)
    for change in (
        {"draft_ids": torch.tensor([1, 1])},
        {"target_ids": torch.tensor([3])},
        {"target_ids": shared.target_ids + 10_000},
        {"draft_ids": shared.draft_ids.double()},
    ):
        replace(shared, **change).save(path)
        with pytest.raises(CheckpointError, match=r"no file of DraftMap\.save"):
            DraftMap.load(path)


def test_tokenizers_that_share_nothing_are_refused() -> None:
    dog, cat = (Tokenizer(models.WordLevel({word: 0}, unk_token="<unk>")) for word in ("dog", "cat"))
    with pytest.raises(TokenizerError, match="share no token"):
        DraftMap.between(dog, cat)


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_over_the_pairs_speaks_in_the_drafts_token_ids(bias) -> None:
    draft, target = tokenizer_of("byte-level BPE"), tokenizer_of("SentencePiece BPE with byte fallback")
    shared = DraftMap.between(draft, target)
    head = el.OutputHead(8, table_size(target), bias=bias)
    teacher, hidden = shared.draft_head(head), torch.randn(2, 3, 8)
    logits = head(hidden)[..., shared.target_ids]
    torch.testing.assert_close(teacher(hidden), logits)
    tokens = shared.draft_ids[torch.randint(len(shared.draft_ids), (2, 3))]
    places = torch.searchsorted(shared.draft_ids, tokens)
    expected = logits.log_softmax(-1).gather(-1, places.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(teacher.token_log_probs(hidden, tokens), expected)
    best = teacher.token_statistics(hidden, tokens, statistics=("is_argmax",), top_k=1)
    assert torch.equal(best.top_ids[..., 0], shared.draft_ids[logits.argmax(-1)])
    assert torch.equal(teacher.to_tokens(teacher.to_draft(tokens)), tokens)
    outside = (shared.to_target(torch.arange(shared.draft_size)) < 0).nonzero()[0]
    assert teacher.token_log_probs(hidden[:1, :1], outside.view(1, 1)).item() == float("-inf")
    assert f"{len(shared.draft_ids)} of {shared.draft_size} tokens" in repr(teacher)
    student = DraftHead(el.OutputHead(16, shared.draft_size), shared.draft_ids)
    value = divergence(student.uncomputed_logits(torch.randn(2, 3, 16)), teacher.uncomputed_logits(hidden))
    assert value > 0


def test_names_that_do_not_fit_are_refused() -> None:
    head = el.OutputHead(8, 20)
    for names, size, error in (
        ([1, 2], 5, "names has 2 tokens, and token_ids 3"),
        ([1, 2, 3], None, "belong together"),
        ([1, 2, 2], 5, "Token 2 is at places"),
    ):
        with pytest.raises(SizeError, match=error):
            DraftHead(head, [4, 5, 6], names=names, vocab_size=size)
    with pytest.raises(TokenIdError, match="token id 5"):
        DraftHead(head, [4, 5, 6], names=[1, 2, 5], vocab_size=5)


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.usefixtures("both_paths")
@cases("kind, dtype", [ForwardKL(), ReverseKL(), JensenShannon(0.3)], TOLERANCES)
def test_the_divergence_has_one_event_for_all_other_tokens(kind, dtype) -> None:
    """Heads of all kinds are compared in `tests/laws/test_head_outputs.py`."""
    shared = DraftMap(torch.arange(0, 300, 3), torch.arange(200, 100, -1), 300, 250, "", "")
    student, teacher = el.OutputHead(8, 300, bias=True, dtype=dtype), el.OutputHead(16, 250, dtype=dtype)
    for parameter in (*student.parameters(), *teacher.parameters()):
        torch.nn.init.normal_(parameter)
    hidden, teacher_hidden = torch.randn(700, 8, dtype=dtype, requires_grad=True), torch.randn(700, 16, dtype=dtype)
    leaves = [hidden, *student.parameters()]

    def events(head: el.OutputHead, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits = states.double() @ head.weight.double().T
        log_probs = (logits if head.bias is None else logits + head.bias.double()).log_softmax(-1)
        others = log_probs.index_fill(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([log_probs[..., ids], others], -1)

    def compare(found: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(
            found.double(), wanted.double(), rtol=0, atol=TOLERANCES[dtype] * float(wanted.detach().abs().max())
        )

    own, other = events(student, hidden, shared.draft_ids), events(teacher, teacher_hidden, shared.target_ids)
    expected = kind.of_log_probs(own, other.detach()).mean()
    found = shared.divergence((hidden, student), (teacher_hidden, teacher), kind)
    compare(found, expected)
    is_second = dtype == torch.float64
    grads, wanted = (torch.autograd.grad(each, leaves, create_graph=is_second) for each in (found, expected))
    for grad, want in zip(grads, wanted, strict=True):
        compare(grad, want)
    if is_second:
        again = (torch.autograd.grad(sum(x.square().sum() for x in each), leaves) for each in (grads, wanted))
        for grad, want in zip(*again, strict=True):
            compare(grad, want)


def test_a_divergence_that_is_not_defined_is_refused(unchecked) -> None:
    draft, target = tokenizer_of("bytes"), tokenizer_of("byte-level BPE")
    shared, hidden = DraftMap.between(draft, target), torch.randn(3, 8)
    small, large = el.OutputHead(8, 257), el.OutputHead(8, shared.target_size)
    with pytest.raises(SizeError, match="All 257 tokens of a head are shared.*DraftHead"):
        shared.divergence((hidden, small), (hidden, large))
    alone = divergence((hidden, DraftHead(small, shared.draft_ids)), (hidden, shared.draft_head(large)))
    own, other = small(hidden)[:, shared.draft_ids], large(hidden)[:, shared.target_ids]
    torch.testing.assert_close(alone, ForwardKL().of_log_probs(own.log_softmax(-1), other.log_softmax(-1)).mean())
    spare = el.OutputHead(8, 300)
    with pytest.raises(SizeError, match=r"kind must be .*, not 'forward'"):
        shared.divergence((hidden, spare), (hidden, large), "forward")
    with pytest.raises(ShapeError, match="must match"):
        shared.divergence((hidden, spare), (hidden[:2], large))
    with pytest.raises(TokenIdError, match="outside the full vocabulary of 200 tokens"):
        shared.divergence((hidden, el.OutputHead(8, 200)), (hidden, large))
