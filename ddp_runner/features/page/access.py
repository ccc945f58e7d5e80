"""Checks host, origin and token of each request to the live page, before anything else sees it. Knows no page."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ACTIONS = "/act/"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "frame-ancestors 'none'; form-action 'self'; base-uri 'self'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


class Access:
    """An ASGI application around another one. ``is_open``: reading needs no token; actions always do."""

    def __init__(self, app: App, *, token: str, port: int, is_open: bool) -> None:
        self._app = app
        self._token = token
        self._cookie = f"ddp_runner_page_{port}"
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is allowed."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        asked = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if reason := self._refusal(scope, headers, asked):
            await _refuse(scope, receive, send, reason)
        elif "token" in asked and scope["type"] == "http":
            await self._remember(scope, asked, send)
        else:
            await self._app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope, headers: dict[str, str], asked: dict[str, str]) -> str:
        """Why not; empty where it may."""
        # INVARIANT page-asks-first: no request reaches the page before host, origin and token are checked.
        # Broken if: a route, a file or a socket is served by anything that is not inside this application.
        # Guarded by: test_other_origins_hosts_and_wrong_tokens_are_refused.
        if self._is_open and _hostname(headers.get("host", "")) not in LOOPBACK:
            return (
                "this page answers to 127.0.0.1 and localhost only"  # another name: rebound to us
            )
        is_reading = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if reason := _of_another_site(headers, is_reading=is_reading):
            return reason
        is_action = str(scope["path"]).startswith(ACTIONS)
        if is_action and is_reading:
            return "actions are asked for by POST"
        if (is_action or not self._is_open or "token" in asked) and not self._knows(headers, asked):
            return "the link with the token was printed where the page was started"
        return ""

    def _knows(self, headers: dict[str, str], asked: dict[str, str]) -> bool:
        given = asked.get("token", "")
        if not given:
            try:
                found = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
            except CookieError:
                found = None
            given = found.value if found is not None else ""
        return hmac.compare_digest(given.encode(), self._token.encode())

    async def _remember(self, scope: Scope, asked: dict[str, str], send: Send) -> None:
        """The token goes into a cookie, and out of the address."""
        rest = urlencode({key: value for key, value in asked.items() if key != "token"})
        path = "/" + quote(str(scope["path"]).lstrip("/\\"))
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Lax"
        await send(
            {
                "type": "http.response.start",
                "status": 303,
                "headers": [
                    (b"location", (path + ("?" + rest if rest else "")).encode("latin-1")),
                    (b"set-cookie", cookie.encode()),
                    (b"cache-control", b"no-store"),
                ],
            }
        )
        await send({"type": "http.response.body", "body": b""})


def _of_another_site(headers: dict[str, str], *, is_reading: bool) -> str:
    """Why it is none of this page's own requests; empty where it is. Reading by a link has no origin."""
    origin = headers.get("origin")
    if origin is None:
        return "" if is_reading else "a request without an origin"
    is_same = urlsplit(origin).netloc == headers.get("host", "")
    if not is_same or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return "a request of another site"
    return ""


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await send(message)

    return sending


async def _refuse(scope: Scope, receive: Receive, send: Send, reason: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": f"refused: {reason}\n".encode()})
