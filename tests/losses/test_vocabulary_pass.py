"""The chunked loss against the plain definition: values, gradients, memory, compiled graphs, bad input."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from comparison import assert_no_worse
from covering import cases, some
from kernel_paths import cpu_taken_for_cuda, without_numba
from memory import Shapes

from embedlayer import ShapeError, SizeError, TokenIdError, linear_cross_entropy, token_log_probs
from embedlayer.kernels.gpu.launch import launches_observed
from embedlayer.losses import chunk_size, operators
from embedlayer.losses.options import LogitSettings, LossSettings
from embedlayer.losses.uncomputed_logits import RequestedGradients
from embedlayer.losses.vocabulary_pass import VocabularyPass

OPTIONS = {
    "nothing": {},
    "bias": {"bias": True},
    "scale and softcap": {"logit_scale": 0.5, "softcap": 2.0},
    "smoothing and z": {"label_smoothing": 0.1, "z_loss": 0.1},
    "padding": {"padding_idx": 4},
    "padding masked": {"padding_idx": 4, "mask_padding": True},
    "spare rows": {"vocab_size": 20},
    "all": {
        "bias": True,
        "softcap": 5.0,
        "logit_scale": 1.5,
        "label_smoothing": 0.2,
        "z_loss": 0.05,
        "padding_idx": 0,
        "vocab_size": 20,
    },
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunk_size.MAX_CHUNK_TOKENS, "cpu", 3)
    monkeypatch.setitem(chunk_size.ROWS_OF_A_BLOCK, "cpu", 6)


@pytest.fixture(params=["kernels", "torch operators", "CUDA", "CUDA, not dropped"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with compiled kernels, without, and in the branch for CUDA, where a chunk has few tokens."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
        yield request.param
    elif request.param == "torch operators":
        with without_numba():
            yield request.param
    else:
        monkeypatch.setitem(chunk_size.MAX_CHUNK_TOKENS, "cuda", 16)
        monkeypatch.setattr(chunk_size, "WORK_BYTES", 1 << 12)
        with cpu_taken_for_cuda():
            yield request.param


def dropped(path: str) -> dict[str, bool]:
    return {"drop_ignored": False} if "not dropped" in path else {}


def make(options, dtype=torch.float64, tokens=(2, 4), vocab=23, width=5):
    options = dict(options)
    hidden = torch.randn(*tokens, width, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, width, dtype=dtype).requires_grad_()
    vocab = options.get("vocab_size", vocab)
    if options.get("bias"):
        options["bias"] = torch.randn(vocab, dtype=dtype).requires_grad_()
    targets = torch.randint(1, vocab, tokens)
    targets[targets == 4] = 5
    if targets.numel() > 1:
        targets.view(-1)[1] = -100
    return hidden, weight, targets, options


def leaves(hidden, weight, options):
    return [leaf for leaf in (hidden, weight, options.get("bias")) if leaf is not None]


@cases("name, reduction", OPTIONS, ["mean", "sum", "none"])
def test_values_and_gradients_equal_the_plain_definition(path, name, reduction) -> None:
    hidden, weight, targets, options = make(OPTIONS[name], tokens=(2, 4) if "CUDA" not in path else (3, 19))
    plain = linear_cross_entropy(hidden, weight, targets, impl="plain", reduction=reduction, **options)
    options |= dropped(path)
    ours = linear_cross_entropy(hidden, weight, targets, impl="chunked", reduction=reduction, **options)
    grad_output = torch.randn_like(plain)
    wanted = leaves(hidden, weight, options)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(plain, wanted, grad_output)
    for _ in range(2):  # a graph that is kept gives its gradients again
        result = torch.autograd.grad(ours, wanted, grad_output, retain_graph=True)
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("both_paths")
@cases("name, reduction", ["nothing", "all"], ["mean", "none"])
def test_gradients_and_their_gradients_are_right_in_float64(name, reduction) -> None:
    hidden, weight, targets, options = make(OPTIONS[name], tokens=(4,), vocab=21, width=3)
    fixed, padding = weight.detach().clone(), options.get("padding_idx", 0)

    def loss(hidden, weight, bias=None):
        if "padding_idx" in options:  # the loss has no gradient by this row
            weight = torch.cat([weight[:padding], fixed[padding : padding + 1], weight[padding + 1 :]])
        return linear_cross_entropy(
            hidden, weight, targets, impl="chunked", reduction=reduction, **{**options, "bias": bias}
        )

    assert torch.autograd.gradcheck(loss, leaves(hidden, weight, options), fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, leaves(hidden, weight, options), fast_mode=True)


@pytest.mark.usefixtures("path")
@cases("sizes, dtype", [(1, 1, 1), (7, 33, 5), (34, 67, 31)], [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_no_worse_than_plain_in_lower_precision(dtype, sizes) -> None:
    tokens, vocab, width = sizes
    hidden, weight, targets, options = make({"bias": True}, dtype, (tokens,), vocab + 5, width)
    exact_in = [leaf.detach().double().requires_grad_() for leaf in leaves(hidden, weight, options)]

    def results(hidden, weight, bias, impl):
        loss = linear_cross_entropy(hidden, weight, targets, bias=bias, impl=impl)
        return loss, *torch.autograd.grad(loss, (hidden, weight, bias))

    exact = results(*exact_in, impl="plain")
    plain = results(*leaves(hidden, weight, options), impl="plain")
    ours = results(*leaves(hidden, weight, options), impl="chunked")
    assert ours[0].dtype == torch.float32
    for fast, slow, right in zip(ours, plain, exact, strict=True):
        assert fast.dtype == slow.dtype
        assert_no_worse(fast, slow, right, slack=2 * torch.finfo(dtype).eps * right.abs().max().item())


@pytest.mark.usefixtures("path")
def test_a_small_gradient_in_float16_survives_until_a_grad_scaler_has_raised_it(monkeypatch) -> None:
    monkeypatch.setitem(chunk_size.MAX_CHUNK_TOKENS, "cpu", 64)
    hidden, weight, targets, _ = make({}, torch.float16, (512,), 40, 8)
    (linear_cross_entropy(hidden, weight, targets, impl="chunked") * 2.0**14).backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    (linear_cross_entropy(*exact, targets, impl="plain") * 2.0**14).backward()
    torch.testing.assert_close(weight.grad.double(), exact[1].grad, rtol=1e-2, atol=1.0)
    torch.testing.assert_close(hidden.grad.double(), exact[0].grad, rtol=1e-2, atol=0.1)


@pytest.mark.usefixtures("both_paths")
def test_under_autocast_it_behaves_as_plain_does() -> None:
    hidden, weight, targets, _ = make({}, torch.float32, (40,), 60, 16)
    result = {}
    for impl in ("plain", "chunked"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, targets, impl=impl)
        result[impl] = loss, *torch.autograd.grad(loss, (hidden, weight))
    for ours, plain in zip(result["chunked"], result["plain"], strict=True):
        assert ours.dtype == plain.dtype == torch.float32
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("impl", ["plain", "chunked"])
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_target_that_counts_is_loss_zero_and_gradients_zero(impl, tokens, reduction) -> None:
    hidden, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    targets = torch.full((tokens,), -100)
    loss = linear_cross_entropy(hidden, weight, targets, impl=impl, reduction=reduction)
    loss.sum().backward()
    assert loss.eq(0).all()
    assert loss.shape == ((tokens,) if reduction == "none" else ())
    assert hidden.grad.eq(0).all()
    assert weight.grad.eq(0).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_of_tokens_by_vocabulary_is_made_and_one_of_the_table(monkeypatch, reduction) -> None:
    monkeypatch.setitem(chunk_size.BUFFER_BYTES, "cpu", 2**10)
    monkeypatch.setitem(chunk_size.MAX_CHUNK_TOKENS, "cpu", 64)
    tokens, vocab, width = 80, 150, 64
    hidden, weight, targets, _ = make({}, torch.float32, (tokens,), vocab, width)
    with Shapes() as shapes:
        linear_cross_entropy(hidden, weight, targets, impl="chunked", reduction=reduction).sum().backward()
    assert not shapes.largest(tokens * vocab)
    fresh = [
        name for name, numel in shapes.numels if numel == vocab * width and name.startswith(("empty", "new_", "zeros"))
    ]
    assert len(fresh) == 1


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("chunk_tokens", some([16], [3, 16, 400]))
def test_a_gradient_of_bfloat16_rows_over_several_chunks_is_no_worse_than_plain(monkeypatch, chunk_tokens) -> None:
    monkeypatch.setitem(chunk_size.MAX_CHUNK_TOKENS, "cpu", chunk_tokens)
    hidden, weight, targets, _ = make({}, torch.bfloat16, (400,), 60, 16)
    found = {}
    for impl in ("plain", "chunked"):
        loss = linear_cross_entropy(hidden, weight, targets, impl=impl, reduction="sum")
        found[impl] = torch.autograd.grad(loss, weight)[0]
    leaves = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    exact = torch.autograd.grad(linear_cross_entropy(*leaves, targets, impl="plain", reduction="sum"), leaves[1])[0]
    ours, plain = ((each.double() - exact).square().mean().sqrt() for each in (found["chunked"], found["plain"]))
    assert found["chunked"].dtype == torch.bfloat16
    assert ours <= 1.1 * plain


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("needed", [0, 1, None])
def test_only_the_requested_gradients_are_computed(monkeypatch, needed) -> None:
    hidden, weight, targets, _ = make({}, torch.float32, (9,), 30, 8)
    for place, leaf in enumerate((hidden, weight)):
        leaf.requires_grad_(place == needed)
    seen = []
    compute = VocabularyPass.losses_and_gradients

    def recorded(*parts):
        seen.append(compute(*parts))
        return seen[-1]

    monkeypatch.setattr(VocabularyPass, "losses_and_gradients", recorded)
    loss = linear_cross_entropy(hidden, weight, targets, impl="chunked")
    assert [part is not None for part in seen[0][1]] == [needed == 0, needed == 1, False]
    assert loss.requires_grad == (needed is not None)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, targets, impl="chunked")
    assert seen[1][1] == (None, None, None)


def test_ignored_targets_are_dropped_before_any_work(path, monkeypatch) -> None:
    hidden, weight, targets, _ = make({}, tokens=(50,))
    targets[7:] = -100
    seen = []
    compute = VocabularyPass.losses_and_gradients

    def counted(self, *rest):
        seen.extend(self.tokens.counts)
        return compute(self, *rest)

    monkeypatch.setattr(VocabularyPass, "losses_and_gradients", counted)
    linear_cross_entropy(hidden, weight, targets, impl="chunked", **dropped(path))
    assert seen == [50 if dropped(path) else 6]


@pytest.mark.usefixtures("both_paths")
def test_a_view_of_a_larger_table_and_a_hidden_state_of_another_layout_are_taken() -> None:
    table = torch.randn(30, 6, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(6, 4, 2, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 25, (2, 4))
    result = []
    for impl in ("plain", "chunked"):
        loss = linear_cross_entropy(hidden.permute(2, 1, 0), table[:25], targets, impl=impl)
        result.append(torch.autograd.grad(loss, (hidden, table)))
    torch.testing.assert_close(*result, rtol=1e-12, atol=1e-14)
    assert result[1][1][25:].eq(0).all()


@pytest.mark.usefixtures("both_paths")
def test_large_logits_neither_overflow_nor_lose_the_loss() -> None:
    hidden, weight, targets, _ = make({"logit_scale": 1e4}, torch.float32, (6,), 40, 8)
    exact = linear_cross_entropy(hidden.double(), weight.double(), targets, logit_scale=1e4, impl="plain")
    plain = linear_cross_entropy(hidden, weight, targets, logit_scale=1e4, impl="plain")
    ours = linear_cross_entropy(hidden, weight, targets, logit_scale=1e4, impl="chunked")
    assert_no_worse(ours, plain, exact, slack=1e-6 * exact.item())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(
    ("backend", "reduction"), some([("inductor", "none")], product(["aot_eager", "inductor"], ["none", "mean"]))
)
def test_it_compiles_to_one_graph(unchecked: None, backend, reduction) -> None:
    hidden, weight, targets, _ = make({}, torch.float32, (9,), 30, 8)
    bias = torch.randn(30, requires_grad=True)

    def loss(hidden, weight, bias):
        states = torch.tanh(hidden)
        result = linear_cross_entropy(
            states, weight, targets, bias=bias, impl="chunked", reduction=reduction, softcap=3.0
        )
        return (result * 2).sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    result, expected = compiled(hidden, weight, bias), loss(hidden, weight, bias)
    torch.testing.assert_close(result, expected)
    parts = (hidden, weight, bias)
    torch.testing.assert_close(torch.autograd.grad(result, parts), torch.autograd.grad(expected, parts))


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_operator_keeps_torchs_rules(dtype, weighted) -> None:
    hidden, weight, targets, _ = make({}, dtype, (4,), 9, 3)
    for reduction in ("mean", "none"):
        requested = RequestedGradients(hidden=True, weight=True, bias=False)
        settings = operators.OperatorArguments(9, dtype, LogitSettings(), LossSettings(reduction=reduction), requested)
        weights = torch.rand(targets.shape) if weighted else None
        inputs = (hidden, weight, None, targets, weights, None, *settings.flat())
        torch.library.opcheck(
            operators._operator, inputs, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
        )


@pytest.mark.parametrize("impl", ["plain", "chunked"])
@pytest.mark.parametrize("bad", [23, -1, 2**40])
def test_a_target_outside_is_named(impl, bad) -> None:
    hidden, weight, targets, _ = make({})
    targets[1, 2] = bad
    with pytest.raises(TokenIdError, match=rf"token id {bad} at row 1, column 2 is outside this table of 23 rows"):
        linear_cross_entropy(hidden, weight, targets, impl=impl)


@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_a_target_outside_is_named_also_by_a_compiled_graph(unchecked: None, impl) -> None:
    hidden, weight, targets, _ = make({}, torch.float32)
    compiled = torch.compile(
        lambda targets: linear_cross_entropy(hidden, weight, targets, impl=impl), fullgraph=True, backend="eager"
    )
    compiled(targets)
    targets[0, 3] = 99
    with pytest.raises(TokenIdError, match="token id 99 at row 0, column 3"):
        compiled(targets)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(2, 4, 6)}, ShapeError, r"hidden \(2, 4, 6\) and weight \(23, 5\) do not fit"),
        ({"targets": torch.zeros(8, dtype=torch.long)}, ShapeError, r"of shape \(2, 4\).* not int64 of shape \(8,\)"),
        ({"targets": torch.zeros(2, 4)}, ShapeError, "must be int64 or int32"),
        ({"hidden": torch.zeros(2, 4, 5, dtype=torch.float16)}, ShapeError, "float16 and the rows torch.float64"),
        ({"impl": "fast"}, SizeError, "impl must be one of auto, plain, chunked, triton, not 'fast'"),
        ({"reduction": "max"}, SizeError, "reduction must be one of"),
        ({"label_smoothing": 0.1, "mask_padding": True, "padding_idx": 0}, SizeError, "use one"),
    ],
)
def test_what_does_not_fit_is_refused(unchecked: None, change, error, message) -> None:
    hidden, weight, targets, _ = make({})
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets, **change})


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_log_probs_of_tokens_are_those_of_log_softmax_with_their_gradients(impl) -> None:
    hidden, weight, tokens, _ = make({})
    ours = token_log_probs(hidden, weight, tokens, impl=impl, logit_scale=1 / 0.7)
    scores = F.log_softmax(hidden @ weight.T / 0.7, dim=-1)
    expected = scores.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (tokens >= 0)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    grad_output = torch.randn_like(ours)
    result = torch.autograd.grad(ours, (hidden, weight), grad_output)
    torch.testing.assert_close(
        result, torch.autograd.grad(expected, (hidden, weight), grad_output), rtol=1e-10, atol=1e-12
    )


IN_THE_INTERPRETER = [
    ("nothing", torch.bfloat16, "mean"),
    ("padding masked", torch.float16, "none"),
    ("all", torch.float32, "mean"),
    ("all", torch.bfloat16, "none"),
]


@pytest.mark.parametrize(
    ("name", "dtype", "reduction"),
    some(IN_THE_INTERPRETER, product(OPTIONS, [torch.float32, torch.bfloat16, torch.float16], ["mean", "none"])),
)
def test_triton_kernels_in_the_interpreter_are_no_worse_than_plain(monkeypatch, name, dtype, reduction) -> None:
    pytest.importorskip("triton")
    monkeypatch.setitem(chunk_size.MAX_CHUNK_TOKENS, "cuda", 16)
    hidden, weight, targets, options = make(OPTIONS[name], dtype, (3, 7), 90, 12)
    parts = leaves(hidden, weight, options)
    size = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 6}[dtype]  # of float16, its float32 products and a copy
    bytes_of_16_tokens = 16 * options.get("vocab_size", 90) * size

    def results(impl, dtype):
        cast = [part.detach().to(dtype).requires_grad_() for part in parts]
        own = options if len(parts) < 3 else {**options, "bias": cast[2]}
        budget = {} if impl == "plain" else {"chunk_bytes": bytes_of_16_tokens}  # two chunks, the last one padded
        loss = linear_cross_entropy(*cast[:2], targets, impl=impl, reduction=reduction, **own, **budget)
        return loss, *torch.autograd.grad(loss, cast, torch.linspace(0.5, 1.5, loss.numel()).to(loss).view(loss.shape))

    exact, plain = results("plain", torch.float64), results("plain", dtype)
    launched: list[str] = []
    with cpu_taken_for_cuda(triton=True), launches_observed(lambda each: launched.append(each.name)):
        found = results("triton", dtype)
    assert launched.count("statistics_gradient") == 2
    for ours, slow, right in zip(found, plain, exact, strict=True):
        assert ours.dtype == slow.dtype
        assert_no_worse(ours, slow, right, slack=2 * torch.finfo(dtype).eps * right.abs().max().item())
