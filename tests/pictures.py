"""What tests of pictures share."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def drawn(figure: Figure):
    """Draw everything, and give the renderer that knows where it is."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    return renderer


def texts(figure: Figure, panel: int = 0) -> list[str]:
    return [text.get_text() for text in figure.axes[panel].texts]


def lines(figure: Figure, panel: int = 0) -> dict:
    """Label of a line to its points; lines without a label of their own are left out."""
    named = (line for line in figure.axes[panel].lines if not str(line.get_label()).startswith("_"))
    return {line.get_label(): line.get_xydata() for line in named}


def image(figure: Figure, panel: int = 0):
    return figure.axes[panel].images[0].get_array()


def disjoint(boxes) -> bool:
    return not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
