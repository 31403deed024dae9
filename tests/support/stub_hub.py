"""A Hugging Face hub on loopback, with what the client needs of it: one repository, its errors, and
an upload."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

COMMIT, NAME = "a1" * 20, "org/model"


class StubHub:
    """`files` of the repository org/model at `COMMIT`, which is also its main branch.

    `gated` and `broken` are how it answers; `asked` are the paths that were asked for, `uploaded`
    the files that came.
    """

    def __init__(self, url: str, files: dict[str, bytes]) -> None:
        self.url, self.files = url, files
        self.gated = self.broken = False
        self.asked: list[str] = []
        self.uploaded: dict[str, bytes] = {}
        self.made: dict[str, Any] = {}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        self.asked.append(f"{method} {path}")
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if self.broken:
            return 503, {}, b"out of order"
        if parts[0] == "api":
            return self._api(method, parts[1:], parse_qs(urlsplit(path).query), body)
        name, at, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        if refused := self._refused(name, at):
            return refused
        if self.gated:
            return _error(403, "GatedRepo", "accept the terms")
        if file not in self.files:
            return _error(404, "EntryNotFound", "")
        content = self.files[file]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        return 200, headers, content

    def _refused(self, name: str, at: str) -> tuple[int, dict[str, str], bytes] | None:
        if name != NAME:
            return _error(401, "RepoNotFound", "Repository not found")
        if at not in ("main", COMMIT):
            return _error(404, "RevisionNotFound", f"Invalid rev id: {at}")
        return None

    def _api(
        self, method: str, parts: list[str], query: dict[str, list[str]], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if method == "POST":
            return self._upload(parts, body)
        name, what, at = (
            "/".join(parts[1:3]),
            *([*parts[3:5], "revision", "main"][:2] if len(parts) > 3 else ("", "main")),
        )
        if refused := self._refused(name, at):
            return refused
        if what == "tree":
            found: Any = [
                {"type": "file", "path": file, "size": len(content), "oid": "0" * 40}
                for file, content in self.files.items()
            ]
        else:
            siblings = [{"rfilename": file, "size": len(self.files[file])} for file in self.files]
            about = {"id": name, "modelId": name, "sha": COMMIT, "tags": [], "private": False}
            found = {**about, "siblings": siblings}
        return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()

    def _upload(self, parts: list[str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        reply: Any = {}
        if parts[:2] == ["repos", "create"]:
            self.made = json.loads(body)
            name = f"{self.made.get('organization') or 'me'}/{self.made['name']}"
            reply = {"url": f"{self.url}/{name}", "id": name}
        elif "preupload" in parts:
            how = {"uploadMode": "regular", "shouldIgnore": False}
            reply = {"files": [{"path": one["path"], **how} for one in json.loads(body)["files"]]}
        elif "commit" in parts:
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    file = line["value"]
                    self.uploaded[file["path"]] = base64.b64decode(file["content"])
            where = f"{self.url}/{'/'.join(parts[1:3])}/commit/{COMMIT}"
            reply = {"success": True, "commitOid": COMMIT, "commitUrl": where, "hookOutput": ""}
        return 200, {"Content-Type": "application/json"}, json.dumps(reply).encode()


def _error(status: int, code: str, text: str) -> tuple[int, dict[str, str], bytes]:
    return status, {"X-Error-Code": code, "X-Error-Message": text}, b""


@contextmanager
def stub_hub(directory: Path | None = None) -> Iterator[StubHub]:
    """A hub that has the files of a directory."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, content = hub.answer(self.command, self.path, body)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = _reply

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = sorted(directory.iterdir()) if directory else []
    files = {file.name: file.read_bytes() for file in found}
    hub = StubHub(f"http://127.0.0.1:{server.server_port}", files)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def go_online(
    monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, token: str | None = None
) -> None:
    """Let the hub's client in this process ask the hub at `url`, with a cache of its own."""
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    for name, value in {
        "HF_HUB_OFFLINE": False,
        "ENDPOINT": url,
        "HF_HUB_CACHE": str(cache),
        "HF_TOKEN_PATH": str(cache / "token"),
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)
