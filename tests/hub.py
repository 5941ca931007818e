"""A small Hugging Face Hub on loopback: the routes that model downloads use, and a request log.

    with Hub({"org/name": {"a" * 40: {"config.json": b"{}", "model.safetensors": path}}}) as hub:
        subprocess.run(..., env={"HF_ENDPOINT": hub.url})

Files are bytes or paths; `*.safetensors` are stored with LFS. No Xet header is ever sent. A dataset
is named "datasets/org/name"; only its files are served.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Files = Mapping[str, bytes | Path]

REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
INFO = re.compile(rf"/api/models/{REPO}(/revision/(?P<revision>[^/]+))?")
TREE = re.compile(rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)")
RESOLVE = re.compile(
    r"/(?P<repo>(?:datasets/)?[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)"
)


@dataclass
class Repo:
    """One model repository: commits, what `main` and other refs point to, and who may read it."""

    commits: dict[str, Files]
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    readers: frozenset[str] = frozenset()
    """Tokens that open a gated or private repository."""

    def push(self, commit: str, files: Files, *, ref: str = "main") -> None:
        self.commits[commit] = files
        self.refs[ref] = commit

    def find(self, revision: str) -> str | None:
        commit = self.refs.get(revision, revision)
        return commit if commit in self.commits else None


class Refusal(Exception):
    """An answer that is an error, with the headers by which the client tells errors apart."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message
        super().__init__(status, code, message)


class Hub:
    """The server, running inside `with`.

    `requests` counts by "METHOD path"; `statuses` maps a path to an error status to answer it
    with; `drops` maps a file name to the number of bytes after which its next download breaks;
    `after_info` holds what to do, once, after the next answer about a repository.
    """

    def __init__(
        self, repos: Mapping[str, Mapping[str, Files]], *, tokens: Iterable[str] = ()
    ) -> None:
        self.repos: dict[str, Repo] = {}
        for name, commits in repos.items():
            self.repos[name] = Repo(dict(commits), {"main": list(commits)[-1]})
        self.tokens = frozenset(tokens)
        self.requests: Counter[str] = Counter()
        self.ranges: list[str] = []
        self.statuses: dict[str, int] = {}
        self.drops: dict[str, int] = {}
        self.after_info: list[Callable[[], None]] = []
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self})
        )
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def downloads(self) -> set[str]:
        """The files whose bytes were asked for, as paths in their repository."""
        found = (RESOLVE.fullmatch(key.removeprefix("GET ")) for key in self.requests)
        return {match["file"] for match in found if match}

    def open(
        self, name: str, revision: str, token: str | None, *, content: bool
    ) -> tuple[str, Files]:
        """The commit and files a reader sees; gating closes contents but not listings.

        As on the real Hub, what a stranger may not see looks exactly like what is not there.
        """
        if token is not None and token not in self.tokens:
            raise Refusal(401, message="Invalid credentials in Authorization header")
        repo = self.repos.get(name)
        if repo is None or (repo.private and token not in repo.readers):
            raise Refusal(404 if token else 401, "RepoNotFound", "Repository not found")
        if content and repo.gated and token not in repo.readers:
            raise Refusal(403 if token else 401, "GatedRepo", f"Access to {name} is restricted")
        commit = repo.find(revision)
        if commit is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repo.commits[commit]


def content(file: bytes | Path) -> bytes:
    return file if isinstance(file, bytes) else file.read_bytes()


def is_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


def sha256(file: bytes | Path) -> str:
    return hashlib.sha256(content(file)).hexdigest()


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data)).hexdigest()


def _blob(name: str, files: Files, *, oid: str, digest: str) -> dict[str, Any]:
    """How the Hub describes a stored file; its two listings differ in two keys."""
    data = content(files[name])
    blob: dict[str, Any] = {oid: git_oid(data), "size": len(data)}
    if is_lfs(name):
        blob["lfs"] = {digest: sha256(data), "size": len(data), "pointerSize": 134}
    return blob


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test output clean: `Hub.requests` is the log."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests[f"{self.command} {path}"] += 1
        try:
            if path in self.hub.statuses:
                raise Refusal(self.hub.statuses[path])
            for pattern, route in (
                (INFO, self._info),
                (TREE, self._tree),
                (RESOLVE, self._resolve),
            ):
                # Matched before unquoting: a ref such as refs%2Fpr%2F1 is one segment.
                if match := pattern.fullmatch(url.path):
                    parts = {key: unquote(value or "") for key, value in match.groupdict().items()}
                    return route(query=parse_qs(url.query), **parts)
            raise Refusal(404)
        except Refusal as refusal:
            self._refuse(refusal)

    def _open(self, repo: str, revision: str, *, content: bool = False) -> tuple[str, Files]:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return self.hub.open(repo, revision, token if scheme == "Bearer" else None, content=content)

    def _info(self, *, repo: str, revision: str, query: dict[str, list[str]]) -> None:
        commit, files = self._open(repo, revision or "main")
        siblings = [{"rfilename": name} for name in sorted(files)]
        if "blobs" in query:
            for sibling in siblings:
                sibling |= _blob(sibling["rfilename"], files, oid="blobId", digest="sha256")
        state = self.hub.repos[repo]
        gated = "manual" if state.gated else False
        about = {"id": repo, "sha": commit, "private": state.private, "gated": gated}
        self._send_json({**about, "siblings": siblings})
        while self.hub.after_info:
            self.hub.after_info.pop()()

    def _tree(self, *, repo: str, revision: str, query: dict[str, list[str]]) -> None:
        _, files = self._open(repo, revision)
        self._send_json(
            [
                {"type": "file", "path": name, **_blob(name, files, oid="oid", digest="oid")}
                for name in sorted(files)
            ]
        )

    def _resolve(self, *, repo: str, revision: str, file: str, query: dict[str, list[str]]) -> None:
        commit, files = self._open(repo, revision, content=True)
        if file not in files:
            raise Refusal(404, "EntryNotFound", f"Entry not found: {file}")
        data = content(files[file])
        etag = sha256(data) if is_lfs(file) else git_oid(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if is_lfs(file):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        status, start = 200, 0
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            status, start = 206, int(wanted[1])
            self.hub.ranges.append(f"{file} {wanted[0]}")
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(status, data[start:], headers, name=file)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, refusal: Refusal) -> None:
        headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
        headers = {name: value for name, value in headers.items() if value}
        self._send(refusal.status, b"", headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str], *, name: str = "") -> None:
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.hub.drops:
            data = data[: self.hub.drops.pop(name)]
            self.close_connection = True
        self.wfile.write(data)
