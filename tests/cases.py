"""Every kind as a module that maps a batch to tensors: for laws about transforming, compiling and exporting.

Tables, positions, heads, input layers and losses of `kinds`, each with inputs for a batch of three.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from kinds import (
    BAGS,
    EMBED_DIM,
    LAYERS,
    NUM_HEADS,
    POSITIONS,
    STREAM_HEADS,
    STREAM_IDS,
    STREAM_TABLES,
    TABLES,
    TIED_HEADS,
    TIED_STREAM_HEADS,
    UNTIED_HEADS,
    tied_streams,
)
from torch import Tensor, nn
from torch.func import functional_call

import embedlayer as el
from embedlayer.heads import StreamHead

IDS = torch.tensor([[1, 2, 3, 7], [7, 48, 0, 49], [2, 2, 49, 5]])
TARGETS = torch.tensor([[2, 3, 7, -100], [48, 0, 49, 11], [-100, -100, 5, 2]])

LOSSES: dict[str, dict[str, object]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "other ignore_index": {"ignore_index": 5},
    "label smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "soft cap, scale": {"softcap": 2.0, "logit_scale": 0.5},
    "padding": {"padding_idx": 0},
    "masked padding": {"padding_idx": 9, "mask_padding": True},
    "weights of tokens": {"weighted": True},
    "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 2.0, "padding_idx": 3, "reduction": "none"},
}


def with_weights(targets: Tensor, *, weighted: bool = False, **options: Any) -> dict[str, Any]:
    """The options of a loss of `LOSSES`; with `weighted` each target has a weight, NaN where it is ignored."""
    weights = {"token_weights": targets.double().cos().masked_fill(targets == -100, torch.nan)} if weighted else {}
    return {**options, **weights}


class UsesPosition(nn.Module):
    """Applies a position at each of its three points: to the input, to queries and keys, and to the scores."""

    def __init__(self, position: el.Position) -> None:
        super().__init__()
        self.position = position

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-2])
        x = self.position.add(x, places)
        heads = x.unflatten(-1, (NUM_HEADS, -1)).transpose(-2, -3)
        q, k = self.position.rotate(heads, heads, places)
        scores, bias = q @ k.transpose(-1, -2), self.position.bias(places, places)
        return scores if bias is None else scores + bias.squeeze(0)


class UsesHead(nn.Module):
    """Logits, or with targets the loss, of a head whose table is registered beside it."""

    def __init__(self, head: el.OutputHead, table: el.TokenTable | None = None, **options: object) -> None:
        super().__init__()
        self.table, self.head, self.options = table, head, options

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return self.head(hidden)
        return self.head.loss(hidden, targets, **with_weights(targets, **self.options))


class UsesStreams(nn.Module):
    """Logits of all streams one after another, or with targets their loss, of a head whose table stands beside it."""

    def __init__(self, head: StreamHead, table: el.TokenTable | None = None, **options: object) -> None:
        super().__init__()
        self.table, self.head, self.options = table, head, options

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return torch.cat(self.head(hidden), -1)
        return self.head.loss(hidden, targets, **with_weights(targets, **self.options)).loss


class UsesBag(nn.Module):
    """The vector of each bag of a batch, or of one bag."""

    def __init__(self, bag: el.tables.Bag) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids) if ids.dim() > 1 else self.bag(ids.unsqueeze(0)).squeeze(0)


class Case(NamedTuple):
    """A module and its inputs for a batch of three."""

    module: nn.Module
    inputs: tuple[Tensor, ...]

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.module.named_parameters() if p.requires_grad}

    def value(self, parameters: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        """One number that depends on all outputs, not linearly."""
        return functional_call(self.module, parameters, inputs).sin().sum()

    def variables(self, inputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], list[Tensor], Callable[..., Tensor]]:
        """What can be differentiated, parameters and float inputs, and `value` as a function of it."""

        def of(parameters: dict[str, Tensor], floats: list[Tensor]) -> Tensor:
            given = iter(floats)
            return self.value(parameters, *(next(given) if x.is_floating_point() else x for x in inputs))

        return self.parameters, [x for x in inputs if x.is_floating_point()], of


def hidden() -> Tensor:
    return torch.randn(3, 4, EMBED_DIM, dtype=torch.float64)


def with_head(name: str, *targets: Tensor, **options: Any) -> Case:
    if name in UNTIED_HEADS:
        module = UsesHead(UNTIED_HEADS[name](), **options)
    else:
        table = TABLES[TIED_HEADS[name]]()
        module = UsesHead(el.OutputHead(table), table, **options)
    targets = tuple(x.where(x != -100, options.get("ignore_index", -100)) for x in targets)
    return Case(module.double(), (hidden(), *targets))


def uses_streams(name: str, **options: object) -> UsesStreams:
    """A head of streams by its name, with the table that it is tied to."""
    if name in STREAM_HEADS:
        return UsesStreams(STREAM_HEADS[name](), **options)
    table = TABLES[TIED_STREAM_HEADS[name]]()
    return UsesStreams(tied_streams(table), table, **options)


def with_streams(name: str, *, loss: bool = False) -> Case:
    module = uses_streams(name, impl="chunked").double()
    streams, states = module.head.num_streams, hidden()
    states = states.unsqueeze(-2).expand(-1, -1, streams, -1).cos() if module.head.hidden_per_stream else states
    targets = torch.stack([(TARGETS + stream).clamp(max=9).where(TARGETS >= 0, -100) for stream in range(streams)], -1)
    return Case(module, (states, targets) if loss else (states,))


STREAMS = [*STREAM_HEADS, *TIED_STREAM_HEADS]
HEADS = [*UNTIED_HEADS, *TIED_HEADS]
CASES: dict[str, Callable[[], Case]] = {
    **{f"table: {name}": lambda name=name: Case(TABLES[name]().double(), (IDS,)) for name in TABLES},
    **{f"bag: {name}": lambda name=name: Case(UsesBag(BAGS[name]()).double(), (IDS,)) for name in BAGS},
    **{
        f"streams: {name}": lambda name=name: Case(STREAM_TABLES[name]().double(), (STREAM_IDS,))
        for name in STREAM_TABLES if name != "mapped"
    },
    **{f"position: {name}": lambda name=name: Case(UsesPosition(POSITIONS[name]()).double(), (hidden(),))
       for name in POSITIONS},
    **{f"layer: {name}": lambda name=name: Case(LAYERS[name]().double(), (IDS,)) for name in LAYERS},
    **{f"head: {name}": lambda name=name: with_head(name) for name in HEADS},
    **{f"loss: {name}": lambda name=name: with_head(name, TARGETS, impl="chunked") for name in HEADS},
    **{f"streams: {name}": lambda name=name: with_streams(name) for name in STREAMS},
    **{f"loss of streams: {name}": lambda name=name: with_streams(name, loss=True) for name in STREAMS},
    **{
        f"loss: {options}": lambda options=options: with_head("untied", TARGETS, impl="chunked", **LOSSES[options])
        for options in LOSSES
    },
    **{
        f"loss over rows: {options}": lambda options=options: with_head("tied to delta", TARGETS, **LOSSES[options])
        for options in LOSSES if not {"padding_idx"} & set(LOSSES[options])
    },
}  # fmt: skip

CODE_PATHS = [
    *(f"bag: {name}" for name in ("mean over dense", "sum over dense, plain")),
    *(f"position: {name}" for name in ("learned", "sinusoidal", "axial", "rotary", "dynamic", "rotary, axes")),
    *(f"position: {name}" for name in ("rotary, query scaling", "query-scaled", "alibi", "relative")),
    *(f"layer: TransformerEmbedding, {name}" for name in ("learned", "rotary")),
    *(f"layer: TransformerEmbedding over {name}" for name in ("dense, rounded scale", "row-sparse", "factorised")),
    *(f"layer: TransformerEmbedding over {name}" for name in ("int8", "int4, q4_0", "delta over int8")),
    *("layer: GPTEmbedding", "layer: DecoderLM", "streams: dense", "streams: shared padding"),
    *("head: untied, bias, softcap", "head: tied to dense, spare rows", "head: tied to factorised"),
    *("layer: TransformerEmbedding over stored, FP8", "layer: TransformerEmbedding over stored, 4 bits"),
    *("head: tied to int8", "head: tied to int4, groups", "head: tied to delta over int8", "head: tied to stored, FP8"),
    *("loss: all", "loss: tied to int4", "loss over rows: soft cap, scale"),
    *("streams: transposed", "loss of streams: one weight", "loss of streams: own rows in int8"),
    *("loss of streams: three weights", "loss of streams: transposed", "loss of streams: streams of dense"),
]
"""One case for each code path; each of the others differs from one of these in its numbers alone."""
