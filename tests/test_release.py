"""What a release consists of agrees: versions, addresses, the page of a package index."""

import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import wdjax

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
OURS = re.compile(
    r"https://(?:[\w.]*github\.(?:com|io)|raw\.githubusercontent\.com)/[^\s)\"'>]*wdjax"
)


@pytest.mark.fast
def test_one_version():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M)
    assert cited is not None
    assert wdjax.__version__ == PROJECT["version"] == cited[1]
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert released[0] == wdjax.__version__
    assert released == sorted(released, key=lambda name: [*map(int, name.split("."))], reverse=True)


@pytest.mark.fast
def test_one_address():
    owner = "/".join(REPOSITORY.split("/")[-2:])
    assert PROJECT["urls"]["Documentation"] == "https://{}.github.io/{}".format(*owner.split("/"))
    assert all(
        PROJECT["urls"][name].startswith(f"{REPOSITORY}/") for name in ("Changelog", "Issues")
    )
    places = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CITATION.cff"]
    places += [*ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.ipynb"), *ROOT.glob(".github/**/*")]
    for path in places:
        for found in OURS.findall(path.read_text("utf-8") if path.is_file() else ""):
            assert found in (REPOSITORY, PROJECT["urls"]["Documentation"]), path
    assert f'pip install "wdjax @ git+{REPOSITORY}"' in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.fast
def test_the_package_page_finds_its_picture_and_its_links(monkeypatch):
    for depth in range(4):  # The interface is all that the hook needs of the builder.
        package = ".".join(["hatchling", "metadata", "plugin", "interface"][: depth + 1])
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(MetadataHookInterface=object))
    readme = (ROOT / "README.md").read_text("utf-8")
    page = runpy.run_path(str(ROOT / "docs" / "site" / "package_page.py"))["whole"](
        readme, REPOSITORY
    )
    assert f"]({REPOSITORY}/raw/main/docs/accuracy.png)" in page
    assert f"]({REPOSITORY}/blob/main/CONTRIBUTING.md)" in page
    assert not re.findall(r"\]\((?!https://|#)", page)
    for place in re.findall(r"\]\((?!https?:|#)([^)]+)\)", readme):
        assert (ROOT / place).exists(), place


@pytest.mark.fast
def test_reports_ask_for_the_versions():
    templates = [*ROOT.glob(".github/**/*.md")]
    assert len(templates) == 3
    for template in templates:
        assert "python -m wdjax versions" in template.read_text("utf-8"), template


@pytest.mark.fast
def test_slow_tests_exist():
    named = (ROOT / "tests" / "slow.txt").read_text("utf-8").splitlines()
    assert named == sorted(set(named))
    for file, _, test in (name.partition("::") for name in named):
        assert f"def {test.partition('[')[0]}(" in (ROOT / "tests" / file).read_text("utf-8"), test
