"""Every table, position, head, layer and loss compiles as one graph and is exported, for any batch and any length.

An exported program holds operators of PyTorch alone, so it runs where embedlayer is not installed, and other formats
know what they are.
"""

from itertools import product

import pytest
import torch
import transformers
from cases import CASES, CODE_PATHS, IDS, Case
from covering import some
from kinds import (
    EMBED_DIM,
    MAX_SEQ_LEN,
    NUM_HEADS,
    POSITIONS,
    TABLES,
    TIED_HEADS,
    UNTIED_HEADS,
    VOCAB_SIZE,
    with_pending_updates,
)
from torch import Tensor, nn
from torch._dynamo import mark_dynamic
from torch._dynamo.testing import CompileCounter
from torch.export import Dim, ExportedProgram, export

import embedlayer as el

SIZES = {0: Dim("B"), 1: Dim("T", max=MAX_SEQ_LEN)}
QUANTISED_TOLERANCE = {"rtol": 1e-3, "atol": 5e-5}
LOSSES_COMPILED = [name for name in CODE_PATHS if name.startswith("loss")]
"""One for each way to compute a loss. Tables are compiled inside layers and heads."""

ADDS_NOTHING = {
    f"layer: TransformerEmbedding, {name}"
    for name, build in POSITIONS.items()
    if name != "rotary" and build().hook != "add"
}
"""Layers whose position scheme adds nothing to the input: they compute what the layer with rotary positions does."""

ALL_CASES = [
    name
    for name in CASES
    if name not in ADDS_NOTHING and (not name.startswith(("table", "loss")) or name in LOSSES_COMPILED)
]
PARTS_OF_OTHERS = {
    "position: learned",
    "position: rotary",
    "layer: GPTEmbedding",
    "layer: TransformerEmbedding, rotary",
    "layer: TransformerEmbedding over int8",
    "layer: TransformerEmbedding over stored, FP8",
    "head: tied to int8",
    "streams: dense",
    "loss of streams: streams of dense",
}
"""Cases whose parts occur in cases that are run always: the decoder, a delta over int8, a head of FP8 and others."""

COMPILED_ELSEWHERE = {
    *("loss of streams: own rows in int8", "loss over rows: soft cap, scale", "loss: tied to int4"),
    *("bag: sum over dense, plain", "bag: mean over dense", "head: tied to dense, spare rows", "streams: transposed"),
    *("layer: TransformerEmbedding over int4, q4_0", "layer: TransformerEmbedding over delta over int8"),
    *("loss of streams: three weights", "loss of streams: transposed"),
}
"""Losses over rows that are dequantised or computed, of which one is compiled below with a soft cap; what the tests of
bags and of IDs of every shape compile; other streams. All of them are exported, or traced, here."""
EXPORTED_IN_PARTS = {"layer: DecoderLM", "loss: tied to int4"} | {
    f"loss of streams: {name}" for name in ("one weight", "three weights")
}
"""Decoders are exported below, and heads over codes and the losses of other streams and heads beside these."""


def assert_close(one: object, other: object, name: str) -> None:
    torch.testing.assert_close(one, other, **(QUANTISED_TOLERANCE if "int" in name else {}))


