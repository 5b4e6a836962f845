"""Figures of tables, positions and training (extra `plots`).

Each function returns a new `matplotlib.figure.Figure`. It uses neither pyplot nor a current figure, and does not change
matplotlib's settings. Without matplotlib it raises a `MissingExtraError`. Save a figure with `figure.savefig(path)`, or
embed it in an HTML page with `svg(figure, prefix=...)`.

The colours are distinct with any kind of colour vision and in grey. Texts and lines have a few fixed colours, which a
page can replace by its own (`THEME`), for instance in dark mode.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
