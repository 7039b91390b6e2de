"""Where the notebooks leave their figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["keep"]


def keep(drawn: Figure | Axes, name: str) -> None:
    """Save a figure as ``name.png`` if the environment variable ``MLA_FIGURES`` names a folder; Jupyter shows it either way.

    Parameters
    ----------
    drawn : matplotlib.figure.Figure or matplotlib.axes.Axes
        The figure, or axes of it.
    name : str
        Of the file, without its ending.
    """
    folder = os.environ.get("MLA_FIGURES")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        figure = drawn.get_figure(root=True)
        if figure is None:
            raise ValueError("drawn: expected axes of a figure, got axes that were removed")
        figure.savefig(Path(folder) / f"{name}.png", dpi=110)
