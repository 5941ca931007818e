"""One repacked folder of the embedded checkpoint, and a Hub on loopback to push it to."""

import json
import shutil
import time

import huggingface_hub
import pytest
from click.testing import CliRunner
from hub import Account, Hub
from push_names import COMMIT, READER, REPO, SOURCE, TOKEN
from verify_builds import DEMO

from qatpack.checkpoint.source import Source
from qatpack.cli import main
from qatpack.push import job
from qatpack.repack.job import repack


@pytest.fixture(scope="session")
def repacked(tmp_path_factory):
    """Never written to: see `build`."""
    out = tmp_path_factory.mktemp("push") / "build"
    repack(Source(DEMO, SOURCE, COMMIT, {}), out)
    return out


@pytest.fixture
def build(repacked, tmp_path):
    folder = tmp_path / "build"
    shutil.copytree(repacked, folder)
    return folder


@pytest.fixture
def hub():
    accounts = {
        TOKEN: Account("nina", orgs={"acme": "write", "guests": "read"}),
        READER: Account("nina", role="read", orgs={"acme": "write"}),
    }
    with Hub({}, accounts=accounts) as hub:
        yield hub


@pytest.fixture
def waits(monkeypatch):
    """The seconds that were slept, without sleeping."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


@pytest.fixture
def client(hub, tmp_path, monkeypatch, waits):
    """huggingface_hub in this process speaks to the Hub, with nobody's cache or token file."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    address = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return monkeypatch


@pytest.fixture
def no_conformance(monkeypatch):
    """Readers' demands are checked in tests of their own: they need torch."""
    monkeypatch.setattr(job, "conformance", lambda payload: None)


@pytest.fixture
def push(client, no_conformance, build):
    """`push(..., code=0)`: the command on the build and `REPO`; no token shows, ever."""

    def run(*arguments, code=0, repo=REPO, folder=build, given=None):
        command = ["push", str(folder), repo, *map(str, arguments)]
        result = CliRunner().invoke(main, command, input=given)
        assert result.exit_code == code, result.output
        for secret in ("hf_writer", "hf_reader", "X-Amz-Signature"):
            assert secret not in result.output
        if code == 1:
            assert "Traceback" not in result.output
            assert result.stderr.strip().splitlines()[-1].startswith("Error: ")
        return result

    return run


@pytest.fixture
def stored(hub, build):
    """Asserts that a repository's branch holds the folder's files, and gives them."""

    def check(repo=REPO, ref="main", others=(".gitattributes",)):
        files = hub.repos[repo].head(ref)
        manifest = json.loads((build / "repack_report.json").read_text())
        names = {record["name"] for record in manifest["files"]} | {"repack_report.json"}
        assert set(files) >= names
        for name in set(files) - set(others):
            data = files[name] if isinstance(files[name], bytes) else files[name].read_bytes()
            assert data == (build / name).read_bytes(), name
        return files

    return check
