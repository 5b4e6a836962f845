"""Checkpoints whose table and head a library quantised: read, used, and compared with the dequantised model."""

import re

import pytest
import torch
import torch.nn.functional as F
from stored_folders import write_folder
from stored_formats import CASES, StoredCase

import embedlayer as el
from embedlayer.tables.stored_embedding import StoredEmbedding


def one_of_each() -> list[str]:
    """The name of one case of each kind of layout: up to the first number, and a few more of the first ones."""
    kinds: dict[str, str] = {}
    for name in CASES:
        kinds.setdefault(re.split(r"\d|,", name)[0], name)
    return list(kinds.values())


READ = [*one_of_each(), "MLX 4 bits, groups of 64, bfloat16", "pack-quantized 4 bits, group, asymmetric, bfloat16"]


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_computes_what_its_dequantised_model_computes(tmp_path, name, tied) -> None:
    table = CASES[name]()
    head = None if tied else StoredCase(*table)
    model = write_folder(tmp_path, table, head)
    layer = el.load(tmp_path)
    assert isinstance(layer.table, StoredEmbedding)
    assert (layer.head.tied, layer.table.dtype) == (tied, table.rows.dtype)
    ids = torch.randint(0, len(table.rows), (2, 9))
    hidden = torch.randn(2, 9, table.rows.shape[1])
    assert torch.equal(layer.input(ids), model.get_input_embeddings()(ids))
    for dtype in (torch.float32, torch.bfloat16):
        head_rows = model.get_output_embeddings().weight.detach().to(dtype)
        rows, states = layer.to(dtype).table.rows(0, 99), hidden.to(dtype)
        assert torch.equal(rows, model.get_input_embeddings().weight.to(dtype))
        torch.testing.assert_close(layer.head(states), F.linear(states, head_rows))
        loss = F.cross_entropy(F.linear(states.float(), head_rows.float()).flatten(0, 1), ids.flatten())
        torch.testing.assert_close(layer.head.loss(states, ids).float(), loss, rtol=1e-2, atol=1e-5)
    decoder, model = el.load_llama(tmp_path, dtype=torch.float32), model.float()
    torch.testing.assert_close(decoder(ids), model(ids).logits)
    generated = model.generate(ids[:1], attention_mask=torch.ones(1, 9), max_new_tokens=8, do_sample=False)
    assert torch.equal(el.generate(decoder, ids[:1], max_new_tokens=8, temperature=0.0), generated)
