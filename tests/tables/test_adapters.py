"""Numbers and patterns of an adapter's configuration are checked where they enter, for every method that is read."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from embedlayer import DeltaEmbedding, TokenEmbedding
from embedlayer.core import CheckpointError
from embedlayer.vocab import merge_adapter

ADAPTER_CONFIG = "adapter_config.json"
NAME = "base_model.model.model.embed_tokens"
ROWS = {f"{NAME}.token_adapter.trainable_tokens_delta": torch.ones(2, 8)}
FACTORS = {f"{NAME}.lora_embedding_A": torch.ones(2, 20), f"{NAME}.lora_embedding_B": torch.ones(8, 2)}
HEAD = {f"{NAME}.lora_A.weight": torch.ones(2, 8), f"{NAME}.lora_B.weight": torch.ones(20, 2)}
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "embed_tokens"]}
METHODS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "trainable tokens": (
        {"peft_type": "TRAINABLE_TOKENS", "token_indices": [3, 5]},
        {f"{NAME}.trainable_tokens_delta": torch.ones(2, 8)},
    ),
    "tokens beside LoRA": (LORA | {"trainable_token_indices": {"embed_tokens": [3, 5]}}, ROWS),
    "LoRA of a table": (LORA, FACTORS),
    "LoRA of a head": (LORA, HEAD),
    "rsLoRA": (LORA | {"use_rslora": True}, FACTORS),
}
NO_NUMBER = [math.nan, math.inf, -math.inf, 1e400, "4", True, [4], None]
NO_RANK = [0, -1, 2**70, 2.5, *NO_NUMBER]
NO_TOKENS = [[3, 3], [True, False], [-1, 3], [3, 2**70], [3.0, 5], ["3", 5], "35", 3, [[3, 5]], [math.nan, 3]]
LORAS = ("LoRA of a table", "LoRA of a head", "rsLoRA")
ENDLESS = [
    *("(a+)+b", "((a*)*)*b", "(a|a)*b", "(a|aa)+$b", ".*.*.*.*b", "(a|a)" * 30 + "b", "a?" * 40 + "a" * 40),
    *("(" * 20 + "a*" + ")*" * 20 + "b", "(?:x(?:a|a))*b", "a" * 201, "(a", "a)", "[a", "*a", r"\\"[:1]),
]
"""Patterns that `re` matches in exponential time, or does not read."""
HOSTILE: list[tuple[str, str, Any]] = [
    *((name, "lora_alpha", value) for name in LORAS for value in (2**70, *NO_NUMBER)),
    *((name, "alpha_pattern", {"embed_tokens": value}) for name in LORAS for value in (2**70, *NO_NUMBER)),
    *((name, "r", value) for name in LORAS for value in NO_RANK),
    *((name, "rank_pattern", {"embed_tokens": value}) for name in LORAS for value in NO_RANK),
    *(("trainable tokens", "token_indices", value) for value in NO_TOKENS),
    *(("tokens beside LoRA", "trainable_token_indices", value) for value in NO_TOKENS),
    *(("tokens beside LoRA", "trainable_token_indices", {"embed_tokens": value}) for value in NO_TOKENS),
    *((name, "use_dora", True) for name in LORAS),
    *((name, "target_modules", value) for name in LORAS for value in (["lm_head"], ["tokens"], [], 5)),
    *((name, "rank_pattern", {"(a+)+{9}": 2}) for name in LORAS),
    *((name, "alpha_pattern", {"(a(?=x))+": 2}) for name in LORAS),
    *(("LoRA of a table", "alpha_pattern", {pattern: 2}) for pattern in ENDLESS),
]


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_sound_adapter_changes_the_table(method: str, tmp_path: Path) -> None:
    table = TokenEmbedding(20, 8)
    before = table.weight.detach().clone()
    merge_adapter(table, write(tmp_path, *METHODS[method]))
    assert not torch.equal(table.weight, before)
    assert table.weight.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_tensors_that_are_not_finite_are_refused(method: str, tmp_path: Path) -> None:
    config, tensors = METHODS[method]
    for name, value in product(tensors, (math.nan, math.inf)):
        table = TokenEmbedding(20, 8)
        before = table.weight.detach().clone()
        bad = tensors[name].clone()
        bad[0, 0] = value
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            merge_adapter(table, write(tmp_path, config, tensors | {name: bad}))
        assert torch.equal(table.weight, before)


def test_numbers_and_patterns_out_of_range_are_one_error_with_the_key(tmp_path: Path) -> None:
    for method, key, value in HOSTILE:
        config, tensors = METHODS[method]
        folder, table = write(tmp_path, config | {key: value}, tensors), TokenEmbedding(20, 8)
        before = table.weight.detach().clone()
        for read in (merge_adapter, lambda table, folder: DeltaEmbedding.from_pretrained(folder, base=table)):
            with pytest.raises(CheckpointError) as caught:
                read(table, folder)
            assert ADAPTER_CONFIG in str(caught.value), (method, key, value)
            assert key in str(caught.value) or "names token" in str(caught.value), (method, key, value)
            if key.endswith("_pattern") and "embed_tokens" in value:
                assert f"{key}['embed_tokens']" in str(caught.value), value
            assert len(str(caught.value)) < 500
        assert torch.equal(table.weight, before)


def test_the_first_pattern_that_matches_gives_alpha_and_rank(tmp_path: Path) -> None:
    config = {"r": 9, "rank_pattern": {r"^model\.(embed|embed_tokens)": 2}, "alpha_pattern": {"x+": 1, ".*_tokens": 6}}
    table = TokenEmbedding(20, 8)
    with torch.no_grad():
        table.weight.zero_()
    merge_adapter(table, write(tmp_path, LORA | config, FACTORS))
    torch.testing.assert_close(table.weight, torch.full((20, 8), 6.0))  # 6 / 2 of a product of 2
    with pytest.raises(CheckpointError, match=r"states the rank 9 for model\.embed_tokens, and .* of rank 2"):
        merge_adapter(table, write(tmp_path, LORA | {"r": 9}, FACTORS))


@pytest.mark.parametrize(
    "pattern", [r"layers\.\d+\..*", r"(q|k)_proj", r".*\.(1[0-9]|2[0-3])\.(gate|up)", "[(*+]|x", r"x{2}\.(y_)?\w+", "k"]
)
def test_a_pattern_matches_what_peft_matches(pattern: str, tmp_path: Path) -> None:
    get_pattern_key = pytest.importorskip("peft.utils.other").get_pattern_key
    names = ["layers.12.q", "a.k_proj", "m.layers.23.up", "m.layers.24.up", "xx.y_1", "xx.z", "(", "x", "a.k", "ak"]
    for name in names:
        tensors = {key.replace("model.embed_tokens", name): value for key, value in FACTORS.items()}
        config = LORA | {"target_modules": [name], "rank_pattern": {pattern: 2}, "r": 9}
        folder = write(tmp_path, config, tensors)
        error = ""
        try:
            merge_adapter(TokenEmbedding(20, 8), folder)
        except CheckpointError as refused:  # also of a module that is no table
            error = str(refused)
        assert ("states the rank 9" in error) == (get_pattern_key([pattern], name) != pattern)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_lora_of_any_rank_is_merged(rank: int, tmp_path: Path) -> None:
    factors = {f"{NAME}.lora_embedding_A": torch.randn(rank, 20), f"{NAME}.lora_embedding_B": torch.randn(8, rank)}
    a, b = factors.values()
    table = TokenEmbedding(20, 8)
    expected = table.weight.detach() + 4 / rank * (b @ a).T
    merge_adapter(table, write(tmp_path, LORA | {"r": rank}, factors))
    torch.testing.assert_close(table.weight.detach(), expected)


NO_FACTORS = {
    "rank 0": {f"{NAME}.lora_A.weight": torch.ones(0, 8), f"{NAME}.lora_B.weight": torch.ones(20, 0)},
    "torch.int64": {name: factor.long() for name, factor in HEAD.items()},
}


@pytest.mark.parametrize("why", NO_FACTORS)
def test_matrices_without_a_rank_or_of_integers_are_refused(why: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=why):
        merge_adapter(TokenEmbedding(20, 8), write(tmp_path, LORA, NO_FACTORS[why]))


def test_patterns_that_are_not_needed_are_not_run(tmp_path: Path) -> None:
    config = LORA | {"target_modules": "(" * 50 + "a+" + ")+" * 50 + "$", "layers_pattern": "(((("}
    merge_adapter(TokenEmbedding(20, 8), write(tmp_path, config, FACTORS))
