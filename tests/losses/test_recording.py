"""Recorded numbers of tokens are those of all logits, and recording changes no bit of loss and gradients."""

import pytest
import torch
import torch.distributed as dist
from covering import cases, some
from kinds import EMBED_DIM, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE
from processes import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import embedlayer as el
from embedlayer.distributed import shard_table
from embedlayer.losses import linear_cross_entropy
from embedlayer.losses.recording import record_losses

HEADS = {**{name: lambda name=name: el.OutputHead(TABLES[TIED_HEADS[name]]()) for name in TIED_HEADS}, **UNTIED_HEADS}
N, SAMPLED = 40, 16
"""Tokens of a batch, and how many of them have a recorded variance."""


def recorded_by_definition(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    z, counted = logits.double().flatten(0, -2), targets.flatten() != -100
    ids = targets.flatten().where(counted, 0)
    sample = counted.nonzero()[:, 0][torch.arange(SAMPLED) * int(counted.sum()) // SAMPLED]
    variances = torch.stack([row[row > -torch.inf].var(correction=0) for row in z[sample]])
    return {
        "log_probs": z.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)[counted],
        "logsumexp": z.logsumexp(-1)[counted],
        "largest": z.amax(-1)[counted],
        "variances": variances,
    }


def require_recorded(records, logits: Tensor, targets: Tensor) -> None:
    [record] = records
    counted = torch.ones(N, dtype=torch.bool) if record.counted is None else record.counted
    assert torch.equal(record.targets[counted], targets.flatten()[targets.flatten() != -100])
    for name, expected in recorded_by_definition(logits, targets).items():
        value = getattr(record, name)
        value = value if name == "variances" else value[counted]
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5, msg=name)


def targets_of(shape) -> Tensor:
    targets = torch.randint(1, VOCAB_SIZE, shape)
    targets.view(-1)[::7] = -100
    return targets


@cases("name, impl, reduction", HEADS, ("plain", "chunked"), ("mean", "none"), pairs=["impl, reduction"])
def test_a_record_has_the_numbers_of_all_logits(name, impl, reduction) -> None:
    head = HEADS[name]()
    hidden, targets = torch.randn(2, N // 2, EMBED_DIM), targets_of((2, N // 2))
    with record_losses() as records:
        head.loss(hidden, targets, impl=impl, reduction=reduction)
    with torch.no_grad():
        require_recorded(records, head(hidden), targets)


@cases(
    "options, drop, requires_grad",
    [{}, {"softcap": 3.0, "temperature": 0.7}, {"padding_idx": 0, "mask_padding": True}],
    [True, False],
    [True, False],
    pairs=["options, drop", "drop, requires_grad"],
)
def test_records_know_the_options_of_the_logits(options, drop, requires_grad) -> None:
    hidden, weight, bias = torch.randn(N, 8), torch.randn(VOCAB_SIZE, 8).requires_grad_(requires_grad), torch.randn(50)
    targets = targets_of((N,))
    with record_losses() as records:
        linear_cross_entropy(hidden, weight, targets, bias=bias, drop_ignored=drop, impl="chunked", **options)
    logits = el.losses.finish_logits(hidden @ weight.detach().T, bias=bias, **options)
    require_recorded(records, logits, targets)


@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_recording_changes_no_bit(impl) -> None:
    head, hidden, targets = el.OutputHead(EMBED_DIM, VOCAB_SIZE), torch.randn(N, EMBED_DIM), targets_of((N,))

    def result() -> list[Tensor]:
        states = hidden.clone().requires_grad_()
        loss = head.loss(states, targets, impl=impl, z_loss=1e-3, label_smoothing=0.1)
        return [loss.detach(), *torch.autograd.grad(loss, [states, head.weight])]

    alone = result()
    with record_losses():
        watched = result()
    assert all(map(torch.equal, alone, watched))


def test_what_a_backward_pass_computes_again_is_not_recorded_again() -> None:
    head, hidden, targets = el.OutputHead(EMBED_DIM, VOCAB_SIZE), torch.randn(N, EMBED_DIM), targets_of((N,))
    with record_losses() as records:
        loss = head.loss(hidden, targets, impl="chunked")
        loss.backward(retain_graph=True)
        loss.backward()
        checkpoint(head.loss, hidden, targets, use_reentrant=False).backward()
    head.loss(hidden, targets)  # outside of the context
    assert len(records) == 2


@pytest.mark.long
def test_a_compiled_loss_is_recorded_when_it_runs(unchecked) -> None:
    head, hidden, targets = el.OutputHead(EMBED_DIM, VOCAB_SIZE), torch.randn(N, EMBED_DIM), targets_of((N,))
    compiled = torch.compile(lambda states: head.loss(states, targets, impl="chunked"), fullgraph=True)
    compiled(hidden)
    with record_losses() as records:
        compiled(hidden)
    with torch.no_grad():
        require_recorded(records, head(hidden), targets)


@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_logits_that_are_not_numbers_are_recorded_as_such(impl) -> None:
    hidden = torch.randn(3, 8).index_fill(0, torch.tensor([1]), torch.nan)
    with record_losses() as records:
        linear_cross_entropy(hidden, torch.randn(VOCAB_SIZE, 8), torch.arange(3), impl=impl)
    assert records[0].largest.isnan().tolist() == records[0].logsumexp.isnan().tolist() == [False, True, False]


def sharded_records(reduction: str) -> None:
    torch.manual_seed(0)
    rank, whole = dist.get_rank(), TABLES["dense"]()
    hidden, targets = torch.randn(2, N, EMBED_DIM), targets_of((2, N))
    logits = whole.logits(hidden, softcap=4.0).detach()
    table = shard_table(whole, init_device_mesh("cpu", (2,)))
    with record_losses() as records:
        table.loss(hidden[rank], targets[rank], softcap=4.0, reduction=reduction)
    [record] = records
    expected = torch.cat([recorded_by_definition(logits[i], targets[i])["variances"] for i in range(2)])
    torch.testing.assert_close(record.variances, expected, rtol=1e-5, atol=1e-5)
    of_rank = record._replace(variances=record.variances[SAMPLED * rank :][:SAMPLED])
    require_recorded([of_rank], logits[rank], targets[rank])


@pytest.mark.parametrize("reduction", some(["mean"], ["mean", "none"]))
def test_ranks_of_sharded_rows_record_their_own_tokens(reduction) -> None:
    on_ranks(2, sharded_records, reduction)
