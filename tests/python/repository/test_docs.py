"""The pages' links lead somewhere, and every page can be found from the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def links(page: Path) -> list[Path]:
    """Files of the repository that `page` links to."""
    targets = LINK.findall(page.read_text())
    return [(page.parent / target).resolve() for target in targets if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    assert [target for target in links(page) if not target.exists()] == []


def test_every_page_is_reachable_from_the_readme() -> None:
    found: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in found and page.suffix == ".md" and page.exists():
            found.add(page)
            todo.extend(links(page))
    assert {page for page in PAGES if page not in found} == set()
