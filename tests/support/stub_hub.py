"""A Hugging Face hub on loopback, with what the client needs of it: one repository, its errors, and
an upload."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT, NAME = "a1" * 20, "org/model"
Reply = tuple[int, dict[str, str], bytes]  # status, headers, body


class StubHub:
    """`files` of the repository org/model at `COMMIT`, which is also its main branch.

    `gated` and `broken` are how it answers; `asked` are the paths that were asked for, `uploaded`
    the files that came, into a repository that was `made` so.
    """

    def __init__(self, url: str, files: dict[str, bytes]) -> None:
        self.url, self.files = url, files
        self.gated = self.broken = False
        self.asked, self.uploaded = list[str](), dict[str, bytes]()
        self.made: dict[str, Any] = {}

    def answer(self, method: str, path: str, body: bytes) -> Reply:
        self.asked.append(f"{method} {path}")
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if self.broken:
            return 503, {}, b"out of order"
        if method == "POST":
            return _json(self._upload(parts[1:], body))
        named = parts[2:] if parts[0] == "api" else parts
        if len(named) < 2:
            return _error(404, "EntryNotFound", "")
        owner, name, *rest = named
        what, at, *file = rest or ("revision", "main")
        if f"{owner}/{name}" != NAME:
            return _error(401, "RepoNotFound", "Repository not found")
        if at not in ("main", COMMIT):
            return _error(404, "RevisionNotFound", f"Invalid rev id: {at}")
        if what == "resolve":
            return self._file("/".join(file))
        files = [
            {"path": one, "rfilename": one, "size": len(self.files[one])} for one in self.files
        ]
        if what == "tree":
            return _json([{"type": "file", "oid": "0" * 40, **file} for file in files])
        about = {"id": NAME, "modelId": NAME, "sha": COMMIT, "tags": [], "private": False}
        return _json({**about, "siblings": files})

    def _file(self, name: str) -> Reply:
        if self.gated:
            return _error(403, "GatedRepo", "accept the terms")
        if name not in self.files:
            return _error(404, "EntryNotFound", "")
        content = self.files[name]
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        return 200, {"X-Repo-Commit": COMMIT, "ETag": tag}, content

    def _upload(self, parts: list[str], body: bytes) -> object:
        if parts[:2] == ["repos", "create"]:
            self.made = json.loads(body)
            name = f"{self.made.get('organization') or 'me'}/{self.made['name']}"
            return {"url": f"{self.url}/{name}", "id": name}
        if "preupload" in parts:
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": one["path"], **how} for one in json.loads(body)["files"]]}
        if "commit" not in parts:
            return {}
        for line in map(json.loads, body.decode().splitlines()):
            if line["key"] == "file":
                self.uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        where = f"{self.url}/{'/'.join(parts[1:3])}/commit/{COMMIT}"
        return {"success": True, "commitOid": COMMIT, "commitUrl": where, "hookOutput": ""}


def _json(content: object) -> Reply:
    return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


def _error(status: int, code: str, text: str) -> Reply:
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

        def log_message(self, format: str, *args: Any) -> None: ...

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

    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    known = {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(cache)}
    known |= {"HF_TOKEN_PATH": str(cache / "token")}
    for name, value in {**known, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
