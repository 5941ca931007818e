"""What stops a push before anything is sent, each with its own sentence."""

import json
import traceback
from importlib import import_module

import pytest
from click.testing import CliRunner
from hub import Account, Fault, Repo
from push_names import READER, REPO, TOKEN

from qatpack.checkpoint.hub import HUB_ID
from qatpack.cli import main
from qatpack.push import job, upload
from qatpack.push.rights import Account as Known
from qatpack.push.rights import read_account, refusal

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


PNG = b"\x89PNG\r\n\x1a\n"


def untouched(hub):
    return not hub.asked(r"PUT .*|POST (?!/api/validate-yaml).*")


def test_no_token(push, hub, client):
    client.delenv("HF_TOKEN")
    result = push(code=1)
    assert f"no token for {hub.url}: run `hf auth login` with one that may write" in result.stderr
    assert not hub.requests


@pytest.mark.parametrize("token", ["hf_writer\x00writerwriter", "hf_writer writerwriter", "hf_wäh"])
def test_a_token_that_is_none_is_not_even_sent(push, hub, client, token):
    if "\x00" in token:
        client.setattr("huggingface_hub.get_token", lambda: token)
    else:
        client.setenv("HF_TOKEN", token)
    result = push(code=1)
    assert "the token in use has blanks or other characters" in result.stderr
    assert not hub.requests


def test_offline(push, hub, client):
    client.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = push(code=1)
    assert "HF_HUB_OFFLINE forbids the Hub, and a push needs it" in result.stderr
    assert not hub.requests


def test_a_hub_that_cannot_be_reached(push, client, waits):
    client.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    result = push(code=1)
    assert "http://127.0.0.1:9 cannot be reached: check the network" in result.stderr
    assert waits == [1, 2, 4, 8]


def test_what_is_no_hub(push, hub):
    hub.statuses["/api/whoami-v2"] = 404
    assert "does not know what a push asks of it" in push(code=1).stderr


def test_a_refused_token(push, client):
    client.setenv("HF_TOKEN", "hf_unknownunknown")
    result = push(code=1)
    assert "the Hub refused your token: renew it with `hf auth login`" in result.stderr
    assert "hf_unknown" not in result.output


SCOPES = {
    "none": {},
    "read": {("org", "acme"): ["repo.content.read"]},
    "other": {("user", "nina"): ["repo.write"]},
    "model": {("model", REPO): ["repo.write"]},
    "org": {("org", "acme"): ["repo.content.read", "repo.write"]},
}


@pytest.mark.parametrize(
    ("account", "repo", "exists", "said"),
    [
        (Account("nina", "read", {"acme": "write"}), REPO, False, "nina may only read: make one"),
        (Account("nina"), REPO, False, "nina is no member of acme: push to nina/demo-w4a16"),
        (Account("nina", orgs={"acme": "read"}), REPO, False, "nina may only read in acme"),
        (Account("nina", "fineGrained", {"acme": "write"}, SCOPES["none"]), REPO, False,
         "may not create repositories of acme: tick write access"),
        (Account("nina", "fineGrained", {"acme": "write"}, SCOPES["read"]), REPO, True,
         f"may not write to {REPO}: tick write access"),
        (Account("nina", "fineGrained", {"acme": "write"}, SCOPES["other"]), REPO, True,
         f"may not write to {REPO}"),
        (Account("nina", "fineGrained", {"acme": "write"}, SCOPES["model"]), REPO, False,
         "may not create repositories of acme"),
        (Account("nina", "fineGrained", {"acme": "write"}, SCOPES["model"]), REPO, True, None),
        (Account("nina", "fineGrained", {"acme": "write"}, SCOPES["org"]), REPO, False, None),
        (Account("nina", orgs={"acme": "admin"}), REPO, False, None),
        (Account("nina"), "nina/demo", False, None),
        (Account("nina", orgs={"acme": "contributor"}), REPO, True, "Forbidden: you cannot write"),
    ],
)  # fmt: skip
def test_rights(push, hub, account, repo, exists, said):
    hub.accounts[TOKEN] = account
    if exists:
        hub.repos[repo] = Repo({"a" * 40: {}}, {"main": "a" * 40}, private=True)
    result = push(repo=repo, code=0 if said is None else 1)
    if said is not None:
        assert said in result.stderr
        assert untouched(hub)


