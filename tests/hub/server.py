"""The server: one thread a connection, every request through one table of routes."""

import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from . import reading, writing
from .state import Account, Fault, Files, Refusal, Repo
from .store import CHUNK, File, chunks, size

REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
HOLDER = r"(?P<repo>(?:datasets/)?[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES: list[tuple[str, Callable[..., None]]] = [
    (rf"GET /api/models/{REPO}(/revision/{REVISION})?", reading.info),
    (rf"GET /api/models/{REPO}/tree/{REVISION}", reading.tree),
    (rf"GET /api/models/{REPO}/refs", reading.refs),
    (rf"POST /api/models/{REPO}/paths-info/{REVISION}", reading.paths_info),
    (rf"(GET|HEAD) /{HOLDER}/resolve/{REVISION}/(?P<file>.+)", reading.resolve),
    (r"GET /api/whoami-v2", reading.whoami),
    (rf"GET /api/models/{REPO}/auth-check(?P<write>/write)?", reading.auth_check),
    (r"POST /api/validate-yaml", writing.validate_yaml),
    (r"POST /api/repos/create", writing.create_repo),
    (rf"PUT /api/models/{REPO}/settings", writing.settings),
    (rf"POST /api/models/{REPO}/branch/(?P<branch>[^/]+)", writing.create_branch),
    (rf"POST /api/models/{REPO}/preupload/{REVISION}", writing.preupload),
    (rf"POST /{REPO}\.git/info/lfs/objects/batch", writing.batch),
    (r"PUT /storage/(?P<oid>[0-9a-f]{64})", writing.put),
    (r"PUT /storage/(?P<oid>[0-9a-f]{64})/(?P<part>\d+)", writing.put_part),
    (r"POST /storage/(?P<oid>[0-9a-f]{64})/complete", writing.complete),
    (r"POST /storage/(?P<oid>[0-9a-f]{64})/verify", writing.verify),
    (rf"POST /api/models/{REPO}/commit/{REVISION}", writing.commit),
]


