"""MkDocs hooks: the site has the repository's other Markdown pages too, and draws diagrams without another server."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
_RECIPES = sorted((ROOT / "recipes").glob("*/README.md"))
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "deploy.md",
    "examples/countdown/README.md": "countdown.md",
    **{f"recipes/{file.parent.name}/README.md": f"recipe-{file.parent.name}.md" for file in _RECIPES},
}
"""Page outside `docs/` -> its page of the site."""
MERMAID = ROOT / "build" / "mermaid.min.js"
"""`make docs` downloads it; without it the theme loads it from unpkg.com in the reader's browser."""
_LINK = re.compile(r"(\]\(|<img src=\")([^)\s#\"]+)")


def site_path(page: str, target: str) -> str:
    """Return a relative link of a page of the repository as a link of the site.

    Args:
        page: the page with the link, relative to the root of the repository.
        target: the linked file, relative to the page.

    """
    if "://" in target:
        return target
    file = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return posixpath.relpath(_on_site(file), posixpath.dirname(_on_site(page)) or ".")


def _on_site(file: str) -> str:
    return PAGES.get(file, file.removeprefix("docs/"))


def with_site_links(page: str, text: str) -> str:
    """Return a page of the repository with links of the site."""
    return _LINK.sub(lambda found: found[1] + site_path(page, found[2]), text)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside `docs/`, and Mermaid."""
    for source, name in PAGES.items():
        content = with_site_links(source, (ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, name, content=content))
    if MERMAID.exists():
        files.append(File.generated(config, "mermaid.min.js", abs_src_path=str(MERMAID)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links out of `docs/` to the pages of the site."""
    is_outside = page.file.src_uri in PAGES.values()
    return markdown if is_outside else with_site_links(f"docs/{page.file.src_uri}", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load Mermaid where there is a diagram."""
    if 'class="mermaid"' not in output or not MERMAID.exists():
        return output
    script = posixpath.relpath("mermaid.min.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("</head>", f'<script src="{script}"></script></head>', 1)
