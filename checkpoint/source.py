"""Where a checkpoint comes from: a local folder, or a Hub repository pinned to one commit."""

import glob
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import SourceError
from .folder import INDEX_NAME
from .hub import COMMIT, SHA256, TOKEN, class_names, sentence, status_code
from .sidecars import is_sidecar

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

# huggingface_hub is imported where it is used: a local folder must not pay for it.


NOT_CACHED = "{id} at {revision} is not complete in the local cache {cache}"

MESSAGES = {
    "GatedRepoError": (
        "{id} is gated and your account has no access: accept its terms at {url}, then run"
        " `hf auth login` and this command again"
    ),
    "RevisionNotFoundError": (
        "{id} has no revision {revision}: choose a branch, tag or commit from {url}/commits/main"
    ),
    "RepositoryNotFoundError 401": (
        "{id} is no folder here, and on {endpoint} it is private or does not exist: check the name"
        " at {url}, and for a private repository run `hf auth login` first"
    ),
    "RepositoryNotFoundError": (
        "{id} is no folder here and no repository that your account can see on {endpoint}: check"
        " the name at {url}, or see with `hf auth whoami` whose token is in use"
    ),
    "DisabledRepoError": "{id} was disabled on the Hub: {url} says why",
    "OfflineModeIsEnabled": (
        NOT_CACHED + ", and HF_HUB_OFFLINE forbids the Hub: unset it, or run `hf download {id}`"
        " where there is a network"
    ),
    "LocalEntryNotFoundError": (
        NOT_CACHED + ", and {endpoint} did not answer: check the network and run this again"
    ),
    "TransportError": (
        NOT_CACHED + ", and {endpoint} cannot be reached: check the network, proxy and HF_ENDPOINT,"
        " then run this again"
    ),
    "FileMetadataError": (
        "{endpoint} does not answer as a Hub for {id}: check HF_ENDPOINT and the proxy"
    ),
    "HfHubHTTPError 401": (
        "the Hub refused your token when asked for {id}: renew it with `hf auth login`, and unset"
        " HF_TOKEN if an old one is there"
    ),
    "HfHubHTTPError 403": (
        "your token may not read {id}: give it read access at {endpoint}/settings/tokens"
    ),
    "HfHubHTTPError 429": (
        "the Hub limits how often you may ask for {id}: wait a few minutes, or run `hf auth login`"
        " for a higher limit"
    ),
    "HfHubHTTPError": (
        "the Hub answered {status} for {id}: run this again later; finished files are kept"
    ),
    "OSError": (
        "the local cache {cache} cannot take {id} ({reason}): mend that, or set HF_HOME to a"
        " folder on another disk"
    ),
}
"""From an exception's class, or one of its bases, and HTTP status to the sentence users read."""


@dataclass(frozen=True)
class Source:
    """A checkpoint on this disk and what is known of its origin.

    `lfs_sha256` gives the sha256 of files, by name, that the Hub keeps under it: what the file
    was when it was downloaded, known without hashing. Empty for a folder of unknown origin.
    """

    folder: Path
    id: str | None = None
    """`org/name` on the Hub."""
    commit: str | None = None
    """The 40 hex digits of the Hub commit that every file belongs to."""
    lfs_sha256: Mapping[str, str] = field(default_factory=dict)


def resolve_source(source: str | os.PathLike[str], *, revision: str | None = None) -> Source:
    """Find a checkpoint: an existing folder, or else `org/name` on the Hub, downloaded.

    A folder is taken as it is, and recognised when huggingface_hub wrote it (its cache, or
    `hf download --local-dir`). A repository's `revision` (a branch, tag or commit; default
    `main`) is first resolved to a commit, and only that commit's files are used: later pushes
    change nothing. Fetched are the top-level sidecars (`SIDECARS`) and the weights: the shards
    that the index names; without an index `model.safetensors`; without either every
    `*.safetensors`. The files lie in huggingface_hub's cache and its settings hold (HF_HOME,
    HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE); offline, the cached commit of the revision serves.

    Raises:
        SourceError: nothing is there, or it cannot be reached; one sentence with the next step.
    """
    name = os.fspath(source)
    try:
        folder = Path(name).expanduser()
    except RuntimeError:  # ~nobody/...
        folder = Path(name)
    if name and folder.is_dir():  # Path("") is the current folder
        return _local(folder, revision)
    if name and folder.exists():
        raise SourceError(f"{name} is a file: give the folder of the checkpoint instead")
    if not _is_hub_id(name):
        raise SourceError(
            f"{TOKEN.sub('hf_...', name)!r} is neither a folder nor a Hub id: give a folder that"
            " holds config.json and safetensors, or a name like"
            " google/gemma-4-E2B-it-qat-q4_0-unquantized"
        )
    return _from_hub(name, revision or "main")


