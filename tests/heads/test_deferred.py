"""Logits of a patched head: they are never computed for a cross entropy, and right as soon as anything reads them."""

import copy
import io
import itertools
import logging
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import cases
from deferred_heads import deferred, is_unread
from kernel_paths import cpu_taken_for_cuda
from small_blocks import small_blocks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from embedlayer import OutputHead, StaleRowsError, TokenEmbedding, TokenIdError, token_log_probs

B, T, D, V = 3, 8, 4, 97
LOGGER = "embedlayer.heads.logit_source"


def heads(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[OutputHead, OutputHead]:
    """A plain head, and its copy with deferred logits."""
    torch.manual_seed(0)
    plain = OutputHead(D, V, bias=bias, init_std=1.0).to(dtype)
    if bias:
        nn.init.normal_(plain.bias)
    return plain, deferred(copy.deepcopy(plain))


def states(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


class Large(TorchDispatchMode):
    """Whether an operation has a result with as many numbers as all logits."""

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if type(each) is Tensor and not each.is_meta]  # no memory
        self.found = self.found or max(sizes, default=0) >= B * (T - 1) * V
        return result


MASK = torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < 0.6
SHIFT = torch.randn(1, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
BETWEEN = {
    "flattened": lambda z: z.view(-1, V),
    "shifted": lambda z: z[..., :-1, :].contiguous().view(-1, z.size(-1)),
    "last positions": lambda z: z[:, -T + 1 :].reshape(-1, z.shape[-1]),
    "one text": lambda z: z[:, :, None].squeeze(2).flatten(0, 1)[: B * (T - 1)],
    "masked": lambda z: z[MASK],
    "chosen": lambda z: z[torch.tensor([0, 2, 1]), torch.arange(3)[:, None], :][torch.tensor([0, 0, 2])].flatten(0, -2),
    "same dtype and device": lambda z: z.to(z.device).to(z.dtype).type_as(z).to("cpu", non_blocking=True).flatten(0, 1),
    "scaled": lambda z: (z * 0.25 / 2).view(-1, V),
    "scaled by a tensor": lambda z: (0.5 * torch.div(z, torch.tensor(3.0))).view(-1, V),
    "soft cap": lambda z: (torch.tanh(z / 5.0) * 5.0).view(B * T, V),
    "scaled soft cap": lambda z: torch.mul((z.view(-1, V) * 3 / 5.0).tanh(), 7.0) / 2,
    "shifted logits": lambda z: (z * 2 + SHIFT.to(z.dtype)).view(-1, V),
    "shifted soft cap": lambda z: torch.tanh((SHIFT[0].to(z.dtype) + z) / 3).view(-1, V),
    "a copy": lambda z: torch.clone(z).unsqueeze(0).view(-1, V),
}


def targets_for(rows: int) -> Tensor:
    targets = torch.randint(0, V, (rows,), generator=torch.Generator().manual_seed(4))
    targets[::5] = -100
    return targets


def gradients(head: OutputHead, hidden: Tensor) -> list[Tensor | None]:
    found = [hidden.grad, *(parameter.grad for parameter in head.parameters())]
    hidden.grad = None
    head.zero_grad()
    return found


OPTIONS = [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": 3}]


@cases("between, options", BETWEEN, OPTIONS)
def test_the_loss_and_its_gradients_are_those_of_the_logits_without_any_logits(between, options) -> None:
    hidden, results = states(), []
    for head in heads():
        with Large() as large:
            logits = BETWEEN[between](head(hidden))
            targets = targets_for(len(logits)).clamp(min=3 if "ignore_index" in options else -100)
            loss = F.cross_entropy(logits, targets, **options)
            (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
        results.append([loss, *gradients(head, hidden)])
    assert is_unread(logits)
    assert not large.found or len(logits) < B * (T - 1)
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@cases(
    "dtype, autocast, cast",
    [torch.bfloat16, torch.float16, torch.float32],
    [False, True],
    [False, True],
    pairs=["dtype, autocast", "autocast, cast"],
)
def test_in_low_precision_it_is_no_worse_than_the_loss_of_the_plain_logits(dtype, autocast, cast) -> None:
    truth_hidden, (truth, _) = states(dtype).detach().double().requires_grad_(), (heads(dtype)[0].double(), None)
    targets = targets_for(B * T)
    F.cross_entropy(truth(truth_hidden).view(-1, V), targets).backward()
    true_gradients = gradients(truth, truth_hidden)
    hidden, errors = states(dtype), []
    dtypes: list[tuple[Any, ...]] = []
    for head in heads(dtype):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = head(hidden)
            dtypes.append((logits.dtype, logits.element_size()))
            loss = F.cross_entropy((logits.float() if cast else logits).view(-1, V), targets)
        loss.backward()
        dtypes[-1] += (loss.dtype,)
        errors.append([(a - b).abs().max() for a, b in zip(gradients(head, hidden), true_gradients, strict=True)])
    assert dtypes[0] == dtypes[1]
    for theirs, ours, truth in zip(*errors, true_gradients, strict=True):
        assert ours <= theirs + 2 * torch.finfo(torch.bfloat16 if autocast else dtype).eps * truth.abs().max()


def test_a_loss_of_float64_is_not_rounded_where_the_model_casts_its_logits() -> None:
    hidden, results = states(), []
    for head, cast in zip(heads(), (False, True), strict=True):
        logits = head(hidden).view(-1, V)
        loss = F.cross_entropy(logits.float() if cast else logits, targets_for(B * T), reduction="sum") / 7
        loss.backward()
        results.append([loss, *gradients(head, hidden)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-13, atol=1e-13)


class Doubling(torch.autograd.Function):
    """A function below Python that reads its argument, as the fused losses of other libraries do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.ops.aten.mul(x, 2) + x.new_zeros(x.shape)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


class StraightThrough(torch.autograd.Function):
    """A function whose backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


def written(z: Tensor) -> Tensor:
    z[..., 5] = -1.0
    return z


def written_through_a_view(z: Tensor) -> Tensor:
    scaled, view = z * 2, z.view(-1, V)
    view[3:, 7] = 2.0
    return z + scaled


READERS = {
    "log_softmax": lambda z: z.log_softmax(-1),
    "one token": lambda z: z[..., 3:5],
    "last dimension moved": lambda z: z.transpose(1, 2),
    "loss over flat logits": lambda z: F.cross_entropy(z.flatten(1).view(-1, V), targets_for(B * T)),
    "itself": lambda z: z * z,
    "other logits": lambda z: torch.cat([z, z], 1),
    "written": written,
    "written through a view": written_through_a_view,
    "divided in place": lambda z: z.div_(3.0),
    "other dtype": lambda z: z.to(torch.float32).double() if z.dtype == torch.float64 else z,
    "custom function": lambda z: Doubling.apply(z),
    "custom function of a view": lambda z: Doubling.apply(z[:, :-1].float()),
    "other gradient": lambda z: StraightThrough.apply(z),
    "class weights": lambda z: F.cross_entropy(z.view(-1, V), targets_for(B * T), torch.linspace(1, 2, V).to(z)),
    "probabilities": lambda z: F.cross_entropy(z.view(-1, V), torch.full((B * T, V), 1 / V).to(z)),
    "loss over the middle": lambda z: F.cross_entropy(z.transpose(1, 2), targets_for(B * T).view(B, T)),
    "numbers": lambda z: z.new_tensor(z.detach().numpy().sum() + float(z.tolist()[0][0][0])) + z.sum() * 0,
    "split": lambda z: z.split(2, 1)[1],
    "loss and logits": lambda z: F.cross_entropy(z.view(-1, V), targets_for(B * T)) + z.square().mean(),
}


@cases("reader, dtype", READERS, [torch.float32, torch.float64])
def test_whatever_reads_the_logits_sees_the_plain_ones(reader, dtype) -> None:
    hidden, results = states(dtype), []
    for head in heads(dtype):
        result = READERS[reader](head(hidden))
        result.double().square().sum().backward()
        results.append([result, *gradients(head, hidden)])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)
    if not results[0][0].dim():
        return
    assert torch.equal(results[1][0], results[0][0])


def test_it_looks_like_a_tensor_of_logits() -> None:
    plain, lazy = (head(states()) for head in heads())
    assert isinstance(lazy, Tensor)
    assert lazy.shape == plain.shape == (B, T, V)
    assert (lazy.dtype, lazy.device, lazy.ndim) == (plain.dtype, plain.device, plain.dim())
    assert (len(lazy), lazy.numel(), lazy.size(-1)) == (B, plain.numel(), V)
    assert lazy.is_floating_point()
    assert lazy.requires_grad
    assert not lazy.is_leaf
    assert lazy.grad_fn is not None
    assert len({lazy}) == 1
    assert is_unread(lazy)  # nothing so far needed the logits
    assert repr(lazy).partition("grad_fn")[0] == repr(plain).partition("grad_fn")[0]
    assert torch.equal(lazy, plain)
    assert (lazy == plain).all()
    assert np.array_equal(lazy.detach().numpy(), plain.detach().numpy())
    assert torch.equal(torch.stack(list(lazy)), plain)
    with torch.no_grad():
        assert torch.equal(lazy + 1, plain + 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode) -> None:
    plain, deferred = heads()
    with mode():
        hidden = states().detach().clone()
        expected, logits = plain(hidden), deferred(hidden)
        assert is_unread(logits)
        targets = targets_for(B * T)
        loss = F.cross_entropy(logits.view(-1, V), targets)
        torch.testing.assert_close(loss, F.cross_entropy(expected.view(-1, V), targets), rtol=1e-12, atol=0)
        assert not loss.requires_grad
        assert is_unread(logits)
        assert torch.equal(logits, expected)
        for copied in (copy.deepcopy(logits), pickle.loads(pickle.dumps(logits))):
            assert type(copied) is Tensor
            assert torch.equal(copied, expected)
        buffer = io.BytesIO()
        torch.save({"logits": logits}, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer)["logits"], expected)


def test_one_position_as_in_generation_is_computed_at_once() -> None:
    plain, deferred = heads()
    hidden = states()
    for one in (hidden[:, -1:], hidden[0, 0], hidden[:0]):
        assert type(deferred(one)) is Tensor
        assert torch.equal(deferred(one), plain(one))


def test_the_mean_over_no_target_is_nan_without_gradient_as_in_torch() -> None:
    hidden = states()
    for head in heads():
        loss = F.cross_entropy(head(hidden).view(-1, V), torch.full((B * T,), -100))
        assert loss.isnan()
        loss.backward()
        assert not any(gradient.any() for gradient in gradients(head, hidden))


def test_a_target_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(TokenIdError, match=f"token id {V} "):
        F.cross_entropy(heads()[1](states()).view(-1, V), torch.full((B * T,), V))


# The autograd graph


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, V).float() / 2, targets_for(B * (T - 1)))


def gradients_seen(head: OutputHead, hidden: Tensor) -> list[Tensor]:
    """The gradient of the logits in every kind of hook, and the gradients of head and hidden states."""
    seen: list[Tensor] = []
    handle = head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    head.register_forward_hook(lambda module, args, output: output.register_hook(seen.append) and None)
    logits = head(hidden)
    logits.retain_grad()
    loss_of(logits).backward()
    handle.remove()
    assert type(logits) is Tensor or is_unread(logits)
    return [*seen, logits.grad, *gradients(head, hidden)]


def test_hooks_of_the_logits_get_the_gradient_of_the_logits() -> None:
    hidden = states()
    expected, found = (gradients_seen(head, hidden) for head in heads())
    assert type(found[0]) is not Tensor  # computed when it is read
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours + 0, theirs, rtol=1e-6, atol=1e-8)


