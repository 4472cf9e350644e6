"""The HTML report in a real browser, headless Chromium: no errors in the console, and its controls work.

Skipped where no Chromium is installed (Debian: apt-get install chromium).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from autopar.plans import Plan
from autopar.report.page import page

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")

# Clicks the controls, and writes what is then visible into an attribute of the page.
_SCRIPT = """
<script>
addEventListener("load", () => {
  const layouts = document.querySelector("#layouts"), tree = layouts.querySelector(".tree");
  const open = () => tree.querySelectorAll("details[open]").length;
  const names = () => [...tree.querySelectorAll(".name")];
  const seen = () => names().filter((n) => n.checkVisibility()).map((n) => n.textContent.trim());
  const found = {all: tree.querySelectorAll("details").length};
  layouts.querySelector("[data-fold]").click();
  found.folded = open();
  layouts.querySelector("[data-unfold]").click();
  found.unfolded = open();
  const field = layouts.querySelector("input");
  field.value = "C_PROJ";
  field.dispatchEvent(new Event("input"));
  found.filtered = seen();
  found.told = layouts.querySelector("output").textContent;
  field.value = "";
  field.dispatchEvent(new Event("input"));
  found.unfiltered = seen().length;
  layouts.querySelector("[data-fold]").click();
  dispatchEvent(new Event("beforeprint"));
  found.printed = document.querySelectorAll("details:not([open])").length;
  dispatchEvent(new Event("afterprint"));
  found.after = open();
  found.unnamed = [...document.querySelectorAll("button, input, a")].filter(
    (e) => !(e.textContent.trim() || e.getAttribute("aria-label"))).length;
  found.picture = document.querySelector("#memory svg").getBoundingClientRect().height;
  document.documentElement.dataset.found = JSON.stringify(found);
});
</script>
"""


def _chromium(folder: Path, *words: str) -> tuple[str, list[str]]:
    """Chromium's output, and the lines of its console."""
    command = [str(_CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _visit(folder: Path, text: str, words: Sequence[str] = ()) -> dict[str, Any]:
    (folder / "report.html").write_text(text.replace("</body>", _SCRIPT + "</body>"), encoding="utf-8")
    dom, console = _chromium(folder, *words, "--dump-dom", (folder / "report.html").as_uri())
    assert console == []
    match = re.search(r'data-found="([^"]*)"', dom)
    assert match, dom[:2000]
    found: dict[str, Any] = json.loads(unescape(match[1]))
    return found


def test_what_can_be_pressed_works(plan: Plan, tmp_path: Path) -> None:
    found = _visit(tmp_path, page(plan))
    assert found["all"] >= 3
    assert (found["folded"], found["unfolded"]) == (0, found["all"])
    names = [name.split(" ·")[0] for name in found["filtered"]]
    assert "c_proj" in names and "c_fc" not in names and names[0] == "transformer"
    assert found["told"] == "1 lines"
    assert found["unfiltered"] > len(names)
    assert (found["printed"], found["after"]) == (0, 0)
    assert found["unnamed"] == 0
    assert found["picture"] > 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(plan: Plan, tmp_path: Path, scheme: str) -> None:
    (tmp_path / "inner.html").write_text(page(plan), encoding="utf-8")
    frame = """<iframe src="inner.html" width="360" height="800"></iframe><script>
    const inner = document.querySelector("iframe");
    inner.addEventListener("load", () => {
      const page = inner.contentDocument.documentElement;
      const style = inner.contentWindow.getComputedStyle(page.querySelector("body"));
      document.documentElement.dataset.found = JSON.stringify({
        width: page.scrollWidth, paper: style.backgroundColor});
    });</script>"""
    (tmp_path / "frame.html").write_text(frame, encoding="utf-8")
    words = ["--allow-file-access-from-files", f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"]
    dom, console = _chromium(tmp_path, *words, "--dump-dom", (tmp_path / "frame.html").as_uri())
    assert console == []
    match = re.search(r'data-found="([^"]*)"', dom)
    assert match, dom
    found = json.loads(unescape(match[1]))
    assert found["width"] <= 360
    assert found["paper"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]


def test_the_console_would_be_heard(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "broken.html").write_text("<script>nothing.here()</script>", encoding="utf-8")
    _, console = _chromium(tmp_path, "--dump-dom", (tmp_path / "broken.html").as_uri())
    assert any("nothing is not defined" in line for line in console)
