"""A headless Chromium that tells what a page did: its console, its requests, its plots."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def find_browser() -> tuple[str, str]:
    """Paths of Chromium and ChromeDriver, or the test is skipped."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs Chromium and ChromeDriver")
    return binary, driver


@contextmanager
def browser(profile: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """A window of the given size that prefers dark or light colours."""
    webdriver = pytest.importorskip("selenium.webdriver")
    binary, path = find_browser()
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(path))
    try:
        driver.set_page_load_timeout(60)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get("about:blank")
        driver.get_log("performance")  # what the browser's own start page asked for
        yield driver
    finally:
        driver.quit()


def console_errors(driver: Any) -> list[str]:
    """Messages of level SEVERE on the console."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def requests(driver: Any) -> list[str]:
    """Addresses that the page asked for."""
    found = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(message["params"]["request"]["url"])
    return found