def test_a_hook_may_change_the_gradient() -> None:
    hidden, results = states(), []
    for head in heads():
        logits = head(hidden)
        logits.register_hook(lambda gradient: gradient.clamp(min=-0.001) * 3)
        loss_of(logits).backward()
        results.append(gradients(head, hidden))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)


def test_the_gradient_of_the_logits_can_be_requested() -> None:
    hidden = states()
    plain, deferred = (head(hidden) for head in heads())
    expected, found = (torch.autograd.grad(loss_of(logits), logits)[0] for logits in (plain, deferred))
    torch.testing.assert_close(found + 0, expected, rtol=1e-6, atol=1e-9)


def test_second_derivatives() -> None:
    hidden, results = states(), []
    for head in heads():
        logits = head(hidden).view(-1, V) / 3
        loss = F.cross_entropy(torch.tanh(logits), targets_for(B * T))
        (first,) = torch.autograd.grad(loss, hidden, create_graph=True)
        first.square().sum().backward()
        results.append([first, *gradients(head, hidden)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)


def test_a_second_backward_needs_retain_graph_and_adds_the_same() -> None:
    _, head = heads()
    hidden = states()
    loss = loss_of(head(hidden))
    loss.backward(retain_graph=True)
    once = [each.clone() for each in (hidden.grad, head.weight.grad)]
    loss.backward()
    torch.testing.assert_close([hidden.grad, head.weight.grad], [2 * each for each in once])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_two_losses_of_the_same_logits() -> None:
    hidden, results = states(), []
    for head in heads():
        logits = head(hidden)
        (loss_of(logits) + 2 * loss_of(logits * 3)).backward()
        results.append(gradients(head, hidden))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-8)


