"""On an accelerator a loss waits once or never, and a bad target raises its error at the next wait."""

import importlib
from collections.abc import Callable

import pytest
import torch
from covering import cases
from kernel_paths import cpu_taken_for_cuda
from torch import Tensor

import embedlayer as el
from benchmarks.operator_counter import OperatorCounter
from embedlayer.core.index_checks import target_record
from embedlayer.losses import (
    BlockLogits,
    ForwardKL,
    JensenShannon,
    LinearLogits,
    TopKTargets,
    counted_tokens,
    divergence,
    token_statistics,
)
from embedlayer.losses.definition import reduction_factors
from embedlayer.losses.options import LossSettings

N, V, D = 40, 3000, 8


def losses(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    return el.linear_cross_entropy(hidden, weight, targets, **options)


def none(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    return el.linear_cross_entropy(hidden, weight, targets, reduction="none", bias=weight[:, 0], **options)


def regularised(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    options |= {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 5.0, "reduction": "sum"}
    return el.linear_cross_entropy(hidden, weight, targets, **options)


def weighted(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    return el.linear_cross_entropy(
        hidden, weight, targets, token_weights=torch.ones_like(hidden[:, 0]).detach(), **options
    )


def masked(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    options |= {"padding_idx": 3, "mask_padding": True, "bias": weight[:, 0]}
    return el.linear_cross_entropy(hidden, weight, targets, **options)


def statistics(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    wanted = ("log_probs", "entropy", "sum_squared_probs", "is_argmax")
    found = token_statistics(hidden, weight, targets, statistics=wanted, top_k=64, **options)
    assert found.log_probs is not None
    assert found.entropy is not None
    return torch.stack([found.log_probs, found.entropy, found.top_logits[..., -1]], -1)


def of_function(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    logits = BlockLogits(hidden, lambda states, start, stop: states @ weight[start:stop].T, len(weight), 1000)
    log_probs = token_statistics(logits, targets, top_k=5, **options).log_probs
    assert log_probs is not None
    return log_probs


def multi_token(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean", **options) -> Tensor:
    head = el.OutputHead(hidden.shape[-1], len(weight), device="meta")
    head.weight = torch.nn.Parameter(weight)
    states = [hidden[None], hidden[None]]
    return head.multi_token_loss(states, targets[None], [1.0, 0.3], reduction=reduction, **options).loss


def multi_token_none(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    return multi_token(hidden, weight, targets, "none", **options)


def of_ids(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    teacher = TopKTargets(targets.unsqueeze(-1), hidden.new_zeros(*targets.shape, 1))
    return divergence((hidden, weight), teacher, ForwardKL(), labels=targets, **options)


def of_teacher(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    student = LinearLogits(hidden, weight)
    return divergence(
        student, LinearLogits(hidden.detach(), weight.detach()), JensenShannon(), labels=targets, **options
    )


WITH_IDS: dict[str, Callable[..., Tensor]] = {
    "loss": losses,
    "none": none,
    "regularised": regularised,
    "weighted": weighted,
    "masked padding": masked,
    "statistics": statistics,
    "logits of a function": of_function,
    "multi-token": multi_token,
    "multi-token, none": multi_token_none,
    "teacher of K tokens": of_ids,
}
OUTPUTS = {**WITH_IDS, "Jensen-Shannon": of_teacher}


def waits(output: Callable[..., Tensor], **options: object) -> list[str]:
    """The lines at which the host waits in forward and backward."""
    hidden, weight = (torch.empty(rows, D, device="meta").requires_grad_() for rows in (N, V))
    targets = torch.empty(N, dtype=torch.long, device="meta")
    with OperatorCounter() as count:
        output(hidden, weight, targets, **options).sum().backward()
    return [wait.place for wait in count.waits]


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_host_waits_once_and_never_where_it_is_not_to_wait(name, monkeypatch) -> None:
    assert len(waits(OUTPUTS[name])) == 1
    assert waits(OUTPUTS[name], drop_ignored=False) == []
    monkeypatch.setattr(counted_tokens, "is_capturing", lambda x: True)
    assert waits(OUTPUTS[name]) == []


def entropy(hidden: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    found = token_statistics(hidden, weight, statistics=("entropy",)).entropy
    assert found is not None
    return found


def test_without_tokens_and_labels_the_host_never_waits() -> None:
    assert waits(entropy) == []
    assert waits(lambda hidden, weight, _: divergence((hidden, weight), (hidden, weight.detach()))) == []


@pytest.mark.parametrize("name", WITH_IDS)
def test_a_bad_target_is_nan_until_the_next_wait_raises_its_error(name) -> None:
    hidden, weight = torch.randn(N, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    targets = torch.randint(0, V, (N,))
    bad = targets.clone()
    bad[7] = V + 5
    with cpu_taken_for_cuda():
        for wait in (lambda: losses(hidden, weight, targets), el.TokenEmbedding(2, 2).check):
            result = WITH_IDS[name](hidden.requires_grad_(), weight, bad, drop_ignored=False)
            assert result.isnan().any()
            if result.dim():
                assert not result.isnan().all()
            (grad,) = torch.autograd.grad(result.sum(), hidden)
            assert grad[7].eq(0).all() or "multi" in name
            with pytest.raises(el.TokenIdError, match=f"token id {V + 5} .* outside this table of {V} rows"):
                wait()
        with pytest.raises(el.TokenIdError, match=f"token id {V + 5} .* outside this table of {V} rows"):
            WITH_IDS[name](hidden, weight, bad)


@cases("length, drop, other, earlier, weighted", [1, 5, 2049], [False, True], [0, -100], [False, True], [False, True])
def test_kernels_check_targets_as_torch_operators_do(length, drop, other, earlier, weighted) -> None:
    pytest.importorskip("triton")
    targets = torch.randint(0 if drop else -3, V + 3 * (not drop), (2, length))
    targets[0, 0] = -100
    weights = torch.randn(2, length) if weighted else None
    found = []
    for triton in (False, True):
        with cpu_taken_for_cuda(triton=triton):
            record = target_record(targets.device)
            if earlier and not drop:
                record.copy_(torch.tensor([3, V, 2, V]))
            mask, checked = counted_tokens.counted_targets(targets, V, -100, drop=drop, other=other, weights=weights)
            factors = reduction_factors(mask, LossSettings(token_weights=weights), torch.float32)
            assert checked.factors is None or torch.equal(checked.factors, factors)
            found.append([mask, checked.ids, *checked.tokens, checked.is_bad, record.clone()])
            record.fill_(-1)
    for ours, expected in zip(*found, strict=True):
        assert ours is expected is None or torch.equal(ours, expected)


@cases(
    "name, is_bad, chunk_bytes",
    ["loss", "regularised", "weighted", "masked padding", "multi-token"],
    [False, True],
    [None, 6000],
)
def test_kernels_give_bad_and_ignored_targets_the_results_of_torch_operators(name, is_bad, chunk_bytes) -> None:
    pytest.importorskip("triton")
    rows = 300
    hidden, weight = torch.randn(9, D).requires_grad_(), torch.randn(rows, D)
    targets = torch.randint(0, rows, (9,))
    targets[3], targets[8] = -100, rows + 5 if is_bad else 0
    found = []
    for triton in (False, True):
        with cpu_taken_for_cuda(triton=triton):
            result = WITH_IDS[name](
                hidden, weight, targets, drop_ignored=False, impl="chunked", chunk_bytes=chunk_bytes
            )
            found.append([result, *torch.autograd.grad(result, hidden)])
            assert result.isnan() == is_bad
            if is_bad:
                with pytest.raises(el.TokenIdError, match=f"token id {rows + 5} at row "):
                    el.TokenEmbedding(2, 2).check()
    if is_bad:
        assert found[1][1][[3, 8]].eq(0).all() or "multi" in name
        assert found[1][1].isfinite().all()
    else:
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_in_a_compiled_graph_too(unchecked: None, impl) -> None:
    hidden, weight, targets = torch.randn(2, 5, 8, requires_grad=True), torch.randn(30, 8), torch.randint(0, 30, (2, 5))
    targets[0, 1] = -100
    expected = el.linear_cross_entropy(hidden, weight, targets, impl="plain")
    with cpu_taken_for_cuda():
        compiled = torch.compile(
            lambda targets: el.linear_cross_entropy(hidden, weight, targets, impl=impl), fullgraph=True, backend="eager"
        )
        torch.testing.assert_close(compiled(targets), expected)
        targets[1, 3] = 30
        assert compiled(targets).isnan()
        with pytest.raises(el.TokenIdError, match="token id 30 at row 1, column 3 is outside this table of 30 rows"):
            el.TokenEmbedding(2, 2).check()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("embedlayer.core.index_checks", "checked_copy"),
        ("embedlayer.heads.draft", "require_draft_tokens"),
        ("embedlayer.row_sparse.hooks", "with_updates_applied"),
        ("embedlayer.tables.stored.rows_in_files", "mapped_rows"),
        ("embedlayer.losses.operators", "chunked_cross_entropy"),
    ],
)
def test_operators_that_wait_are_left_out_of_cuda_graphs(module, name) -> None:
    importlib.import_module(module)
    tags = getattr(torch.ops.embedlayer, name).default.tags
    assert (torch.Tag.cudagraph_unsafe in tags) == (name != "chunked_cross_entropy")
