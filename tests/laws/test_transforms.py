"""Every table, position, head, layer and loss can be transformed by `torch.func`, and agrees with autograd.

Eager mode computes with fused functions and compiled kernels, a transform with the plain definitions, so each
comparison here is also one of the two. All in float64.
"""

import pytest
import torch
from cases import CASES, CODE_PATHS, IDS, LOSSES, Case, with_weights
from covering import looped, some
from kinds import EMBED_DIM, LAYERS, MAX_SEQ_LEN, POSITIONS, TABLES, UNTIED_HEADS, VOCAB_SIZE, with_pending_updates
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, stack_module_state, vmap

import embedlayer as el

QUANTISED_TOLERANCE = {"rtol": 1e-3, "atol": 5e-5}
"""The kernels for quantised rows compute in float32, and round a multiplication and an addition once or twice."""


def assert_close(one: object, other: object, name: str = "") -> None:
    torch.testing.assert_close(one, other, **(QUANTISED_TOLERANCE if "int" in name else {}))


def skip_without_batched_views(name: str) -> None:
    """Torch 2.11 has no batching rule for `Tensor.view(dtype)`, by which codes of stored rows are read as bytes."""
    try:
        vmap(lambda x: x.view(torch.int8))(torch.zeros(1, 1, dtype=torch.uint8))
    except RuntimeError:
        if "stored" in name:
            pytest.skip("this release of torch has no batching rule for view(dtype)")


AROUND_A_TABLE = (
    "layer: ",
    "head: tied",
    "loss: tied",
    "streams: streams of",
    "loss of streams: streams of",
    "loss over rows",
)
ALWAYS = [name for name in CASES if name in CODE_PATHS or not name.startswith(AROUND_A_TABLE)]
"""Each table, position, head and loss by itself or once in another; what surrounds a table is a case of its own."""

every_case = looped("name", some(ALWAYS, CASES))
PARTS = ("table", "bag", "position", "layer", "head")
each_code_path = looped("name", some([name for name in ALWAYS if name in CODE_PATHS or name.startswith(PARTS)], CASES))
"""For laws about other derivatives: a loss in each way, and not for each kind of table."""