def of_other_size(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs with a batch of five and a length of seven."""
    return tuple(torch.cat([x, x[:2]]).index_select(1, torch.tensor([0, 1, 2, 3, 2, 1, 0])) for x in inputs)


def exported(case: Case) -> ExportedProgram:
    return export(case.module.eval(), case.inputs, dynamic_shapes=(SIZES,) * len(case.inputs))


def operators(program: ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("name", some({*CODE_PATHS} - PARTS_OF_OTHERS - COMPILED_ELSEWHERE, ALL_CASES))
@pytest.mark.usefixtures("unchecked")
def test_one_graph_serves_two_sizes(name) -> None:
    case, graphs = CASES[name](), CompileCounter()
    module = torch.compile(case.module.eval(), fullgraph=True, backend=graphs)
    for x in case.inputs:
        mark_dynamic(x, (0, 1))
    with torch.set_grad_enabled("row-sparse" not in name):  # its look-up with gradients ends a graph
        for inputs in (case.inputs, of_other_size(case.inputs)):
            assert_close(module(*inputs), case.module(*inputs), name)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("name", some({*CODE_PATHS} - PARTS_OF_OTHERS - EXPORTED_IN_PARTS, ALL_CASES))
@pytest.mark.usefixtures("unchecked")
def test_an_exported_program_serves_any_size_with_torch_operators_alone(name) -> None:
    case = CASES[name]()
    program = exported(case)
    assert not {target for target in operators(program) if "embedlayer" in target or "quantized" in target}
    run = program.module()
    for inputs in (case.inputs, of_other_size(case.inputs)):
        assert_close(run(*inputs), case.module(*inputs), name)


@pytest.mark.parametrize("name", some({*CODE_PATHS} - PARTS_OF_OTHERS - EXPORTED_IN_PARTS, ALL_CASES))
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.usefixtures("unchecked")
def test_a_traced_module_computes_with_inputs_of_other_values(name) -> None:
    """`torch.jit.trace` fixes sizes, and what no operator computes would be a constant of the trace."""
    case = CASES[name]()
    module = case.module.requires_grad_(False)
    if "FP8" in name or "4 bits" in name:
        with pytest.raises(RuntimeError, match="aten::view"):  # codes are views of bytes, which it does not know
            torch.jit.trace(module, case.inputs, check_trace=False)
        return
    traced = torch.jit.trace(module, case.inputs, check_trace=False)
    others = tuple(each.flip(0).clone() for each in case.inputs)
    assert_close(traced(*others), module(*others), name)


MASK = torch.tensor([[1, 1, 2, 2], [0, 1, 1, 1], [1] * 4])


@pytest.mark.parametrize(
    ("name", "is_masked"),
    some([("rotary", False), ("alibi", True)], product(("rotary", "alibi", "learned"), (False, True))),
)
@pytest.mark.usefixtures("unchecked")
def test_a_decoder_with_shared_key_heads_is_exported_with_and_without_a_mask(name, is_masked) -> None:
    model = el.DecoderLM(TABLES["dense"](), POSITIONS[name](), num_layers=1, num_heads=NUM_HEADS, num_kv_heads=2)
    given = {"attention_mask": MASK} if is_masked else {}
    program = export(
        model.eval(), (IDS,), given, dynamic_shapes={"ids": SIZES, **dict.fromkeys(given, SIZES)}, strict=False
    )
    ids, *masks = of_other_size((IDS, *given.values()))
    kwargs = dict(zip(given, (mask.sort(-1).values for mask in masks), strict=True))  # documents rise
    assert_close(program.module()(ids, **kwargs), model(ids, **kwargs), name)


def test_ids_outside_the_table_are_clamped_in_an_exported_program() -> None:
    case = CASES["table: dense"]()
    program = exported(case).module()
    found = program(torch.tensor([[-1, VOCAB_SIZE], [5, 10**6]]))
    assert torch.equal(found, case.module(torch.tensor([[0, VOCAB_SIZE - 1], [5, VOCAB_SIZE - 1]])))


def test_an_exported_row_sparse_table_has_its_pending_updates() -> None:
    table = with_pending_updates()
    assert torch.equal(export(table, (IDS,)).module()(IDS), table(IDS))


@pytest.mark.parametrize("name", some(["tied to int8"], [*TIED_HEADS, *UNTIED_HEADS]))
@pytest.mark.usefixtures("unchecked")
def test_one_graph_of_any_sizes_contains_loss_and_logits_of_one_head_with_a_soft_cap(name) -> None:
    head = el.OutputHead(TABLES[TIED_HEADS[name]](), softcap=3.0) if name in TIED_HEADS else UNTIED_HEADS[name]()
    head.softcap = 3.0

    def both(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        statistics = head.token_statistics(hidden, targets, temperature=0.7)
        return head.loss(hidden, targets, z_loss=0.1), head(hidden), *statistics[:2]  # type: ignore[return-value]

    graphs = CompileCounter()
    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=graphs)
    for shape in ((2, 5), (3, 4)):
        hidden, targets = torch.randn(*shape, EMBED_DIM), torch.randint(1, VOCAB_SIZE, shape)
        torch.testing.assert_close(compiled(hidden, targets), both(hidden, targets), rtol=1e-4, atol=1e-5)
    assert graphs.frame_count == 1


PATCHED = "a patched model"
ONNX = ["layer: TransformerEmbedding over delta over int8", "head: tied to int4", PATCHED]


class Patched(nn.Module):
    """The logits of a patched model, from IDs."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_positions=MAX_SEQ_LEN, n_embd=24, n_layer=0, n_head=4)
        self.model = el.patch(transformers.GPT2LMHeadModel(config).eval())

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


class Together(nn.Module):
    """Several modules in one program, whose export takes hardly longer than that of one of them."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.hidden = nn.Embedding(VOCAB_SIZE, EMBED_DIM)
        self.parts = nn.ModuleList([Patched() if name == PATCHED else CASES[name]().module.float() for name in names])

    def forward(self, ids: Tensor) -> list[Tensor]:
        inputs = [ids if name.startswith("layer") or name == PATCHED else self.hidden(ids) for name in self.names]
        return [part(x) for part, x in zip(self.parts, inputs, strict=True)]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.usefixtures("unchecked")
def test_onnxruntime_computes_what_each_module_computes() -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    module, others = Together(ONNX), of_other_size((IDS,))
    smallest = 1 if torch.__version__ >= "2.11" else 2  # torch 2.9 compares sizes with 1, as in `matmul`
    sizes = {0: Dim("B", min=smallest), 1: Dim("T", min=smallest, max=MAX_SEQ_LEN)}
    program = torch.onnx.export(module.eval(), (IDS,), dynamo=True, dynamic_shapes=(sizes,), verbose=False)
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    outputs = map(torch.from_numpy, session.run(None, {session.get_inputs()[0].name: others[0].numpy()}))
    for name, found, expected in zip(ONNX, outputs, module(*others), strict=True):
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if name == PATCHED else {"rtol": 1e-3, "atol": 5e-5}
        torch.testing.assert_close(found, expected, **tolerance)