def fetch_dataset_file(name: str, file: str, commit: str) -> Path:
    """One file of the Hub dataset `org/name` at a commit, from huggingface_hub's cache or the Hub.

    Raises `SourceError` where neither has it.
    """
    from huggingface_hub import hf_hub_download

    with _explained(f"datasets/{name}", commit):
        return Path(hf_hub_download(name, file, repo_type="dataset", revision=commit))


def _is_hub_id(name: str) -> bool:
    if name.count("/") != 1:
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _local(folder: Path, revision: str | None) -> Source:
    source = _from_snapshot(folder) or _from_local_dir(folder) or Source(folder)
    if revision not in (None, source.commit):
        is_at = f", at commit {source.commit}" if source.commit else ""
        raise SourceError(
            f"{folder} is a local folder{is_at}, and a revision chooses among a Hub repository's"
            " commits: leave out --revision, or name the repository as org/name"
        )
    return source


def _from_snapshot(folder: Path) -> Source | None:
    """`models--org--name/snapshots/<commit>/` of a huggingface_hub cache, else None.

    A cached LFS file is a link to `../../blobs/<its sha256>`; other files' blobs are git's 40 hex.
    """
    snapshot = folder.resolve()
    kind, *names = snapshot.parent.parent.name.split("--")
    if snapshot.parent.name != "snapshots" or kind != "models" or len(names) != 2:
        return None
    if not COMMIT.fullmatch(snapshot.name):
        return None
    links = {
        entry.name: Path(os.readlink(entry)) for entry in snapshot.iterdir() if entry.is_symlink()
    }
    sha256 = {
        file: target.name
        for file, target in sorted(links.items())
        if target.parent.name == "blobs" and SHA256.fullmatch(target.name)
    }
    return Source(folder, "/".join(names), snapshot.name, sha256)


def _from_local_dir(folder: Path) -> Source | None:
    """A folder of `hf download --local-dir` none of whose files changed since, else None.

    Its `.cache/huggingface/download/<file>.metadata` has a line each for commit, etag (an LFS
    file's sha256) and time. All or nothing: a file without such a record, changed after it or of
    another commit means that no one commit describes the folder.
    """
    records = folder / ".cache" / "huggingface" / "download"
    if not records.is_dir():
        return None
    commits, sha256 = set(), {}
    for file in sorted(entry.name for entry in folder.iterdir() if _is_kept(entry.name)):
        record = _read_record(records / f"{file}.metadata")
        # huggingface_hub allows this second too: file times are coarser than time.time().
        if record is None or _modified(folder / file) - 1 > record[2]:
            return None
        commits.add(record[0])
        if SHA256.fullmatch(record[1]):
            sha256[file] = record[1]
    if len(commits) != 1:
        return None
    return Source(folder, None, commits.pop(), sha256)


def _modified(path: Path) -> float:
    """Time of the last change; of a link to nothing, never matching a record."""
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")


def _read_record(path: Path) -> tuple[str, str, float] | None:
    try:
        commit, etag, time = path.read_text(encoding="utf-8").split()
        return (commit, etag, float(time)) if COMMIT.fullmatch(commit) else None
    except (OSError, ValueError):
        return None


