"""Sources: local folders of every kind, and the real Hub client against a Hub on loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hub import Hub, sha256

from qatpack.checkpoint.errors import SourceError
from qatpack.checkpoint.source import Source, resolve_source

OLD, NEW = "a" * 40, "b" * 40
NAME = "google/gemma-qat"
WEIGHTS = b"weights" * 40_000
TOKEN = "hf_secretsecretsecret"
FILES = {
    ".gitattributes": b"*.safetensors filter=lfs",
    "LICENSE": b"Apache",
    "README.md": b"card",
    "chat_template.jinja": b"{{ }}",
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "model.gguf": b"gguf",
    "onnx/model.onnx": b"onnx",
    "original/params.json": b"{}",
    "pytorch_model.bin": b"pickle",
}
WANTED = {"LICENSE", "README.md", "chat_template.jinja", "config.json", "model.safetensors"}

# huggingface_hub reads its environment when imported, so each call is a process of its own.
CALL = """
import json, sys
from dataclasses import asdict
from qatpack.checkpoint.errors import SourceError
from qatpack.checkpoint.source import resolve_source

found = []
for name, revision in json.loads(sys.argv[1]):
    try:
        found.append(asdict(resolve_source(name, revision=revision)))
    except SourceError as error:
        found.append(str(error))
print(json.dumps(found, default=str))
"""


def run(hub_url: str, home: Path, *calls: tuple[str, str | None], **env: str) -> Any:
    """What each (source, revision) resolves to, or its error; asserts that no token shows."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    clean |= {"HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", CALL, json.dumps(calls)],
        env=clean | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return [*json.loads(done.stdout), done.stderr]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub({NAME: {OLD: FILES}}, tokens=[TOKEN]) as hub:
        yield hub


def test_branch_is_pinned_and_only_needed_files_are_fetched_once(hub: Hub, tmp_path: Path) -> None:
    first, _ = run(hub.url, tmp_path, (NAME, None))
    assert (first["id"], first["commit"]) == (NAME, OLD)
    assert first["lfs_sha256"] == {"model.safetensors": sha256(WEIGHTS)}
    folder = Path(first["folder"])
    assert folder.name == OLD
    assert {entry.name for entry in folder.iterdir()} == WANTED
    assert hub.downloads() == WANTED
    assert all(hub.requests[f"GET /{NAME}/resolve/{OLD}/{file}"] == 1 for file in WANTED)

    hub.requests.clear()
    second, _ = run(hub.url, tmp_path, (NAME, None))
    assert second == first
    assert not hub.downloads()
    # The folder itself tells as much as the Hub did, without asking it.
    assert asdict(resolve_source(folder)) == first | {"folder": folder}
    assert resolve_source(folder, revision=OLD).commit == OLD


def test_push_during_the_download_changes_nothing(hub: Hub, tmp_path: Path) -> None:
    newer = {**FILES, "model.safetensors": b"newer"}
    hub.after_info.append(lambda: hub.repos[NAME].push(NEW, newer))
    first, _ = run(hub.url, tmp_path, (NAME, "main"))
    assert first["commit"] == OLD
    assert (Path(first["folder"]) / "model.safetensors").read_bytes() == WEIGHTS
    later, pinned, _ = run(hub.url, tmp_path, (NAME, "main"), (NAME, OLD))
    assert later["commit"] == NEW
    assert pinned == first


def test_only_shards_of_the_index_are_fetched(hub: Hub, tmp_path: Path) -> None:
    shards = {f"model-0000{i}-of-00002.safetensors": b"%d" % i for i in (1, 2)}
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    files = {
        **shards,
        "config.json": b"{}",
        "consolidated.safetensors": b"all",
        "model.safetensors.index.json": index,
    }
    hub.repos[NAME].push(NEW, files)
    found, _ = run(hub.url, tmp_path, (NAME, None))
    assert hub.downloads() == set(files) - {"consolidated.safetensors"}
    assert found["lfs_sha256"] == {name: sha256(data) for name, data in shards.items()}


def test_without_index_one_model_file_is_enough(hub: Hub, tmp_path: Path) -> None:
    hub.repos[NAME].push(NEW, {**FILES, "consolidated.safetensors": b"all"})
    run(hub.url, tmp_path, (NAME, None))
    assert hub.downloads() == WANTED


