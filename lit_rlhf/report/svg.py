"""matplotlib's drawings as part of a page: small, the same each time, in the page's own colours and letters."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_rlhf.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that stand for the page's variables, so that one drawing serves light and dark.
TEXT, GRID, MUTED = "#0a0101", "#0a0102", "#0a0103"
ARMS = tuple(f"#0a02{place:02x}" for place in range(8))
PHASES = tuple(f"#0a03{place:02x}" for place in range(6))
_VARIABLES = {
    TEXT: "currentColor",
    GRID: "var(--grid)",
    MUTED: "var(--muted)",
    **{colour: f"var(--arm-{place})" for place, colour in enumerate(ARMS)},
    **{colour: f"var(--phase-{place})" for place, colour in enumerate(PHASES)},
}
DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
"""Line styles that go with the colours, for those who cannot tell them apart."""
_SIZE = (4.2, 2.9)  # inches: letters stay readable when it is shrunk to a phone's width
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lit-rlhf",
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "figure.constrained_layout.use": True,
}


def arm_colour(place: int) -> str:
    """Colour of an arm.

    Args:
        place: Of the arm in the comparison.
    """
    return ARMS[place % len(ARMS)]


def arm_dashes(place: int) -> Any:
    """Line style of an arm.

    Args:
        place: Of the arm in the comparison.
    """
    return DASHES[place % len(DASHES)]


@dataclass(frozen=True)
class Plot:
    """A drawing with its words.

    Args:
        key: Its id in the page.
        title: Above it.
        caption: What to see in it.
        svg: The drawing.
        section: ``learning``, ``groups`` or ``time``.
    """

    key: str
    title: str
    caption: str
    svg: str
    section: str


class Drawing:
    """A figure with one pair of axes, in the house style; use it as a context manager and read :attr:`svg` after it.

    Args:
        name: Begins the ids of the drawing, so that several can stand in one page.
        height: In inches.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """

    def __init__(self, name: str, height: float = _SIZE[1]) -> None:
        self.name = name
        self.height = height
        self.svg = ""

    def __enter__(self) -> Axes:
        matplotlib = load_matplotlib()
        from matplotlib.figure import Figure

        self._context = matplotlib.rc_context(_STYLE)
        self._context.__enter__()
        self._figure = Figure(figsize=(_SIZE[0], self.height))
        return self._figure.add_subplot()

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            if kind is None:
                self.svg = _inline(self._figure, self.name)
        finally:
            self._context.__exit__(None, None, None)


def load_matplotlib() -> Any:
    """The library, on first use.

    Raises:
        ConfigurationError: Saying how to install it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError("lit-rlhf report draws with matplotlib: pip install 'lit-rlhf[report]'") from error
    return matplotlib


def _inline(figure: Figure, name: str) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    # The page knows its width.
    svg = re.sub(
        r'<svg[^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{name}">', svg, count=1
    )
    svg = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"font(-family)?: ?[^;\"]*?(\d[\d.]*)px[^;\"]*", r"font-size: \2px", svg)
    return re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], svg)
