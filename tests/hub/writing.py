"""The routes of an upload: repository, upload modes, LFS storage, commit."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .state import Files, Refusal, Repo
from .store import LARGE, File, chunks, size

if TYPE_CHECKING:
    from .server import Handler

LICENCES = {"apache-2.0", "gemma", "mit", "other"}
SIGNATURE = "X-Amz-Signature=0123456789abcdef"
"""Part of every upload address: a secret of the storage, which no output may show either."""


def validate_yaml(web: "Handler") -> None:
    """The first block has to be a mapping with a known licence."""
    match = re.match(r"---\n(.*?)\n---\n", web.json()["content"], re.DOTALL)
    try:
        data = yaml.safe_load(match[1]) if match else {}
        fault = None if isinstance(data, dict) else "is no mapping"
    except yaml.YAMLError:
        data, fault = {}, "cannot be parsed"
    if fault is None and match and data.get("license") not in LICENCES:
        fault = f'"license" must be one of {sorted(LICENCES)}'
    if fault is not None:
        raise Refusal(400, body={"errors": [{"message": fault}], "warnings": []})
    web.send_json({"errors": [], "warnings": []})


def create_repo(web: "Handler") -> None:
    account, asked = web.account(), web.json()
    name = f"{asked.get('organization') or account.name}/{asked['name']}"
    if name in web.hub.repos:
        body = {"error": "You already created this model repo", "url": f"{web.hub.url}/{name}"}
        raise Refusal(409, body=body)
    if not account.may_write(name, create=True):
        raise Refusal(403, message=f"You don't have the rights to create {name}")
    private = asked.get("private") or asked.get("visibility") == "private"
    web.hub.repos[name] = Repo({}, private=bool(private))
    web.hub.repos[name].add({".gitattributes": b"*.safetensors filter=lfs\n"})
    web.send_json({"url": f"{web.hub.url}/{name}", "name": name})


def _writable(web: "Handler", repo: str, *, pull: bool = False) -> Repo:
    """The repository, if the token may write there; a pull request takes less."""
    account = web.account()
    state = web.hub.visible(repo, web.token)
    if state.gated and web.token not in state.readers:
        raise Refusal(403, "GatedRepo", f"Access to {repo} is restricted")
    if not account.may_write(repo) and not (pull and account.role != "read"):
        raise Refusal(403, message="Forbidden: pass a token with write access")
    return state


def settings(web: "Handler", *, repo: str) -> None:
    state, asked = _writable(web, repo), web.json()
    state.private = asked.get("visibility", "") == "private" or bool(asked.get("private"))
    web.send_json({"private": state.private})


def create_branch(web: "Handler", *, repo: str, branch: str) -> None:
    state, asked = _writable(web, repo), web.json()
    if branch in state.refs:
        raise Refusal(409, message="Reference already exists")
    start = state.find(asked.get("startingPoint", "main"))
    if start is None:
        raise Refusal(404, "RevisionNotFound")
    state.refs[branch] = start
    web.send_json({})


def _pull(web: "Handler") -> bool:
    return web.query.get("create_pr") == ["1"]


def preupload(web: "Handler", *, repo: str, revision: str) -> None:
    state = _writable(web, repo, pull=_pull(web))
    if state.find(revision) is None:
        raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    modes = [
        {"path": file["path"], "uploadMode": _mode(file), "shouldIgnore": False, "oid": None}
        for file in web.json()["files"]
    ]
    web.send_json({"files": modes})


def _mode(file: dict[str, Any]) -> str:
    large = file["path"].endswith(".safetensors") or file["size"] >= LARGE
    return "lfs" if large else "regular"


def batch(web: "Handler", *, repo: str) -> None:
    """Objects that are stored already get no action: the client then sends nothing."""
    _writable(web, repo, pull=True)
    web.send_json(
        {
            "transfer": "basic" if web.hub.part_size is None else "multipart",
            "objects": [_object(web, item["oid"], item["size"]) for item in web.json()["objects"]],
        }
    )


def _object(web: "Handler", oid: str, nbytes: int) -> dict[str, Any]:
    if oid in web.hub.objects:
        return {"oid": oid, "size": nbytes}
    base, part = f"{web.hub.url}/storage/{oid}", web.hub.part_size
    upload: dict[str, Any] = {"href": f"{base}?{SIGNATURE}"}
    if part is not None:
        count = -(-nbytes // part)
        urls = {str(i): f"{base}/{i}?{SIGNATURE}" for i in range(1, count + 1)}
        upload = {"href": f"{base}/complete", "header": {"chunk_size": str(part), **urls}}
    verify = {"href": f"{base}/verify"}
    return {"oid": oid, "size": nbytes, "actions": {"upload": upload, "verify": verify}}


def _receive(web: "Handler", path: Path | None) -> tuple[File, str]:
    """Store a body, on disk if the hub has a folder; the sha256 of what came."""
    if "Authorization" in web.headers or SIGNATURE not in web.path:
        raise Refusal(400, message="storage takes the signed address and no other credentials")
    digest = hashlib.sha256()
    if path is None:
        data = b"".join(web.body())
        return data, hashlib.sha256(data).hexdigest()
    with open(path, "wb") as file:
        for data in web.body():
            digest.update(data)
            file.write(data)
    return path, digest.hexdigest()


def _place(web: "Handler", name: str) -> Path | None:
    return None if web.hub.storage is None else web.hub.storage / name


def put(web: "Handler", *, oid: str) -> None:
    for action in web.hub.before_put:
        action(oid)
    file, found = _receive(web, _place(web, oid))
    if found != oid:
        raise Refusal(400, message="the content has another sha256")
    web.hub.uploads[oid] += 1
    web.hub.objects[oid] = file
    web.send(200, b"", {"ETag": f'"{oid}"'})


def put_part(web: "Handler", *, oid: str, part: str) -> None:
    for action in web.hub.before_put:
        action(oid)
    file, found = _receive(web, _place(web, f"{oid}.{part}"))
    web.hub.uploads[f"{oid}.{part}"] += 1
    web.hub.parts.setdefault(oid, {})[int(part)] = file
    web.send(200, b"", {"ETag": f'"{found}"'})


def complete(web: "Handler", *, oid: str) -> None:
    """Join the parts that the client names; their sum has to be the object."""
    asked, parts = web.json(), web.hub.parts.get(oid, {})
    if [p["partNumber"] for p in asked["parts"]] != sorted(parts):
        raise Refusal(400, message="parts are missing")
    whole = b"".join(b"".join(chunks(parts[number])) for number in sorted(parts))
    if hashlib.sha256(whole).hexdigest() != oid:
        raise Refusal(400, message="the parts have another sha256")
    web.hub.objects[oid] = whole
    web.send_json({})


def verify(web: "Handler", *, oid: str) -> None:
    asked = web.json()
    stored = web.hub.objects.get(asked["oid"])
    if asked["oid"] != oid or stored is None or size(stored) != asked["size"]:
        raise Refusal(404, message="no such object")
    web.send_json({})


def commit(web: "Handler", *, repo: str, revision: str) -> None:
    """Apply the lines of the request on top of its parent, whole or not at all."""
    state = _writable(web, repo, pull=_pull(web))
    lines = [json.loads(line) for line in b"".join(web.body()).splitlines()]
    header = lines[0]["value"]
    parent = state.find(revision)
    if parent is None:
        raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    if header.get("parentCommit", parent) != parent:
        raise Refusal(412, message="A commit has happened since. Please refresh and try again.")
    files = dict(state.commits[parent])
    for line in lines[1:]:
        _apply(web, files, line["key"], line["value"])
    ref = f"refs/pr/{len([r for r in state.refs if r.startswith('refs/pr/')]) + 1}"
    made = state.add(files, ref=ref if _pull(web) else revision)
    state.messages += [header["summary"], header["description"]]
    answer = {"commitUrl": f"{web.hub.url}/{repo}/commit/{made}", "commitOid": made}
    if _pull(web):
        answer["pullRequestUrl"] = f"{web.hub.url}/{repo}/discussions/{ref.rpartition('/')[2]}"
    web.send_json(answer)


def _apply(web: "Handler", files: dict[str, Any] | Files, key: str, value: dict[str, Any]) -> None:
    assert isinstance(files, dict)
    path = value["path"]
    if key == "file":
        files[path] = base64.b64decode(value["content"])
    elif key == "lfsFile":
        stored = web.hub.objects.get(value["oid"])
        if stored is None or size(stored) != value["size"]:
            raise Refusal(400, message=f"{path}: the LFS object is not stored")
        files[path] = stored
    elif key == "deletedFile":
        if files.pop(path, None) is None:
            raise Refusal(404, "EntryNotFound", "A file with this name doesn't exist")
    else:
        raise Refusal(400, message=f"unknown operation {key}")