def _from_hub(name: str, revision: str) -> Source:
    from huggingface_hub import HfApi

    with _explained(name, revision):
        try:
            api = HfApi(library_name="qatpack")
            info = api.model_info(name, revision=revision, files_metadata=True)
        except Exception as error:
            cached = _from_cache(name, revision) if _is_no_answer(error) else None
            if cached is None:
                raise
            if "OfflineModeIsEnabled" not in class_names(error):
                warnings.warn(
                    f"the Hub does not answer: using {name} as cached, commit {cached.commit}",
                    stacklevel=3,
                )
            return cached
        return _download(name, revision, info)


def _download(name: str, revision: str, info: "ModelInfo") -> Source:
    """The wanted files of exactly the commit that `info` describes."""
    from huggingface_hub import hf_hub_download, snapshot_download

    commit, siblings = info.sha, info.siblings or []
    if commit is None:
        raise SourceError(
            f"the Hub names no commit for {name} at {revision}: give one as --revision"
        )
    names = [sibling.rfilename for sibling in siblings]
    shards = None
    if INDEX_NAME in names:
        shards = _shards(Path(hf_hub_download(name, INDEX_NAME, revision=commit)))
    weights = _weights(names, shards)
    if not weights:
        raise SourceError(
            f"{name} has no safetensors weights at commit {commit}: give the repository of the"
            " unquantized checkpoint in safetensors files"
        )
    wanted = weights | {file for file in names if is_sidecar(file)}
    patterns = [glob.escape(file) for file in sorted(wanted)]
    folder = Path(snapshot_download(name, revision=commit, allow_patterns=patterns))
    _remember(folder, revision)
    sha256 = {s.rfilename: s.lfs.sha256 for s in siblings if s.lfs and s.rfilename in wanted}
    return Source(folder, name, commit, sha256)


def _remember(snapshot: Path, revision: str) -> None:
    """Note in the cache which commit a branch or tag is, as huggingface_hub does when not pinned.

    Without it a download by commit is not found offline by its branch. A cache that cannot be
    written is no reason to fail.
    """
    if revision == snapshot.name:
        return
    ref = snapshot.parents[1] / "refs" / revision
    partial = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
    try:
        ref.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(snapshot.name, encoding="utf-8")
        partial.replace(ref)
    except OSError:
        partial.unlink(missing_ok=True)


def _from_cache(name: str, revision: str) -> Source | None:
    """The cached snapshot of a revision if its config and all its weights are there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    names = [entry.name for entry in folder.iterdir() if entry.exists()]
    shards = _shards(folder / INDEX_NAME)
    weights = _weights(names, shards)
    complete = weights and weights >= (shards or set())
    return _from_snapshot(folder) if complete else None


def _shards(index: Path) -> set[str] | None:
    """The files an index names; None without a readable one (its reader will say what is wrong)."""
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _weights(names: Iterable[str], shards: set[str] | None) -> set[str]:
    found = {name for name in names if _is_weights(name)}
    if shards is not None:
        return found & shards
    return found & {"model.safetensors"} or found


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def _is_kept(name: str) -> bool:
    return _is_weights(name) or is_sidecar(name)


def _is_no_answer(error: Exception) -> bool:
    """Whether the Hub was not heard or is down: only then may the cache answer in its place."""
    unheard = not {"OfflineModeIsEnabled", "TransportError"}.isdisjoint(class_names(error))
    return unheard or (status_code(error) or 0) >= 500


@contextmanager
def _explained(name: str, revision: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into the `SourceError` of `MESSAGES`, if it has one."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        cause = error
        # "Not in the cache" is how huggingface_hub wraps what went wrong on the way to the Hub.
        if "LocalEntryNotFoundError" in class_names(error) and isinstance(
            error.__cause__, Exception
        ):
            cause = error.__cause__
        message = _message(cause, name, revision)
        if message is None:
            raise
        raise SourceError(message) from error


def _message(error: Exception, name: str, revision: str) -> str | None:
    from huggingface_hub import constants

    message = sentence(error, MESSAGES)
    return message and message.format(
        id=name,
        revision=revision,
        endpoint=constants.ENDPOINT,
        url=f"{constants.ENDPOINT}/{name}",
        cache=constants.HF_HUB_CACHE,
        status=status_code(error),
        reason=getattr(error, "strerror", None) or type(error).__name__,
    )
