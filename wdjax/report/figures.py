"""Figures that a notebook shows as pictures; imports matplotlib, so it is imported late itself."""

import io

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure without global state that a notebook shows once, as the value of a cell.

    Figures of ``pyplot`` are shown by ``pyplot``'s backend. This one belongs to none, and without
    a method of its own Jupyter would print its name.
    """

    def _repr_png_(self) -> bytes:
        target = io.BytesIO()
        self.savefig(target, format="png", dpi=100)
        return target.getvalue()
