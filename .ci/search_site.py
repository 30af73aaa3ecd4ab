"""Ends with an error unless the search of a site in a folder finds something in a browser without a network."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if chromium is None:
    print("no Chromium: the search of the site is not tried")
    sys.exit()
with sync_playwright() as started:
    browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    for page in ("index.html", "skill/SKILL.html"):
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))  # noqa: B023
        tab.goto(Path(sys.argv[1], page).resolve().as_uri())
        tab.click(".md-search__input")
        tab.keyboard.type("group size")
        tab.wait_for_selector(".md-search-result__link[href*='choosing.html']", state="attached", timeout=60_000)
        assert not [url for url in asked if url.startswith("http")], asked
    browser.close()
print("the search of the site works from a folder")
