"""The page in headless Chromium: its scripts run under its own policy. Skipped where there is no Chromium."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from attnlab.report import command
from tests.report.page.conftest import Write

pytest.importorskip("bokeh")
pytest.importorskip("itables")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "<script>alert(1)</script>"
IMAGE = '"><img src=x onerror=alert(1)>'


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_scripts_run_and_hostile_texts_are_shown_as_they_are(write: Write, tmp_path: Path) -> None:
    for i in range(15):
        mechanism = {1: HOSTILE, 2: IMAGE}.get(i, "mla")
        losses = [(step, 5 / step + i) for step in range(1, 300)]
        write(tmp_path / f"outputs/run{i:02}", losses, [(f"satz {HOSTILE}", "a reference", "a b")], attention=mechanism)
    page = tmp_path / "report.html"
    assert command.main([str(tmp_path / "outputs"), "-o", str(page)]) == 0
    options = ["--headless=new", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--no-first-run"]
    options += ["--no-sandbox"] * (os.geteuid() == 0) + ["--virtual-time-budget=30000", "--dump-dom"]
    done = subprocess.run([str(BROWSER), *options, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert 'data-ready=""' in done.stdout  # the last line of the page's script
    assert "1 to 10 of 15 runs" in done.stdout
    assert "<img" not in done.stdout and "&lt;script&gt;alert(1)&lt;/script&gt;" in done.stdout
