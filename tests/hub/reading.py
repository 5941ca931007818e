"""The routes that change nothing."""

import re
from typing import TYPE_CHECKING

from .state import Files, Refusal
from .store import describe, git_oid, is_lfs, sha256, size

if TYPE_CHECKING:
    from .server import Handler


def _open(web: "Handler", repo: str, revision: str, *, content: bool = False) -> tuple[str, Files]:
    return web.hub.open(repo, revision, web.token, content=content)


def info(web: "Handler", *, repo: str, revision: str) -> None:
    commit, files = _open(web, repo, revision or "main")
    siblings = [{"rfilename": name} for name in sorted(files)]
    if "blobs" in web.query:
        for sibling in siblings:
            name = sibling["rfilename"]
            sibling |= describe(name, files[name], oid="blobId", digest="sha256")
    state = web.hub.repos[repo]
    gated = "manual" if state.gated else False
    about = {"id": repo, "sha": commit, "private": state.private, "gated": gated}
    web.send_json({**about, "siblings": siblings})
    while web.hub.after_info:
        web.hub.after_info.pop()()


def _listed(files: Files, names: list[str]) -> list[dict]:
    return [
        {"type": "file", "path": name, **describe(name, files[name], oid="oid", digest="oid")}
        for name in names
    ]


def tree(web: "Handler", *, repo: str, revision: str) -> None:
    """All files in pages of five, so that the client has to follow the links."""
    _, files = _open(web, repo, revision)
    names = sorted(files)
    start = int(web.query.get("cursor", ["0"])[0])
    headers = {}
    if start + 5 < len(names):
        link = f"{web.hub.url}{web.path.partition('?')[0]}?recursive=True&cursor={start + 5}"
        headers = {"Link": f'<{link}>; rel="next"'}
    web.send_json(_listed(files, names[start : start + 5]), **headers)


def paths_info(web: "Handler", *, repo: str, revision: str) -> None:
    _, files = _open(web, repo, revision)
    wanted = web.json()["paths"]
    web.send_json(_listed(files, [name for name in wanted if name in files]))


def refs(web: "Handler", *, repo: str) -> None:
    state = web.hub.visible(repo, web.token)
    branches = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
        for name, commit in state.refs.items()
        if not name.startswith("refs/")
    ]
    web.send_json({"branches": branches, "converts": [], "tags": []})


def resolve(web: "Handler", *, repo: str, revision: str, file: str) -> None:
    commit, files = _open(web, repo, revision, content=True)
    if file not in files:
        raise Refusal(404, "EntryNotFound", f"Entry not found: {file}")
    stored = files[file]
    etag = sha256(stored) if is_lfs(file, stored) else git_oid(stored)
    headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
    if is_lfs(file, stored):
        headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(size(stored))}
    status, start = 200, 0
    if wanted := re.fullmatch(r"bytes=(\d+)-", web.headers.get("Range", "")):
        status, start = 206, int(wanted[1])
        web.hub.ranges.append(f"{file} {wanted[0]}")
        headers["Content-Range"] = f"bytes {start}-{size(stored) - 1}/{size(stored)}"
    web.send(status, stored, headers, start=start, name=file)


def whoami(web: "Handler") -> None:
    web.send_json(web.account().whoami())


def auth_check(web: "Handler", *, repo: str, write: str) -> None:
    account = web.account()
    web.hub.visible(repo, web.token)
    if write and not account.may_write(repo):
        raise Refusal(403, message=f"Forbidden: you cannot write to {repo}")
    web.send_json({})
