"""A push from its checks to the listing read back."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..card.files import CARD_NAME
from ..checkpoint.errors import PushError
from ..checkpoint.hub import redact
from ..checkpoint.output import write_file
from ..checkpoint.progress import Progress, ignore_progress
from ..checkpoint.source import Source
from ..verify.findings import Severity, listed
from ..verify.job import verify
from .folder import Payload, hashed, read_payload
from .refusals import explained, patiently
from .remote import Changes, Repository, compare, foreign, look, mistakable
from .rights import Account, read_account, refusal
from .upload import additions, message, prepare, read_back, upload

if TYPE_CHECKING:
    from huggingface_hub import HfApi

FORMAT = "qatpack.push/1"

_TOKEN = re.compile(r"[!-~]+")
"""What a header can carry; another token would show up in the client's complaint."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to push.

    - `branch`: created from `main` where it is not there; `pr`: open a pull request instead.
    - `public`: may be, or become, visible to everybody; with `pr` only the former.
    - `delete`: remove files there that the build does not have.
    - `hash_files`: hold every file against the manifest's sha256 first.
    """

    branch: str = "main"
    pr: bool = False
    public: bool = False
    delete: bool = False
    hash_files: bool = True


@dataclass(frozen=True)
class Plan:
    """Everything that was checked, and what the push will do."""

    account: Account
    there: Repository
    payload: Payload
    changes: Changes
    options: Options
    endpoint: str

    @property
    def private(self) -> bool:
        """Whether the repository will be private afterwards."""
        return not self.publishes and self.there.private is not False

    @property
    def publishes(self) -> bool:
        """Whether the push makes the repository public. A pull request never does."""
        options = self.options
        return options.public and not options.pr and self.there.private is not False

    @property
    def sent_bytes(self) -> int:
        """Of the files in the commit; what the Hub has already is not sent again."""
        return sum(self.payload.files[name].size for name in self.changes.sent)

    def to_json(self) -> dict[str, Any]:
        """The schema documented in docs/publishing.md."""
        there, payload, changes = self.there, self.payload, self.changes
        return {
            "format": FORMAT,
            "repo": there.id,
            "endpoint": self.endpoint,
            "exists": there.exists,
            "private": self.private,
            "branch": None if self.options.pr else there.branch,
            "pr": self.options.pr,
            "parent": there.head,
            "account": self.account.name,
            "message": message(payload.build),
            "files": len(payload.files),
            "bytes": payload.bytes,
            "sent_bytes": self.sent_bytes,
            "hashed": payload.hashed,
            "new": list(changes.new),
            "changed": list(changes.changed),
            "unchanged": list(changes.unchanged),
            "deleted": list(changes.deleted),
            "kept": list(changes.kept),
            "left": list(payload.left),
        }


@dataclass(frozen=True)
class Pushed:
    """What stands on the Hub after a push. `sent`: whether a commit was made."""

    commit: str
    url: str
    pr_url: str | None
    private: bool
    sent: bool

    def to_json(self) -> dict[str, Any]:
        """The schema documented in docs/publishing.md."""
        return asdict(self)


Tell = Callable[[str], None]


def _silent(_: str) -> None:
    """Nobody wants to know of a wait."""


def plan_push(
    folder: Path,
    repo: str,
    options: Options,
    *,
    progress: Progress = ignore_progress,
    tell: Tell = _silent,
) -> Plan:
    """Check folder, token and repository, cheap checks first; nothing is changed anywhere.

    `progress` gets the bytes hashed, `tell` a sentence before a wait. Raises `PushError` and
    `CheckpointError`, each with what to do next.
    """
    payload = read_payload(folder, repo)
    api = open_api()
    with explained(repo, options.branch), _redacted_log():
        account = read_account(patiently(api.whoami, tell=tell))
        there = look(api, repo, options.branch, tell)
        if not options.delete:
            _check_beside(payload, there)
        _check_rights(api, account, there, options, tell)
        if payload.card_written:
            _check_card(payload, tell)
    _check_visibility(there, options)
    conformance(payload)
    if options.hash_files:
        payload = hashed(payload, progress)
    changes = compare(payload.files, there, delete=options.delete)
    return Plan(account, there, payload, changes, options, api.endpoint)


def push(plan: Plan, *, tell: Tell = _silent) -> Pushed:
    """Do what was planned, read the listing back, and only then make it public.

    Every file is held against its sha256 once more, and the card is written into the folder, before
    anything is sent. Raises `PushError`; files that have arrived are kept by the Hub, so that the
    same push goes on where it stopped.
    """
    payload, there, options = plan.payload, plan.there, plan.options
    added, files = additions(payload.files, plan.changes)
    if payload.card_written:
        write_file(payload.folder / CARD_NAME, payload.files[CARD_NAME].text or b"")
    api = open_api()
    with explained(there.id, there.branch), _redacted_log():
        head = prepare(api, there, pr=options.pr, tell=tell)
        commit, pr_url = head, None
        if not plan.changes.none:
            sent = upload(
                api, there, head, added, files, plan.changes, payload.build,
                pr=options.pr, tell=tell,
            )  # fmt: skip
            commit, pr_url = sent.commit, sent.pr_url
        read_back(api, there.id, commit, files, plan.changes, tell)
        if plan.publishes:
            _publish(api, there, tell)
    url = f"{api.endpoint}/{there.id}/tree/{commit}"
    return Pushed(commit, url, pr_url, plan.private, not plan.changes.none)


def _publish(api: HfApi, there: Repository, tell: Tell) -> None:
    """Raises `PushError` saying that everything has arrived all the same."""
    try:
        with explained(there.id, there.branch):
            patiently(lambda: api.update_repo_settings(there.id, private=False), tell=tell)
    except PushError as error:
        raise PushError(
            f"{there.id} was pushed and read back, but is still private: {error}"
        ) from error


def open_api() -> HfApi:
    """The client, once it is clear that it may be used. Raises `PushError`."""
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise PushError(
            "HF_HUB_OFFLINE forbids the Hub, and a push needs it: unset it and run this again."
        )
    token = get_token()
    if token is None:
        raise PushError(
            f"no token for {constants.ENDPOINT}: run `hf auth login` with one that may write, or "
            "set HF_TOKEN."
        )
    if not _TOKEN.fullmatch(token):
        raise PushError(
            "the token in use has blanks or other characters that no token has: set HF_TOKEN "
            "anew, or run `hf auth login`."
        )
    return HfApi(library_name="qatpack", token=token)


def conformance(payload: Payload) -> None:
    """Hold the folder against what readers demand, and against its own report.

    Raises `PushError` naming the first error.
    """
    found = payload.results.verification
    if found is not None and not found.passed:
        raise PushError(
            f"{payload.folder}: its own verify_report.json says that it did not pass: "
            f"{found.verdict}; repack it again."
        )
    report = verify(Source(payload.folder))
    if errors := [f for f in report.findings if f.severity is Severity.ERROR]:
        more = f" and {len(errors) - 1} more" if len(errors) > 1 else ""
        raise PushError(
            f"{payload.folder}: readers could not use it: {str(errors[0]).rstrip('.')}{more}; see "
            f"`qatpack verify {payload.folder}`."
        )


def _check_rights(
    api: HfApi, account: Account, there: Repository, options: Options, tell: Tell
) -> None:
    """By what the token says, then for a repository that is there by asking about it."""
    if options.pr:
        if not there.exists:
            raise PushError(
                f"{there.id} is not there, and a pull request needs it: leave out --pr."
            )
        if account.role != "read":
            return
    said = refusal(account, there.id, exists=there.exists, endpoint=api.endpoint)
    if said is not None:
        raise PushError(f"{said}.")
    # Earlier releases of the client cannot ask this; there the upload itself is answered.
    if there.exists and "write" in signature(api.auth_check).parameters:
        patiently(lambda: api.auth_check(there.id, write=True), tell=tell)


def _check_card(payload: Payload, tell: Tell) -> None:
    """Ask the Hub whether it takes the card's metadata.

    Not by `ModelCard.validate`, which in huggingface_hub 1.x asks huggingface.co whatever
    HF_ENDPOINT says.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, hf_raise_for_status

    card = (payload.files[CARD_NAME].text or b"").decode()
    asked = {"repoType": "model", "content": card}

    def validate() -> None:
        response = get_session().post(f"{constants.ENDPOINT}/api/validate-yaml", json=asked)
        hf_raise_for_status(response)

    try:
        patiently(validate, tell=tell)
    except ValueError as error:  # its BadRequestError
        said = redact(" ".join(str(getattr(error, "server_message", error) or "").split()))
        reason = f" ({said})" if said else ""
        raise PushError(
            f"the Hub refuses the metadata of {CARD_NAME}{reason}: mend that of the source's "
            "card, then run `qatpack card` and this again."
        ) from error


def _check_beside(payload: Payload, there: Repository) -> None:
    if odd := mistakable(foreign(payload.files, there)):
        raise PushError(
            f"{there.id} holds {listed(odd)}, which readers could take for this build's weights: "
            "remove what the build does not have with --delete, or choose another repository."
        )


def _check_visibility(there: Repository, options: Options) -> None:
    if there.private is False and not options.public:
        raise PushError(
            f"{there.id} is public: everybody would see the push; say so with --public, or choose "
            "another repository."
        )


class _Redaction(logging.Filter):
    """The client's notes name storage addresses with the permission in them."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        return True


@contextmanager
def _redacted_log() -> Iterator[None]:
    """Keep secrets out of what huggingface_hub logs meanwhile, also under HF_DEBUG."""
    from huggingface_hub.utils import logging as hub_logging

    secrets = _Redaction()
    handlers = list(hub_logging.get_logger("huggingface_hub").handlers)
    for handler in handlers:
        handler.addFilter(secrets)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(secrets)
