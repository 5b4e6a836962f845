"""Hot paths on a GPU: they wait no more often than their counts on meta tensors say, and CUDA graphs replay them."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import cases

from benchmarks.hot_paths import PATHS
from embedlayer import DecoderLM, Position, RowAdamW, RowSparseEmbedding, StaleRowsError, TokenEmbedding
from embedlayer.kernels import kernels_disabled
from embedlayer.kernels.gpu.launch import launches_observed
from embedlayer.losses import linear_cross_entropy
from embedlayer.models.attention import AddedScores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("unchecked"),
]

GIB = 24
"""Memory of a GPU that the hot paths need."""


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Free the memory of the device after each test."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def waits_of(call) -> list[str]:
    """Return a line for each wait of the host for the device in a call, as torch reports them."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in caught if "synchronizing CUDA operation" in str(each.message)]


def test_a_wait_is_seen() -> None:
    x = torch.ones(3, device="cuda")
    assert len(waits_of(lambda: x.sum().item())) == 1
    assert not waits_of(lambda: x.sum())


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in PATHS])
def test_a_hot_path_waits_no_more_often_than_is_counted(path) -> None:
    if torch.cuda.mem_get_info()[1] < GIB * 2**30:
        pytest.skip(f"needs {GIB} GiB of memory on the device")
    if path.ranks > torch.cuda.device_count():
        pytest.skip(f"needs {path.ranks} CUDA devices")
    counted = len(path.count().waits)
    with torch.device("cuda"):
        call = path.build()
    for _ in range(2):
        call()
    waits = waits_of(call)
    assert len(waits) <= counted, waits


def captured(call) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of a call, which has run before on another stream; no autograd graph may outlive the call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, "documents", "documents and padding"])
def test_a_decoder_waits_once_for_the_lengths_of_documents(mask, dtype) -> None:
    model = DecoderLM(TokenEmbedding(100, 128), "rotary", num_layers=3, num_heads=4, num_kv_heads=2).to("cuda", dtype)
    tokens = torch.randint(100, (2, 600), device="cuda")
    documents = 1 + torch.arange(600, device="cuda").expand(2, 600) // 130
    if mask == "documents and padding":
        documents = documents.where(torch.arange(600, device="cuda") % 50 > 3, 0)

    def step() -> None:
        model(tokens, attention_mask=None if mask is None else documents).square().mean().backward()

    step()
    assert len(waits_of(step)) == (mask is not None and dtype == torch.bfloat16)


def test_captured_attention_over_documents_reads_new_documents() -> None:
    places, documents = torch.arange(96, device="cuda"), torch.ones(2, 96, dtype=torch.int64, device="cuda")
    q, k, v = (torch.randn(2, 4, 96, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    result: dict[str, Any] = {}

    def attend() -> None:
        scores = AddedScores(Position(), places, places, documents, None, 4)
        result["y"] = scores.attend(q, k, v, None)

    graph = captured(attend)
    replayed = result["y"]
    for length in (96, 40, 1):
        documents.copy_((1 + places // length).expand(2, 96))
        graph.replay()
        attend()
        torch.testing.assert_close(replayed, result["y"], rtol=2e-2, atol=2e-2)


@cases(
    "dtype, options",
    [torch.float32, torch.bfloat16],
    [{}, {"softcap": 5.0}, {"reduction": "none"}, {"label_smoothing": 0.1, "z_loss": 1e-3}],
)
def test_a_captured_loss_is_computed_for_new_inputs_at_each_replay(dtype, options) -> None:
    tokens, rows, width = 64, 1000, 32
    hidden, weight = (torch.empty(n, width, dtype=dtype, device="cuda", requires_grad=True) for n in (tokens, rows))
    targets = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    result: dict[str, Any] = {}

    def step() -> None:
        loss = linear_cross_entropy(hidden, weight, targets, **options)
        result["grads"] = torch.autograd.grad(loss.sum(), (hidden, weight))
        result["loss"] = loss.detach()

    def new_inputs() -> None:
        with torch.no_grad():
            hidden.normal_()
            weight.normal_()
            targets.random_(rows)
            targets[::5] = -100

    new_inputs()
    graph = captured(step)
    for _ in range(3):
        new_inputs()
        graph.replay()
        replayed = [each.clone() for each in (result["loss"], *result["grads"])]
        again = linear_cross_entropy(hidden, weight, targets, drop_ignored=False, **options)
        eager = [again.detach(), *torch.autograd.grad(again.sum(), (hidden, weight))]
        torch.testing.assert_close(replayed, eager)
        if not options:
            exact = F.cross_entropy(hidden.double() @ weight.double().T, targets)
            error = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(replayed[0].double(), exact.detach(), rtol=error, atol=error)


def test_a_captured_look_up_reads_new_ids_and_records_a_bad_one() -> None:
    table = TokenEmbedding(100, 8, device="cuda")
    ids = torch.zeros(2, 5, dtype=torch.int64, device="cuda")
    grad = torch.randn(2, 5, 8, device="cuda")
    result: dict[str, Any] = {}

    def step() -> None:
        vectors = table(ids)
        (result["grad"],) = torch.autograd.grad(vectors, table.weight, grad)
        result["vectors"] = vectors.detach()

    graph = captured(step)
    for _ in range(3):
        ids.random_(100)
        graph.replay()
        vectors = F.embedding(ids, table.weight)
        assert torch.equal(result["vectors"], vectors)
        torch.testing.assert_close(result["grad"], torch.autograd.grad(vectors, table.weight, grad)[0])
    table.check()
    ids[1, 2] = 100
    graph.replay()
    with pytest.raises(IndexError, match="token id 100 at row 1, column 2"):
        table.check()


def test_a_captured_step_of_a_row_sparse_table_is_refused() -> None:
    table = RowSparseEmbedding(100, 8, device="cuda")
    optimizer = RowAdamW(table.parameters(), lr=1e-2)
    ids, grad = torch.randint(100, (2, 5), device="cuda"), torch.randn(2, 5, 8, device="cuda")

    def step() -> None:
        table(ids).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(StaleRowsError, match="CUDA graph"):
        captured(step)
    step()  # and goes on outside of a graph
    table.check()


@pytest.mark.parametrize("disabled", [False, True])
def test_kernels_are_disabled_in_backward_passes_too(disabled) -> None:
    hidden, weight = (torch.randn(n, 32, device="cuda", requires_grad=True) for n in (64, 1000))
    targets = torch.randint(1000, (64,), device="cuda")
    launched: list[str] = []
    with kernels_disabled() if disabled else nullcontext(), launches_observed(lambda each: launched.append(each.name)):
        loss = linear_cross_entropy(hidden, weight, targets, reduction="none", impl="chunked")
        del launched[:]
        loss.sum().backward()
    assert bool(launched) != disabled


@cases("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_a_gradient_scaler_train_as_without_a_gpu(dtype) -> None:
    """A step under autocast with a scaler changes the rows as the same step in float32, up to rounding."""
    torch.manual_seed(0)
    start = torch.randn(50, 16)
    ids = torch.randint(50, (4, 9))
    after = []
    for device in ("cpu", "cuda"):
        table = TokenEmbedding.from_pretrained(start.clone()).to(device)
        table.weight.requires_grad_()
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda" and dtype == torch.bfloat16):
            loss = table.loss(table(ids.to(device)), ids.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        after.append(table.weight.detach().cpu())
    error = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*after, rtol=error, atol=error)
