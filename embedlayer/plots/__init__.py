"""Figures of tables, positions and training (extra `plots`).

Each function returns a new `matplotlib.figure.Figure`. It uses neither pyplot nor a current figure, and does not change
matplotlib's settings. Save a figure with `figure.savefig(path)`, or embed it in an HTML page with `svg(figure)`.

The colours are distinct with any kind of colour vision and in grey. Texts and lines have a few fixed colours, which a
page can replace by its own (`THEME`), for instance in dark mode.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedlayer.plots.attention import attention_bias as attention_bias
    from embedlayer.plots.attention import rotary_angles as rotary_angles
    from embedlayer.plots.attention import rotary_scores as rotary_scores
    from embedlayer.plots.curves import dimension_curves as dimension_curves
    from embedlayer.plots.heatmaps import compare_positions as compare_positions
    from embedlayer.plots.heatmaps import path_steps as path_steps
    from embedlayer.plots.heatmaps import position_heatmap as position_heatmap
    from embedlayer.plots.heatmaps import token_path as token_path
    from embedlayer.plots.maps import table_map as table_map
    from embedlayer.plots.rows import gradient_rows as gradient_rows
    from embedlayer.plots.rows import norm_histogram as norm_histogram
    from embedlayer.plots.rows import spectrum as spectrum
    from embedlayer.plots.similarity import attention_orders as attention_orders
    from embedlayer.plots.similarity import position_similarity as position_similarity
    from embedlayer.plots.similarity import similarity_matrix as similarity_matrix
    from embedlayer.plots.similarity import token_similarity as token_similarity
    from embedlayer.plots.style import THEME as THEME
    from embedlayer.plots.style import svg as svg
    from embedlayer.plots.training import loss_curve as loss_curve
    from embedlayer.plots.training import loss_curves as loss_curves
    from embedlayer.plots.training import optimizer_paths as optimizer_paths
    from embedlayer.plots.visible import visible_characters as visible_characters
    from embedlayer.plots.visible import visible_text as visible_text

_HOMES = {
    "attention": ("attention_bias", "rotary_angles", "rotary_scores"),
    "curves": ("dimension_curves",),
    "heatmaps": ("compare_positions", "path_steps", "position_heatmap", "token_path"),
    "maps": ("table_map",),
    "rows": ("gradient_rows", "norm_histogram", "spectrum"),
    "similarity": ("attention_orders", "position_similarity", "similarity_matrix", "token_similarity"),
    "style": ("THEME", "svg"),
    "training": ("loss_curve", "loss_curves", "optimizer_paths"),
    "visible": ("visible_characters", "visible_text"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
