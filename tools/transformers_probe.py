"""Observe what a model of transformers computes: inputs of blocks, rotations of queries and keys, biases, and logits.

    run = observe(model, {"input_ids": ids})
    run.stacks["model.layers"][3].rotations  # calls of the family's rotary functions in block 3

A block is an element of an `nn.ModuleList` that gets hidden states and is not inside of another block. A stack is such
a list. Functions and methods of the modeling files that rotate, compute a bias or attend are recorded while the model
runs (`call_recording`); each call is attributed to the block that is running. No code
here is for one model type.

transformers computes angles in float32, which at position 3,000 are off by up to 1e-4 radians. `Float64` makes the same
code compute in float64: every `float32` that the code names becomes `float64`. Long positions are compared with this.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from call_recording import FunctionCall, is_rotary, recorded_calls, rotated_tensors
from tiny_models import HEAD_INPUTS, UNHOOKED
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

BIAS = re.compile(r"alibi|compute_bias|compute_position_bias")
ATTENTION = "eager_attention_forward"


class Float64(TorchFunctionMode):
    """Compute in float64 wherever the code asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(*map(_widened, args), **{key: _widened(value) for key, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64() -> Iterator[None]:
    """Run code in float64: as `Float64`, with float64 as the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class Rotation:
    """A call of a rotary function.

    Attributes:
        function: Name of the function.
        owner: Class of the module that called it.
        before: Queries and keys that it got, or one of both.
        after: What it returned for them.
        attentions: Number of attention calls before it in the block.
    """

    function: str
    owner: str
    before: list[Tensor]
    after: list[Tensor]
    attentions: int


@dataclass
class Block:
    """What happened in a block.

    Attributes:
        module: The block.
        state: Hidden states that it got.
        output: Hidden states that it returned; `None` if it returned none.
        rotations: Calls of rotary functions.
        queries: Queries that attention got.
        biases: Results of functions that compute a bias.
    """

    module: nn.Module
    state: Tensor
    output: Tensor | None = None
    rotations: list[Rotation] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)
    biases: list[Tensor] = field(default_factory=list)


@dataclass
class Run:
    """What happened in a forward pass.

    Attributes:
        stacks: Name of each list of blocks -> index -> block, in the order of the calls.
        biases: Biases that were computed outside of blocks.
        hidden: Output of the module whose output enters the head; `None` if it was not seen.
        logits: Logits of the model; `None` if it has none.
    """

    stacks: dict[str, dict[int, Block]] = field(default_factory=dict)
    biases: list[Tensor] = field(default_factory=list)
    hidden: Tensor | None = None
    logits: Tensor | None = None


def observe(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    states: Run | None = None,
) -> Run:
    """Run a model and return what happened.

    The input of the head is the output of the outermost module around the last stack that does not return logits, or
    the input of the module in `HEAD_INPUTS`.

    Args:
        model: A model of transformers with eager attention.
        inputs: Arguments of its `forward`.
        states: An earlier run; each block then gets the hidden states that it got in that run.
    """
    run = Run()
    places = _places(model)
    ids = next(inputs[name] for name in ("input_ids", "decoder_input_ids", "audio_input_ids") if name in inputs)
    tokens = ids.shape[1] if ids.dim() == 3 else ids.shape[-1]  # `(B, T, K)`: codes of K streams
    running: list[tuple[nn.Module, Block | None]] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = None
        if not any(each is not None for _, each in running):
            name, index = places[module]
            found = _hidden_states(args, kwargs, tokens)
            if found is not None:
                where, state = found
                earlier = None if states is None else states.stacks.get(name, {}).get(index)
                if earlier is not None and earlier.state.shape == state.shape:
                    state = earlier.state
                    if isinstance(where, int):
                        args = (*args[:where], state, *args[where + 1 :])
                    else:
                        kwargs = {**kwargs, where: state}
                block = Block(module, state.detach().clone())
                run.stacks.setdefault(name, {}).setdefault(index, block)  # of several calls, the first one
        running.append((module, block))
        return args, kwargs

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        _, block = running.pop()
        if block is not None:
            first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
            block.output = None if first is None else first.detach().clone()

    def current() -> Block | None:
        return next((block for _, block in running if block is not None), None)

    outputs: dict[str, Tensor] = {}

    def returned(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
            if first is not None and first.is_floating_point():
                outputs[name] = first.detach().clone()

        return hook

    handles = []
    whole = UNHOOKED.get(model.config.model_type)
    if whole is not None:
        whole = whole if hasattr(model, whole.partition(".")[0]) else whole.partition(".")[2]  # a base model
        places[model.get_submodule(whole)] = (whole, 0)
    for block in places:
        handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(block.register_forward_hook(after))
    around = {name for stack, _ in places.values() for name in _ancestors(stack)}
    handles += [model.get_submodule(name).register_forward_hook(returned(name)) for name in around]
    hidden = HEAD_INPUTS.get(model.config.model_type, "")
    head = dict(model.named_modules()).get(hidden) if hidden else None
    if head is not None:
        handles.append(head.register_forward_pre_hook(lambda _, args: outputs.update({hidden: args[0].detach()})))
    try:
        with torch.no_grad(), _recorded(model, current, run):
            output = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    run.logits = getattr(output, "logits", None)
    if run.logits is None and isinstance(output, Mapping):
        run.logits = output.get("prediction_logits")
    rows = 0 if run.logits is None else run.logits.shape[-1]
    names = [hidden] if head is not None else _ancestors(list(run.stacks)[-1]) if run.stacks else []
    run.hidden = next((outputs[name] for name in names if name in outputs and outputs[name].shape[-1] != rows), None)
    return run


def _ancestors(name: str) -> list[str]:
    """Return the names of the modules that contain a module, except the whole model, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _places(model: nn.Module) -> dict[nn.Module, tuple[str, int]]:
    """Return each element of each `nn.ModuleList`, heads excepted: name of the list and index in it."""
    return {
        block: (name, index)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict)
        for index, block in enumerate(module if isinstance(module, nn.ModuleList) else module.values())
        if not isinstance(block, nn.Linear)
    }


def _hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any], tokens: int) -> tuple[int | str, Tensor] | None:
    """Return the first argument that may be hidden states, and its place: floats `(B, T, D)` or `(T, B, D)`."""
    for where, value in (*enumerate(args), *kwargs.items()):
        is_state = isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3
        if is_state and value.shape[-2:] != (tokens, tokens):
            return where, value
    return None


