"""The system's Chromium without a window, told what to do over a pair of pipes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Chromium reads commands from descriptor 3 and answers on descriptor 4.
MOVE = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"


class Page:
    """A page of a browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._last = os.fdopen(commands, "wb"), os.fdopen(answers, "rb"), 0
        self._rest, self._session = b"", ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)
        self.run("new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))")

    def run(self, script: str) -> Any:
        """Value of an expression; of a promise, when it is kept."""
        found = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, fact: str) -> None:
        """Until an expression is true."""
        self.run(f"(async () => {{ while (!({fact})) await new Promise(done => setTimeout(done, 20)); }})()")

    def picture(self) -> bytes:
        """The page as a PNG, in base64."""
        return str(self._call("Page.captureScreenshot")["data"]).encode()

    def close(self) -> None:
        self._session = ""
        self._call("Browser.close")
        self._commands.close()
        self._answers.close()

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            while b"\0" not in self._rest:
                more = self._answers.read1(65536)  # type: ignore[attr-defined] # a buffered reader has it
                assert more, "the browser has ended"
                self._rest += more
            raw, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(raw)
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return dict(answer["result"])


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser for as long as the context lasts; its profile is in the folder."""
    assert CHROMIUM is not None
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    command = [sys.executable, "-c", MOVE, str(theirs_in), str(theirs_out), CHROMIUM, *options, "about:blank"]
    process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        page = Page(commands, answers)
        yield page
        page.close()
        process.wait(30)
    finally:
        process.kill()
        process.wait(30)