def test_hooks_of_the_parameters_run_once() -> None:
    _, head = heads()
    calls = []
    head.weight.register_hook(lambda gradient: calls.append("weight"))
    loss_of(head(states())).backward()
    F.log_softmax(head(states()), -1).sum().backward()
    assert calls == ["weight"] * 2


def test_only_what_is_trained_gets_a_gradient() -> None:
    for frozen in itertools.product([False, True], repeat=2):
        _, head = heads()
        hidden = states().detach().requires_grad_(not frozen[0])
        head.weight.requires_grad_(not frozen[1])
        loss_of(head(hidden)).backward()
        assert (hidden.grad is None, head.weight.grad is None) == frozen
        assert head.bias.grad is not None


# What cannot be computed any more, and the log


@pytest.mark.parametrize("how", ["in place", "through data", "hidden"])
def test_reading_logits_after_their_weights_changed_is_an_error(how) -> None:
    _, head = heads()
    hidden = states()
    logits, read = head(hidden), head(hidden)
    before = read.detach()
    with torch.no_grad():
        if how == "in place":
            torch.optim.SGD(head.parameters(), lr=0.1).step()
            head.weight.mul_(0.9)
        elif how == "through data":
            head.weight.data += 0.1
        else:
            hidden.mul_(2)
    assert torch.equal(read, before)  # those that were read before stay
    with pytest.raises(StaleRowsError, match=r"Use them before optimizer.step\(\)"):
        logits.argmax(-1)
    with pytest.raises(StaleRowsError, match="have changed since the forward pass"):
        F.cross_entropy(logits.view(-1, V), targets_for(B * T))


