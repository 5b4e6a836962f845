"""Code of other libraries that reads `head.weight` gets what the head computes and trains, or an error that says so."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import looped
from kinds import EMBED_DIM, TABLES, VOCAB_SIZE
from memory import Memory
from torch import Tensor, nn

import embedlayer as el
from embedlayer.core.errors import EmbedLayerError

pytestmark = pytest.mark.filterwarnings("ignore")  # what PEFT fears of tied models
V, D = VOCAB_SIZE, EMBED_DIM


Built = tuple[Any, nn.Module]


def tied(table: el.TokenTable) -> Built:
    table = table.double()
    if isinstance(table, el.TokenEmbedding):
        table.padding_idx = None  # the head does not train its row, and `head.weight` is the parameter itself
    return el.OutputHead(table), table


def untied(head: nn.Linear) -> Built:
    return head.double(), head


def patched(*, tied: bool, new_rows: bool = False, compressed: str = "", **lora: Any) -> Built:
    """The head of a patched LLaMA, and the model."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": D, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=V, tie_word_embeddings=tied, pad_token_id=0, **sizes)
    model = el.patch(transformers.LlamaForCausalLM(config).double())
    if new_rows:
        el.vocab.train_only_rows(model, [7, 48, 49])
    if compressed:
        el.compress.replace_table(model, el.compress.compress_table(model.get_input_embeddings(), compressed))
    head = model.lm_head
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, init_lora_weights=False, **lora)).double()
    return head, model


HEADS: dict[str, Callable[[], Built]] = {
    **{
        f"tied, {name}": lambda name=name: tied(TABLES[name]())
        for name in TABLES
        if name not in ("row-sparse", "dense, spare rows")  # which no head is tied to; which have rows of no token
    },
    "untied": lambda: untied(el.OutputHead(D, V)),
    "untied, int8": lambda: untied(el.OutputHead(rows=TABLES["int8"]())),
    "untied, delta": lambda: untied(el.OutputHead(rows=TABLES["delta"]())),
    "patched, tied": lambda: patched(tied=True),
    "patched, untied": lambda: patched(tied=False),
    "patched, tied, new rows": lambda: patched(tied=True, new_rows=True),
    "patched, untied, new rows": lambda: patched(tied=False, new_rows=True),
    "patched, tied, int8": lambda: patched(tied=True, compressed="int8"),
    "patched, tied, rank=8": lambda: patched(tied=True, compressed="rank=8"),
    "patched, tied, LoRA": lambda: patched(tied=True, target_modules=["embed_tokens"]),
    "patched, untied, LoRA": lambda: patched(tied=False, target_modules=["embed_tokens"]),
    "patched, tied, copy": lambda: patched(tied=True, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
}


class Chunked(torch.autograd.Function):
    """Logits as the kernels of trainers compute them: a chunk of rows at a time, in a function of autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        chunks = range(0, weight.shape[0], 16)
        return torch.cat([hidden @ weight[start : start + 16].to(hidden.dtype).t() for start in chunks], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        chunks = range(0, weight.shape[0], 16)
        for_hidden = sum(grad[:, start : start + 16] @ weight[start : start + 16] for start in chunks)
        return for_hidden, grad.t() @ hidden if ctx.needs_input_grad[1] else None


class Transposed(torch.autograd.Function):
    """The same logits as one product with the transpose, whose gradient has its shape."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, columns)
        return hidden @ columns

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, columns = ctx.saved_tensors
        return grad @ columns.t()[0 : columns.shape[1]], hidden.t() @ grad


def saved(weight: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(weight, buffer)
    buffer.seek(0)
    loaded: Tensor = torch.load(buffer)
    return loaded


IDS = torch.tensor([[7, 3, 49], [0, 48, 7]])
ANSWERED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda weight, hidden: F.linear(hidden, weight),
    "product": lambda weight, hidden: hidden @ weight.T,
    "matmul": lambda weight, hidden: torch.matmul(hidden, weight.transpose(0, 1)),
    "chunks": lambda weight, hidden: Chunked.apply(hidden, weight),
    "slices": lambda weight, hidden: torch.cat([hidden @ weight[n : n + 20].T for n in range(0, V, 20)], -1),
    "row": lambda weight, hidden: weight[-2],
    "columns": lambda weight, hidden: weight[40:, 3:9],
    "padding row": lambda weight, hidden: weight[0, :],
    "IDs": lambda weight, hidden: weight[IDS],
    "embedding": lambda weight, hidden: F.embedding(IDS, weight),
    "no conversion": lambda weight, hidden: F.linear(hidden, weight.to(hidden.device, hidden.dtype).contiguous()),
    "detached": lambda weight, hidden: F.linear(hidden, weight.detach()),
    "detached rows": lambda weight, hidden: weight.data[IDS],
}
"""What is read block by block; the others below may be an error."""
READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **ANSWERED,
    "columns of a function": lambda weight, hidden: Transposed.apply(hidden, weight.T),
    "bfloat16": lambda weight, hidden: weight.to(torch.bfloat16),
    "float": lambda weight, hidden: weight.float(),
    "norm": lambda weight, hidden: weight.norm(),
    "mean": lambda weight, hidden: weight.mean(0),
    "mask": lambda weight, hidden: weight[weight[:, 0] > 0],
    "clone": lambda weight, hidden: weight.clone(),
    "sum": lambda weight, hidden: weight + 1,
    "stack": lambda weight, hidden: torch.stack([weight, weight]),
    "products by rows": lambda weight, hidden: weight @ hidden.T,
    "out": lambda weight, hidden: torch.mm(hidden.detach(), weight.detach().t(), out=torch.empty(5, V).double()),
    "file": lambda weight, hidden: saved(weight.detach()),
    "deepcopy": lambda weight, hidden: copy.deepcopy(weight.detach()),
}


