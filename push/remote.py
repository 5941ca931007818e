"""What is on the Hub: the repository, its branch, and the files of one commit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..checkpoint.errors import PushError
from ..checkpoint.hub import class_names
from .folder import LocalFile
from .refusals import patiently

if TYPE_CHECKING:
    from huggingface_hub import HfApi

OWN = (".gitattributes",)
"""Files of the repository itself, never deleted."""

_READ = re.compile(r"[^/]+\.(safetensors|bin|pt|gguf)|model\.safetensors\.index\.json")
"""Files that a reader could take for weights of the build, at the top of the repository."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a commit. `sha256`: of its content, for LFS files; `git_oid`: for the others."""

    size: int
    sha256: str | None
    git_oid: str

    def holds(self, file: LocalFile) -> bool:
        """Whether its content is the local file's, as far as the hashes at hand tell."""
        if self.size != file.size:
            return False
        if self.sha256 is not None:
            return self.sha256 == file.sha256
        return self.git_oid == file.git_oid()


@dataclass(frozen=True)
class Repository:
    """Where a push goes, as it is before it.

    `head`: the commit that the push builds on, None for a repository that is not there yet.
    `private`: None likewise. `has_branch`: whether the branch is there already.
    """

    id: str
    branch: str
    head: str | None = None
    private: bool | None = None
    has_branch: bool = False
    files: Mapping[str, RemoteFile] = field(default_factory=dict)

    @property
    def exists(self) -> bool:
        """Whether it is there and visible to the token."""
        return self.head is not None


def look(api: HfApi, repo: str, branch: str, tell: Callable[[str], None]) -> Repository:
    """The repository at its branch; at `main` where it has no such branch yet."""
    found, has_branch = None, True
    for revision in dict.fromkeys((branch, "main")):
        try:
            found = patiently(lambda r=revision: api.model_info(repo, revision=r), tell=tell)
            has_branch = revision == branch
            break
        except Exception as error:
            names = class_names(error)
            if "RepositoryNotFoundError" in names and "GatedRepoError" not in names:
                return Repository(repo, branch)
            if "RevisionNotFoundError" not in names or revision == "main":
                raise
    if found is None or found.sha is None:
        raise PushError(f"the Hub names no commit of {repo} at {branch}; run this again.")
    files = list_files(api, repo, found.sha, tell)
    return Repository(repo, branch, found.sha, bool(found.private), has_branch, files)


def list_files(
    api: HfApi, repo: str, commit: str, tell: Callable[[str], None]
) -> dict[str, RemoteFile]:
    """Every file of one commit by its path."""
    from huggingface_hub.hf_api import RepoFile

    # The client's 2.x repeats this itself, 1.x only from the second page on.
    entries = patiently(
        lambda: list(api.list_repo_tree(repo, recursive=True, revision=commit)), tell=tell
    )
    return {
        entry.path: RemoteFile(entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)
        for entry in entries
        if isinstance(entry, RepoFile)
    }


@dataclass(frozen=True)
class Changes:
    """What a push does to the files of a repository, by name, sorted."""

    new: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    deleted: tuple[str, ...]
    kept: tuple[str, ...]
    """Files there that the build does not have and that stay."""

    @property
    def sent(self) -> tuple[str, ...]:
        """The files that the commit holds."""
        return tuple(sorted((*self.new, *self.changed)))

    @property
    def none(self) -> bool:
        """Whether the repository already is what it should be."""
        return not self.sent and not self.deleted


def compare(files: Mapping[str, LocalFile], there: Repository, *, delete: bool) -> Changes:
    """What has to change. With `delete`, files that the build does not have go."""
    common = sorted(files.keys() & there.files.keys())
    same = tuple(name for name in common if there.files[name].holds(files[name]))
    foreign = tuple(sorted(there.files.keys() - files.keys() - set(OWN)))
    return Changes(
        new=tuple(sorted(files.keys() - there.files.keys())),
        changed=tuple(name for name in common if name not in same),
        unchanged=same,
        deleted=foreign if delete else (),
        kept=() if delete else foreign,
    )


def mistakable(names: Iterable[str]) -> list[str]:
    """Those of the files left there that readers could load instead of the build."""
    return [name for name in names if _READ.fullmatch(name)]


def differences(files: Mapping[str, LocalFile], there: Mapping[str, RemoteFile]) -> list[str]:
    """The pushed files that the listing lacks or describes otherwise."""
    return sorted(n for n, file in files.items() if n not in there or not there[n].holds(file))