class Hub:
    """The server, running inside `with`. Of a dataset, "datasets/org/name", it serves files only.

    `requests` counts by "METHOD path"; `statuses` maps a path to an error status to answer it
    with, `faults` are for a number of requests; `drops` maps a file name to the number of bytes
    after which its next download breaks; `after_info` holds what to do, once, after the next answer
    about a repository; `before_put` what to do as each upload to the storage begins.
    """

    def __init__(
        self,
        repos: Mapping[str, Mapping[str, Files]],
        *,
        tokens: Iterable[str] = (),
        accounts: Mapping[str, Account] | None = None,
        storage: Path | None = None,
        part_size: int | None = None,
    ) -> None:
        self.repos: dict[str, Repo] = {}
        for name, commits in repos.items():
            self.repos[name] = Repo(dict(commits), {"main": list(commits)[-1]})
        self.accounts = dict(accounts or {})
        self.tokens = frozenset(tokens) | self.accounts.keys()
        self.storage, self.part_size = storage, part_size
        self.objects: dict[str, File] = {}
        self.parts: dict[str, dict[int, File]] = {}
        self.requests: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.ranges: list[str] = []
        self.statuses: dict[str, int] = {}
        self.faults: list[Fault] = []
        self.drops: dict[str, int] = {}
        self.after_info: list[Callable[[], None]] = []
        self.before_put: list[Callable[[str], None]] = []
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
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
        resolve = re.compile(rf"GET /{HOLDER}/resolve/{REVISION}/(?P<file>.+)")
        found = (resolve.fullmatch(key) for key in self.requests)
        return {match["file"] for match in found if match}

    def asked(self, pattern: str) -> int:
        """How many requests matched "METHOD path"."""
        return sum(n for key, n in self.requests.items() if re.fullmatch(pattern, key))

    def open(
        self, name: str, revision: str, token: str | None, *, content: bool
    ) -> tuple[str, Files]:
        """The commit and files a reader sees; gating closes contents but not listings."""
        repo = self.visible(name, token)
        if content and repo.gated and token not in repo.readers:
            raise Refusal(403 if token else 401, "GatedRepo", f"Access to {name} is restricted")
        commit = repo.find(revision)
        if commit is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repo.commits[commit]

    def visible(self, name: str, token: str | None) -> Repo:
        """What a stranger may not see looks exactly like what is not there, as on the real Hub."""
        if token is not None and token not in self.tokens:
            raise Refusal(401, message="Invalid credentials in Authorization header")
        repo, account = self.repos.get(name), self.accounts.get(token or "")
        namespace = name.partition("/")[0]
        member = account is not None and namespace in (account.name, *account.orgs)
        if repo is None or (repo.private and not member and token not in repo.readers):
            raise Refusal(404 if token else 401, "RepoNotFound", "Repository not found")
        return repo


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that died is no fault of the server."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test output clean: `Hub.requests` is the log."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path, self.query = unquote(url.path), parse_qs(url.query)
        request = f"{self.command} {path}"
        with self.hub.lock:
            self.hub.requests[request] += 1
            fault = next((f for f in self.hub.faults if f.hits(request)), None)
        self.left, self.fault = int(self.headers.get("Content-Length") or 0), fault
        try:
            if fault is not None and not fault.lost and fault.cut is None:
                raise Refusal(fault.status, message=fault.message, **dict(fault.headers))
            if path in self.hub.statuses:
                raise Refusal(self.hub.statuses[path])
            self._route(f"{self.command} {url.path}")
        except Refusal as refusal:
            self._refuse(refusal)
        except ConnectionError:
            self.close_connection = True

    def _route(self, request: str) -> None:
        for pattern, route in ROUTES:
            # Matched before unquoting: a ref such as refs%2Fpr%2F1 is one segment.
            if match := re.fullmatch(pattern, request):
                parts = {key: unquote(value or "") for key, value in match.groupdict().items()}
                return route(self, **parts)
        raise Refusal(404)

    @property
    def token(self) -> str | None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if scheme == "Bearer" else None

    def account(self) -> Account:
        if self.token not in self.hub.accounts:
            raise Refusal(401, message="Invalid credentials in Authorization header")
        return self.hub.accounts[self.token]

    def body(self) -> Iterable[bytes]:
        """The request's body; breaks off where the fault says so."""
        limit = None if self.fault is None else self.fault.cut
        while self.left:
            data = self.rfile.read(min(CHUNK, self.left, limit or CHUNK))
            if not data:
                raise ConnectionError
            self.left -= len(data)
            if limit is not None and (limit := limit - len(data)) <= 0:
                self.close_connection = True
                raise ConnectionError
            yield data

    def json(self) -> Any:
        return json.loads(b"".join(self.body()) or b"{}")

    def send_json(self, value: object, status: int = 200, **headers: str) -> None:
        headers = {name.replace("_", "-"): text for name, text in headers.items()}
        self.send(
            status, json.dumps(value).encode(), {"Content-Type": "application/json"} | headers
        )

    def _refuse(self, refusal: Refusal) -> None:
        for _ in self.body():  # or the client, still sending, would see the connection break
            pass
        headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
        headers = {name: value for name, value in headers.items() if value} | refusal.headers
        data = b"" if refusal.body is None else json.dumps(refusal.body).encode()
        self.send(refusal.status, data, {"Content-Type": "application/json"} | headers)

    def send(
        self, status: int, file: File, headers: Mapping[str, str], *, start: int = 0, name: str = ""
    ) -> None:
        if self.fault is not None and self.fault.lost:
            self.close_connection = True
            return
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(size(file) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = self.hub.drops.pop(name, None)
        self.close_connection |= limit is not None
        for data in chunks(file, start):
            self.wfile.write(data if limit is None else data[:limit])
            if limit is not None and (limit := limit - len(data)) <= 0:
                return
