"""The upload: one commit on top of a known one, repeated where that is safe, then read back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..card.build import Build
from ..checkpoint.errors import PushError
from ..checkpoint.hub import status_code
from ..verify.findings import listed
from .folder import LocalFile
from .refusals import TRIES, patiently, pause
from .remote import Changes, Repository, differences, list_files

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi


@dataclass(frozen=True)
class Sent:
    """The commit that now holds the build. `pr_url`: of the pull request, if it is one."""

    commit: str
    pr_url: str | None = None


def message(build: Build) -> str:
    """The commit's summary: source id, source commit, tool version."""
    at = f" at {build.commit}" if build.commit else ""
    return f"Exact W4A16 of {build.source_id or 'a QAT checkpoint'}{at} (qatpack {build.version})"


def description(build: Build) -> str:
    """The commit's text: the options that decide the bytes."""
    flags = {"text only": build.text_only, "per-layer embedding packed": build.pack_ple,
             "tensors off the grid kept": build.keep_off_grid}  # fmt: skip
    return ", ".join([f"{build.scale_dtype} scales", *(name for name, on in flags.items() if on)])


def prepare(api: HfApi, there: Repository, *, pr: bool, tell: Callable[[str], None]) -> str:
    """Create what is missing, repository (private) and branch; the commit to build on."""
    head = there.head
    if head is None:
        patiently(lambda: api.create_repo(there.id, private=True, exist_ok=True), tell=tell)
        head = patiently(lambda: api.model_info(there.id, revision="main"), tell=tell).sha
        if head is None:
            raise PushError(f"the Hub names no commit of the new {there.id}; run this again.")
    if not pr and not there.has_branch and there.branch != "main":
        patiently(
            lambda: api.create_branch(there.id, branch=there.branch, revision=head, exist_ok=True),
            tell=tell,
        )
    return head


def upload(
    api: HfApi,
    there: Repository,
    head: str,
    files: Mapping[str, LocalFile],
    changes: Changes,
    build: Build,
    *,
    pr: bool,
    tell: Callable[[str], None],
) -> Sent:
    """Send what changed as one commit whose parent is `head`.

    Large files first, each checked by the Hub against its sha256 and kept there if a later one
    fails; then the commit. An answer that is lost is not taken for a failure: the branch is looked
    at again. Raises `PushError` where the branch moved meanwhile.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    additions = [
        CommitOperationAdd(name, files[name].text or str(files[name].path)) for name in changes.sent
    ]
    deletions = [CommitOperationDelete(name, is_folder=False) for name in changes.deleted]
    revision = None if pr else there.branch
    api.preupload_lfs_files(there.id, additions, revision=revision, create_pr=pr, free_memory=False)
    for attempt in range(TRIES):
        try:
            return _commit(api, there, head, [*deletions, *additions], build, pr=pr)
        except Exception as error:
            wait = pause(error, attempt)
            if wait is None or attempt == TRIES - 1:
                raise
            if pr and status_code(error) != 429:
                raise PushError(
                    f"the answer to the pull request was lost: look at {api.endpoint}/{there.id}/"
                    "discussions before you run this again."
                ) from error
            tell(f"the commit was not answered; looking at it again in {wait:g} s.")
            time.sleep(wait)
            if not pr and (arrived := _arrived(api, there, head, files, changes, tell)):
                return arrived
    raise AssertionError("the last try returns or raises")


def _commit(
    api: HfApi,
    there: Repository,
    head: str,
    operations: list[CommitOperationAdd | CommitOperationDelete],
    build: Build,
    *,
    pr: bool,
) -> Sent:
    made = api.create_commit(
        there.id,
        operations,
        commit_message=message(build),
        commit_description=description(build),
        revision=None if pr else there.branch,
        create_pr=pr,
        parent_commit=head,
    )
    return Sent(made.oid, made.pr_url)


def _arrived(
    api: HfApi,
    there: Repository,
    head: str,
    files: Mapping[str, LocalFile],
    changes: Changes,
    tell: Callable[[str], None],
) -> Sent | None:
    """The commit that a lost answer was about, None if the branch still stands where it did.

    Raises `PushError` where it moved and holds something else.
    """
    now = patiently(lambda: api.model_info(there.id, revision=there.branch), tell=tell).sha
    if now is None or now == head:
        return None
    found = list_files(api, there.id, now, tell)
    if differences(files, found) or any(name in found for name in changes.deleted):
        raise PushError(
            f"{there.id} was changed on {there.branch} while this ran: look at {api.endpoint}/"
            f"{there.id}/commits/{there.branch} and run this again."
        )
    return Sent(now)


def read_back(
    api: HfApi,
    repo: str,
    commit: str,
    files: Mapping[str, LocalFile],
    changes: Changes,
    tell: Callable[[str], None],
) -> None:
    """Hold the Hub's listing of the new commit against the folder: every file, size and hash.

    Raises `PushError` naming what differs.
    """
    found = list_files(api, repo, commit, tell)
    if wrong := differences(files, found):
        raise PushError(
            f"{repo} at {commit} does not hold what was sent: {listed(wrong)} differ in size or "
            "hash; run this again."
        )
    if stayed := [name for name in changes.deleted if name in found]:
        raise PushError(f"{repo} at {commit} still holds {listed(stayed)}; run this again.")