def test_an_accelerator_gives_nan_for_changed_weights_and_raises_the_error_where_it_waits() -> None:
    _, head = heads()
    model = TokenEmbedding(V, D)
    model.head = head
    with cpu_taken_for_cuda():
        results = {
            "logits": lambda logits: logits.softmax(-1),
            "log-probabilities": lambda logits: token_log_probs(logits.view(-1, V), targets_for(B * T).clamp(min=0)),
            "few logits": loss_of,
        }
        unread = {name: head(states()) for name in (*results, "loss")}
        head.weight.data += 0.1
        for name, result in results.items():
            assert torch.isnan(result(unread[name])).all(), name
            with pytest.raises(StaleRowsError, match="have changed since the forward pass"):
                model.check()
        with (
            small_blocks(few_logits=0, device="cuda"),
            pytest.raises(StaleRowsError, match="have changed since the forward pass"),
        ):
            loss_of(unread["loss"])
        assert torch.isfinite(loss_of(head(states())))


def test_what_reads_the_logits_is_logged_once(caplog) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    _, head = heads()
    loss_of(head(states())).backward()
    assert not caplog.records
    head(states()).argmax(-1)
    head(states()).softmax(-1)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("Model: torch.Tensor.argmax reads the logits")


def test_modes_of_torch_and_transforms_see_plain_logits(unchecked: None) -> None:
    plain, deferred = heads()
    hidden = states().detach()

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        assert torch.equal(deferred(hidden), plain(hidden))

    def loss(x, head):
        return F.cross_entropy(head(x).view(-1, V), targets_for(B * T))

    ours, theirs = (torch.func.grad(loss)(hidden, head) for head in (deferred, plain))
    torch.testing.assert_close(ours, theirs)
    mapped = torch.func.vmap(deferred)(hidden)
    assert torch.equal(mapped, torch.func.vmap(plain)(hidden))
    _, tangent = torch.func.jvp(deferred, (hidden,), (hidden,))
    torch.testing.assert_close(tangent, F.linear(hidden, plain.weight))
    exported = torch.export.export(deferred, (hidden,)).module()
    assert torch.equal(exported(hidden), plain(hidden))


def test_a_compiled_head_and_loss_equal_the_plain_ones_in_one_graph(unchecked: None, caplog) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    hidden, targets, results = states(), targets_for(B * T), []
    for head in heads():
        compiled = torch.compile(
            lambda head=head: F.cross_entropy(head(hidden).view(-1, V) / 2, targets),
            fullgraph=True,
            backend="aot_eager",
        )
        loss = compiled()
        loss.backward()
        results.append([loss, *gradients(head, hidden)])
    torch.testing.assert_close(results[1], results[0])
    messages = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert ["torch.compile" in message for message in messages] == [True]
