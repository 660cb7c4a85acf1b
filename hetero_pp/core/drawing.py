"""Draw pictures in one style: sizes, colours, curves and saving. matplotlib is imported once something is drawn."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#333333"
STYLE: Any = {
    "font.size": 13,
    "axes.titlesize": 16,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 14,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.9,
}
WIDTH, HEIGHT, DPI = 16.0, 10.0, 100  # inches, inches and dots per inch: 1600 x 1000 pixels


def new_figure(height: float) -> Figure:
    """Return an empty figure of the usual width. `height`: in inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(WIDTH, height), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.15))


def palette(count: int) -> list[Any]:
    """Return a colour for each of `count` curves; they repeat after 20."""
    from matplotlib import colormaps

    colours = colormaps["tab10" if count <= 10 else "tab20"]
    return [colours(index % colours.N) for index in range(count)]


def draw_curve(axes: Axes, points: Iterable[tuple[float, float]], most_marks: int, **style: Any) -> None:
    """Draw a curve, with a mark at each point if there are at most `most_marks`."""
    x, y = zip(*points, strict=True)
    axes.plot(x, y, marker="o" if len(x) <= most_marks else "", **style)


FORMATS = (".png", ".svg", ".pdf", ".jpg", ".webp")


def require_format(path: Path | None) -> None:
    """Raise ConfigError for a picture whose format is not known; a name without a suffix is a PNG."""
    if path is not None and path.suffix.lower() not in ("", *FORMATS):
        raise ConfigError((), f"{path}: found the format `{path.suffix}`, expected one of {', '.join(FORMATS)}")


def save_figure(figure: Figure, path: Path, dpi: int = DPI) -> None:
    """Write a figure to a file. The suffix of its name selects the format; by default PNG."""
    content = io.BytesIO()
    figure.savefig(content, dpi=dpi, format=path.suffix.lower().removeprefix(".") or "png")
    write_whole(path, content.getvalue())