def outcome(read: str, weight: Tensor, hidden: Tensor) -> Tensor | EmbedLayerError:
    try:
        return READS[read](weight, hidden)
    except EmbedLayerError as error:
        return error


def gradients(result: Tensor, tensors: list[Any]) -> list[Tensor | None]:
    for each in tensors:
        each.grad = None
    if result.requires_grad:
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(2)).to(result.dtype)
        (result * weights).sum().backward()
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in tensors]


@looped("name, read", HEADS, READS)
def test_a_read_has_the_values_and_gradients_of_the_head_or_is_an_error(unchecked: None, name, read) -> None:
    torch.manual_seed(0)
    head, model = HEADS[name]()
    hidden = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    tensors = [hidden, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    rows = head(torch.eye(D, dtype=torch.float64)).T + 0.0  # the matrix, as the head itself multiplies by it
    expected = READS[read](rows, hidden)
    found = outcome(read, head.weight, hidden)
    if isinstance(found, EmbedLayerError):
        assert read not in ANSWERED, found
        assert "head(hidden)" in str(found)
        return
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, tensors), gradients(expected, tensors))
    with torch.no_grad():
        torch.testing.assert_close(READS[read](head.weight, hidden), expected)


@looped("name", HEADS)
def test_sizes_and_types_of_a_weight_always_answer(unchecked: None, name) -> None:
    head, _ = HEADS[name]()
    weight, rows = head.weight, head(torch.eye(D, dtype=torch.float64)).T + 0.0
    assert isinstance(weight, Tensor)
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.size(), weight.dim(), len(weight)) == (rows.shape, rows.size(), 2, V)
    assert (weight.dtype, weight.device, weight.numel()) == (rows.dtype, rows.device, V * D)
    assert weight.requires_grad == rows.requires_grad
    assert repr(weight)


@pytest.mark.parametrize("read", ["linear", "chunks", "slices"])
def test_no_second_matrix_is_allocated(unchecked: None, read) -> None:
    table = el.DeltaEmbedding(el.TokenEmbedding(20_000, 32), [7, 19_998])
    head, hidden = el.OutputHead(table), torch.randn(2, 32)
    with Memory() as memory, torch.set_grad_enabled(read != "chunks"):  # which allocates its own gradient
        result = READS[read](head.weight, hidden)
        if result.requires_grad:
            result.sum().backward()
    assert memory.peak < 20_000 * 32 * 4


def test_rows_that_change_before_the_backward_pass_are_an_error() -> None:
    head, hidden = tied(TABLES["delta"]())[0], torch.randn(5, D, dtype=torch.float64)
    logits = Chunked.apply(hidden, head.weight)
    with torch.no_grad():
        head.table.delta.mul_(2)
    with pytest.raises(el.StaleRowsError):
        logits.sum().backward()
