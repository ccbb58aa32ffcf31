"""The built book in a real browser with no network; fixtures for the tests marked `browser`, which `make browser` runs.

Pages are opened as files, the way a reader opens a book that was built or unpacked on a laptop.
"""

import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
HTML = ROOT / "_build" / "html"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
# Beside --no-sandbox, which root needs: what Chromium would otherwise look up by itself.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip


def url(page: str) -> str:
    """Of a page of the book, as in `url("book/intro.html#the-question")`."""
    return f"{HTML.as_uri()}/{page}"


@pytest.fixture(scope="session")
def browser():
    assert CHROMIUM, "there is no chromium: install it, or name one in the variable CHROMIUM"
    assert (HTML / "index.html").is_file(), "there is no book: run make html"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def open_page(browser):
    """open_page("book/intro.html", **context) -> a Playwright page, offline; `context` as for `Browser.new_context`.

    After the test: no message of an error or a warning on the console, no failed request, none but to files of the book.
    """
    contexts, wrong = [], []

    def opened(path: str, **options):
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: wrong.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: wrong.append(f"error: {e}"))
        page.on("requestfailed", lambda r: wrong.append(f"failed: {r.url}"))
        page.on(
            "request",
            lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else wrong.append(f"asked for: {r.url}"),
        )
        page.goto(url(path), wait_until="load")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong, "\n".join(wrong)
