"""One contract for padding rows: zero in a new table, never trained, and kept, looked up and multiplied as stored."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from covering import looped
from kinds import EMBED_DIM, LOOKUP_TABLES, TABLES, VOCAB_SIZE
from torch import Tensor, nn

import embedlayer as el
from embedlayer.compress import compare_compression, compress_table

PADDED = [name for name in TABLES if name != "dense, plain"]
IDS = torch.tensor([[0, 3, 0], [49, 7, 0]])


def written(table: el.TokenTable) -> el.TokenTable:
    """Write numbers to the padding row of a table that stores it as floats; that of a quantised table has some."""
    stored = table.base if isinstance(table, el.DeltaEmbedding) else table
    stored = getattr(stored, "inner", stored)
    if isinstance(stored, el.TokenEmbedding):
        with torch.no_grad():
            stored.weight[0] = torch.linspace(-1, 1, stored.weight.shape[1])
    elif not table.rows(0, 1).any():
        for parameter in table.parameters():
            nn.init.normal_(parameter)
    return table


LOGITS = {
    "table.logits": lambda table, hidden: table.logits(hidden),
    "OutputHead": lambda table, hidden: el.OutputHead(table)(hidden),
    "uncomputed_logits": lambda table, hidden: table.uncomputed_logits(hidden).logits(),
    "draft head": lambda table, hidden: el.heads.DraftHead(table, range(VOCAB_SIZE))(hidden),
}
SCORES = {
    "loss": lambda table, hidden, ids: -table.loss(hidden, ids, reduction="none", impl="chunked"),
    "token_log_probs": lambda table, hidden, ids: el.OutputHead(table).token_log_probs(hidden, ids),
    "token_statistics": lambda table, hidden, ids: table.token_statistics(hidden, ids, impl="chunked").log_probs,
    "divergence": lambda table, hidden, ids: own_log_probs(table, hidden, ids),
}


def own_log_probs(table: el.TokenTable, hidden: Tensor, ids: Tensor) -> Tensor:
    """The log-probabilities of tokens, as the divergence from a teacher that is certain of them."""
    teacher = el.losses.TopKTargets(ids.unsqueeze(-1), torch.zeros(*ids.shape, 1, dtype=hidden.dtype))
    return -el.losses.divergence(table.uncomputed_logits(hidden), teacher, reduction="none")


@pytest.mark.usefixtures("both_paths")
@looped("name, way", PADDED, [*LOGITS, *SCORES])
def test_every_path_multiplies_the_stored_padding_row(name, way) -> None:
    table = written(TABLES[name]()).requires_grad_(requires_grad=False)
    rows, hidden = table.rows(0, VOCAB_SIZE), torch.randn(2, 3, EMBED_DIM)
    assert rows[0].abs().max() > 0.01
    logits = hidden @ rows.T
    if table.row_sparse and way in ("OutputHead", "token_log_probs"):
        pytest.skip("a head is not tied to a row-sparse table")
    if way in LOGITS:
        torch.testing.assert_close(LOGITS[way](table, hidden), logits, rtol=1e-4, atol=1e-5)
    else:
        expected = logits.log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(SCORES[way](table, hidden, IDS), expected, rtol=1e-4, atol=1e-5)


@looped("name", [name for name in LOOKUP_TABLES if name != "dense, plain"])
def test_every_table_looks_the_stored_padding_row_up(name) -> None:
    table = LOOKUP_TABLES[name]()
    assert table.padding_idx == 0
    table = written(table) if isinstance(table, el.TokenTable) else table
    factor = 1.0 if table.factor is None else table.factor
    with torch.no_grad():
        torch.testing.assert_close(table(IDS), F.embedding(IDS, factor * table.rows(0, VOCAB_SIZE)))


@looped("name", [name for name in PADDED if not name.startswith(("int", "of", "stored"))])
def test_a_new_padding_row_is_zero_and_no_step_changes_it(name) -> None:
    table = TABLES[name]()
    if "int8" not in name:
        assert not table.rows(0, 1).any()
    before = table.rows(0, 1).clone()
    head = el.OutputHead(EMBED_DIM, VOCAB_SIZE) if table.row_sparse else el.OutputHead(table)
    optimizer = (el.RowAdamW if table.row_sparse else torch.optim.AdamW)(table.parameters(), lr=0.1, weight_decay=0.1)
    head.loss(table(IDS), IDS).backward()
    optimizer.step()
    torch.testing.assert_close(table.rows(0, 1), before)


STORES_ROWS = {
    **{name: TABLES[name] for name in ("dense", "dense, spare rows", "factorised", "of a user")},
    "untied head": lambda: el.OutputHead(EMBED_DIM, VOCAB_SIZE, bias=True, padding_idx=0),
}
LOSSES = {
    "look-up": lambda part, hidden: part(IDS).square().sum(),
    "logits": lambda part, hidden: logits_of(part)(hidden).square().sum(),
    "plain": lambda part, hidden: part.loss(hidden, IDS, impl="plain"),
    "chunked": lambda part, hidden: part.loss(hidden, IDS, impl="chunked"),
    "token_statistics": lambda part, hidden: part.token_statistics(hidden, IDS).log_probs.sum(),
    "divergence": lambda part, hidden: own_log_probs(part, hidden, IDS).sum(),
    "multi_token_loss": lambda part, hidden: part.multi_token_loss([hidden, hidden], IDS).loss,
    "draft head": lambda part, hidden: el.heads.DraftHead(part, range(VOCAB_SIZE)).loss(hidden, IDS),
}


def logits_of(part: el.TokenTable | el.OutputHead) -> Callable[[Tensor], Tensor]:
    return part if isinstance(part, el.OutputHead) else el.OutputHead(part)


@pytest.mark.usefixtures("both_paths")
@looped("name, way, written_by", STORES_ROWS, LOSSES, ["nn.init", "load_state_dict", "from_pretrained"])
def test_a_written_padding_row_is_kept_and_never_trained(name, way, written_by, tmp_path) -> None:
    part = STORES_ROWS[name]()
    if isinstance(part, el.OutputHead) and way == "look-up":
        way = "logits"
    key = next(key for key, value in part.named_parameters() if value.dim() == 2 and len(value) >= VOCAB_SIZE)
    nn.init.normal_(part.get_parameter(key))
    row = part.get_parameter(key)[0].detach().clone()
    if written_by != "nn.init":
        new = STORES_ROWS[name]()
        new.load_state_dict(part.state_dict())
        part = new
    if written_by == "from_pretrained":
        part.save_pretrained(tmp_path)
        part = type(part).from_pretrained(tmp_path)
    hidden = torch.randn(2, 3, EMBED_DIM)
    LOSSES[way](part, hidden).backward()
    grad = part.get_parameter(key).grad
    assert torch.equal(part.get_parameter(key)[0], row)
    assert grad[0].eq(0).all()
    assert grad[[3, 7, 49]].ne(0).all()
    if not isinstance(part, el.OutputHead):
        assert part(IDS)[0, 0].ne(0).all()


@looped("to", ["int8", "int4", "q8_0", f"rank={EMBED_DIM}"])
def test_a_compressed_table_keeps_the_padding_row_and_the_comparison_sees_it(to) -> None:
    table = written(TABLES["dense"]())
    small, row = compress_table(table, to), table.weight[0].detach()
    assert (small.rows(0, 1)[0] - row).norm() < 0.15 * row.norm()
    with torch.no_grad():
        damaged = el.TokenEmbedding.from_pretrained(table.weight.clone(), padding_idx=0, scale=table.scale)
        damaged.weight[0] = 0
    kept, lost = compare_compression(table, {"kept": small, "lost": damaged})[1:]
    assert lost.row_error > 2 * kept.row_error