def test_repository_without_safetensors_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.repos[NAME].push(NEW, {"config.json": b"{}", "model.gguf": b"gguf"})
    message, _ = run(hub.url, tmp_path, (NAME, None))
    assert message == (
        f"{NAME} has no safetensors weights at commit {NEW}: give the repository of the"
        " unquantized checkpoint in safetensors files"
    )
    assert not hub.downloads()


def test_broken_download_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    chunk = 10 * 2**20  # the client writes, and so can resume after, whole chunks of this size
    weights = WEIGHTS * 40
    hub.repos[NAME].push(NEW, {**FILES, "model.safetensors": weights})
    hub.drops["model.safetensors"] = chunk + 1000
    found, _ = run(hub.url, tmp_path, (NAME, None))
    assert hub.ranges == [f"model.safetensors bytes={chunk}-"]
    assert (Path(found["folder"]) / "model.safetensors").read_bytes() == weights


def test_offline_uses_what_is_cached_and_complete(hub: Hub, tmp_path: Path) -> None:
    online, _ = run(hub.url, tmp_path, (NAME, None))
    hub.requests.clear()
    calls = [(NAME, None), (NAME, OLD), (NAME, "v2"), ("google/other", None)]
    by_branch, by_commit, *missing, stderr = run(hub.url, tmp_path, *calls, HF_HUB_OFFLINE="1")
    assert by_branch == by_commit == online
    assert "cached" not in stderr
    cache = tmp_path / "hub"
    for (name, revision), message in zip(calls[2:], missing, strict=True):
        assert message == (
            f"{name} at {revision or 'main'} is not complete in the local cache {cache}, and"
            f" HF_HUB_OFFLINE forbids the Hub: unset it, or run `hf download {name}` where there"
            " is a network"
        )
    (Path(online["folder"]) / "model.safetensors").unlink()
    broken, _ = run(hub.url, tmp_path, (NAME, None), HF_HUB_OFFLINE="1")
    assert "is not complete in the local cache" in broken
    assert not hub.requests


def test_unreachable_hub_falls_back_to_the_cache_aloud(hub: Hub, tmp_path: Path) -> None:
    online, _ = run(hub.url, tmp_path, (NAME, None))
    nowhere = "http://127.0.0.1:9"
    cached, message, stderr = run(nowhere, tmp_path, (NAME, None), ("google/other", None))
    assert cached == online
    assert f"using {NAME} as cached, commit {OLD}" in stderr
    assert message == (
        f"google/other at main is not complete in the local cache {tmp_path / 'hub'}, and"
        f" {nowhere} cannot be reached: check the network, proxy and HF_ENDPOINT, then run this"
        " again"
    )


def test_each_refusal_has_its_own_sentence(hub: Hub, tmp_path: Path) -> None:
    for name, state in {"gated": {"gated": True}, "private": {"private": True}}.items():
        hub.repos[f"google/{name}"] = type(hub.repos[NAME])({OLD: FILES}, {"main": OLD}, **state)
    hub.statuses = {
        f"/api/models/google/{status}/revision/main": status for status in (403, 429, 503)
    }
    paths = ["gated", "private", "missing", "403", "429", "503"]
    calls = [*((f"google/{path}", None) for path in paths), (NAME, "v9")]

    *anonymous, _ = run(hub.url, tmp_path, *calls)
    *known, _ = run(hub.url, tmp_path, *calls, HF_TOKEN=TOKEN)
    refused, _ = run(hub.url, tmp_path, (NAME, None), HF_TOKEN=f"{TOKEN}-revoked")

    gated = (
        f"google/gated is gated and your account has no access: accept its terms at"
        f" {hub.url}/google/gated, then run `hf auth login` and this command again"
    )
    assert anonymous[0] == known[0] == gated
    for path, no_token, token in zip(paths[1:3], anonymous[1:3], known[1:3], strict=True):
        assert no_token == (
            f"google/{path} is no folder here, and on {hub.url} it is private or does not exist:"
            f" check the name at {hub.url}/google/{path}, and for a private repository run"
            " `hf auth login` first"
        )
        assert token == (
            f"google/{path} is no folder here and no repository that your account can see on"
            f" {hub.url}: check the name at {hub.url}/google/{path}, or see with"
            " `hf auth whoami` whose token is in use"
        )
    assert known[3].startswith("your token may not read google/403: give it read access")
    assert known[4].startswith("the Hub limits how often you may ask for google/429: wait")
    assert known[5].startswith("the Hub answered 503 for google/503: run this again later")
    assert known[6] == (
        f"{NAME} has no revision v9: choose a branch, tag or commit from"
        f" {hub.url}/{NAME}/commits/main"
    )
    assert refused.startswith(f"the Hub refused your token when asked for {NAME}: renew it")
    for message in [*anonymous, *known, refused]:
        assert "\n" not in message


