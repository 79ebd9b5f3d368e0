"""A page in headless Chromium, driven through the DevTools protocol: real mouse and keys, no other package."""

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tornado.websocket import WebSocketClientConnection, websocket_connect

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 60.0  # seconds; machines of CI are slow


class Page:
    """An open page.

    Args:
        file: the page, on this machine.
        folder: for the browser's profile.
        width, height: of the window, in pixels.
        dark: whether the reader's system is set to dark.
    """

    def __init__(self, file: Path, folder: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.file, self.size, self.dark = file, (width, height), dark
        self.problems: list[str] = []  # errors on the console, exceptions, and requests that left the page
        self._loop = asyncio.Runner()
        self._calls = 0
        assert BROWSER is not None
        options = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={folder}", "--disable-gpu"]
        options += ["--no-first-run", "--no-sandbox"] if os.geteuid() == 0 else ["--no-first-run"]
        self._process = subprocess.Popen(
            [BROWSER, *options, "about:blank"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )

    def __enter__(self) -> Self:
        try:
            self._loop.run(self._connect())
            self._call("Page.enable")
            for domain in ("Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
            width, height = self.size
            self._call(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                mobile=width < 600,
            )  # fmt: skip
            scheme = {"name": "prefers-color-scheme", "value": "dark" if self.dark else "light"}
            self._call("Emulation.setEmulatedMedia", features=[scheme])
            self._call("Page.navigate", url=self.file.as_uri())
            self.wait("document.readyState === 'complete' && (!document.querySelector('#runs') || "
                      "'ready' in document.documentElement.dataset)")  # fmt: skip
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.communicate()
        self._loop.close()

    def get(self, script: str) -> Any:
        """The value of an expression of JavaScript, which is plain."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true."""
        self._loop.run(self._wait(condition))

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of the first element of a selector."""
        x, y = self.place(selector)
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of the first element of a selector, after it was scrolled into the window."""
        find = f"document.querySelector({json.dumps(selector)})"
        box = f"(r => [r.x + r.width / 2, r.y + r.height / 2])({find}.getBoundingClientRect())"
        x, y = self.get(f"({find}.scrollIntoView({{block: 'center'}}), {box})")
        return x, y

    def move(self, x: float, y: float) -> None:
        """Move the mouse."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, text: str) -> None:
        """Write a text into what has the focus."""
        self._call("Input.insertText", text=text)

    def paste(self) -> None:
        """Insert the clipboard's text into what has the focus."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key="v", code="KeyV", modifiers=2, commands=["paste"])

    def point(self, plot: str, number: int) -> tuple[float, float]:
        """Where a plot of Bokeh has drawn a run, after the plot was scrolled into the window."""
        self.place(f"#{plot}")
        x, y = self.get(
            f"""(() => {{
                const view = [...Bokeh.index].find((one) => document.getElementById("{plot}").contains(one.el));
                const marks = view.model.document.get_model_by_name("marks"), data = marks.data_source;
                const i = [...data.get("number")].indexOf({number}), box = view.el.getBoundingClientRect();
                return [box.x + view.frame.x_scale.compute(data.get(marks.glyph.x.field)[i]),
                        box.y + view.frame.y_scale.compute(data.get("quality")[i])];
            }})()"""
        )
        return x, y

    def drawn(self, plot: str) -> list[int]:
        """The numbers of the runs that a plot of Bokeh shows."""
        return self.get(
            f"""(() => {{
                const view = [...Bokeh.index].find((one) => document.getElementById("{plot}").contains(one.el));
                const part = (name) => view.model.document.get_model_by_name(name);
                return part("shown").indices.map((i) => part("marks").data_source.get("number")[i]);
            }})()"""
        )

    def tooltip(self) -> str:
        """The text that is shown beside the mouse; empty: there is none."""
        return self.get(
            """(() => {
                const found = [];
                const walk = (node) => {
                    if (node.classList?.contains("bk-Tooltip") && node.getBoundingClientRect().width)
                        found.push(...[...node.shadowRoot.children].filter((one) => one.tagName !== "STYLE"));
                    for (const one of [...(node.shadowRoot?.children ?? []), ...(node.children ?? [])]) walk(one);
                };
                walk(document.documentElement);
                return found.map((one) => one.textContent).join(" ");
            })()"""
        )

    def picture(self, file: Path, whole: bool = True) -> None:
        """Write a PNG of the page, or of the window."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")["data"]
        file.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **values: Any) -> dict[str, Any]:
        return self._loop.run(asyncio.wait_for(self._answer(method, values), PATIENCE))

    async def _connect(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"ws://[^/]+", line):
                break
        else:
            raise RuntimeError("Chromium did not start")
        browser = await websocket_connect(line.split()[-1])
        self._socket: WebSocketClientConnection = browser
        (target,) = [
            one for one in (await self._answer("Target.getTargets", {}))["targetInfos"] if one["type"] == "page"
        ]
        self._socket = await websocket_connect(f"{found[0]}/devtools/page/{target['targetId']}", max_message_size=2**30)

    async def _answer(self, method: str, values: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        await self._socket.write_message(json.dumps({"id": self._calls, "method": method, "params": values}))
        while True:
            text = await self._socket.read_message()
            assert text is not None, "Chromium has ended"
            message = json.loads(text)
            if message.get("id") == self._calls:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    async def _wait(self, condition: str) -> None:
        for _ in range(int(PATIENCE / 0.05)):
            answer = await self._answer("Runtime.evaluate", {"expression": condition, "returnByValue": True})
            if answer["result"].get("value") is True:
                return
            assert not self.problems, self.problems[0]
            await asyncio.sleep(0.05)
        raise AssertionError(f"not true after {PATIENCE:g} seconds: {condition}; {self.problems}")

    def _note(self, event: str | None, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(str(about["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(str(about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(about["entry"]))
        elif event == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if url != self.file.as_uri() and not url.startswith(("data:", "blob:")):
                self.problems.append(f"request: {url}")
