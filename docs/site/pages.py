"""Pages of the site that are made from other files: the reference, notebooks, project pages."""

import base64
import html
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import names

NOTEBOOKS = sorted((names.ROOT / "notebooks").glob("[0-9]*.ipynb"))
REPOSITORY = tomllib.loads((names.ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"][
    "Repository"
]
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_KEY = re.compile(r"`?\[([a-z]+\d{4}|definitions)\]`?(?![\[(:])")
_ENTRY = re.compile(r"^\* `\[(\w+)\]`", re.MULTILINE)
_BADGE = re.compile(r"\[!\[Open in Colab\]\(.+?\)\]")
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def reference(page: str, shown: set[str]) -> str:
    """A page of the API reference; ``shown`` are the definitions that earlier pages have."""
    text = f"# {names.PAGES[page]} {{ #{page} }}\n\n`{page}`\n\n"
    public = names.public(page)
    again = [f"[`{name.short}`][{name.path}]" for name in public if name.path in shown]
    if again:
        text += f"Also here: {', '.join(again)}.\n\n"
    own = [name.path for name in public if name.path not in shown]
    shown.update(own)
    return text + "\n\n".join(f"::: {path}" for path in own) + "\n"


def _outputs(cell: dict[str, Any], stem: str) -> Iterator[tuple[str, bytes]]:
    """What a cell of code printed and drew, as Markdown; the bytes of a picture or none."""
    for place, output in enumerate(cell["outputs"]):
        data = output.get("data", {})
        if "image/png" in data:
            name = f"{stem}_{cell['id']}_{place}.png"
            yield f"![Figure of the cell above]({name})", base64.b64decode(data["image/png"])
        elif text := "".join(output.get("text", data.get("text/plain", []))).strip():
            yield f'<pre class="output">{html.escape(text)}</pre>', b""


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page, and its pictures by name."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_BADGE.sub("[Open in Colab]", source))  # The badge is on another host.
            continue
        parts.append(f"```python\n{source}\n```")
        for shown, picture in _outputs(cell, path.stem):
            parts.append(shown)
            if picture:
                pictures[re.search(r"\((.+)\)", shown)[1]] = picture
    return "\n\n".join(parts) + "\n", pictures


def gallery(figures: dict[str, list[str]]) -> str:
    """All figures of the notebooks, each a link to the code that draws it."""
    text = "# Gallery\n\nEvery figure links to the notebook that draws it.\n"
    for stem, pictures in figures.items():
        text += f"\n## {stem[3:].replace('_', ' ').capitalize()}\n\n"
        for name in pictures:
            text += f"[![Figure of notebook {stem}](notebooks/{name})](notebooks/{stem}.md)\n"
    return text


def _project_page(file: str) -> str:
    """A file of the repository's root, with links into ``docs`` that work on the site."""

    def link(found: re.Match[str]) -> str:
        place = found[1]
        if place.startswith("docs/"):
            return f"]({place.removeprefix('docs/')}"
        return f"]({REPOSITORY}/blob/main/{place}"

    return _LINK.sub(link, (names.ROOT / file).read_text("utf-8"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills the navigation: the reference, the notebooks, and pages that it does not name."""
    sections = {title: part for entry in config.nav for title, part in entry.items()}
    sections["Reference"][:0] = [{page: f"api/{page}.md"} for page in names.PAGES]
    # A link, since Material asks GitHub for the stars of a `repo_url`.
    sections["Project"] += [{"Repository": REPOSITORY}]
    sections["Notebooks"] += [f"notebooks/{path.stem}.md" for path in NOTEBOOKS]
    named = json.dumps(config.nav)
    pages = sorted(path.name for path in Path(config.docs_dir).glob("*.md"))
    sections["Guides"] += [page for page in pages if f'"{page}"' not in named]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are no file in ``docs``."""
    shown: set[str] = set()
    made: dict[str, str | bytes] = {
        f"api/{page}.md": reference(page, shown) for page in names.PAGES
    }
    figures = {}
    for path in NOTEBOOKS:
        made[f"notebooks/{path.stem}.md"], pictures = notebook(path)
        made |= {f"notebooks/{name}": picture for name, picture in pictures.items()}
        figures[path.stem] = list(pictures)
    made["gallery.md"] = gallery(figures)
    made["changelog.md"] = _project_page("CHANGELOG.md")
    made["contributing.md"] = _project_page("CONTRIBUTING.md")
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in the citation, and links keys of sources to their entries in ``references.md``."""
    citation = (names.ROOT / "CITATION.cff").read_text("utf-8").strip()
    markdown = markdown.replace("<!-- citation -->", f"```yaml\n{citation}\n```")
    if page.file.src_uri == "references.md":
        return _ENTRY.sub(r"* [](){#\1}`[\1]`", markdown)
    parts = _FENCE.split(markdown)
    parts[::2] = [_KEY.sub(r"[\\[\1\\]][\1]", part) for part in parts[::2]]
    return "".join(parts)
