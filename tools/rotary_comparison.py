"""Compare rotary positions that were read from a configuration with those of the model in transformers.

The oracle has no code by model type. A small model is built whose attention, instead of attending, keeps the queries
and keys that it gets and returns zeros. No block then knows anything about positions but by its own queries and keys.
The model runs with all positions 0 and with other positions; rotating the first queries must give the second ones.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import isnan
from typing import Any, NamedTuple

import torch
from call_recording import FunctionCall, is_rotary, recorded_calls, rotated_tensors
from torch import Tensor, nn
from tower_inputs import FRAMES, TOWER_INPUTS, is_tower, stated_positions, tower_inputs

from embedlayer.core.errors import CheckpointError, require
from embedlayer.families import CONFIG_KEYS, RotaryPositions, rotary_facts
from embedlayer.io.files import JsonObject
from embedlayer.positions.position import Position
from embedlayer.positions.rotary.embedding import RotaryEmbedding, rotary_positions

ATTENTION = "embedlayer_compare_rotary"
"""Name of the attention function in transformers' registry that keeps queries and keys."""

SHORT, LONG = (0, 1, 2, 3, 5, 40, 100), (0, 7, 64, 1000, 9000, 100_003)
"""Positions at which queries and keys are compared."""

TOLERANCE = 1e-6
"""Largest `BlockDifference.difference` of equal positions."""

ExtraInputs = Callable[[int], Mapping[str, Any]]
"""Function from a number of tokens to inputs of a model."""

_SMALL: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "index_topk", "n_inner", "ffn_hidden_size"), 32),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("n_group", "topk_group"), 1),
}
"""Size in a configuration -> its value in the small model; none of them is about positions."""


class BlockDifference(NamedTuple):
    """Comparison of the positions of one block with those of the block in transformers.

    Attributes:
        block: Number of the block.
        difference: Largest difference of a rotated query or key, relative to the largest one, and beyond one radian
            relative to the angle: transformers rounds angles to float32.
        reason: What differs; empty for an equal block.
    """

    block: int
    difference: float
    reason: str


def compare_rotary(
    config: JsonObject,
    *,
    interleaved: bool | None = None,
    rotated: bool | Sequence[bool] | None = None,
    default_base: float | None = None,
) -> list[BlockDifference]:
    """Compare `rotary_positions(config, ...)` with the model that transformers builds from the configuration.

    The model has the blocks, the widths of heads and the positions of the configuration; all other sizes are small and
    its weights are random. Nothing is downloaded.

    Args:
        config: The dictionary of a `config.json` with a `model_type` that the installed transformers knows.
        interleaved: As in `rotary_positions`.
        rotated: As in `rotary_positions`.
        default_base: As in `rotary_positions`.

    Returns:
        One entry for each block. Positions are equal if no entry has a `reason`.

    Raises:
        CheckpointError: `rotary_positions` refuses the configuration, or transformers cannot build a model from it.
        MissingExtraError: transformers is not installed.

    Example:
        >>> sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 8}
        >>> config = {"model_type": "llama", "rope_theta": 1e4, "vocab_size": 10, **sizes}
        >>> [each.reason for each in compare_rotary(config)]
        ['', '']
    """
    schemes = rotary_positions(config, interleaved=interleaved, rotated=rotated, default_base=default_base)
    classes = require("transformers.models.auto.configuration_auto", extra="hf").CONFIG_MAPPING
    name = config.get("model_type")
    if name not in classes:
        raise CheckpointError(f"model_type {name!r} is not known to the installed transformers: update it.")
    try:
        model = small_model(classes[str(name)].from_dict(small_config(config)))
    except (ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"transformers cannot build a small model of this configuration: {error}") from error
    return compare_model(model, schemes)


