"""Whether the token in use may write where the push goes, by what the Hub says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WRITERS = ("contributor", "write", "admin")
"""Roles in an organisation that may create repositories there."""


@dataclass(frozen=True)
class Account:
    """Whose token it is.

    `role`: of the token, read, write or fineGrained; None where the Hub does not say (OAuth).
    `orgs`: name -> the account's role there, None where the Hub does not say. `scopes`: of a
    fine-grained token, (kind, name) of what it may write to.
    """

    name: str
    role: str | None
    orgs: Mapping[str, str | None] = field(default_factory=dict)
    scopes: frozenset[tuple[str, str]] = frozenset()


def read_account(whoami: Mapping[str, Any]) -> Account:
    """The account by the Hub's `whoami-v2`; what it leaves out stays unknown."""
    auth = _mapping(whoami.get("auth"))
    token = _mapping(auth.get("accessToken"))
    role = token.get("role")
    scopes = _mapping(token.get("fineGrained")).get("scoped")
    orgs = [_mapping(org) for org in whoami.get("orgs") or ()]
    return Account(
        name=str(whoami.get("name") or ""),
        role=role if isinstance(role, str) else None,
        orgs={str(org["name"]): org.get("roleInOrg") for org in orgs if org.get("name")},
        scopes=frozenset(_scopes(scopes if isinstance(scopes, list) else [])),
    )


def _scopes(scopes: list[Any]) -> list[tuple[str, str]]:
    entities = [
        _mapping(_mapping(scope).get("entity"))
        for scope in scopes
        if "repo.write" in (_mapping(scope).get("permissions") or ())
    ]
    return [(str(entity.get("type")), str(entity.get("name"))) for entity in entities]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def refusal(account: Account, repo: str, *, exists: bool, endpoint: str) -> str | None:
    """Why the push cannot work, with the next step; None where nothing speaks against it.

    What is not known is left to the Hub, which answers the write itself. Names are compared
    without case, as there.
    """
    namespace = repo.partition("/")[0]
    tokens = f"{endpoint}/settings/tokens"
    if account.role == "read":
        return (
            f"the token of {account.name} may only read: make one that may write at {tokens}, then"
            " run `hf auth login` and this again"
        )
    orgs = {name.casefold(): role for name, role in account.orgs.items()}
    if namespace.casefold() not in (account.name.casefold(), *orgs):
        return (
            f"{account.name} is no member of {namespace}: push to {account.name}/"
            f"{repo.partition('/')[2]}, or see with `hf auth whoami` whose token is in use"
        )
    role = orgs.get(namespace.casefold())
    if role is not None and role not in WRITERS:
        return (
            f"{account.name} may only read in {namespace}: ask for the right to write there, or"
            f" push to {account.name}/{repo.partition('/')[2]}"
        )
    if account.role == "fineGrained" and not _granted(account, repo, namespace, exists=exists):
        what = f"write to {repo}" if exists else f"create repositories of {namespace}"
        return (
            f"the fine-grained token of {account.name} may not {what}: tick write access there at"
            f" {tokens}, then run this again"
        )
    return None


def _granted(account: Account, repo: str, namespace: str, *, exists: bool) -> bool:
    wanted = {("user", namespace), ("org", namespace)} | ({("model", repo)} if exists else set())
    granted = {(kind, name.casefold()) for kind, name in account.scopes}
    return not granted.isdisjoint((kind, name.casefold()) for kind, name in wanted)
