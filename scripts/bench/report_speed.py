"""Size of the HTML report of a full-size plan, and time to open it in Chromium; with --pictures, screenshots of it.

    python scripts/bench/report_speed.py                            # plans Llama-3-70B on 256 H100s, beside all schemes
    python scripts/bench/report_speed.py --plan plan.json --pictures out/report

Each of --repeats measurements starts a headless browser with an empty cache. Seconds are by the page's own clock, from
the start of navigation: "loaded" until the page is read and its script has run, "open" until its layout is complete.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from autopar import Cluster, Plan, compare
from autopar.report.page import answers, page
from autopar.sources import load_source

TELL = """<script>addEventListener("load", () => {
  const loaded = performance.now(), height = document.documentElement.getBoundingClientRect().height;
  document.documentElement.dataset.told = JSON.stringify({
    loaded, height, open: performance.now(), elements: document.querySelectorAll("*").length});
});</script></body>"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, help="a plan (JSON) in place of Llama-3-70B's")
    parser.add_argument("--save", type=Path, help="keep the plan here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pictures", type=Path, help="folder for pictures: 1440 and 360 px, light and dark, and paper")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        parser.error("no Chromium is installed (apt-get install chromium)")
    plan = Plan.load(options.plan) if options.plan else _full_size()
    if options.save:
        plan.save(options.save)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    text = page(plan, title="Llama-3-70B on 256 H100s" if options.plan is None else options.plan.stem)
    made = resource.getrusage(resource.RUSAGE_SELF).ru_utime - start
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.html")
        file.write_text(text.replace("</body>", TELL), encoding="utf-8")
        visits = [_visit(browser, file, Path(folder, str(i))) for i in range(options.repeats)]
        print(f"{len(text.encode()) / 2**20:.2f} MiB, {visits[0]['elements']:,} elements, made in {made:.2f} CPU s")
        for name in ("loaded", "open"):
            times = sorted(visit[name] / 1000 for visit in visits)
            print(f"{name:6} median {statistics.median(times):.2f} s, {times[0]:.2f} to {times[-1]:.2f}")
        for question, answer, more in answers(plan):
            print(f"\n{question}\n  {answer}\n  {more}")
        if options.pictures:
            options.pictures.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            for command in _pictures(browser, file, options.pictures):
                subprocess.run(command, check=True, capture_output=True, timeout=300)


def _full_size() -> Plan:
    """The plan of `autopar compare llama-3-70b --mesh 32x8 --batch 256 --seq 8192 --memory 75GiB --tradeoff 5`."""
    source = load_source("llama-3-70b", batch=256, sequence=8192)
    cluster = Cluster.preset("h100", (32, 8), ("dp", "tp"))
    return compare(source.model, source.meta_args, cluster, memory_budget="75GiB", time_limit=300, tradeoff=5)


def _visit(browser: str, file: Path, profile: Path) -> dict[str, Any]:
    command = [*_headless(browser, profile), "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = re.search(r'data-told="([^"]*)"', done.stdout)
    if found is None:
        raise SystemExit(f"the page told nothing: {done.stderr[-500:]}")
    told: dict[str, Any] = json.loads(unescape(found[1]))
    return told


def _pictures(browser: str, file: Path, folder: Path) -> Iterator[list[str]]:
    """Take screenshots. Chromium's windows are at least 500 px wide, so a phone's page is shown in a frame."""
    for scheme in ("light", "dark"):
        for width in (1440, 360):
            shown = file
            if width < 500:
                shown = file.with_name("phone.html")
                frame = f'<iframe src="{file.name}" width="{width}" height="6000" frameborder="0"></iframe>'
                shown.write_text(f'<body style="margin: 0">{frame}', encoding="utf-8")
            look = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
            picture = folder / f"{width}_{scheme}.png"
            window = [f"--window-size={max(width, 500)},6000", f"--screenshot={picture}", look]
            yield [*_headless(browser, file.with_name("look")), *window, shown.as_uri()]
    yield [*_headless(browser, file.with_name("look")), f"--print-to-pdf={folder / 'paper.pdf'}", file.as_uri()]


def _headless(browser: str, profile: Path) -> list[str]:
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]
    return [browser, *words, f"--user-data-dir={profile}"]


if __name__ == "__main__":
    main()
