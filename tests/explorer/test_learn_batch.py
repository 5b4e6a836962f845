"""The scenes about a batch: windows, targets and sums, compared with the data loader, torch and a notebook's cells."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from embedlayer import create_dataloader
from embedlayer.core.errors import TextError


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(9, 40),
    length=st.integers(1, 8),
    stride=st.integers(1, 8),
    batch_size=st.integers(1, 8),
    drop_last=st.booleans(),
)
def test_windows_and_batches_are_those_of_the_data_loader(story, tokens, length, stride, batch_size, drop_last):
    cut = {"tokens": tokens, "length": length, "stride": stride, "batchSize": batch_size, "dropLast": drop_last}
    code = """(() => {
        const { starts, batches, reads } = windows.windowsOf(cut);
        const of = (shift) => batches.map((each) => windows.idsOf(each, cut.length, shift));
        return { starts, reads, inputs: of(0), targets: of(1), ids: windows.IDS };
    })()"""
    shown = story(code, cut=cut)
    ids = shown["ids"][:tokens]
    sizes = {"batch_size": batch_size, "max_length": length, "stride": stride}
    windows = len(create_dataloader(ids, **sizes | {"batch_size": 1}, shuffle=False))
    assert len(shown["starts"]) == windows == -(-(tokens - length) // stride), "the formula that the scene shows"
    if drop_last and windows < batch_size:
        assert shown["inputs"] == []
        with pytest.raises(TextError):
            create_dataloader(ids, **sizes, shuffle=False, drop_last=True)
        return
    batches = list(create_dataloader(ids, **sizes, shuffle=False, drop_last=drop_last))
    assert shown["inputs"] == [inputs.tolist() for inputs, _ in batches]
    assert shown["targets"] == [targets.tolist() for _, targets in batches]
    counted = create_dataloader(list(range(tokens)), **sizes, shuffle=False, drop_last=drop_last)
    read = torch.cat([inputs.flatten() for inputs, _ in counted])
    assert shown["reads"] == torch.bincount(read, minlength=tokens).tolist()


def test_the_text_of_the_batch_is_of_known_words(story):
    text, ids = story("[windows.TEXT, windows.IDS]")
    assert len(text.split()) == len(ids) == 40
    assert set(ids) <= set(range(1, 10)) - {2}
    assert story("batch.scene.task").count("96") == 1


def tensors(story, dim):
    """Return the tables of the scene, float64, and the IDs of its batch."""
    tables, ids = story("[broadcast.tablesOf(dim), broadcast.batchOf(8, 4)]", dim=dim)
    table, places = (
        torch.tensor(tables[name]["data"], dtype=torch.float64).view(-1, dim) for name in ("table", "places")
    )
    return table, places, torch.tensor(ids)


def test_sums_are_those_of_broadcasting(story):
    for dim in [4, 8, 256]:
        table, places, ids = tensors(story, dim)
        code = "broadcast.batchOf(8, 4).map((r) => r.map((id, t) => broadcast.partsOf(tables, id, t).sum))"
        shown = np.array(story(f"((tables) => {code})(broadcast.tablesOf(dim))", dim=dim))
        x = nn.functional.embedding(ids, table) + places
        assert x.shape == (8, 4, dim)
        np.testing.assert_allclose(shown, x, atol=1e-12)
        np.testing.assert_allclose(shown, shown.round(2), atol=1e-9)  # sums of the digits that are shown come out right
        assert not (ids[0] == ids[7]).any(), "rows 0 and 7 have no token at the same position"
        assert (ids[:7, 0] == ids[0, 0]).sum() > 1, "some other row has the token of row 0"


def test_positions_recovered_in_float32_are_those_of_torch(story):
    for dim in [4, 256]:
        table, places, ids = tensors(story, dim)
        tokens = nn.functional.embedding(ids, table.float())
        found = (tokens + places.float()) - tokens
        for b in (0, 7):
            for t in (0, 3):
                code = "broadcast.recovered(broadcast.partsOf(broadcast.tablesOf(dim), id, t))"
                shown = np.array(story(code, dim=dim, id=int(ids[b, t]), t=t), dtype=np.float32)
                np.testing.assert_array_equal(shown, found[b, t].numpy())
        assert torch.equal(found[0, 0], found[7, 0]) == (dim == 4), "the cell of the notebook prints False at D = 256"
        assert torch.allclose(found[0], found[7])
