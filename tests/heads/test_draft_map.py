"""A draft vocabulary is chosen, written and read as the tools of speculative decoding do."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import TABLES, VOCAB_SIZE
from safetensors.torch import load_file, save_file

import embedlayer as el
from embedlayer.heads import DraftHead, eagle_tensors, frequent_tokens, load_draft_tokens, save_draft_tokens

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
