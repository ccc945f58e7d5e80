"""Who may ask the live page for what. These need nothing of the extra: what is guarded is a stand-in."""

from __future__ import annotations

import asyncio

import pytest

from ddp_runner.cli import extras
from ddp_runner.features.page import page
from ddp_runner.features.page.access import Access
from ddp_runner.features.page.known_runs import KnownRuns
from ddp_runner.kernel.rules.errors import BadInputError

HOST = "127.0.0.1:8080"
TOKEN = "a-token-that-nobody-guesses"
COOKIE = f"ddp_runner_page_8080={TOKEN}"


def ask(
    path="/",
    *,
    method="GET",
    query="",
    is_open=True,
    kind="http",
    host=HOST,
    token=TOKEN,
    **headers,
):
    """(status, headers, body) of the answer; status 200 is that of what is guarded, 101 its socket."""
    sent = []

    async def inner(scope, receive, send):
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"served"})

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    named = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": kind,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
    }
    if kind == "http":
        scope["method"] = method
    asyncio.run(Access(inner, token=token, port=8080, is_open=is_open)(scope, receive, send))
    if sent[0]["type"] == "websocket.accept":
        return 101, {}, b""
    if sent[0]["type"] == "websocket.close":
        return sent[0]["code"], {}, b""
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


OWN, OTHER = f"http://{HOST}", "http://example.org"


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        # Looking on from this machine.
        ({}, 200),
        ({"host": "localhost:8080"}, 200),
        ({"host": "[::1]:8080"}, 200),
        ({"host": "rebound.example.org:8080"}, 403),
        ({"host": ""}, 403),
        ({"host": "[::1"}, 403),
        ({"origin": OTHER}, 403),
        ({"origin": "null"}, 403),
        ({"query": "token=wrong"}, 403),
        ({"kind": "websocket", "origin": OWN}, 101),
        ({"kind": "websocket", "origin": OTHER}, 1008),
        ({"kind": "websocket"}, 1008),
        ({"method": "POST", "path": "/_nicegui_ws/", "origin": OWN}, 200),
        ({"method": "POST", "path": "/_nicegui_ws/", "origin": OTHER}, 403),
        # From elsewhere.
        ({"is_open": False}, 403),
        ({"is_open": False, "host": "node7:8080"}, 403),
        ({"is_open": False, "query": "token=wrong"}, 403),
        ({"is_open": False, "query": "token="}, 403),
        ({"is_open": False, "cookie": "ddp_runner_page_8080=wrong"}, 403),
        ({"is_open": False, "cookie": f"ddp_runner_page_9090={TOKEN}"}, 403),
        ({"is_open": False, "cookie": "\x00;=;="}, 403),
        ({"is_open": False, "cookie": COOKIE}, 200),
        ({"is_open": False, "cookie": COOKIE, "host": "node7:8080"}, 200),
        ({"is_open": False, "cookie": COOKIE, "origin": OTHER}, 403),
        ({"is_open": False, "kind": "websocket", "origin": OWN}, 1008),
        ({"is_open": False, "kind": "websocket", "origin": OWN, "cookie": COOKIE}, 101),
        # Doing: always by POST, from the page itself, with the token.
        ({"path": "/act/x/stop", "cookie": COOKIE}, 403),
        ({"path": "/act/x/stop", "method": "POST", "origin": OWN}, 403),
        ({"path": "/act/x/stop", "method": "POST", "cookie": COOKIE}, 403),
        ({"path": "/act/x/stop", "method": "POST", "cookie": COOKIE, "origin": OTHER}, 403),
        ({"path": "/act/x/stop", "method": "POST", "cookie": COOKIE, "origin": OWN}, 200),
        ({"path": "/act/x/stop", "method": "POST", "cookie": COOKIE, "origin": OWN,
          "sec_fetch_site": "cross-site"}, 403),
    ],
)  # fmt: skip
def test_other_origins_hosts_and_wrong_tokens_are_refused(asked, status):
    """Before anything else sees the request."""
    assert ask(**asked)[0] == status


def test_the_token_goes_from_the_link_into_a_cookie():
    """Out of the address, the history and what is sent to other sites; no other site is led to."""
    status, headers, _ = ask("//evil.example.org/x", query=f"a=1&token={TOKEN}", is_open=False)
    assert (status, headers[b"location"]) == (303, b"/evil.example.org/x?a=1")
    cookie = headers[b"set-cookie"].decode()
    assert cookie.startswith(COOKIE)
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie


def test_answers_may_be_framed_and_extended_by_nobody():
    """And the browser fetches nothing from anywhere else."""
    for answer in (ask(), ask(origin=OTHER)):
        policy = answer[1][b"content-security-policy"].decode()
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "http" not in policy


@pytest.mark.parametrize(
    "key", ["..", "../secret", "secret/..", "/etc", ".", "", "run/../run", "link", "run\x00"]
)
def test_a_run_is_looked_up_and_never_a_path(tmp_path, key):
    """What is no folder in the list is no run."""
    root = tmp_path / "logs"
    for folder in (root / "run", tmp_path / "secret"):
        folder.mkdir(parents=True)
        (folder / "status.json").write_text("{}")
    (root / "link").symlink_to(tmp_path / "secret")
    runs = KnownRuns(root)
    assert runs.get("run").folder == root / "run"
    assert runs.get(key) is None


def test_runs_that_live_are_listed_first(tmp_path):
    """Then the newest."""
    for name, state in (("a", "done"), ("b", "running"), ("c", "done")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_text(f'{{"state": "{state}", "pid": 1}}')
    assert next(key for key, _ in KnownRuns(tmp_path).listed()) == "b"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-l", "gone"], "--log-dir=gone: no such folder"),
        (["--port", "no"], "--port=no: must be a whole number from 1 to 65535"),
        (["--port", "70000"], "--port=70000: must be"),
        (["--port", "²"], "--port=²: must be"),
        (["--host", "no.such.host.invalid"], "--host=no.such.host.invalid: is no address"),
        (
            ["--host", "192.0.2.1", "--port", "8123"],
            "--host=192.0.2.1: is no address of this machine",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, words, text):
    """Before anything is served."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    with pytest.raises(BadInputError) as found:
        page.DECLARATION.run(words)
    assert str(found.value).startswith(text)


def test_without_the_extra_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    """The command is there all the same."""
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"environment --extra page"):
        page.DECLARATION.run(["-l", str(tmp_path), "--port", "8124"])
