"""Divergences of two heads: beside TRL, edges and bad input; values and gradients of all heads are in `tests/laws`."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from covering import cases, some
from small_blocks import small_blocks

from embedlayer import ShapeError, SizeError, TokenIdError
from embedlayer.losses import (
    BlockLogits,
    ForwardKL,
    JensenShannon,
    LinearLogits,
    ReverseKL,
    TopKTargets,
    divergence,
)

KINDS = {"forward": ForwardKL(), "reverse": ReverseKL(), "Jensen-Shannon": JensenShannon(0.3)}


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks(tokens=3, rows=8):
        yield


def pair(dtype=torch.float64, tokens=(2, 4), vocab=23):
    hidden = torch.randn(*tokens, 5, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, 5, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randn(*tokens, 7, dtype=dtype), torch.randn(vocab, 7, dtype=dtype)


@pytest.mark.parametrize(("kind", "beta"), [(ForwardKL(), 0.0), (ReverseKL(), 1.0), (JensenShannon(0.3), 0.3)])
def test_it_is_the_loss_of_trl(kind, beta) -> None:
    trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    hidden, weight, teacher_hidden, teacher_weight = pair()
    labels = torch.randint(0, 23, (2, 4))
    labels[1, :2] = -100
    theirs = trainer.GKDTrainer.generalized_jsd_loss(
        hidden @ weight.T, teacher_hidden @ teacher_weight.T, labels, beta, temperature=0.9
    )
    student = LinearLogits(hidden, weight, temperature=0.9, impl="chunked")
    ours = divergence(student, LinearLogits(teacher_hidden, teacher_weight, temperature=0.9), kind, labels=labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)  # TRL stores beta in float32
    both = [torch.autograd.grad(each, (hidden, weight)) for each in (ours, theirs)]
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("both_paths")
@cases("kind, impl", KINDS, ["plain", "chunked", "blocks", "K targets"], pairs=["kind, impl"])
def test_tokens_that_both_heads_exclude_do_not_count(kind, impl) -> None:
    hidden, weight, teacher_hidden, teacher_weight = pair()
    options = {"bias": torch.zeros(23, dtype=torch.float64).index_fill(0, torch.arange(8, 17), -torch.inf)}
    if impl == "blocks":
        columns = lambda x, start, stop: x @ weight[start:stop].T  # noqa: E731
        student: BlockLogits | LinearLogits = BlockLogits(hidden, columns, 23, 8, **options)
    else:
        student = LinearLogits(hidden, weight, impl="auto" if impl == "K targets" else impl, **options)
    teacher: LinearLogits | TopKTargets = LinearLogits(teacher_hidden, teacher_weight, **options)
    if impl == "K targets":
        teacher = TopKTargets(torch.arange(23).expand(2, 4, 23), teacher.logits().log_softmax(-1))
    ours = divergence(student, teacher, KINDS[kind])
    kept = torch.cat([torch.arange(8), torch.arange(17, 23)])
    log_q = F.log_softmax(hidden @ weight[kept].T, dim=-1)
    log_p = F.log_softmax(teacher_hidden @ teacher_weight[kept].T, dim=-1)
    plain = KINDS[kind].of_log_probs(log_q, log_p).mean()
    torch.testing.assert_close(ours, plain)
    both = [torch.autograd.grad(each, (hidden, weight)) for each in (ours, plain)]
    torch.testing.assert_close(*both)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_only_the_teacher_excludes_count_alike_among_k_targets(kind) -> None:
    hidden, weight, teacher_hidden, teacher_weight = pair()
    bias = torch.zeros(23, dtype=torch.float64).index_fill(0, torch.arange(8, 17), -torch.inf)
    student, teacher = LinearLogits(hidden, weight), LinearLogits(teacher_hidden, teacher_weight, bias=bias)
    targets = TopKTargets(torch.arange(23).expand(2, 4, 23), teacher.logits().log_softmax(-1))
    expected, ours = (divergence(student, each, KINDS[kind]) for each in (teacher, targets))
    torch.testing.assert_close(ours, expected)
    assert ours.isinf() == (kind == "reverse")
    if kind != "reverse":
        torch.testing.assert_close(*(torch.autograd.grad(each, (hidden, weight)) for each in (ours, expected)))


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_one_head_excludes(kind) -> None:
    """The forward divergence is infinite where the student excludes it, the reverse one where the teacher does."""
    hidden, weight, teacher_hidden, teacher_weight = pair()
    excluded = {"bias": torch.zeros(23, dtype=torch.float64).index_fill(0, torch.tensor([9]), -torch.inf)}
    for one, other, infinite in (({}, excluded, "reverse"), (excluded, {}, "forward")):
        for impl in ("plain", "chunked"):
            student = LinearLogits(hidden, weight, impl=impl, **one)
            found = divergence(student, LinearLogits(teacher_hidden, teacher_weight, **other), KINDS[kind])
            assert found.isinf() if kind == infinite else found.isfinite()
            if kind != infinite:
                assert all(grad.isfinite().all() for grad in torch.autograd.grad(found, (hidden, weight)))


@pytest.mark.usefixtures("both_paths")
@cases("kind, reduction", KINDS, ["mean", "sum", "none"])
def test_derivatives_are_right_twice(kind, reduction) -> None:
    hidden, weight, teacher_hidden, teacher_weight = pair(tokens=(4,), vocab=17)
    teacher = LinearLogits(teacher_hidden, teacher_weight)

    def value(hidden, weight):
        return divergence(LinearLogits(hidden, weight, impl="chunked"), teacher, KINDS[kind], reduction=reduction)

    assert torch.autograd.gradcheck(value, (hidden, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(value, (hidden, weight), fast_mode=True)


@pytest.mark.parametrize(
    ("kind", "is_compiled"),
    [(kind, False) for kind in KINDS] + some([("Jensen-Shannon", True)], [(kind, True) for kind in KINDS]),
)
def test_it_is_transformed_and_compiled(unchecked: None, kind, is_compiled) -> None:
    hidden, weight, teacher_hidden, teacher_weight = pair()

    def value(hidden, teacher_hidden):
        return divergence(LinearLogits(hidden, weight), LinearLogits(teacher_hidden, teacher_weight), KINDS[kind])

    if not is_compiled:
        each = torch.stack([value(*both) for both in zip(hidden, teacher_hidden, strict=True)])
        torch.testing.assert_close(torch.func.vmap(value)(hidden, teacher_hidden), each)
        return
    compiled = torch.compile(value, fullgraph=True, backend="aot_eager")(hidden, teacher_hidden)
    torch.testing.assert_close(compiled, value(hidden, teacher_hidden))


def test_what_does_not_fit_is_refused(unchecked: None) -> None:
    hidden, weight, teacher_hidden, teacher_weight = pair()
    student, teacher = LinearLogits(hidden, weight), LinearLogits(teacher_hidden, teacher_weight)
    ids = torch.zeros(2, 4, 3, dtype=torch.long)
    for other, options, error in (
        (LinearLogits(teacher_hidden, teacher_weight[:20]), {}, ShapeError),
        (LinearLogits(teacher_hidden[:1], teacher_weight), {}, ShapeError),
        (teacher, {"labels": torch.zeros(8, dtype=torch.long)}, ShapeError),
        (TopKTargets(ids, torch.zeros(2, 4, 2)), {}, ShapeError),
        (TopKTargets(ids[..., :0], torch.zeros(2, 4, 0)), {}, SizeError),
        (TopKTargets(ids + 23, torch.zeros(2, 4, 3)), {}, TokenIdError),
    ):
        with pytest.raises(error):
            divergence(student, other, **options)
    for beta in (0, 1, -0.5):
        with pytest.raises(SizeError):
            JensenShannon(beta)