def _recorded(model: nn.Module, current: Callable[[], Block | None], run: Run) -> AbstractContextManager[None]:
    """Record the calls of rotary, bias and attention functions in the running block, or in the run."""

    def keep(name: str) -> bool:
        return is_rotary(name) or bool(BIAS.search(name)) or name == ATTENTION

    def record(call: FunctionCall) -> None:
        block = current()
        if is_rotary(call.name):
            pairs = rotated_tensors(call)
            if block is not None and pairs:
                before, after = [one for one, _ in pairs], [two for _, two in pairs]
                block.rotations.append(Rotation(call.name, call.caller, before, after, len(block.queries)))
        elif call.name != ATTENTION:
            is_bias = isinstance(call.result, Tensor) and call.result.is_floating_point() and call.result.dim() >= 2
            (run.biases if block is None else block.biases).extend([call.result] * is_bias)
        elif block is not None and isinstance(call.arguments.get("query"), Tensor):
            block.queries.append(call.arguments["query"].detach())

    return recorded_calls(model, keep, record)


def main_stacks(model: nn.Module, run: Run) -> list[str]:
    """Return the names of the stacks of a run: the encoder's, if there is one, and the decoder's or the only one.

    Of several lists of blocks, the one with most blocks that ran counts, the first one among equals.
    """
    groups: list[list[str]] = [list(run.stacks)]
    if getattr(model.config, "is_encoder_decoder", False):
        inner = {id(each) for each in model.get_encoder().modules()}
        encoder = [name for name in run.stacks if id(model.get_submodule(name)) in inner]
        groups = [encoder, [name for name in run.stacks if name not in encoder]]
    return [max(names, key=lambda name: len(run.stacks[name])) for names in groups if names]


def ends(model: nn.Module, ids: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input of the first block, the input of the head, and the logits."""
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    run = observe(model, {"input_ids": ids, **inputs})
    blocks = run.stacks[main_stacks(model, run)[0]]
    assert run.hidden is not None
    assert run.logits is not None
    return blocks[min(blocks)].state, run.hidden, run.logits


def arranged(state: Tensor, shape: tuple[int, int, int]) -> Tensor | None:
    """Return hidden states as `(streams, B, T, D)`; `None` if they have no such layout.

    Args:
        state: Hidden states whose dimensions are B, T and D in any order, perhaps with one for streams. Streams may
            also be next to each other in D. Tokens behind the first T are left out: padding to a multiple of a window,
            or ProphetNet's second stream.
        shape: B, T and D.
    """
    batch, tokens, width = shape
    sizes = list(state.shape)
    if sorted(sizes) == sorted(shape):
        return state.permute(*[sizes.index(size) for size in shape]).unsqueeze(0)
    if len(sizes) == 4 and all(size in sizes for size in shape):
        order = [sizes.index(size) for size in shape]
        stream = next(index for index in range(4) if index not in order)
        return state.permute(stream, *order)
    if sizes[:2] == [batch, tokens] and sizes[2] % width == 0:
        return state.unflatten(2, (-1, width)).permute(2, 0, 1, 3)
    if len(sizes) == 3 and sizes[0] == batch and sizes[2] == width and sizes[1] > tokens:
        return state[:, :tokens].unsqueeze(0)
    return None