def by_autograd(case: Case, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients of `value` by all parameters and float inputs, in eager mode."""
    inputs = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
    learned = [p for p in case.module.parameters() if p.requires_grad]
    wanted = [*learned, *(x for x in inputs if x.is_floating_point())]
    value = case.module(*inputs).sin().sum()
    if not wanted or not value.requires_grad:
        return [torch.zeros_like(x) for x in wanted]
    found = torch.autograd.grad(value, wanted, allow_unused=True)
    dense = [None if g is None else g.to_dense() for g in found]
    return [torch.zeros_like(x) if g is None else g for g, x in zip(dense, wanted, strict=True)]


def flat(found: tuple[dict[str, Tensor], list[Tensor]]) -> list[Tensor]:
    return [*found[0].values(), *found[1]]


@every_case
def test_grad_is_that_of_autograd(name) -> None:
    case = CASES[name]()
    parameters, floats, of = case.variables(case.inputs)
    assert_close(flat(grad(of, argnums=(0, 1))(parameters, floats)), by_autograd(case, case.inputs), name)


@every_case
def test_vmap_over_a_batch_is_a_loop(name) -> None:
    skip_without_batched_views(name)
    case = CASES[name]()
    expected = torch.stack([case.module(*sample) for sample in zip(*case.inputs, strict=True)])
    assert_close(vmap(case.module)(*case.inputs), expected, name)


@each_code_path
def test_per_sample_gradients_are_those_of_each_sample(name) -> None:
    skip_without_batched_views(name)
    case = CASES[name]()

    def gradients(*inputs: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        parameters, floats, of = case.variables(inputs)
        return grad(of, argnums=(0, 1))(parameters, floats)

    samples = list(zip(*case.inputs, strict=True))
    expected = [torch.stack(each) for each in zip(*(by_autograd(case, sample) for sample in samples), strict=True)]
    assert_close(flat(vmap(gradients)(*case.inputs)), expected, name)


@each_code_path
def test_forward_derivatives_are_those_of_the_gradient(name) -> None:
    case = CASES[name]()
    parameters, floats, of = case.variables(case.inputs)
    if not parameters and not floats:
        pytest.skip("nothing here has a derivative")
    tangents = ({key: torch.randn_like(p) for key, p in parameters.items()}, [torch.randn_like(x) for x in floats])
    pairs = zip(by_autograd(case, case.inputs), flat(tangents), strict=True)
    expected = sum(((g * t).sum() for g, t in pairs), torch.zeros((), dtype=torch.float64))
    _, derivative = jvp(of, (parameters, floats), tangents)
    assert_close(derivative, expected, name)
    with forward_ad.dual_level():
        duals = {key: forward_ad.make_dual(parameters[key], tangents[0][key]) for key in parameters}
        value = of(duals, [forward_ad.make_dual(x, t) for x, t in zip(floats, tangents[1], strict=True)])
        tangent = forward_ad.unpack_dual(value).tangent
    assert_close(torch.zeros_like(expected) if tangent is None else tangent, expected, name)


@each_code_path
def test_batched_gradients_are_those_of_a_loop(name) -> None:
    case = CASES[name]()
    inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in case.inputs)
    output = case.module(*inputs)
    wanted = [x for x in (*case.module.parameters(), *inputs) if x.requires_grad]
    if not output.requires_grad or any(getattr(part, "row_sparse", False) for part in case.module.modules()):
        pytest.skip("nothing has a gradient here, or a sparse one, of which torch makes no batches")
    vectors = torch.randn(2, *output.shape, dtype=torch.float64)

    def gradients(vector: Tensor, *, batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            output, wanted, vector, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )

    expected = [None if each[0] is None else torch.stack(each)
                for each in zip(*(gradients(vector, batched=False) for vector in vectors), strict=True)]  # fmt: skip
    found = gradients(vectors, batched=True)
    assert not any(g.requires_grad for g in found if g is not None)
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            assert_close(one, other, name)


TWICE_DIFFERENTIABLE = [
    name for name in CASES if name.startswith("loss") or name in ("layer: DecoderLM", "table: factorised")
]


@looped("name", some([name for name in TWICE_DIFFERENTIABLE if name in ALWAYS], TWICE_DIFFERENTIABLE))
def test_second_derivatives_are_the_same_in_both_orders(name) -> None:
    case = CASES[name]()
    parameters, floats, of = case.variables(case.inputs)
    tangents = ({key: torch.randn_like(p) for key, p in parameters.items()}, [torch.randn_like(x) for x in floats])
    gradients = grad(of, argnums=(0, 1))

    def along(parameters: dict[str, Tensor], floats: list[Tensor]) -> Tensor:
        pairs = zip(flat(gradients(parameters, floats)), flat(tangents), strict=True)
        return sum(((g * t).sum() for g, t in pairs), torch.zeros((), dtype=torch.float64))

    _, forward_over_reverse = jvp(gradients, (parameters, floats), tangents)
    reverse_over_reverse = grad(along, argnums=(0, 1))(parameters, floats)
    assert_close(flat(forward_over_reverse), flat(reverse_over_reverse))


@looped("options", LOSSES)
def test_the_hessian_of_a_loss_is_that_of_autograd(options) -> None:
    weight, x = torch.randn(11, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    targets = torch.tensor([6, LOSSES[options].get("ignore_index", -100)])

    def value(x: Tensor) -> Tensor:
        options_of_loss = with_weights(targets, impl="chunked", **LOSSES[options])
        return el.linear_cross_entropy(x, weight, targets, **options_of_loss).sum()

    assert_close(hessian(value)(x), torch.autograd.functional.hessian(value, x))


@looped("name", TABLES)
def test_ids_outside_the_table_are_clamped_under_a_transform(name) -> None:
    skip_without_batched_views(name)
    table = TABLES[name]()
    ids = torch.tensor([[-3, 5], [VOCAB_SIZE, 10**6]])
    with torch.no_grad():
        expected = table(torch.tensor([[0, 5], [VOCAB_SIZE - 1, VOCAB_SIZE - 1]]))
        assert_close(vmap(table)(ids), expected, name)
        assert_close(vmap(lambda x: x + table(ids))(torch.zeros(1))[0], expected, name)


def test_positions_and_targets_outside_are_clamped_under_a_transform() -> None:
    position = POSITIONS["learned"]()
    places = torch.tensor([[0, MAX_SEQ_LEN + 3]])
    assert torch.equal(vmap(position.vectors)(places), position.vectors(places.clamp(max=MAX_SEQ_LEN - 1)))
    head, x = UNTIED_HEADS["untied"](), torch.randn(1, 2, EMBED_DIM)
    found = vmap(head.loss)(x, torch.tensor([[VOCAB_SIZE, -100]]))[0]
    assert_close(found, head.loss(x, torch.tensor([[VOCAB_SIZE - 1, -100]])))


def test_an_ensemble_is_one_vmap_over_stacked_parameters() -> None:
    models = [LAYERS["DecoderLM"]() for _ in range(3)]
    stacked = stack_module_state(models)
    found = vmap(lambda state: functional_call(models[0], state, (IDS,)))(stacked)
    assert_close(found, torch.stack([model(IDS) for model in models]))


def test_dropout_under_vmap_draws_for_each_sample() -> None:
    layer = el.TransformerEmbedding(VOCAB_SIZE, 64, MAX_SEQ_LEN, dropout=0.5)
    ids = IDS[:1].expand(2, -1)
    first, second = vmap(layer, randomness="different")(ids)
    kept = layer.eval()(ids[0]) * 2
    for found in (first, second):
        assert torch.equal(torch.where(found == 0, 0, kept), found)
        assert 0.3 < (found == 0).float().mean() < 0.7
    assert not torch.equal(first, second)


def test_a_transform_finds_the_pending_updates_of_a_row_sparse_table() -> None:
    table = with_pending_updates()
    found = vmap(table)(IDS)
    assert_close(found, table(IDS))
