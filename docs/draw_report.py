"""Draws report-light.png and report-dark.png, the upper part of a run's report, with Chromium.

`python docs/draw_report.py RUN` draws the run in the folder RUN, and keeps in report.json what the pictures show of it.
Without RUN, as after a change of the page, the run in report.json is drawn again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder
from aitrain.ui.page import page_data, run_page

DATA = Path(__file__).with_name("report.json")
PICTURES = {scheme: DATA.with_name(f"report-{scheme}.png") for scheme in ("light", "dark")}
OPTIONS = ("model", "peft", "rl_env", "rl_score_range")
"""The options that the pictures show."""
WIDTH, MARGIN, SCALE, COLOURS = 1000, 24, 1.5, 128


def shown(run: Path) -> dict[str, Any]:
    """What the pictures show of a run: its head, its scores, and the curves of reward and held-out score."""
    os.chdir(run.resolve().parents[1])  # so that commands of the page name runs/NAME
    folder = RunFolder(Path(run.parent.name, run.name))
    rollouts = RolloutIndex(folder.rollouts)
    rollouts.refresh()
    data = page_data(folder, rollouts)
    summary = data["summary"]
    assert isinstance(summary, dict)
    curves = summary["curves"]
    summary["curves"] = {"step": curves["step"], "series": {"reward": curves["series"]["reward"]}}
    summary["options"] = [row for row in summary["options"] if row["name"] in OPTIONS]
    for row in summary["options"]:
        if row["name"] == "rl_env":
            row["value"] = Path(row["value"]).name  # no folder of this machine
    summary["environment"] = {"class": summary["environment"].get("class")}
    summary["machines"] = []
    summary["result"].pop("model")  # its folder on this machine
    return {**data, "cases": {"rows": [], "count": 0}, "source": [], "episodes": []}


def digest(content: bytes) -> str:
    """Identifies a page or a picture."""
    return hashlib.sha256(content).hexdigest()


def page_of(data: dict[str, Any]) -> bytes:
    """The page that the pictures show."""
    return run_page(data).encode()


def draw(page: bytes) -> None:
    """Draw the page from its top to the end of its first curves, in light and dark."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        Path(folder, "report.html").write_bytes(page)
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, picture in PICTURES.items():
            tab = browser.new_page(
                viewport={"width": WIDTH, "height": 3000},
                color_scheme="dark" if scheme == "dark" else "light",
                device_scale_factor=SCALE,
                locale="en-GB",
                timezone_id="UTC",
            )
            tab.goto(Path(folder, "report.html").as_uri())
            tab.wait_for_selector("#curves canvas")
            end = tab.evaluate("document.querySelector('#curves .chart').getBoundingClientRect().bottom")
            tab.screenshot(path=picture, clip={"x": 0, "y": 0, "width": WIDTH, "height": end + MARGIN})
            make_small(picture)
        browser.close()


def make_small(picture: Path) -> None:
    """Write the picture again with fewer colours."""
    from PIL import Image

    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    page = page_of(data := shown(Path(sys.argv[1])) if sys.argv[1:] else json.loads(DATA.read_text("utf-8"))["data"])
    draw(page)
    pictures = {file.name: digest(file.read_bytes()) for file in PICTURES.values()}
    kept = {"page": digest(page), "pictures": pictures, "data": data}
    DATA.write_text(json.dumps(kept) + "\n", encoding="utf-8")