def small_config(config: JsonObject) -> JsonObject:
    """Return a configuration of the same positions with small other sizes.

    The hidden size becomes that of at most 4 heads of the same width.
    """
    small = {
        key: min(value, _SMALL[key]) if key in _SMALL and type(value) is int else value for key, value in config.items()
    }
    for key, value in config.items():
        if key.endswith("token_id") and type(value) is int:
            small[key] = min(value, _SMALL["vocab_size"] - 1)
    facts = rotary_facts(config.get("model_type")) or RotaryPositions()
    names = {
        key: next(
            (
                name
                for name in (*(own for own, common in facts.aliases if common == key), *CONFIG_KEYS[key])
                if name in config
            ),
            key,
        )
        for key in CONFIG_KEYS
    }
    hidden, heads = config.get(names["hidden_size"]), config.get(names["num_attention_heads"])
    if type(hidden) is int and type(heads) is int and heads > 4 and hidden % heads == 0:
        groups = config.get("num_key_value_heads") or heads
        small |= {names["hidden_size"]: hidden // heads * 4, names["num_attention_heads"]: 4}
        if "num_key_value_heads" in config:
            small["num_key_value_heads"] = 4 if groups == heads else 1 if groups == 1 else 2
    return small


def small_model(config: Any) -> nn.Module:
    """Build the model of transformers that has a configuration of this class.

    It takes token IDs or input vectors, or where no such class has this configuration, pixels or audio. Its attention
    is the one that keeps queries and keys, if its class can change the attention.

    Args:
        config: Configuration object of transformers.

    Raises:
        CheckpointError: No such class is beside the configuration.
    """
    from transformers import PreTrainedModel
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION, _keep_queries_and_keys)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, eager_mask)
    try:
        module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:  # only a configuration, for the model of another family
        from transformers import AutoModel

        return _with_random_weights(AutoModel.from_config, config)
    found, stacks = [], []
    for name, value in vars(module).items():
        if (
            inspect.isclass(value)
            and issubclass(value, PreTrainedModel)
            and issubclass(type(config), value.config_class or ())
        ):
            inputs = inspect.signature(value.forward).parameters
            reads_text = bool({"input_ids", "inputs_embeds"} & {*inputs})
            if not name.endswith("PreTrainedModel") and (reads_text or {*TOWER_INPUTS} & {*inputs}):
                other = value.config_class is not type(config)  # that of a former name
                found.append((other, not reads_text, not name.endswith("Model"), len(name), name, value))
        elif inspect.isclass(value) and issubclass(value, PreTrainedModel) and name.endswith(("Encoder", "Decoder")):
            stacks.append((name.endswith("Decoder"), False, False, 0, name, value))
    reads_ids = [each for each in stacks if "input_ids" in inspect.signature(each[-1].forward).parameters]
    found = found or reads_ids  # a configuration that two stacks share
    if not found:
        raise CheckpointError(f"{module.__name__} has no model with a {type(config).__name__} that can be observed.")
    return _with_random_weights(min(found)[-1]._from_config, config)


