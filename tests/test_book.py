"""Every page of the built book in a browser with no network: formulas, search, folds, dark mode, small screens, keyboard."""

import base64
import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from browser import HTML, ROOT
from test_project import contents

pytestmark = pytest.mark.browser


def pages() -> list[str]:
    """Of the contents, in order, as paths below the HTML folder."""
    return [f"{name}.html" for name in contents()]


CHAPTERS = [page for page in pages() if page.startswith("notebooks/")]
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def formulas_are_set(page):
    """Wait for MathJax, then: no formula of the page is left as it was written."""
    page.wait_for_function("!document.querySelector('.math') || window.MathJax?.startup?.promise", timeout=30_000)
    page.evaluate("window.MathJax?.startup?.promise")
    written = page.locator(".math").evaluate_all(
        "all => all.filter(e => !e.querySelector('mjx-container')).map(e => e.textContent)"
    )
    wrong = page.locator("mjx-merror, [data-mjx-error]").all_text_contents()
    assert not written + wrong, (written + wrong)[:3]


def theme(page, name: str):
    """At once: halfway through its transition a colour is neither that of the light nor that of the dark theme."""
    page.add_style_tag(content="* { transition: none !important; }")
    page.evaluate("name => { document.documentElement.dataset.theme = name }", name)


def violations(page, **options) -> list[str]:
    """What axe-core finds serious or critical, MathJax's own markup of formulas aside."""
    found = (
        Axe()
        .run(
            page, {"exclude": [["mjx-container"]]}, options={"resultTypes": ["violations"], "preload": False} | options
        )
        .response["violations"]
    )
    return [
        f"{v['id']} ({len(v['nodes'])}): {v['help']}: {v['nodes'][0]['html'][:200]} {v['nodes'][0].get('failureSummary', '')[:300]}"
        for v in found
        if v["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("path", pages())
def test_a_page_needs_no_network(open_page, path):
    """It has its formulas set, its pictures loaded and described, nothing for axe to find in light and in dark, and nothing
    that is wider than a phone but what scrolls by itself."""
    page = open_page(path)
    formulas_are_set(page)
    pictures = page.locator("article img")
    broken = pictures.evaluate_all(
        "all => all.filter(i => !i.complete || !i.naturalWidth || !i.alt.trim()).map(i => i.outerHTML)"
    )
    assert not broken, broken[0][:300]
    theme(page, "light")
    assert not (wrong := violations(page)), "\n".join(wrong)
    theme(page, "dark")
    assert not (wrong := violations(page, runOnly=["color-contrast"])), "\n".join(wrong)
    page.set_viewport_size({"width": 390, "height": 844})
    width = page.evaluate("document.documentElement.scrollWidth")
    wide = "[...document.querySelectorAll('article *')].filter(e => e.getBoundingClientRect().right > 391).map(e => e.outerHTML.slice(0, 200))"
    assert width <= 390, page.evaluate(wide)[:3]


# --- what a reader does -----------------------------------------------------------------------------------------------


def test_search_finds_the_sink(open_page):
    page = open_page("book/intro.html")
    page.keyboard.press("Control+k")
    page.keyboard.type("sink")
    page.keyboard.press("Enter")
    page.wait_for_function("/finished/i.test(document.querySelector('#search-results')?.innerText)")
    found = page.locator("#search-results li a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
    assert any("03_sink_geometry" in href for href in found) and any("notation" in href for href in found)


@pytest.mark.parametrize("path", CHAPTERS)
def test_solutions_are_folded_and_unfold(open_page, path):
    """By mouse and by keyboard, each for itself."""
    page = open_page(path)
    solutions = page.locator(".solution.dropdown")
    assert solutions.count() == page.locator(".exercise").count() >= 3
    for i in range(solutions.count()):
        solution = solutions.nth(i)
        content = solution.locator("p").nth(1)
        assert not content.is_visible()
        button = solution.locator("button.toggle-button")
        if i % 2:
            button.focus()
            page.keyboard.press("Enter")
        else:
            button.click()
        assert content.is_visible()
    button.click()
    assert not content.is_visible()


def test_the_theme_button_turns_the_book_dark_and_it_stays_dark(open_page):
    page = open_page("notebooks/02_separability.html", color_scheme="light")

    def ground() -> int:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    assert ground() > 600
    button = page.locator(".theme-switch-button").first
    for _ in range(3):
        if page.evaluate("document.documentElement.dataset.theme") == "dark":
            break
        button.click()
    page.wait_for_timeout(500)
    assert ground() < 200
    # A figure is drawn on white: it keeps its ground where the page is dark, so that its black text can be read.
    picture = page.locator("article img").first
    assert sum(map(int, re.findall(r"\d+", picture.evaluate("e => getComputedStyle(e).backgroundColor"))[:3])) > 600
    page.goto(page.url)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_the_keyboard_reaches_everything(open_page):
    """Tab goes from the link that skips the contents through every chapter and button, and one can see where it is."""
    page = open_page("notebooks/00_quickstart.html")
    reached, unseen = [], []
    for i in range(150):
        page.keyboard.press("Tab")
        where = page.evaluate(
            """() => {
                const e = document.activeElement, s = getComputedStyle(e);
                return {tag: e.tagName, text: e.textContent.trim().slice(0, 60), kind: e.className, href: e.getAttribute("href") || "",
                        inside: !!e.closest("article"), ring: s.outlineStyle !== "none" || s.boxShadow !== "none"};
            }"""
        )
        if where["tag"] == "BODY":
            break
        reached.append(where)
        if not where["ring"]:
            unseen.append(where)
    links = [where["href"] for where in reached]
    assert reached[0]["text"].lower().startswith("skip")
    assert all(any(page.split("/")[-1] in href for href in links) for page in CHAPTERS[1:]), links
    assert sum("toggle-button" in where["kind"] for where in reached) >= 3  # solutions
    assert any("theme-switch" in where["kind"] for where in reached)
    assert not unseen, unseen[:3]


def test_on_a_phone_the_contents_open_from_the_menu(open_page):
    page = open_page("book/intro.html", **PHONE)
    chapter = page.locator("nav.bd-links a", has_text="Taxonomy")
    assert not chapter.is_visible()
    page.locator("button.primary-toggle").first.tap()
    chapter.tap()
    page.wait_for_url("**/04_taxonomy.html")


@pytest.mark.parametrize("path", CHAPTERS)
def test_a_chapter_can_be_launched_and_downloaded(path):
    """Buttons of the theme, made from the repository in _config.yml; the notebook itself lies in the book."""
    html = (HTML / path).read_text()
    notebook = path.removesuffix(".html") + ".ipynb"
    repository = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"].removeprefix(
        "https://github.com/"
    )
    assert f"https://mybinder.org/v2/gh/{repository}/main?urlpath=" in html
    assert f"https://colab.research.google.com/github/{repository}/blob/main/{notebook}" in html
    assert f'href="../_sources/{notebook}"' in html
    assert (HTML / "_sources" / notebook).read_bytes() == (ROOT / notebook).read_bytes()


# --- the whole --------------------------------------------------------------------------------------------------------


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.targets, self.ids = [], set()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.targets += [found[name] for name in ("href", "src") if found.get(name)]
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}


def test_every_link_inside_the_book_leads_somewhere():
    parsed = {}
    for path in HTML.rglob("*.html"):
        if path.is_relative_to(HTML / "_static"):  # templates of the theme
            continue
        parsed[path] = parser = _Links()
        parser.feed(path.read_text())
    broken = []
    for path, parser in parsed.items():
        for target in set(parser.targets):
            address = urlsplit(target)
            # The page that a server shows for a wrong address is linked from the root, since it can be shown anywhere.
            if address.scheme or address.netloc or path.name == "404.html":
                continue
            there = (path.parent / unquote(address.path)).resolve() if address.path else path
            there = there / "index.html" if there.is_dir() else there
            ids = parsed[there].ids if there in parsed else None
            if not there.is_file() or (address.fragment and ids is not None and unquote(address.fragment) not in ids):
                broken.append(f"{path.relative_to(HTML)}: {target}")
    assert not broken, broken[:10]


def test_run_times_are_those_of_the_runs():
    html = (HTML / "book" / "rerun.html").read_text()
    runs = [json.loads(path.read_text())["chapters"] for path in (ROOT / "book" / "runs").glob("*/run.json")]
    assert len(runs) >= 2
    for chapters in runs:
        for name, done in chapters.items():
            row = next(r for r in html.split("<tr") if f"/{name}.html" in r and " GB<" in r)
            assert f"{done['seconds'] / 60:.1f} min, {done['peak_bytes'] / 1e9:.1f} GB" in row, name


def test_the_first_figure_is_the_notebooks():
    cells = json.loads((ROOT / "notebooks" / "02_separability.ipynb").read_text())["cells"]
    (cell,) = [c for c in cells if c["metadata"].get("mystnb", {}).get("figure", {}).get("name") == "fig-curves-all"]
    (png,) = [base64.b64decode(o["data"]["image/png"]) for o in cell["outputs"] if "image/png" in o.get("data", {})]
    shown = re.search(
        r'<figure.*?id="fig-first".*?<img[^>]*src="([^"]*)"', (HTML / "book" / "intro.html").read_text(), re.DOTALL
    )
    assert (HTML / "book" / shown[1]).read_bytes() == png


def test_the_book_is_small():
    assert sum(path.stat().st_size for path in HTML.rglob("*") if path.is_file()) < 25e6
