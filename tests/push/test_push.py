"""The whole command against a Hub on loopback, by the real client."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub import Account, Fault, Hub, Repo, sha256
from push_names import COMMIT, REPO, SOURCE, TOKEN
from verify_builds import DEMO

from qatpack.checkpoint.source import Source, resolve_source
from qatpack.repack.job import repack
from qatpack.repack.plan import Options
from qatpack.verify.job import Options as VerifyOptions
from qatpack.verify.job import open_reference, verify

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

PUT = r"PUT /storage/.*"
COMMITS = rf"POST /api/models/{REPO}/commit/.*"


def hand_write(folder, text):
    path = folder / "README.md"
    mark = "<!-- hand-written: notes -->\n"
    path.write_text(path.read_text().replace(mark, f"{mark}{text}\n"))


def test_a_folder_becomes_a_private_repository_in_one_commit(push, hub, stored):
    result = push()
    files = stored()
    assert hub.repos[REPO].private
    assert len(hub.repos[REPO].commits) == 2  # the Hub's own first one, and ours
    assert hub.repos[REPO].messages == [
        f"Exact W4A16 of {SOURCE} at {COMMIT} (qatpack 0.1.0)",
        "bfloat16 scales",
    ]
    assert f"vllm serve {REPO}" in files["README.md"].decode()
    assert "Pushed, and read back: 10 files with their sizes and hashes." in result.stdout
    assert f"Next: qatpack verify {REPO}@{hub.repos[REPO].refs['main']}" in result.stdout
    assert result.stderr == ""


def test_the_documented_calls(push, hub, build, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "publishing.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    build.rename(tmp_path / "gemma-4-E2B-it-w4a16")
    monkeypatch.chdir(tmp_path)
    hub.accounts[TOKEN] = Account("nina", orgs={"my-org": "write"})
    exec(code, {})
    assert "model.safetensors" in hub.repos["my-org/gemma-4-E2B-it-w4a16"].head()


def test_a_second_push_sends_nothing(push, hub):
    push()
    before = hub.repos[REPO].refs["main"]
    hub.requests.clear()
    result = push()
    assert "Nothing to push" in result.stdout
    assert hub.repos[REPO].refs["main"] == before
    assert not hub.asked(r"(POST|PUT) (?!/api/validate-yaml).*")


def test_only_what_changed_is_sent(push, hub, build, stored):
    push()
    hand_write(build, "Made on a Tuesday.")
    result = push()
    assert "changed     1: README.md" in result.stdout
    assert "unchanged   9" in result.stdout
    assert "Made on a Tuesday." in stored()["README.md"].decode()
    assert hub.asked(PUT) == 1


def test_dry_run_changes_nothing(push, hub, build):
    before = (build / "README.md").read_bytes()
    result = push("--dry-run")
    assert "will be created, private" in result.stdout
    assert "8 as in the manifest" in result.stdout
    assert "Nothing was changed." in result.stdout
    assert hub.repos == {}
    assert (build / "README.md").read_bytes() == before


def test_json_is_the_plan_and_the_result_and_nothing_else(push, hub):
    plan = json.loads(push("--dry-run", "--json").stdout)
    assert plan["format"] == "qatpack.push/1"
    assert (plan["repo"], plan["exists"], plan["private"], plan["pushed"]) == (
        REPO, False, True, None,
    )  # fmt: skip
    assert len(plan["new"]) == plan["files"] == 10
    done = json.loads(push("--json").stdout)
    assert done["pushed"]["commit"] == hub.repos[REPO].refs["main"]


def test_what_the_manifest_does_not_list_stays_here(push, build, stored):
    (build / ".env").write_text("SECRET=1")
    (build / "logs").mkdir()
    (build / "logs" / "run.log").write_text("x")
    (build / "model.safetensors.partial").write_text("x")
    result = push()
    assert "stays here  3: .env, logs/run.log, model.safetensors.partial" in result.stdout
    assert not {".env", "logs/run.log", "model.safetensors.partial"} & set(stored())


def test_there_and_back_again(push, hub, build, stored):
    """repack, push, download at the pinned commit, verify: the same bytes."""
    report = verify(resolve_source(build), open_reference(resolve_source(DEMO)),
                    VerifyOptions(conformance=False))  # fmt: skip
    (build / "verify_report.json").write_text(json.dumps(report.to_json()))
    push()
    commit = hub.repos[REPO].refs["main"]
    hub.repos[REPO].push("d" * 40, {"config.json": b"{}", "model.safetensors": b"newer"})
    back = resolve_source(REPO, revision=commit)
    assert (back.id, back.commit) == (REPO, commit)
    names = {p.name for p in back.folder.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
    for name in names:
        assert (back.folder / name).read_bytes() == (build / name).read_bytes()
    again = verify(back, open_reference(resolve_source(DEMO)), VerifyOptions(conformance=False))
    assert again.passed
    assert again.total == report.total
    assert "0.231 %" in hub.repos[REPO].commits[commit]["README.md"].decode()


def test_a_handwritten_card_goes_as_it_is(push, build, stored):
    (build / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    result = push()
    assert "warning: README.md: is not written by qatpack" in result.stderr
    assert stored()["README.md"] == b"---\nlicense: mit\n---\n# Mine\n"


KILLED = """
import sys
from pathlib import Path
from qatpack.push import job
job.conformance = lambda payload: None
options = job.Options(hash_files=False)
plan = job.plan_push(Path(sys.argv[1]), sys.argv[2], options)
job.push(plan, tell=print)
"""


def test_a_killed_push_goes_on_where_it_stopped(push, hub, tmp_path):
    """The process dies while the second file is on its way; the first is not sent again."""
    folder = tmp_path / "shards"
    repack(Source(DEMO, SOURCE, COMMIT, {}), folder, Options(shard_bytes=900_000))
    shards = {sha256(path): path.name for path in sorted(folder.glob("*.safetensors"))}
    assert len(shards) >= 3
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env = clean | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN,
                   "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
    began = []

    def kill_after_the_first(oid):
        began.append(oid)
        if len(began) > 1:
            while not hub.uploads:
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            raise ConnectionError  # what still lies in the socket is not taken

    hub.before_put.append(kill_after_the_first)
    command = [sys.executable, "-c", KILLED, str(folder), REPO]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    assert TOKEN.encode() not in output
    hub.before_put.clear()
    assert set(hub.repos[REPO].head()) == {".gitattributes"}
    finished = dict(hub.uploads)
    assert 1 <= len(finished) < len(shards)
    push(folder=folder)
    assert all(hub.uploads[oid] == count == 1 for oid, count in finished.items())
    assert set(hub.uploads) == set(shards)
    files = hub.repos[REPO].head()
    assert {name: sha256(files[name]) for name in shards.values()} == {
        name: oid for oid, name in shards.items()
    }


def test_a_cut_upload_is_sent_again_at_once(push, hub, stored, waits):
    hub.faults.append(Fault(PUT, cut=100_000))
    push()
    stored()
    assert hub.asked(PUT) == 2
    assert waits == [1]


def test_a_failing_storage_is_given_up_after_a_bounded_number_of_tries(push, hub, waits):
    hub.faults.append(Fault(PUT, status=500, times=100))
    result = push(code=1)
    assert "the Hub answered 500 for acme/demo-w4a16: run this again later" in result.stderr
    assert hub.asked(PUT) == 6
    assert sum(waits) < 60
    hub.faults.clear()
    push()


def test_multipart_uploads(push, hub, stored):
    hub.part_size = 1_000_000
    push()
    stored()
    assert hub.asked(PUT) == 3


@pytest.mark.parametrize(
    "request_",
    ["GET /api/whoami-v2", rf"GET /api/models/{REPO}/revision/main", r"POST /api/repos/create",
     COMMITS, r"POST /api/validate-yaml", rf"GET /api/models/{REPO}/tree/.*"],
)  # fmt: skip
def test_a_busy_hub_is_waited_for(push, hub, stored, waits, request_):
    hub.faults += [Fault(request_, status=503), Fault(request_, status=429)]
    push()
    stored()
    assert waits == [1, 2]


def test_the_hub_says_how_long_to_wait(push, hub, waits):
    window = {"RateLimit": '"api";r=0;t=55'}
    hub.faults.append(Fault("GET /api/whoami-v2", 429, headers={"Retry-After": "7"}))
    hub.faults.append(Fault(r"POST /api/repos/create", 429, headers=window))
    result = push()
    assert waits == [7, 55]
    assert "warning: the Hub answered 429; next try in 7 s." in result.stderr


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (429, {"Retry-After": "90000"}, "the Hub limits how often you may ask"),
        (429, {}, "the Hub limits how often you may ask"),
        (502, {}, "the Hub answered 502"),
    ],
)
def test_waiting_has_an_end(push, hub, waits, status, headers, said):
    hub.faults.append(Fault("GET /api/whoami-v2", status, times=100, headers=headers))
    result = push(code=1)
    assert said in result.stderr
    assert sum(waits) == (0 if headers else 1 + 2 + 4 + 8)


def test_a_lost_answer_is_not_taken_for_a_failure(push, hub, stored):
    hub.faults.append(Fault(COMMITS, lost=True))
    push()
    stored()
    assert len(hub.repos[REPO].commits) == 2


def test_a_change_by_somebody_else_is_noticed(push, hub):
    push()
    hub.repos[REPO].push("e" * 40, {"config.json": b"{}"})

    def meanwhile(_):
        hub.repos[REPO].push("f" * 40, {"theirs.txt": b"1"})

    hub.before_put.append(meanwhile)
    hub.objects.clear()
    result = push(code=1)
    assert f"{REPO} was changed on main while this ran" in result.stderr
    assert set(hub.repos[REPO].head()) == {"theirs.txt"}


def test_a_lost_answer_and_a_change_by_somebody_else(push, hub, monkeypatch):
    push()
    hub.repos[REPO].push("e" * 40, {})
    hub.faults.append(Fault(COMMITS, status=500))
    monkeypatch.setattr(
        time, "sleep", lambda _: hub.repos[REPO].push("f" * 40, {"theirs.txt": b"1"})
    )
    result = push(code=1)
    assert "was changed on main while this ran" in result.stderr


def test_a_listing_that_differs_is_told(push, hub, monkeypatch):
    add = Repo.add

    def damage(self, files, *, ref="main"):
        return add(self, {**files, "config.json": b"{}"} if len(files) > 1 else files, ref=ref)

    monkeypatch.setattr(Repo, "add", damage)
    result = push("--public", "--yes", code=1)
    assert "does not hold what was sent: config.json differ in size or hash" in result.stderr
    assert hub.repos[REPO].private


def test_a_branch_is_made_where_it_is_not_there(push, hub, stored):
    push()
    before = hub.repos[REPO].refs["main"]
    result = push("--branch", "next")
    assert "branch      next (new)" in result.stdout
    assert "Nothing to push" in result.stdout
    hub.repos[REPO].push("e" * 40, {".gitattributes": b""}, ref="older")
    push("--branch", "older")
    stored(ref="older")
    assert hub.repos[REPO].refs["main"] == hub.repos[REPO].refs["next"] == before


def test_a_pull_request(push, hub, stored):
    result = push("--pr", code=1)
    assert "is not there, and a pull request needs it" in result.stderr
    hub.repos[REPO] = Repo({"a" * 40: {".gitattributes": b""}}, {"main": "a" * 40}, private=True)
    result = push("--pr")
    assert f"{hub.url}/{REPO}/discussions/1 (private)" in result.stdout
    stored(ref="refs/pr/1")
    assert set(hub.repos[REPO].head()) == {".gitattributes"}
    assert push("--pr", "--branch", "next", code=2)


def test_a_lost_answer_to_a_pull_request_is_not_repeated(push, hub):
    hub.repos[REPO] = Repo({"a" * 40: {".gitattributes": b""}}, {"main": "a" * 40}, private=True)
    hub.faults.append(Fault(COMMITS, lost=True))
    result = push("--pr", code=1)
    assert "the answer to the pull request was lost" in result.stderr
    assert [ref for ref in hub.repos[REPO].refs if "pr" in ref] == ["refs/pr/1"]


def test_public_asks_and_comes_last(push, hub, stored):
    result = push("--public", code=1, given="n\n")
    assert f"Make {REPO} public?" in result.stderr
    assert "not confirmed, nothing was changed; scripts pass --yes" in result.stderr
    assert hub.repos == {}
    push("--public", code=1)  # no terminal, no answer
    result = push("--public", given="y\n")
    stored()
    assert not hub.repos[REPO].private
    assert "(public)" in result.stdout


def test_a_pull_request_never_makes_public(push, hub, stored):
    hub.repos[REPO] = Repo({"a" * 40: {".gitattributes": b""}}, {"main": "a" * 40}, private=True)
    result = push("--pr", "--public")
    assert hub.repos[REPO].private
    assert "discussions/1 (private)" in result.stdout
    hub.repos[REPO].private = False
    assert "which is public?" in push("--pr", "--public", given="y\n").stderr
    stored(ref="refs/pr/2")


def test_what_arrived_but_stays_private_is_told(push, hub, stored):
    hub.faults.append(Fault(rf"PUT /api/models/{REPO}/settings", status=403, message="no"))
    result = push("--public", "--yes", code=1)
    assert f"{REPO} was pushed and read back, but is still private: your token" in result.stderr
    assert hub.repos[REPO].private
    stored()


def test_a_failed_push_never_becomes_public(push, hub):
    hub.faults.append(Fault(COMMITS, status=403))
    push("--public", "--yes", code=1)
    assert hub.repos[REPO].private


def test_a_public_repository_wants_the_word(push, hub, stored):
    hub.repos[REPO] = Repo({"a" * 40: {".gitattributes": b""}}, {"main": "a" * 40})
    result = push(code=1)
    assert f"{REPO} is public: everybody would see the push; say so with --public" in result.stderr
    push("--public", "--yes")
    stored()
    hub.repos["acme/other"] = Repo({"a" * 40: {}}, {"main": "a" * 40}, private=True)
    push("--public", "--yes", repo="acme/other")
    assert not hub.repos["acme/other"].private


def test_files_of_others_stay_unless_told(push, hub, stored):
    there = {".gitattributes": b"", "examples/a.txt": b"1"}
    hub.repos[REPO] = Repo({"a" * 40: there}, {"main": "a" * 40}, private=True)
    result = push()
    assert "kept there  1: examples/a.txt" in result.stdout
    stored(others=(".gitattributes", "examples/a.txt"))
    result = push("--delete", given="y\n")
    assert "deleted     1: examples/a.txt" in result.stdout
    assert f"Delete 1 files of {REPO}?" in result.stderr
    stored()
    assert "examples/a.txt" not in hub.repos[REPO].head()
    assert ".gitattributes" in hub.repos[REPO].head()


@pytest.mark.parametrize(
    "name", ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.gguf"]
)
def test_weights_of_another_build_are_not_left_beside_ours(push, hub, stored, name):
    hub.repos[REPO] = Repo({"a" * 40: {name: b"old"}}, {"main": "a" * 40}, private=True)
    result = push(code=1)
    assert f"{REPO} holds {name}, which readers could take for this build's weights" in (
        result.stderr
    )
    assert not hub.asked("POST /api/validate-yaml")  # before anything that takes time
    push("--delete", "--yes")
    stored()
    assert name not in hub.repos[REPO].head()


def test_another_account_of_the_same_hub(push, hub, client):
    """The Hub by HF_ENDPOINT, the account by the token: nothing is taken from elsewhere."""
    with Hub({}, accounts={TOKEN: Account("nina")}) as other:
        client.setattr("huggingface_hub.constants.ENDPOINT", other.url)
        push(repo="nina/demo")
        assert set(other.repos) == {"nina/demo"}
    assert not hub.requests
