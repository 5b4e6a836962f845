"""Rotary positions on several axes, the scale of queries, direction and layout: beside transformers, and their laws."""

import copy
from importlib import import_module
from itertools import cycle, product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from covering import cases, some
from decoders import CACHES
from releases import skip_before, skip_without
from rotary_schemes import HEAD, MIXED, ON_AXES, SCHEMES, heads, positions_for
from torch import Tensor

from embedlayer import DecoderLM, Position, RotaryEmbedding, TokenEmbedding
from embedlayer.positions import AxialAxes

ROTATIONS = [name for name in SCHEMES if name not in ("channels", "query scaling", "query-scaled")]


# Beside transformers


def beside(model: str, kind: str, **parameters: object) -> tuple[torch.nn.Module, ModuleType]:
    """A rotary module of transformers for heads of this width, and the Python module with its functions."""
    config = SimpleNamespace(
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, **parameters},
        head_dim=HEAD,
        hidden_size=48,
        num_attention_heads=2,
        embed_dim=48,
    )
    name = f"transformers.models.{model}.modeling_{model}"
    skip_without(f"{name}:{kind}")
    module = import_module(name)
    return getattr(module, kind)(config), module


@pytest.mark.parametrize(
    ("name", "model", "kind", "sections"),
    [
        ("chunked", "qwen2_vl", "Qwen2VLRotaryEmbedding", [2, 4, 6]),
        ("chunked", "qwen2_5_vl", "Qwen2_5_VLRotaryEmbedding", [2, 4, 6]),
        ("interleaved", "qwen3_vl", "Qwen3VLTextRotaryEmbedding", [6, 3, 3]),
        ("interleaved", "qwen3_5", "Qwen3_5TextRotaryEmbedding", [6, 3, 3]),
        ("alternating", "ernie4_5_vl_moe", "Ernie4_5_VLMoeTextRotaryEmbedding", [4, 4, 4]),
        ("channels", "hunyuan_vl", "HunYuanVLRotaryEmbedding", [2, 4, 6]),
    ],
)
@pytest.mark.parametrize("positions", [MIXED, MIXED[0]], ids=["three axes", "text"])
def test_sections_are_those_of_transformers(name, model, kind, sections, positions) -> None:
    rotary, module = beside(model, kind, mrope_section=sections)
    skip_without(f"{module.__name__}:apply_rotary_pos_emb")
    if positions.dim() < 3 and model == "ernie4_5_vl_moe":
        skip_before("text positions of ERNIE 4.5 VL")
    q, k = heads(SCHEMES[name])
    expected = module.apply_rotary_pos_emb(q, k, *rotary(q, positions))
    for ours, theirs in zip(SCHEMES[name].rotate(q, k, positions), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)  # their angles are rounded to float32


@pytest.mark.parametrize(
    ("axes", "model", "kind"),
    [
        (AxialAxes(2), "qwen2_vl", "Qwen2VLVisionRotaryEmbedding"),
        (AxialAxes(2), "qwen2_5_vl", "Qwen2_5_VLVisionRotaryEmbedding"),
        (AxialAxes(2, shared_frequencies=True), "pixtral", "PixtralVisionRotaryEmbedding"),
        (AxialAxes(2, alternating=True, last_axis_first=True), "kimi_k25", "Kimi_K25VisionRotaryEmbedding"),
        (AxialAxes(3), "minimax_m3_vl", "MiniMaxM3VLVisionRotaryEmbedding"),
        (AxialAxes(2, pairs_within_axis=True), "gemma4", "Gemma4VisionRotaryEmbedding"),
    ],
)
def test_axial_tables_are_those_of_vision_towers(axes, model, kind) -> None:
    skip_before("rotation of vision towers")
    rotary, module = beside(model, kind, rope_type="axial")
    positions = MIXED[: axes.num_axes, 0]
    x = heads(SCHEMES["plain"])[0][:1]
    rows = positions.T[None] if model == "gemma4" else positions.T
    cos, sin = (each.reshape(1, 1, 7, -1) for each in rotary(x, rows))
    if model == "gemma4":
        expected = module.apply_multidimensional_rope(x, cos[0], sin[0], positions.T[None], unsqueeze_dim=1)
    else:
        halves = x.chunk(2, dim=-1)
        expected = x * cos + torch.cat([-halves[1], halves[0]], dim=-1) * sin
    ours = RotaryEmbedding(HEAD, axes=axes).rotate(x, x, positions[:, None])[0]
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


