"""What a Hub knows: repositories, accounts with their rights, and the faults it is told to have."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha1
from typing import Any

from .store import File

Files = Mapping[str, File]


class Refusal(Exception):
    """An answer that is an error, with the headers by which the client tells errors apart."""

    def __init__(
        self, status: int, code: str = "", message: str = "", *, body: Any = None, **headers: str
    ) -> None:
        self.status, self.code, self.message, self.body = status, code, message, body
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        super().__init__(status, code, message)


@dataclass
class Repo:
    """One model repository: commits, what `main` and other refs point to, and who may read it."""

    commits: dict[str, Files]
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    readers: frozenset[str] = frozenset()
    """Tokens that open a gated or private repository."""
    messages: list[str] = field(default_factory=list)
    """The summary of each commit that was uploaded, then its description."""

    def push(self, commit: str, files: Files, *, ref: str = "main") -> None:
        self.commits[commit] = files
        self.refs[ref] = commit

    def add(self, files: Files, *, ref: str = "main") -> str:
        """A new commit with an id of its own."""
        state = f"{len(self.commits)} {ref} {sorted(files)}".encode()
        commit = sha1(state).hexdigest()
        self.push(commit, files, ref=ref)
        return commit

    def find(self, revision: str) -> str | None:
        commit = self.refs.get(revision, revision)
        return commit if commit in self.commits else None

    def head(self, ref: str = "main") -> Files:
        return self.commits[self.refs[ref]]


@dataclass
class Account:
    """Who a token belongs to. `role`: read, write or fineGrained; `orgs`: name -> role there.

    `scopes`: of a fine-grained token, (entity type, entity name) -> permissions.
    """

    name: str
    role: str = "write"
    orgs: Mapping[str, str] = field(default_factory=dict)
    scopes: Mapping[tuple[str, str], list[str]] = field(default_factory=dict)

    def whoami(self) -> dict[str, Any]:
        token: dict[str, Any] = {"displayName": "test", "role": self.role}
        if self.role == "fineGrained":
            scoped = [
                {"entity": {"type": kind, "name": name}, "permissions": granted}
                for (kind, name), granted in self.scopes.items()
            ]
            token["fineGrained"] = {"global": [], "scoped": scoped}
        orgs = [{"name": name, "roleInOrg": role} for name, role in self.orgs.items()]
        auth = {"type": "access_token", "accessToken": token}
        return {"type": "user", "name": self.name, "orgs": orgs, "auth": auth}

    def may_write(self, repo: str, *, create: bool = False) -> bool:
        namespace = repo.partition("/")[0]
        if self.role == "read":
            return False
        if self.role == "fineGrained":
            entities = [("user", namespace), ("org", namespace)]
            entities += [] if create else [("model", repo)]
            if not any("repo.write" in self.scopes.get(entity, []) for entity in entities):
                return False
        return namespace == self.name or self.orgs.get(namespace) in ("write", "admin")


@dataclass
class Fault:
    """A fault for the next `times` requests whose "METHOD path" matches.

    Answers `status`; or with `cut` closes the connection after so many bytes of the body; or with
    `lost` does what was asked and closes the connection instead of answering.
    """

    pattern: str
    status: int = 500
    times: int = 1
    cut: int | None = None
    lost: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = ""

    def hits(self, request: str) -> bool:
        if self.times and re.fullmatch(self.pattern, request):
            self.times -= 1
            return True
        return False
