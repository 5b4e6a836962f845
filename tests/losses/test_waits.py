"""On an accelerator a loss waits once or never, and a bad target raises its error at the next wait."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import pytest
import torch
from covering import cases, some
from kernel_paths import GPU_BACKENDS, capturing, cpu_taken_for_cuda, running_on
from small_blocks import small_blocks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import embedlayer as el
from benchmarks.operator_counter import OperatorCounter
from embedlayer.losses import (
    BlockLogits,
    ForwardKL,
    JensenShannon,
    LinearLogits,
    TopKTargets,
    divergence,
    token_statistics,
)

N, V, D = 40, 3000, 8


@pytest.fixture(autouse=True)
def in_chunks() -> Iterator[None]:
    """Compute few logits in chunks too, where the host may wait."""
    with small_blocks(few_logits=0), small_blocks(few_logits=0, device="cuda"):
        yield


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


WAITING = ["loss", "masked padding", "statistics", "logits of a function", "multi-token", "teacher of K tokens"]


@pytest.mark.parametrize("name", some([*WAITING, "Jensen-Shannon"], OUTPUTS))
def test_the_host_waits_once_a_loss_and_never_where_it_is_not_to_wait(name) -> None:
    with capturing():
        assert waits(OUTPUTS[name]) == []
    assert [len(waits(OUTPUTS[name])) for _ in range(2)] == [1, 1]
    assert [len(waits(OUTPUTS[name], drop_ignored=drop)) for drop in (True, False)] == [1, 0]


def on_a_gpu(backend: str) -> AbstractContextManager[Any]:
    """Compute as on CUDA by `"torch operators"` or Triton, or on a GPU."""
    return running_on("cuda") if backend == "cuda" else cpu_taken_for_cuda(triton=backend == "triton")


def value_and_gradients(output: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    *leaves, targets = inputs
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    result = output(*leaves, targets)
    return [result.detach(), *torch.autograd.grad(result.sum(), leaves)]


ROWS = 70


BACKENDS = ["torch operators", *GPU_BACKENDS]


def sampled(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    found = token_statistics(hidden, weight, targets, **options)
    assert found.log_probs is not None
    assert found.entropy is not None
    return found.log_probs + found.entropy


OF_STEPS = {"loss": losses, "none": none, "sampled": sampled, "K tokens": of_ids, "Jensen-Shannon": of_teacher}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *some([("loss", "triton")], product(OF_STEPS, ["triton"])),
        *product(OF_STEPS, ["torch operators"]),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in OF_STEPS),
    ],
)
def test_losses_whose_share_of_ignored_targets_changes_equal_the_definition(name, backend) -> None:
    with on_a_gpu(backend):
        for count in (0, 20, 21, 2, 3, 0, 1):  # of 40 targets
            hidden, weight, targets = torch.randn(N, D), torch.randn(ROWS, D), torch.randint(0, ROWS, (N,))
            hidden[:count], targets[:count] = torch.nan, -100
            ours = value_and_gradients(OF_STEPS[name], hidden, weight, targets)
            exact = value_and_gradients(OF_STEPS[name], *(x.cpu() for x in (hidden.double(), weight.double(), targets)))
            torch.testing.assert_close([x.cpu().double() for x in ours], exact, rtol=1e-4, atol=1e-4)


@cases("name", ["loss", "none", "sampled", "K tokens"])
def test_a_loss_raises_at_once_by_default(name) -> None:
    hidden, weight, bad = torch.randn(N, D), torch.randn(ROWS, D), torch.randint(0, ROWS, (N,))
    bad[7] = ROWS + 5
    with cpu_taken_for_cuda(), pytest.raises(el.TokenIdError):
        OF_STEPS[name](hidden, weight, bad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_loss_raises_the_error_of_a_target_for_which_the_host_did_not_wait(backend) -> None:
    hidden, weight, targets = torch.randn(N, D), torch.randn(ROWS, D), torch.randint(0, ROWS, (N,))
    bad = targets.clone()
    bad[7] = ROWS + 5
    message = f"token id {ROWS + 5} at row 0, column 7 is outside this table of {ROWS} rows"
    with on_a_gpu(backend):
        hidden, weight, targets, bad = (x.to(torch.get_default_device()) for x in (hidden, weight, targets, bad))
        for check in (losses, of_teacher, lambda *inputs: el.TokenEmbedding(2, 2).check()):
            assert losses(hidden, weight, bad, drop_ignored=False).isnan()
            with pytest.raises(el.TokenIdError, match=message):
                check(hidden, weight, targets)
            assert losses(hidden, weight, targets).isfinite()  # no error twice


@pytest.mark.parametrize("name", ["none", "logits of a function"])
def test_a_checkpointed_loss_is_recomputed_as_it_was_computed(name) -> None:
    weight = torch.randn(ROWS, D, dtype=torch.float64)
    output = OUTPUTS[name]
    with cpu_taken_for_cuda():
        for count in (0, 20, 1, 20):
            hidden, targets = torch.randn(N, D, dtype=torch.float64), torch.randint(0, ROWS, (N,))
            targets[:count] = -100
            ours = value_and_gradients(lambda *x: checkpoint(output, *x, use_reentrant=False), hidden, weight, targets)
            torch.testing.assert_close(ours, value_and_gradients(output, hidden, weight, targets))


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
            WITH_IDS[name](hidden, weight, bad, drop_ignored=True)


OF_TARGETS = product(
    ["loss", "none", "regularised", "weighted", "masked padding", "multi-token"], [0, 1, 3], [None, 2000]
)


@pytest.mark.parametrize(
    ("name", "bad", "chunk_bytes", "length"),
    some(
        [
            ("weighted", 0, None, 9),
            ("masked padding", 1, 2000, 9),
            ("multi-token", 1, None, 9),
            ("none", 3, None, 2049),  # several programs check the targets
        ],
        [*((*case, 9) for case in OF_TARGETS), ("none", 3, None, 2049), ("weighted", 3, None, 2049)],
    ),
)
def test_kernels_give_bad_and_ignored_targets_the_results_of_torch_operators(name, bad, chunk_bytes, length) -> None:
    pytest.importorskip("triton")
    rows = 100
    hidden, weight = torch.randn(length, D).requires_grad_(), torch.randn(rows, D)
    targets = torch.randint(0, rows, (length,))
    wrong = [5, 7, length - 1][:bad]
    targets[3], targets[wrong] = -100, torch.tensor([rows + 5, -1, rows])[:bad]
    found: list[list[Tensor]] = []
    for triton in (False, True):
        with cpu_taken_for_cuda(triton=triton):
            options = {"drop_ignored": False, "impl": "chunked", "chunk_bytes": chunk_bytes}
            result = WITH_IDS[name](hidden, weight, targets, **options)
            found.append([result, *torch.autograd.grad(result.sum(), hidden)])
            assert result.isnan().sum() == (bad if result.dim() else min(bad, 1))
            if bad:
                with pytest.raises(el.TokenIdError, match=f"token id {rows + 5} at row "):
                    el.TokenEmbedding(2, 2).check()
    torch.testing.assert_close(found[1][0], found[0][0], equal_nan=True)
    if not bad or name == "none":
        torch.testing.assert_close(found[1], found[0], equal_nan=True)
    elif name != "multi-token":
        assert found[1][1][[3, *wrong]].eq(0).all()
        assert found[1][1].isfinite().all()


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