def _with_random_weights(build: Callable[..., nn.Module], config: Any) -> nn.Module:
    """Build a model whose attention keeps queries and keys, with random weights.

    Args:
        build: Function from a configuration and the name of an attention function to the model.
        config: Configuration object of transformers.
    """
    torch.manual_seed(0)
    try:
        model = build(config, attn_implementation=ATTENTION)
    except (ValueError, KeyError) as error:
        if "attn_implementation" not in str(error) and ATTENTION not in str(error):
            raise
        model = build(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # frozen ones are fixed sinusoids
                width = parameter[0].numel() if parameter.dim() > 2 else 1  # of a convolution, of which audio has many
                parameter.normal_(std=min(0.2, width**-0.5))
    return model.eval()


class Call(NamedTuple):
    """Queries and keys that one attention layer got: its number or `None`, and both `(B, heads, T, width)`."""

    layer: int | None
    q: Tensor
    k: Tensor


class Recording(NamedTuple):
    """What one forward pass did.

    Attributes:
        calls: Queries and keys of each attention layer, in order.
        functions: Input and output of each tensor that a function of the modeling file rotated, in order.
        scalings: Largest cosine or sine of each rotary module; at position 0 this is its factor on cosines and sines.
    """

    calls: list[Call]
    functions: list[tuple[Tensor, Tensor]]
    scalings: list[float]


class Observation:
    """A model whose forward passes are recorded while this context is entered.

    Functions of the modeling file that rotate are wrapped until the context is left, in the whole process.

    Args:
        model: A model from `small_model`.
        inputs: Number of tokens -> further inputs of the model, by name; `None` for none.
    """

    def __init__(self, model: nn.Module, inputs: ExtraInputs | None = None) -> None:
        self.model = model
        self.inputs = inputs
        self.is_tower = is_tower(model)
        self.tower: dict[str, Any] = {}
        self.recording = Recording([], [], [])
        self.accepts_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.by_ids = "input_ids" in inspect.signature(model.forward).parameters

    def __enter__(self) -> "Observation":
        self._stack = ExitStack()
        self._stack.enter_context(recorded_calls(self.model, self._rotates, self._keep_rotated))
        for module in self.model.modules():
            if "Rot" in type(module).__name__:
                self._stack.callback(module.register_forward_hook(self._keep_scaling).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _rotates(self, name: str) -> bool:
        """Return whether a function of this name rotates; that of a vision tower only counts in a tower."""
        return is_rotary(name.lower().replace("vision", "") if self.is_tower else name)

    def _keep_rotated(self, call: FunctionCall) -> None:
        """Keep the tensors that a rotary function rotated."""
        self.recording.functions.extend(rotated_tensors(call))

    def _keep_scaling(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Keep the largest cosine or sine that a rotary module returned, in whichever order it returns them."""
        parts = output if isinstance(output, tuple | list) else (output,)
        largest = [float(part.abs().max()) for part in parts if isinstance(part, Tensor) and part.numel()]
        if largest:
            self.recording.scalings.append(max(largest))

    def run(self, positions: Tensor | None, length: int = 0) -> Recording:
        """Run the model on the same token at each position and return what it did.

        Args:
            positions: Position of each token, `(1, T)` or `(axes, 1, T)`. `None` lets the model count `length` tokens
                itself; all input vectors are then equal.
            length: Number of tokens without `positions`.
        """
        inputs = inspect.signature(self.model.forward).parameters
        length = length if positions is None else positions.shape[-1]
        arguments: dict[str, Any] = {} if self.inputs is None else dict(self.inputs(length))
        if self.accepts_positions and positions is not None:
            arguments["position_ids"] = positions
        if "use_cache" in inputs:
            arguments["use_cache"] = False
        if "encoder_hidden_states" in inputs and "Decoder" in type(self.model).__name__:
            arguments = self._encoder_states() | arguments
        if self.by_ids and (positions is not None or "inputs_embeds" not in inputs):
            try:
                return self._forward({"input_ids": torch.full((1, length), 3)} | arguments)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
                if "inputs_embeds" not in inputs or (
                    isinstance(positions, Tensor) and int(positions.max()) > max(SHORT)
                ):
                    raise
                self.by_ids = False  # IDs of several codebooks, or of bytes
        config: Any = self.model.config
        widths = (config.hidden_size, getattr(config, "embedding_size", None) or config.hidden_size)
        vectors = [torch.linspace(-1, 1, width).repeat(1, length, 1) for width in widths]
        try:
            return self._forward(arguments | {"inputs_embeds": vectors[0]})
        except RuntimeError:  # input vectors have the width of the table (RoFormer)
            return self._forward(arguments | {"inputs_embeds": vectors[1]})

    def _encoder_states(self) -> dict[str, Any]:
        """Return hidden states of two tokens of an encoder, fewer than the tokens of the decoder."""
        config: Any = self.model.config
        width = getattr(config, "cross_hidden_size", None) or config.hidden_size
        return {"encoder_hidden_states": torch.ones(1, 2, width)}

    def run_tower(self, positions: Sequence[int]) -> Recording:
        """Run a tower with the same position for all tokens and return what it did.

        Args:
            positions: The position on each axis; empty for those that the tower counts itself.

        Raises:
            CheckpointError: No input was found on which the tower runs, or it has no rotary module that gets positions
                on these axes.
        """
        failed: Exception | None = None
        with stated_positions(self.model, positions) as seen:
            stated = {} if self.inputs is None else dict(self.inputs(FRAMES))
            for inputs in [self.tower] if self.tower else [each | stated for each in tower_inputs(self.model)]:
                try:
                    recording = self._forward(inputs)
                except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
                    failed = error
                    continue
                if positions and set(seen) != {len(positions)}:
                    raise CheckpointError(f"The rotary modules of {type(self.model).__name__} get no such positions.")
                self.tower = inputs
                return recording
        raise CheckpointError(f"{type(self.model).__name__} runs on none of the inputs that were tried.") from failed

    def _forward(self, arguments: dict[str, Any]) -> Recording:
        """Run the model and return what it did."""
        self.recording = Recording([], [], [])
        _KEPT.clear()
        with torch.no_grad():
            self.model(**arguments)
        self.recording.calls.extend(_KEPT)
        _KEPT.clear()
        return self.recording


_KEPT: list[Call] = []


def _keep_queries_and_keys(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Append the queries and keys to `_KEPT`, and return zeros in the shape of an attention output.

    Args:
        module: The attention layer.
        query: Queries, `(B, H, T, K)`.
        key: Keys, `(B, G, T, K)`.
        value: Values, `(B, G, T, V)`.
        attention_mask: Not used.
    """
    keys = key[..., : query.shape[-2], :]  # behind them may be compressed ones, whose positions are others
    if keys.shape[-2] == query.shape[-2]:  # keys of an encoder are fewer
        _KEPT.append(Call(getattr(module, "layer_idx", None), query.detach().clone(), keys.detach().clone()))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def compare_model(
    model: nn.Module,
    schemes: Sequence[Position],
    inputs: ExtraInputs | None = None,
    positions: Tensor | None = None,
    *,
    at: Sequence[Sequence[int]] = (SHORT, LONG),
) -> list[BlockDifference]:
    """Compare position schemes with those of a model from `small_model`.

    Args:
        model: The model.
        schemes: Scheme of each block.
        inputs: Number of tokens -> inputs that the model needs beside tokens and positions; `None` for none.
        positions: Positions of a tower whose rotary modules do not get any, `(A, 1, T)`: those that its code counts.
            They are then the only ones that are compared.
        at: Positions of the tokens of each call of another model than a tower.

    Raises:
        CheckpointError: Neither the model's attention nor its rotary functions can be observed.
    """
    several = next((one.axes.num_axes for one in schemes if isinstance(one, RotaryEmbedding) and one.axes), 1)
    if positions is not None:
        with Observation(model, inputs) as observed:
            return _compare_functions(schemes, observed.run_tower(()).functions, positions)
    if is_tower(model):
        return _compare_tower(model, schemes, several, inputs)
    results = []
    with Observation(model, inputs) as observed:
        for number, chosen in enumerate(at):
            for axes in dict.fromkeys((1, several)):
                stated = torch.tensor(chosen)[None]
                if axes > 1:  # another order of the same positions on each axis
                    stated = torch.stack([stated.roll(axis, -1) for axis in range(axes)])
                try:
                    results.append(_compare(observed, schemes, stated))
                except (IndexError, RuntimeError):  # a table of positions of fixed length (GPT-J)
                    if number == 0:
                        raise
    return [max((one[block] for one in results), key=_badness) for block in range(len(schemes))]


def _badness(one: BlockDifference) -> tuple[bool, float]:
    """Return the key by which the worst of several comparisons of a block is found."""
    return bool(one.reason), one.difference


def _compare(observed: Observation, schemes: Sequence[Position], positions: Tensor) -> list[BlockDifference]:
    """Compare all blocks at the given positions, `(1, T)` or `(axes, 1, T)`."""
    rotates = any(isinstance(scheme, RotaryEmbedding) for scheme in schemes)
    start = observed.run(torch.zeros_like(positions))
    moved = observed.run(positions)
    same = all(torch.equal(a.q, b.q) for a, b in zip(start.calls, moved.calls, strict=True))
    if not observed.accepts_positions or (rotates and same):  # the model counts positions itself
        moved = observed.run(None, positions.shape[-1])
        positions = torch.arange(positions.shape[-1])[None]
        start = start._replace(
            calls=[Call(i, q[..., :1, :].expand_as(q), k[..., :1, :].expand_as(k)) for i, q, k in moved.calls]
        )
    return _compare_recordings(schemes, start, moved, positions)


def _compare_tower(
    model: nn.Module, schemes: Sequence[Position], axes: int, inputs: ExtraInputs | None
) -> list[BlockDifference]:
    """Compare all blocks of a vision or audio tower, whose tokens all have the same position.

    Args:
        model: The tower.
        schemes: Scheme of each block.
        axes: Number of axes of the positions.
        inputs: As in `compare_model`.

    Raises:
        CheckpointError: No input was found on which the tower runs, or it has no rotary module that gets positions.
    """
    results = []
    with Observation(model, inputs) as observed:
        start = observed.run_tower((0,) * axes)
        for positions in (SHORT, LONG):
            for place in range(1, len(positions)):
                stated = tuple(positions[place - axis] for axis in range(axes))
                moved = observed.run_tower(stated)
                tokens = moved.calls[0].q.shape[-2] if moved.calls else 1
                ids = torch.tensor(stated)[:, None, None].expand(-1, 1, tokens)
                results.append(_compare_recordings(schemes, start, moved, ids if axes > 1 else ids[0]))
    return [max((one[block] for one in results), key=_badness) for block in range(len(schemes))]


def _compare_recordings(
    schemes: Sequence[Position], start: Recording, moved: Recording, positions: Tensor
) -> list[BlockDifference]:
    """Compare all blocks in two recordings of the same input.

    Args:
        schemes: Scheme of each block.
        start: Recording at position 0.
        moved: Recording at `positions`.
        positions: Position of each token, `(1, T)` or `(axes, 1, T)`.

    Raises:
        CheckpointError: There is not the same number of attention layers for each block.
    """
    start, moved = (
        each._replace(calls=[call for call in each.calls if call.q.shape[-2] == positions.shape[-1]])
        for each in (start, moved)
    )  # without cross-attention of other tokens
    if not start.calls:
        return _compare_functions(schemes, moved.functions, positions)
    reasons = _scaling_reason(schemes, start.scalings)
    differences: dict[int, BlockDifference] = {}
    changed: set[int] = set()  # blocks whose queries depend on the positions
    turned = False  # whether such queries have the lengths that they have at position 0
    for number, (before, after) in enumerate(zip(start.calls, moved.calls, strict=True)):
        block = _block_of(number, before.layer, len(start.calls), schemes)
        if block is None and moved.functions:  # cross-attention between the blocks
            return _compare_functions(schemes, moved.functions, positions)
        if block is None:
            raise CheckpointError(
                f"The model has {len(start.calls)} attention layers, but {len(schemes)} blocks were read."
            )
        if not torch.equal(before.q, after.q):
            changed.add(block)
            turned |= torch.allclose(before.q.norm(dim=-1), after.q.norm(dim=-1), rtol=1e-4)
        value = _difference(schemes[block], before, after, positions, _is_permuted(before.q, start.functions))
        one = BlockDifference(block, value, f"differs by {value:.1e}" if value > TOLERANCE else reasons)
        differences[block] = max(differences.get(block, one), one, key=_badness)
    missing = "is rotated here, but has no attention in transformers"
    for block, scheme in enumerate(schemes):
        reason = missing if isinstance(scheme, RotaryEmbedding) else ""
        differences.setdefault(block, BlockDifference(block, 0.0, reason))
    found = [differences[block] for block in range(len(schemes))]
    whole = all(x.dim() == 4 and x.shape[-1] == _width(schemes) for x, _ in moved.functions)
    if any(one.reason for one in found) and whole:
        rotated = [isinstance(scheme, RotaryEmbedding) for scheme in schemes]
        if rotated == [block in changed for block in range(len(schemes))] and len(moved.functions) == 2 * sum(rotated):
            # a norm behind the rotation hides it from attention (HunYuan); the functions see whole heads
            return _compare_functions(schemes, moved.functions, positions)
    if not any(isinstance(scheme, RotaryEmbedding) for scheme in schemes) and not moved.functions and not turned:
        return [BlockDifference(block, 0.0, "") for block in range(len(schemes))]  # positions added to the input (ESM)
    return found


def _width(schemes: Sequence[Position]) -> int:
    """Return the width of heads of the first rotated block; 0 if no block is rotated."""
    return next((scheme.head_dim for scheme in schemes if isinstance(scheme, RotaryEmbedding)), 0)


def _block_of(number: int, layer: int | None, calls: int, schemes: Sequence[Position]) -> int | None:
    """Return the block of an attention call, or `None` if it cannot be told.

    Args:
        number: Number of the call in the forward pass.
        layer: Number that the attention layer states, or `None`.
        calls: Calls in the forward pass.
        schemes: Scheme of each block.
    """
    if calls % len(schemes) == 0:
        return number // (calls // len(schemes))
    rotated = [block for block, scheme in enumerate(schemes) if isinstance(scheme, RotaryEmbedding)]
    if layer is None and calls == len(rotated):  # the others have no attention
        return rotated[number]
    return layer if layer is not None and 0 <= layer < len(schemes) else None


def _is_permuted(queries: Tensor, functions: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether queries at position 0 came from a function that permutes interleaved channels to half-split ones.

    Args:
        queries: Queries that an attention layer got.
        functions: Input and output of each rotated tensor.
    """
    for x, y in functions:
        if x.dim() != 4 or y.shape[-1] > queries.shape[-1]:
            continue
        if y.shape[:-1] != queries.shape[:-1]:
            x, y = x.transpose(1, 2), y.transpose(1, 2)
        if y.shape[:-1] != queries.shape[:-1]:
            continue
        width = y.shape[-1]
        if any(torch.allclose(part, y) for part in (queries[..., :width], queries[..., queries.shape[-1] - width :])):
            expected = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
            return torch.allclose(y / y.norm() * x.norm(), expected, atol=1e-5)
    return False


def _scaling_reason(schemes: Sequence[Position], scalings: Sequence[float]) -> str:
    """Return a sentence if no rotary module has the factor on cosines and sines of one of the schemes, else nothing.

    Modules may have more factors: those of layer types that no block has (DeepSeek-V4).
    """
    own = {round(scheme.attention_scaling, 5) for scheme in schemes if isinstance(scheme, RotaryEmbedding)}
    theirs = {round(value, 5) for value in scalings}
    return f"scales cosines by {sorted(own)}, transformers by {sorted(theirs)}" if theirs and not own <= theirs else ""


def _difference(scheme: Position, before: Call, after: Call, positions: Tensor, permuted: bool) -> float:
    """Return the largest relative difference of the queries and keys that a scheme rotates and those of the model.

    Args:
        scheme: The scheme.
        before: Queries and keys at position 0.
        after: Queries and keys at `positions`.
        positions: The positions, `(1, T)` or `(axes, 1, T)`.
        permuted: Whether the model permutes interleaved channels to half-split ones before it rotates them.
    """
    pairs = list(zip((before.q, before.k), (after.q, after.k), strict=True))
    if not isinstance(scheme, RotaryEmbedding):
        flat, results = positions[0] if positions.dim() == 3 else positions, []
        start = scheme.rotate(torch.ones_like(before.q), before.k, torch.zeros_like(flat))[0]
        for counted in (flat, torch.arange(flat.shape[-1])):  # Llama 4 scales queries by the count of tokens
            rotated = scheme.rotate(before.q / start, before.k, counted)
            results.append(max(_relative(a, b, torch.ones(())) for a, (_, b) in zip(rotated, pairs, strict=True)))
        return min(results)
    width = scheme.head_dim
    if width > before.q.shape[-1]:
        return float("inf")
    if permuted and not scheme.interleaved:
        return float("inf")
    if permuted:
        scheme = RotaryEmbedding(**(scheme_arguments(scheme) | {"interleaved": False}))
    angles = _angles(scheme, positions)
    results = []
    for offset in dict.fromkeys((0, before.q.shape[-1] - width)):
        part = slice(offset, offset + width)
        rotated = scheme.rotate(before.q[..., part], before.k[..., part], positions)
        worst = 0.0
        for ours, (old, new) in zip(rotated, pairs, strict=True):
            own = _unscaled(scheme, ours)
            expected = torch.cat([old[..., :offset], own, old[..., offset + width :]], dim=-1)
            bound = torch.ones(expected.shape[-2:])
            bound[:, part] = angles
            worst = max(worst, _relative(expected, new, bound))
        results.append(worst)
    return min(results)


def scheme_arguments(scheme: RotaryEmbedding) -> dict[str, Any]:
    """Return the arguments from which a scheme was built, with objects and not their descriptions."""
    names = inspect.signature(RotaryEmbedding).parameters
    return {name: getattr(scheme, name) for name in names}


def _unscaled(scheme: RotaryEmbedding, x: Tensor) -> Tensor:
    """Return rotated vectors without the factor on cosines and sines, which vectors at position 0 have already."""
    rotary, x = scheme.rotary_dim, x.clone()
    part = slice(x.shape[-1] - rotary, None) if scheme.trailing else slice(0, rotary)
    x[..., part] /= scheme.attention_scaling
    return x


def _angles(scheme: RotaryEmbedding, positions: Tensor) -> Tensor:
    """Return an upper bound of the angle of each channel at each position, `(T, K)`, in radians, at least 1."""
    longest = positions.reshape(-1, positions.shape[-1]).amax(0).double()
    frequencies = scheme.frequencies(int(longest.max()) + 1).abs()
    if scheme.axes is not None:
        frequencies = frequencies.cummin(0).values if not scheme.axes.has_own_frequencies else frequencies
    channels = frequencies.repeat_interleave(2) if scheme.interleaved else frequencies.repeat(2)
    rest = torch.zeros(scheme.head_dim - scheme.rotary_dim, dtype=channels.dtype)
    channels = torch.cat([rest, channels] if scheme.trailing else [channels, rest])
    return (longest[:, None] * channels).clamp_min(1.0).float()


def _relative(ours: Tensor, theirs: Tensor, bound: Tensor) -> float:
    """Return the largest difference divided by `bound`, relative to the largest number; infinite without a number."""
    value = float(((ours - theirs).abs() / bound).max() / theirs.abs().max().clamp_min(1e-30))
    return float("inf") if isnan(value) else value


def _compare_functions(
    schemes: Sequence[Position], functions: Sequence[tuple[Tensor, Tensor]], positions: Tensor
) -> list[BlockDifference]:
    """Compare all blocks with the functions of the modeling file that rotate, for models without such an attention.

    Args:
        schemes: Scheme of each block.
        functions: Input and output of each rotated tensor, in order.
        positions: Position of each token, `(1, T)`.

    Raises:
        CheckpointError: There is not the same number of rotated tensors for each rotated block.
    """
    rotated = [block for block, scheme in enumerate(schemes) if isinstance(scheme, RotaryEmbedding)]
    functions = [(x, y) for x, y in functions if x.dim() == 4]
    if rotated and (not functions or len(functions) % len(rotated)):
        raise CheckpointError("Neither the model's attention nor its rotary functions can be observed.")
    if functions and not rotated:
        return [BlockDifference(block, float("inf"), "is rotated in transformers") for block in range(len(schemes))]
    results = [BlockDifference(block, 0.0, "") for block in range(len(schemes))]
    for number, (x, y) in enumerate(functions):
        block = rotated[number * len(rotated) // len(functions)]
        scheme = schemes[block]
        assert isinstance(scheme, RotaryEmbedding)
        if x.shape[-3] == positions.shape[-1]:
            x, y = x.transpose(-2, -3), y.transpose(-2, -3)
        wide = torch.nn.functional.pad(x, (0, scheme.head_dim - x.shape[-1]))
        ours = scheme.rotate(wide, wide, positions)[0][..., : x.shape[-1]]
        one = _relative(ours, y, _angles(scheme, positions)[:, : x.shape[-1]])
        found = BlockDifference(block, one, f"differs by {one:.1e}" if one > TOLERANCE else "")
        results[block] = max(results[block], found, key=_badness)
    return results