def test_a_hub_that_says_less_about_rights_is_left_to_answer_itself():
    account = read_account({"name": "nina", "orgs": [{"name": "acme"}], "auth": {"type": "oauth"}})
    assert account == Known("nina", None, {"acme": None})
    assert refusal(account, REPO, exists=False, endpoint="e") is None
    cased = Known("Nina", None, {"ACME": "write"})
    assert refusal(cased, REPO, exists=False, endpoint="e") is None
    assert refusal(cased, "nina/x", exists=False, endpoint="e") is None
    scoped = Known("Nina", "fineGrained", {}, frozenset({("user", "nina")}))
    assert refusal(scoped, "NINA/x", exists=False, endpoint="e") is None
    odd = {"auth": {"accessToken": {"role": "fineGrained", "fineGrained": {"scoped": [None, 3]}}}}
    assert read_account(odd).scopes == frozenset()
    assert read_account({"orgs": None, "auth": []}).role is None


def test_gated_private_and_unwritable_differ(push, hub):
    states = {"gated": {"gated": True}, "theirs": {"private": True}, "plain": {}}
    for name, state in states.items():
        hub.repos[f"acme/{name}"] = Repo({"a" * 40: {}}, {"main": "a" * 40}, **state)
    hub.faults.append(Fault(r"GET /api/models/acme/gated/revision/main", 403))
    gated = push("--public", "--yes", repo="acme/gated", code=1).stderr
    assert "your token may not write to acme/gated" in gated
    gated = push("--public", "--yes", repo="acme/gated", code=1).stderr
    assert f"acme/gated is gated and your account has no access: accept its terms at {hub.url}" in (
        gated
    )
    hub.accounts[TOKEN] = Account("nina", orgs={"acme": "write"})
    hub.faults.append(Fault(r"POST /api/models/acme/plain/preupload/main", 403, message="no way"))
    plain = push("--public", "--yes", repo="acme/plain", code=1).stderr
    assert 'your token may not write to acme/plain ("no way"): give it write access' in plain


def test_a_name_that_somebody_took_out_of_sight(push, hub, client):
    """A repository that the token may not see looks missing, and its name is taken."""
    hub.repos["nina/taken"] = Repo({"a" * 40: {}}, {"main": "a" * 40}, private=True)
    client.setattr(hub, "visible", _hide(hub, "nina/taken"))
    result = push(repo="nina/taken", code=1)
    assert "nina/taken is not there, or is private and your account may not see it" in result.stderr


def _hide(hub, hidden):
    from hub.state import Refusal

    visible = hub.visible

    def see(name, token):
        if name == hidden:
            raise Refusal(404, "RepoNotFound", "Repository not found")
        return visible(name, token)

    return see


def test_storage_that_has_to_be_paid(push, hub):
    hub.faults.append(Fault(rf"POST /{REPO}.git/.*", 402, message="Private storage is full"))
    result = push(code=1)
    assert 'the Hub wants payment for acme/demo-w4a16 ("Private storage is full")' in result.stderr


@pytest.mark.parametrize("status", [401, 403, 404])
def test_final_answers_are_not_tried_again(push, hub, waits, status):
    hub.faults.append(Fault(r"PUT /storage/.*", status, times=100))
    push(code=1)
    assert hub.asked(r"PUT /storage/.*") == 1
    assert waits == []


def test_a_hub_without_xet(push, hub, client):
    """The client takes Xet wherever hf_xet is installed; the way out is named."""
    pytest.importorskip("hf_xet")
    client.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    result = push(code=1)
    assert hub.asked(rf"GET /api/models/{REPO}/xet-write-token/.*") >= 1
    assert "HF_HUB_DISABLE_XET=1 sends them over LFS instead" in result.stderr


