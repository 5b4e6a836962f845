"""A matplotlib figure that notebooks display without pyplot."""

import io

from matplotlib.figure import Figure

PIXEL_RATIO = 2  # pixels of the PNG file per pixel on the page, so that the figure is sharp on screens of high density


class NotebookFigure(Figure):
    """Matplotlib figure with a PNG representation of its own.

    IPython can display only figures of pyplot. Figures of this library are not registered there, because pyplot would
    keep each of them in memory.
    """

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Return the figure as a PNG file, and the width and height at which a notebook displays it, in pixels."""
        width, height = (round(inches * self.dpi) for inches in self.get_size_inches())
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=PIXEL_RATIO * self.dpi)
        return picture.getvalue(), {"width": width, "height": height}