def test_the_direction_is_that_of_nanochat() -> None:
    rotary, module = beside("nanochat", "NanoChatRotaryEmbedding")
    position = RotaryEmbedding(HEAD, reversed=True)
    q, k = heads(position)
    expected = module.apply_rotary_pos_emb(q, k, *rotary(q, MIXED[0]))
    for ours, theirs in zip(position.rotate(q, k, MIXED[0]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_trailing_channels_are_those_of_deepseek_v4() -> None:
    skip_without("transformers.models.deepseek_v4.modeling_deepseek_v4")
    module = import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    position = RotaryEmbedding(HEAD, rotary_dim=16, interleaved=True, trailing=True)
    q, k = heads(position)
    expected = module.apply_rotary_pos_emb(q, *position.cos_sin(MIXED[0]))
    torch.testing.assert_close(position.rotate(q, k, MIXED[0])[0], expected)


def test_ntk_alpha_is_that_of_hunyuan() -> None:
    rotary, _ = beside("hunyuan_v1_dense", "HunYuanDenseV1RotaryEmbedding", rope_type="dynamic", alpha=1000.0)
    ours = SCHEMES["alpha"].frequencies()
    torch.testing.assert_close(ours.float(), rotary.inv_freq, rtol=1e-5, atol=0)


# Laws over all of them


@pytest.mark.parametrize("name", SCHEMES)
def test_prepared_saved_large_and_float64_rotations_are_those_of_the_scheme(name, tmp_path) -> None:
    position, at = SCHEMES[name], positions_for(name)
    position.save_pretrained(tmp_path)
    saved = type(position).from_pretrained(tmp_path)
    assert saved.config == position.config
    for dtype, positions in product((torch.float32, torch.bfloat16, torch.float64), (at, MIXED[0], MIXED[0, 0])):
        q, k = heads(position, dtype=dtype)
        prepared = copy.deepcopy(position.prepare(positions))
        assert isinstance(prepared, tuple)
        rotated = position.rotate(q, k, positions)
        for other in (position.rotate(q, k, prepared), saved.rotate(q, k, positions)):
            assert all(
                ours.dtype == dtype and torch.equal(ours, again) for ours, again in zip(rotated, other, strict=True)
            )

    q, k = heads(position, dtype=torch.float64)  # rotated by float64 angles
    if not isinstance(position, RotaryEmbedding):
        expected = q * position.query_scaling.factors(at, torch.float64)[..., None, :, None], k
    else:
        expected = by_the_formula(position, q, at), by_the_formula(position, k, at)
        if position.query_scaling is not None:
            factors = position.query_scaling.factors(at, torch.float64)
            expected = expected[0] * factors[..., None, :, None], expected[1]
    for ours, plain in zip(position.rotate(q, k, at), expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-12, rtol=0)

    q = torch.randn(2, 1600, 7, q.shape[-1])  # rotated in blocks, or as complex numbers
    k = torch.randn(q.shape)
    large = position.rotate(q, k, at)
    for one, few in zip(large, position.rotate(q[:, :2], k[:, :2], at), strict=True):
        torch.testing.assert_close(one[:, :2], few, atol=1e-6, rtol=0)


COMPILED = ["chunked, dynamic", "interleaved", "alternating", "channels", "axial, within", "query scaling"]
COMPILED += ["reversed, trailing", "query-scaled"]
"""One scheme for each way to compute angles and to rotate by them."""
TRANSFORMS = ["compile", "export", "vmap"]
THROUGH = [
    *product(["chunked, dynamic", "channels"], ["compile"]),
    *zip(COMPILED, cycle(["export", "vmap"]), strict=False),
]
"""Each of them is exported or mapped, and those compiled that `tests/laws/test_export.py` does not compile always."""
ALL = [way for way in product(SCHEMES, TRANSFORMS) if way != ("chunked, dynamic", "vmap")]
"""Without the scheme whose frequencies depend on the longest position of all rows."""


@pytest.mark.parametrize(("name", "transform"), some(THROUGH, ALL))
def test_prepared_angles_pass_through_compile_export_and_vmap(name, transform, unchecked) -> None:
    position = SCHEMES[name]
    q, k = heads(position)
    positions = positions_for(name)

    class Blocks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = position

        def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
            prepared = self.position.prepare(positions)
            for _ in range(2):
                q, k = self.position.rotate(q, k, prepared)
            return torch.cat([q, k], dim=1)

    if transform == "compile":
        torch.compiler.reset()
        result = torch.compile(Blocks(), fullgraph=True, backend="aot_eager")(q, k, positions)
    elif transform == "export":
        result = torch.export.export(Blocks(), (q, k, positions)).module()(q, k, positions)
    else:
        by_row = torch.func.vmap(lambda q, k, at: Blocks()(q[None], k[None], at)[0], in_dims=(0, 0, -2))
        result = by_row(q, k, positions.unsqueeze(-3))
    torch.testing.assert_close(result, Blocks()(q, k, positions), atol=1e-5, rtol=1e-5)


@cases("name, shift", ROTATIONS, [1, 5000, 10_000_000])
def test_scores_depend_on_distances_along_each_axis(name, shift) -> None:
    position = SCHEMES[name]
    if name == "chunked, dynamic":
        position = position.at_length(4 * shift)
    q, k = heads(position, dtype=torch.float64)
    positions = positions_for(name)
    further = positions + shift * torch.tensor([1, 2, 3])[:, None, None] if name in ON_AXES else positions + shift

    def scores(at: Tensor) -> Tensor:
        rotated, keys = position.rotate(q, k, at)
        return rotated @ keys.repeat_interleave(2, 1).mT

    torch.testing.assert_close(scores(positions), scores(further), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ON_AXES)
@pytest.mark.parametrize("length", [7, 700])
def test_text_is_rotated_as_without_axes_and_as_with_equal_ones(name, length) -> None:
    position: Any = SCHEMES[name]
    axes = position.axes
    q, k = (torch.randn(2, count, length, position.head_dim) for count in (40, 2))
    text = torch.arange(length)
    ours = position.rotate(q, k, text)
    equal = position.rotate(q, k, text.expand(axes.num_axes, 1, -1))
    assert all(torch.equal(one, other) for one, other in zip(ours, equal, strict=True))
    if not isinstance(axes, AxialAxes):
        plain = RotaryEmbedding.from_config({**position.config, "axes": None}).rotate(q, k, text)
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


# In a model


def decoder(position: Position) -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(TokenEmbedding(40, 48, init_std=1.0), position, num_layers=3, num_heads=2, head_dim=HEAD).eval()


class Doubled(RotaryEmbedding):
    """A scheme of a user that overrides `rotate` only and computes with positions."""

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(q, k, positions * 2)


def test_a_scheme_that_overrides_rotate_gets_positions() -> None:
    ids = torch.arange(9)[None]
    doubled, plain = decoder(Doubled(HEAD)), decoder(RotaryEmbedding(HEAD))
    torch.testing.assert_close(doubled(ids), plain(ids, positions=torch.arange(9) * 2))


@cases("name, kind", [name for name in ON_AXES if name not in ("chunked, dynamic", "axial, within")], CACHES)
@torch.no_grad()
def test_a_cache_continues_positions_on_several_axes(name, kind) -> None:
    """Three tokens of text, four of an image, then text: it continues at the largest position plus one."""
    model = decoder(SCHEMES[name])
    ids = torch.randint(0, 40, (2, 10))
    image = torch.tensor([[3, 3, 3, 3], [3, 3, 4, 4], [3, 4, 3, 4]])
    text = torch.arange(3).expand(3, -1)
    whole = torch.cat([text, image, torch.arange(5, 8).expand(3, -1)], dim=-1)[:, None].expand(-1, 2, -1)
    cache = CACHES[kind]()
    parts = [
        model(ids[:, :3], cache=cache),
        model(ids[:, 3:7], positions=image[:, None], cache=cache),
        model(ids[:, 7:8], cache=cache),
        model(ids[:, 8:], cache=cache),
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids, positions=whole), atol=1e-4, rtol=1e-4)
    assert torch.equal(cache.positions[..., :10], whole)


def by_the_formula(position: RotaryEmbedding, x: Tensor, positions: Tensor) -> Tensor:
    """Rotate each pair by `position * frequency` in float64, with the frequencies of the scheme's own formula."""
    scaling, axes, half = position.scaling, position.axes, position.rotary_dim // 2
    if scaling is not None:
        sets = scaling.frequency_sets(position.rotary_dim, position.base)
        frequencies = scaling.select(sets, scaling.length or int(positions.max()) + 1)
    elif axes is not None and axes.has_own_frequencies:
        frequencies = axes.frequencies(position.rotary_dim, position.base)
    else:
        frequencies = position.base ** (-torch.arange(half, dtype=torch.float64) / half)
    frequencies = -frequencies if position.reversed else frequencies
    at = positions.double().unsqueeze(-1)  # (B, T, 1), or (A, B, T, 1)
    if axes is None:
        angles = at * frequencies
    else:  # of each pair, or of each channel
        axis_of = axes.index(position.rotary_dim).tolist()
        angles = torch.stack([at[axis, ..., 0] * frequencies[i % half] for i, axis in enumerate(axis_of)], dim=-1)
    result, channels = x.clone(), position.pair_channels()
    for pair, (a, b) in enumerate(channels.tolist()):
        one = angles[..., pair].unsqueeze(-2)
        other = angles[..., half + pair].unsqueeze(-2) if angles.shape[-1] > half else one
        result[..., a] = x[..., a] * one.cos() - x[..., b] * one.sin()
        result[..., b] = x[..., b] * other.cos() + x[..., a] * other.sin()
    return result