def test_metadata_that_the_hub_refuses(push, hub, build):
    card = (build / "ORIGINAL_README.md").read_text()
    manifest = json.loads((build / "repack_report.json").read_text())
    (build / "ORIGINAL_README.md").write_text(card.replace("apache-2.0", "my-own-3"))
    for record in manifest["files"]:
        if record["name"] == "ORIGINAL_README.md":
            record["bytes"] = (build / "ORIGINAL_README.md").stat().st_size
    (build / "repack_report.json").write_text(json.dumps(manifest))
    result = push("--no-hash", code=1)
    assert "the Hub refuses the metadata of README.md" in result.stderr
    assert untouched(hub)


def change_manifest(build, change):
    path = build / "repack_report.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_an_unfinished_folder(push, hub, build):
    (build / "repack_report.json").unlink()
    result = push(code=1)
    assert "has no repack_report.json; it is unfinished or not made by qatpack" in result.stderr
    assert not hub.requests


def test_files_that_are_missing_cut_or_changed(push, hub, build):
    path = build / "tokenizer.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert f"{path}: has {len(whole) - 1:,} bytes, repack_report.json says" in push(code=1).stderr
    path.write_bytes(whole[:-1] + b" ")
    assert "have another sha256 than repack_report.json records" in push(code=1).stderr
    assert untouched(hub)
    result = push("--no-hash", "--dry-run")
    assert "hashes      skipped (--no-hash)" in result.stdout
    path.unlink()
    assert "lacks tokenizer.json, named by repack_report.json" in push(code=1).stderr


def test_a_folder_repacked_without_hashes(push, build, stored):
    def forget(manifest):
        for record in manifest["files"]:
            record["sha256"] = None

    change_manifest(build, forget)
    assert "hashes      skipped (--no-hash)" in push("--no-hash", repo="acme/unhashed").stdout
    stored("acme/unhashed")
    assert "hashes      0 as in the manifest, 8 not recorded" in push().stdout
    stored()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_that_changes_after_the_plan_is_not_sent(push, hub, build, monkeypatch, name):
    def meanwhile(*_):
        data = bytearray((build / name).read_bytes())
        data[-1] ^= 1
        (build / name).write_bytes(data)

    monkeypatch.setattr(import_module("qatpack.cli.push"), "_confirm", meanwhile)
    for options in ((), ("--no-hash",)):
        result = push(*options, code=1)
        assert f"{build / name}: has changed since it was repacked or read" in result.stderr
        assert untouched(hub)
        meanwhile()


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "/etc/passwd",
        "a/../../b",
        "",
        "a\nb",
        "..",
        "a\\b",
        "./config.json",
        ".",
        ".env",
        ".git/config",
        ".gitattributes",
        "a/.b",
    ],
)
def test_a_manifest_that_names_files_outside(push, hub, build, name):
    change_manifest(build, lambda m: m["files"].append({"name": name, "bytes": 1, "sha256": None}))
    result = push(code=1)
    assert "which is no file inside the folder" in result.stderr
    assert not hub.requests


@pytest.mark.parametrize(
    "name", ["config.json", "README.md", "ORIGINAL_README.md", "repack_report.json", "plots/a.png",
             "verify_report.json", "plots"],
)  # fmt: skip
def test_a_file_that_is_a_link_is_not_followed(push, hub, build, tmp_path, name):
    secret = tmp_path / "secret"
    path = build / name
    path.parent.mkdir(exist_ok=True)
    if name == "plots":
        secret.mkdir()
        (secret / "a.png").write_bytes(PNG)
    elif path.exists():
        path.rename(secret)
    else:
        secret.write_text("secret")
    path.symlink_to(secret)
    result = push(code=1)
    assert f"{path}: is a link to {secret}, and only files of the folder itself" in result.stderr
    assert not hub.requests


def test_a_plot_that_is_no_picture(push, hub, build):
    (build / "plots").mkdir()
    (build / "plots" / "a.png").write_bytes(b"SECRET=1")
    assert "plots/a.png: is no PNG picture; remove it" in push(code=1).stderr
    assert not hub.requests