def test_readers_of_gated_and_private_repositories_get_them(hub: Hub, tmp_path: Path) -> None:
    state = hub.repos[NAME]
    state.gated, state.private, state.readers = True, True, frozenset([TOKEN])
    found, _ = run(hub.url, tmp_path, (NAME, None), HF_TOKEN=TOKEN)
    assert found["commit"] == OLD


def test_cache_on_a_file_is_explained(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub").touch()
    message, _ = run(hub.url, tmp_path, (NAME, None))
    assert message.startswith(f"the local cache {tmp_path / 'hub'} cannot take {NAME} (")
    assert message.endswith("): mend that, or set HF_HOME to a folder on another disk")


def test_local_dir_of_the_real_client_is_recognised(hub: Hub, tmp_path: Path) -> None:
    program = (
        "import sys; from huggingface_hub import snapshot_download;"
        "snapshot_download(sys.argv[1], local_dir=sys.argv[2])"
    )
    folder = tmp_path / "copy"
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
    call = [sys.executable, "-c", program, NAME, str(folder)]
    subprocess.run(call, env=env, check=True, capture_output=True)
    known = Source(folder, None, OLD, {"model.safetensors": sha256(WEIGHTS)})
    assert resolve_source(folder) == known


@pytest.fixture
def local_dir(tmp_path: Path) -> Path:
    records = tmp_path / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    for name, etag in {"config.json": "c" * 40, "model.safetensors": "d" * 64}.items():
        (tmp_path / name).write_bytes(b"{}")
        os.utime(tmp_path / name, (1000, 1000))
        (records / f"{name}.metadata").write_text(f"{OLD}\n{etag}\n1000.5\n")
    return tmp_path


def test_unchanged_local_dir_is_known(local_dir: Path) -> None:
    assert resolve_source(local_dir) == Source(
        local_dir, None, OLD, {"model.safetensors": "d" * 64}
    )


def test_changed_local_dir_is_a_plain_folder(local_dir: Path) -> None:
    os.utime(local_dir / "config.json", (2000, 2000))
    assert resolve_source(local_dir) == Source(local_dir)


@pytest.mark.parametrize("record", [f"{NEW}\n{'c' * 40}\n1000.5\n", "damaged", ""])
def test_local_dir_without_one_commit_is_a_plain_folder(local_dir: Path, record: str) -> None:
    records = local_dir / ".cache" / "huggingface" / "download"
    (records / "config.json.metadata").write_text(record)
    assert resolve_source(local_dir) == Source(local_dir)


def test_file_of_unknown_origin_makes_a_plain_folder(local_dir: Path) -> None:
    (local_dir / "tokenizer.json").touch()
    assert resolve_source(local_dir) == Source(local_dir)


def test_plain_folder_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_source(NAME) == Source(Path(NAME))


def test_revision_of_a_local_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="leave out --revision, or name the repository"):
        resolve_source(tmp_path, revision="main")


def test_revision_of_another_snapshot_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "models--google--gemma-qat" / "snapshots" / OLD
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to(f"../../blobs/{'d' * 64}")
    (folder / "config.json").symlink_to(f"../../blobs/{'c' * 40}")
    found = resolve_source(folder)
    assert found == Source(folder, NAME, OLD, {"model.safetensors": "d" * 64})
    with pytest.raises(SourceError, match=f"at commit {OLD}, and a revision"):
        resolve_source(folder, revision=NEW)


def test_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SourceError, match="is a file: give the folder"):
        resolve_source(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "name", ["", "gemma", "./gemma", "a/b/c", "bad--name/x", f"https://me:{TOKEN}@hf.co/org/name"]
)
def test_neither_folder_nor_hub_id(name: str) -> None:
    with pytest.raises(SourceError, match="neither a folder nor a Hub id") as caught:
        resolve_source(name)
    assert TOKEN not in str(caught.value)


def test_local_folder_never_imports_the_client(tmp_path: Path) -> None:
    program = (
        "import sys; from qatpack.checkpoint.source import resolve_source;"
        "resolve_source(sys.argv[1]); sys.exit('huggingface_hub' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
