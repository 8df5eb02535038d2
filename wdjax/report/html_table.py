"""Tables of the page, with row headers, that scroll by themselves where they are too wide; and
lists of what its reader must know."""

import html
from collections.abc import Iterable, Sequence


def table(
    caption: str, titles: Sequence[str], rows: Iterable[tuple[str, str]], sortable: bool = False
) -> str:
    """A table of rows that each have a name and cells.

    Args:
      caption: what the table is, in plain text.
      titles: of the columns, that of the names first, in plain text.
      rows: the name in plain text, and the other cells, ``<td>`` and all.
      sortable: whether the titles are buttons that sort the rows.
    """
    heads = [html.escape(title) for title in titles]
    opened, closed = '<th scope="col">', "</th>"
    if sortable:
        opened = '<th scope="col" aria-sort="none"><button type="button">'
        closed = "</button></th>"
    head = "".join(f"{opened}{title}{closed}" for title in heads)
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>{cells}</tr>' for name, cells in rows
    )
    caption = html.escape(caption)
    return (
        f'<div class="scroll" role="group" tabindex="0" aria-label="{caption}"><table>'
        f"<caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        "</table></div>"
    )


def doubts(texts: Iterable[str]) -> str:
    """A list of what a reader must know before believing the numbers; nothing without any."""
    said = "".join(f'<li class="fails">{html.escape(text)}</li>' for text in texts)
    return f"<ul>{said}</ul>" if said else ""