def test_a_report_of_its_own_that_failed(client, hub, build, monkeypatch):
    from qatpack.checkpoint.hashing import hash_file

    report = json.loads((build / "repack_report.json").read_text())
    failed = {
        "format": "qatpack.verify/1", "tool": {"version": "1"}, "complete": True, "passed": False,
        "build": {"name": "b", "manifest_sha256": hash_file(build / "repack_report.json")},
        "reference": None, "verdict": {"text": "damaged: 3 scales"}, "findings": [], "checks": [],
        "fidelity": None, "copied": None, "provenance": None,
    }  # fmt: skip
    (build / "verify_report.json").write_text(json.dumps(failed))
    result = CliRunner().invoke(main, ["push", str(build), REPO])
    assert result.exit_code == 1
    assert "its own verify_report.json says that it did not pass: damaged: 3 scales" in (
        result.stderr
    )
    assert report
    assert untouched(hub)


def test_a_folder_that_readers_cannot_use(client, hub, build):
    config = json.loads((build / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    text = json.dumps(config)
    (build / "config.json").write_text(text)

    def resize(manifest):
        for record in manifest["files"]:
            if record["name"] == "config.json":
                record["bytes"] = len(text)

    change_manifest(build, resize)
    result = CliRunner().invoke(main, ["push", str(build), REPO, "--no-hash"])
    assert result.exit_code == 1
    assert "readers could not use it" in result.stderr
    assert untouched(hub)


def test_no_token_even_in_a_traceback(client, hub, build, no_conformance):
    """A Hub, or a proxy, that repeats what it was sent."""
    hub.faults.append(Fault("GET /api/whoami-v2", 403, message=f"bad token {TOKEN} at {READER}"))
    result = CliRunner().invoke(main, ["--debug", "push", str(build), REPO])
    shown = "".join(traceback.format_exception(result.exception)) + result.output
    assert "HfHubHTTPError" in shown
    assert "hf_..." in shown
    for secret in ("hf_writer", "hf_reader"):
        assert secret not in shown


def test_no_token_in_what_the_client_logs(push, hub):
    hub.faults.append(Fault(r"PUT /storage/.*", 500, message=f"bad token {TOKEN}"))
    push()  # asserts it of the client's own notes about the retry


def test_no_token_in_any_file(push, build):
    push()
    for path in build.rglob("*"):
        assert path.is_dir() or b"hf_writer" not in path.read_bytes(), path


def test_interrupted(push, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(upload, "_commit", stop)
    assert "push and evaluate when run again" in push(code=1).stderr


@pytest.mark.parametrize("name", ["", "-x", "a b", "a..b", "a/", "v1.lock", "a~1", "é:x", "a" * 40])
def test_a_branch_that_git_would_not_take(push, hub, name):
    assert "cannot name a branch" in push("--branch", name, code=2).stderr
    assert not hub.requests


@pytest.mark.parametrize("asked", ["²", "٣", "-1", "soon", "1e3", ""])
def test_a_wait_that_is_no_number(push, waits, hub, asked):
    headers = {"Retry-After": asked.encode().decode("latin-1")}
    hub.faults.append(Fault("GET /api/whoami-v2", 503, headers=headers))
    push()
    assert waits == [1]


def test_a_refusal_without_a_reason(push, hub):
    hub.faults.append(Fault("POST /api/validate-yaml", 400, message=""))
    assert "refuses the metadata of README.md: mend that" in push(code=1).stderr


NO_IDS = [
    "demo",
    "../..",
    "a/..",
    "a--b/c",
    "a/b.git",
    ".a/b",
    "a/b-",
    "a/b/c",
    "é/b",
    "a/" + "b" * 97,
]


def test_hub_ids_are_those_of_huggingface_hub():
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    for name in ("a/b", "Org_1/x.y-z", "a/_b", "a/" + "b" * 96):
        validate_repo_id(name)
        assert HUB_ID.fullmatch(name), name
    for name in NO_IDS[1:]:
        assert not HUB_ID.fullmatch(name), name
        with pytest.raises(HFValidationError):
            validate_repo_id(name)


@pytest.mark.parametrize("name", NO_IDS)
def test_a_name_that_is_none(push, name):
    assert "is no Hub id; write org/name" in push(repo=name, code=2).stderr
    assert job.FORMAT == "qatpack.push/1"
