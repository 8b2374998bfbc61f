"""The page in a browser, and the command that starts the server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("prometheus_client", reason="the extra serve is not installed")

import httpx
from browser import CHROMIUM, Page, browser
from running_server import Running, wait_for

from specdec_loop.cli import main
from specdec_loop.cli.errors import UserError
from specdec_loop.cli.serve import check_address, model_name, names

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


def pieces(page: Page) -> list[tuple[str, str]]:
    """Class and text of each piece that is shown."""
    return [tuple(pair) for pair in page.run("[...part('text').children].map(s => [s.className, s.textContent])")]


def test_the_page_shows_the_text_and_accepted_drafts_in_colour(server: Running, page: Page) -> None:
    prompt = "<b>ab</b>" * 5  # is shown, not obeyed
    fields = {"max_tokens": 40, "temperature": 0.5, "seed": 3}
    server.complete(prompt, **fields)  # the drafter knows the text from now on
    choice = server.complete(prompt, **fields, mark_accepted=True)["choices"][0]
    page.open(f"http://127.0.0.1:{server.port}/")
    for name, value in {"prompt": prompt, **fields}.items():
        page.run(f"part('{name}').value = {json.dumps(value)}")
    page.run("part('run').click()")
    page.wait_for("part('counts').textContent")
    shown = pieces(page)
    assert shown[0] == ("prompt", prompt)
    assert [text for _, text in shown[1:]] == [text for text, _ in choice["pieces"]]
    assert "".join(text for _, text in shown[1:]) == choice["text"]
    kept = [kind for kind, _ in shown[1:]].count("kept")
    counts = page.run("part('counts').textContent")
    assert kept > 10 and re.fullmatch(
        rf"\d+ pieces in \d+ steps, {kept} of them accepted drafts; .* ended: length", counts
    )
    colours = page.run("['kept', 'drawn'].map(c => getComputedStyle(document.querySelector(`#text .${c}`)).color)")
    assert colours == ["rgb(10, 107, 46)", "rgb(0, 0, 0)"]


def test_the_page_says_why_a_request_was_refused(server: Running, page: Page) -> None:
    page.open(f"http://127.0.0.1:{server.port}/?second#prompt=x&max_tokens=9999")  # a link runs at once
    page.wait_for("part('counts').textContent")
    assert page.run("part('error').textContent") == "max_tokens must be an integer in [1, 4096], got 9999"
    assert pieces(page) == [("prompt", "x")]


def test_an_empty_field_of_the_page_is_left_out(server: Running, page: Page) -> None:
    page.open(f"http://127.0.0.1:{server.port}/?empty#prompt=x&max_tokens=&temperature=&seed=")
    page.wait_for("part('counts').textContent")
    assert page.run("part('error').textContent") == "" and len(pieces(page)) > 1


def test_stop_ends_the_request_on_the_server_too(server: Running, page: Page) -> None:
    server.gate.clear()
    page.open(f"http://127.0.0.1:{server.port}/?third#prompt=abc&max_tokens=200")
    wait_for(lambda: len(server.api.scheduler.streams) == 1)
    page.run("part('stop').click()")
    wait_for(lambda: not server.api.scheduler.streams)
    server.gate.set()
    page.wait_for("part('counts').textContent")
    assert page.run("part('counts').textContent").endswith("ended: stopped")
    assert page.run("part('error').textContent") == ""


def test_the_page_may_talk_to_its_server_alone(server: Running) -> None:
    answer = server.client.get("/")
    assert "default-src 'none'; connect-src 'self'" in answer.headers["content-security-policy"]
    assert "http" not in answer.text.replace("http-equiv", "")  # nothing comes from elsewhere


# --- the command


def test_names_of_loopback_addresses_are_known_and_others_are_open() -> None:
    assert names("127.0.0.1") == names("localhost") == ["127.0.0.1", "[::1]", "localhost"]
    assert "[::1]" in names("::1") and "127.0.0.2" in names("127.0.0.2")
    assert names("0.0.0.0") == names("::") == names("example.org") == []


def test_a_model_has_the_name_of_its_folder_wherever_it_is_named_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny/inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "tiny")
    assert model_name(".") == model_name("inner/..") == model_name(str(tmp_path / "tiny")) == "tiny"
    assert model_name("Qwen/Qwen3-0.6B") == "Qwen3-0.6B"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_in_use_is_named_before_a_model_is_loaded(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--host {host} --port {port}: Address already in use$"):
            check_address(host, port)
    check_address(host, port)
    with pytest.raises(UserError, match=r"--host no\.such\.host\.invalid --port 80: "):
        check_address("no.such.host.invalid", 80)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is open to other machines: give --api-key-file FILE"),
        (["--api-key-file", "missing"], "--api-key-file: there is no file missing"),
        (["--method", "mtp-block"], "--method: mtp-block verifies under rule block, and only under match is a seeded"),
        (["--method", "lookahead", "--draft-budget", "3"], "it needs the whole of its trees verified"),
        (["--pages", "1", "--page-size", "4"], "1 pages of 4 tokens hold no text"),
        (["--method", "nothing"], "--method: no method is called nothing"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.delenv("SPECDEC_API_KEY", raising=False)
    assert main(["serve", "--target", str(folder), "--device", "cpu", "--threads", "1", "--port", "0", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("specdec_loop serve: ") and message in err and err.count("\n") == 1


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_loop.cli.serve.find_spec", lambda name: None if name == "uvicorn" else True)
    assert main(["serve"]) == 2
    assert "uvicorn not installed: pip install uvicorn" in capsys.readouterr().err


def test_the_command_serves_until_it_is_interrupted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\n\nsecond\n")
    code = "import sys; from specdec_loop.cli import main; sys.exit(main())"
    options = ["--target", str(folder), "--api-key-file", str(tmp_path / "keys"), "--port", "0", "--threads", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")])}
    command = [sys.executable, "-c", code, "serve", *options, "--device", "cpu"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = ""
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                address = found[1]
                break
        body = {"prompt": "ab", "max_tokens": 5, "temperature": 0}
        headers = {"authorization": "Bearer second"}
        answer = httpx.post(f"{address}/v1/completions", json=body, headers=headers, trust_env=False, timeout=60)
        assert answer.status_code == 200 and answer.json()["model"] == folder.name
        assert httpx.get(f"{address}/v1/models", trust_env=False).status_code == 401
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
