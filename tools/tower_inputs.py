"""Run vision and audio towers of transformers on random inputs, with positions of the caller's choice.

A tower takes pixels or audio, and counts positions itself. Its rotary module gets them as `position_ids`, where they
are replaced. The inputs follow from the names of parameters of `forward` and from the first weight of the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

PIXELS = ("pixel_values", "pixel_values_videos", "hidden_states")
AUDIO = ("input_features", "input_values", "latents", "past_values", "inputs_embeds", "noise_embeds")
TOWER_INPUTS = (*PIXELS, *AUDIO)
"""Parameters of `forward` that hold the input of a tower."""

GRIDS = ((4, 8), (6, 12))
"""Rows and columns of patches of an image, in the order in which they are tried."""

FRAMES = 64
"""Length of an audio input in frames."""


def is_tower(model: nn.Module) -> bool:
    """Return whether a model takes pixels or audio, or counts positions itself and has a module that gets them."""
    names = signature(model.forward).parameters
    if "input_ids" not in names and "inputs_embeds" not in names:
        return True
    return "input_ids" not in names and "position_ids" not in names and bool(rotary_modules(model))


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """Return the rotary modules of a model that get positions."""
    found = [each for each in model.modules() if "Rot" in type(each).__name__]
    return [each for each in found if "position_ids" in signature(each.forward).parameters]


def tower_inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield inputs that the tower may accept, by parameter of `forward`; the caller takes the first that runs."""
    names = signature(model.forward).parameters
    own = next((name for name in TOWER_INPUTS if name in names), "")
    generator = torch.Generator().manual_seed(0)
    shapes = _image_shapes(model) if own in PIXELS else _audio_shapes(model)
    for shape, rows, columns in shapes:
        inputs: dict[str, Any] = {own: torch.randn(shape, generator=generator)}
        grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        for name, parameter in names.items():
            if name.endswith("grid_thw"):
                inputs[name] = torch.tensor([[1, rows, columns]])
            elif name == "merge_sizes":
                inputs[name] = torch.tensor([2])
            elif name == "chunk_sample_lengths":
                inputs[name] = torch.tensor([1 << 30])
            elif name == "pixel_position_ids":
                inputs[name] = grid[None]
            elif name == "padding_mask_videos" and parameter.default is parameter.empty:
                inputs[name] = torch.ones(shape[:2], dtype=torch.long)
        yield inputs


def _first_weight(model: nn.Module) -> Tensor:
    """Return the weight of the first linear or convolutional layer, that of patches first, which takes the input."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, kinds)]
    layers.sort(key=lambda layer: "patch_embed" not in layer[0])
    return layers[0][1].weight if layers else torch.empty(1, 1)


def _image_shapes(model: nn.Module) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield shapes of pixels, and the rows and columns of patches."""
    config: Any = model.config
    weight = _first_weight(model)
    patch = getattr(config, "patch_size", None) or weight.shape[-1]
    patch = patch if isinstance(patch, int) else patch[0]
    gridded = any(name.endswith(("grid_thw", "position_ids")) for name in signature(model.forward).parameters)
    for rows, columns in GRIDS:
        count, one = rows * columns, tuple(weight.shape[1:])
        if gridded:
            yield from ((shape, rows, columns) for shape in ((count, one[0]), (count, weight[0].numel())))
            yield from ((shape, rows, columns) for shape in ((1, count, one[0]), (count, *one), (1, count, *one)))
            side = patch * getattr(config, "spatial_merge_size", 1)
            yield (count, side, side, 3), rows, columns
        else:
            yield (1, 3, rows * patch, columns * patch), rows, columns
    side = getattr(config, "image_size", None)
    if side is not None and not gridded:
        side = side if isinstance(side, int) else side[0]
        yield (1, 3, side, side), side // patch, side // patch
    yield (1, 4, 3, 4 * patch, 4 * patch), 4, 4


def _audio_shapes(model: nn.Module) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield shapes of audio features or samples, and two zeros in place of rows and columns."""
    config: Any = model.config
    weight = _first_weight(model)
    names = ("num_mel_bins", "input_feat_size", "feature_size", "hidden_size", "latent_dim")
    widths = [weight.shape[1], *(getattr(config, name, None) for name in names)]
    for width in dict.fromkeys(width for width in widths if type(width) is int):
        yield from ((shape, 0, 0) for shape in ((1, FRAMES, width), (1, width, FRAMES)))
    for samples in (FRAMES, 64 * FRAMES, 1024 * FRAMES):
        yield from ((shape, 0, 0) for shape in ((1, samples), (1, 1, samples)))


@contextmanager
def stated_positions(model: nn.Module, positions: Sequence[int]) -> Iterator[list[int]]:
    """Replace the positions of all tokens in the rotary modules of a model while this context is entered.

    Args:
        model: A model whose rotary modules have a parameter `position_ids`, `(..., T)` or `(..., T, A)`.
        positions: Position on each axis, which all tokens get. If it is empty, nothing is replaced.

    Yields:
        A list that gets the number of axes of the positions of each call of a rotary module.
    """
    seen: list[int] = []

    def replace(module: nn.Module, args: Any, kwargs: Any) -> Any:
        bound = signature(module.forward).bind(*args, **kwargs)
        given = bound.arguments["position_ids"]
        several = given.dim() > 1 and given.shape[-1] == len(positions) > 1
        seen.append(len(positions) if several else 1)
        stated = torch.tensor(positions if several else positions[0], device=given.device)
        bound.arguments["position_ids"] = stated.to(given.dtype).expand_as(given).contiguous()
        return bound.args, bound.kwargs

    with ExitStack() as stack:
        for module in rotary_modules(model) if positions else ():
            stack.callback(module.register_forward_pre_hook(replace, with_kwargs=True).remove)
        yield seen
