"""The card as a whole: what it shows of which result file, and what it leaves out."""

import json
import re

import pytest
from click.testing import CliRunner
from huggingface_hub import ModelCard

from qatpack.card.build import _TOTALS
from qatpack.card.fields import FieldError, Fields
from qatpack.card.markdown import plain, table
from qatpack.card.page import make_card, write_card
from qatpack.checkpoint.errors import CheckpointError, QatpackError
from qatpack.cli import main

VERIFY, EVALUATION = "verify_report.json", "evaluation.json"
FIGURES = {VERIFY: "0.231 %", EVALUATION: "0.00021 ± 1e-05 nats"}


TOTALS = dict.fromkeys(_TOTALS, 0)


def made(folder, **options):
    return make_card(folder, **options)[1]


def test_without_other_results_only_the_repack_speaks(folder):
    text = made(folder)
    assert "| values identical to the source | 90.665 % |" in text
    assert "By verification" not in text
    assert "By evaluation" not in text
    assert "model-index" not in text
    assert "nats" not in text
    assert "tokens/s" not in text


def test_all_results(folder, report, evaluation, put):
    put(folder, VERIFY, report)
    put(folder, EVALUATION, evaluation)
    (folder / "plots").mkdir()
    (folder / "plots" / "build-levels.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "plots" / "notes.txt").write_bytes(b"no")
    results, text = make_card(folder, repo="acme/demo")
    assert results.warnings == ()
    assert results.names == (VERIFY, EVALUATION, "plots/build-levels.png")
    for shown in (
        *FIGURES.values(),
        "| values identical | 90.665 % |",
        "| other tensors, byte for byte | 267 of 267 |",
        "trained grid at bfloat16 steps",
        "| same top token | 99.290 ± 0.130 % |",
        "| perplexity ratio | 0.9994 ± 0.0003 |",
        "| greedy tokens equal before the first difference | 57 of 128 (the reference again: 91) |",
        "| 1 | 103.5 (101.0..104.0) | 133.2 | 0.777 | 12.5 ms | 20.2 ms |",
        r"KL(reference \|\| build) in nats, float32 log-softmax, mean over 4,096 positions",
        "WikiText-2 raw v1 test at " + "b" * 40,
        "8 windows of 512 tokens with BOS",
        "Device: TPU v5e (tpu), JAX 0.10.2, qatpack 0.1.0",
        "![build levels](plots/build-levels.png)",
        "vllm serve acme/demo",
        f"qatpack verify acme/demo --reference google/gemma-demo-qat --revision {'c' * 40}",
        f"qatpack repack google/gemma-demo-qat OUT --revision {'c' * 40} --scale-dtype bfloat16",
        "Licence, as the source states it: apache-2.0.",
        "tpu-inference 0.32 still demands k and v",
    ):
        assert shown in text, shown
    assert "notes.txt" not in text


def test_the_hub_shows_what_was_evaluated(folder, evaluation, put):
    put(folder, EVALUATION, evaluation)
    data = ModelCard(made(folder)).data
    found = {result.metric_type: result for result in data.eval_results}
    assert {kind: result.metric_value for kind, result in found.items()} == {
        "perplexity": 160.4,
        "kl_divergence": 0.00021,
        "top1_agreement": 0.9929,
    }
    assert found["perplexity"].dataset_name == "WikiText-2 raw v1 test"
    assert found["perplexity"].dataset_revision == "b" * 40


def test_a_build_that_failed_says_so_first(folder, report, put):
    report["passed"] = False
    report["verdict"]["text"] = "damaged: 3 scales"
    report["findings"].append(
        {"severity": "error", "code": "x", "where": "a", "what": "b <script>", "do": ""}
    )
    put(folder, VERIFY, report)
    text = made(folder)
    assert "**This build did not pass its verification.**" in text
    assert "- error: a: b &lt;script&gt;" in text


OTHERS = {
    "another build": (VERIFY, lambda r: r["build"].update(manifest_sha256="0" * 64),
                      "it was made of another build: its repack_report.json has another sha256"),
    "no manifest": (VERIFY, lambda r: r["build"].update(manifest_sha256=None),
                    "it was made of a folder without repack_report.json"),
    "a sample": (VERIFY, lambda r: r.update(complete=False), "it looked at a sample only"),
    "another source": (VERIFY, lambda r: r["reference"].update(id="google/other"),
                       "it was held against the id google/other"),
    "another format": (VERIFY, lambda r: r.update(format="qatpack.verify/9"), "format is not"),
    "words for figures": (VERIFY, lambda r: r["fidelity"]["total"].update(values="many"),
                          "fidelity.total.values is no count"),
    "no figures": (VERIFY, lambda r: r["fidelity"]["total"].pop("cast"), "total.cast is missing"),
    "infinite": (VERIFY, lambda r: r["fidelity"]["total"].update(relative_error=1e999),
                 "relative_error is not finite"),
    "other weights": (EVALUATION, lambda e: e["builds"][0]["sha256"].update(
        {"model.safetensors": "0" * 64}), "it read other files of the build"),
    "another reference": (EVALUATION, lambda e: e["reference"]["sha256"].update(
        {"model.safetensors": "0" * 64}), "it read other files of the source"),
    "no hashes": (EVALUATION, lambda e: e["builds"][0].update(sha256=None),
                  "it names no sha256 of the build's files"),
    "nothing read": (EVALUATION, lambda e: e["builds"][0].update(sha256={}), "it read other files"),
    "several builds": (EVALUATION, lambda e: e["builds"].append(e["builds"][0]),
                       "it speaks of 2 builds"),
    "a true mean": (EVALUATION, lambda e: e["builds"][0]["divergence"].update(mean=True),
                    "divergence.mean is no number"),
    "a negative divergence": (EVALUATION, lambda e: e["builds"][0]["divergence"].update(mean=-1.0),
                              "divergence.mean is -1, outside of 0 to inf"),
    "a huge integer": (EVALUATION, lambda e: e["builds"][0]["divergence"].update(max=10**400),
                       "divergence.max is not finite"),
    "a huge count": (EVALUATION, lambda e: e["conventions"].update(windows=2**63),
                     "conventions.windows is no count"),
    "more than all": (EVALUATION, lambda e: e["builds"][0]["divergence"].update(same_top=1.01),
                      "divergence.same_top is 1.01, outside of 0 to 1"),
    "more tokens than there are": (
        EVALUATION, lambda e: e["builds"][0]["greedy"].update(equal_before=129),
        "greedy.equal_before is 129 of 128"),
    "no repeatable reference": (
        EVALUATION, lambda e: e["reference_results"]["self_check"].update(max=0.5),
        "the reference differs from itself by up to 0.5 nats"),
    "a part above its whole": (VERIFY, lambda r: r["fidelity"]["total"].update(identical=10**12),
                               "fidelity.total.identical is 1,000,000,000,000 of"),
    "a list": (EVALUATION, lambda e: e.update(machine=[1]), "machine is no JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_not_of_this_build_lends_no_figure(folder, report, evaluation, put, case):
    name, change, reason = OTHERS[case]
    value = report if name == VERIFY else evaluation
    put(folder, name, value)
    assert FIGURES[name] in made(folder)
    change(value)
    put(folder, name, value)
    results, text = make_card(folder)
    assert FIGURES[name] not in text
    assert results.names == ()
    (warning,) = results.warnings
    assert warning.startswith(f"{name}: left out of the card: ")
    assert reason in warning


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', '{"a": 1, "a": 2}'])
@pytest.mark.parametrize("name", [VERIFY, EVALUATION])
def test_damaged_result_files_lend_nothing(folder, put, name, text):
    put(folder, name, text)
    results, _ = make_card(folder)
    assert len(results.warnings) == 1
    assert results.names == ()


def test_a_manifest_without_hashes_proves_no_evaluation(folder, evaluation, put):
    manifest = json.loads((folder / "repack_report.json").read_text())
    for record in manifest["files"]:
        record["sha256"] = None
    put(folder, "repack_report.json", manifest)
    put(folder, EVALUATION, evaluation)
    assert "records no sha256 of the build's files" in make_card(folder)[0].warnings[0]


def test_plots_alone_are_not_shown(folder):
    (folder / "plots").mkdir()
    (folder / "plots" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    results, text = make_card(folder)
    assert ".png" not in text
    assert "plots: left out" in results.warnings[0]


def test_hand_written_parts_survive(folder, report, put):
    write_card(folder, repo="acme/demo")
    path = folder / "README.md"
    ours = "Mine, with a | and <b>tags</b>.\n\n## A heading\n"
    empty = "<!-- hand-written: notes -->\n"
    path.write_text(path.read_text().replace(empty, empty + ours).replace("# gemma", "# Gone"))
    put(folder, VERIFY, report)
    write_card(folder)
    text = path.read_text()
    assert ours in text
    assert "# Gone" not in text
    assert FIGURES[VERIFY] in text
    assert "vllm serve acme/demo" in text  # remembered
    write_card(folder)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace("<!-- end of hand-written: notes -->", ""),
        lambda t: t.replace("hand-written: notes", "hand-written: diary"),
        lambda t: t + "<!-- hand-written: notes -->\n<!-- end of hand-written: notes -->\n",
        lambda t: t.replace(
            "<!-- hand-written: notes -->\n",
            "<!-- hand-written: notes -->\n<!-- hand-written: introduction -->\n",
        ),
    ],
)
def test_broken_marks_stop_rather_than_lose_text(folder, change):
    path = folder / "README.md"
    path.write_text(change(path.read_text()))
    before = path.read_text()
    with pytest.raises(CheckpointError, match=r"README\.md: "):
        write_card(folder)
    assert path.read_text() == before


def test_a_card_of_somebody_else_is_left_alone(folder):
    path = folder / "README.md"
    path.write_text("# Mine\n")
    with pytest.raises(QatpackError, match="was not written by qatpack; move it away"):
        write_card(folder)
    assert path.read_text() == "# Mine\n"
    write_card(folder, overwrite=True)
    assert "# Mine" not in path.read_text()


HOSTILE = [
    "](javascript:alert(1))", "<img src=x onerror=alert(1)>", "a | b\n\n# Title", "`code`",
    "<!-- hand-written: notes -->", "https://evil.example/x", "![x](http://evil)", "\x00\x1b[2J",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_foreign_words_stay_words(folder, report, put, text):
    report["verdict"]["text"] = text
    report["checks"] = [text]
    put(folder, VERIFY, report)
    if not text.startswith("https:"):  # an address may well be the licence's: it becomes a link
        block = f"---\nlicense: gemma\nlicense_link: {json.dumps(text)}\n---\n"
        (folder / "ORIGINAL_README.md").write_text(block)
    body = made(folder).split("\n---\n", 1)[1]
    unescaped = re.sub(r"\\.", "", body.replace("https://huggingface.co", ""))
    for active in ("](javascript", "<img", "\n# Title", "://evil", "](http://evil", "\x1b"):
        assert active not in unescaped
    assert body.count("<!-- hand-written: ") == 2


def test_a_real_licence_link_is_one(folder):
    link = "https://ai.google.dev/gemma/docs/gemma_4_license"
    (folder / "ORIGINAL_README.md").write_text(f"---\nlicense: gemma\nlicense_link: {link}\n---\n")
    text = made(folder)
    assert f"]({link})" in text
    assert f"license_link: {link}" in text


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("source", {"id": "a/b](x", "commit": None, "files": []}, "source.id is no valid id"),
        ("source", {"id": "../..", "commit": None, "files": []}, "source.id is no valid id"),
        ("source", {"id": None, "commit": "main", "files": []}, "source.commit is no valid commit"),
        ("tool", {"version": "1 | 2"}, "tool.version is no valid version"),
        ("totals", {**TOTALS, "values": 1, "identical": 2}, r"totals.identical is 2 of 1"),
        ("totals", {**TOTALS, "groups": 2, "zero": 1, "certified": 2}, r"totals.certified is 2 of"),
        ("totals", {}, "totals.source_bytes is missing"),
        ("files", "none", "files is no list"),
        ("format", "qatpack.repack/9", "format is not qatpack.repack/1"),
    ],
)
def test_a_manifest_of_the_wrong_kind_is_refused(folder, put, key, value, said):
    manifest = json.loads((folder / "repack_report.json").read_text())
    put(folder, "repack_report.json", {**manifest, key: value})
    with pytest.raises(CheckpointError, match=rf"repack_report\.json: {said}"):
        make_card(folder)


def test_options_are_named(folder, put):
    manifest = json.loads((folder / "repack_report.json").read_text())
    options = {"scale_dtype": "float32", "on_off_grid": "keep", "text_only": True,
               "pack_ple": True, "shard_bytes": 7}  # fmt: skip
    put(folder, "repack_report.json", {**manifest, "options": options})
    text = made(folder)
    assert "--scale-dtype float32 --on-off-grid keep --text-only --pack-ple --shard-size 7" in text
    assert "AutoModelForCausalLM" in text
    assert "towers are left out" in text
    assert "vLLM reads it from 0.29 on" in text
    assert "steps are stored as they are" in text


def test_the_command_says_what_it_used(folder, report, put):
    put(folder, VERIFY, report)
    put(folder, EVALUATION, "{")
    (folder / "ORIGINAL_README.md").unlink()
    result = CliRunner().invoke(main, ["card", str(folder)])
    assert result.exit_code == 0, result.output
    path = folder / "README.md"
    assert result.stdout == f"{path} from repack_report.json, verify_report.json.\n"
    assert "warning: evaluation.json: left out of the card" in result.stderr
    assert "warning: README.md: the source's card states no licence" in result.stderr
    assert "license: other" in path.read_text()
    assert CliRunner().invoke(main, ["card", str(folder), "--repo", "x"]).exit_code == 2
    (folder / "repack_report.json").unlink()
    assert "is unfinished" in CliRunner().invoke(main, ["card", str(folder)]).stderr
    missing = CliRunner().invoke(main, ["card", str(folder / "gone")])
    assert "gone: there is no such folder" in missing.stderr


def test_the_usage_of_transformers_loads(folder):
    """The block of the card, run on the folder."""
    transformers = pytest.importorskip("transformers")
    (block,) = re.findall(r"```python\n(.*?)```", made(folder, repo="acme/demo"), re.DOTALL)
    kinds = re.findall(r"Auto\w+", block.splitlines()[0])
    config = transformers.AutoConfig.from_pretrained(folder)
    mapping = getattr(transformers, kinds[0])._model_mapping
    assert mapping[type(config)].__name__ == config.architectures[0]


def test_shares_say_all_only_of_all(folder, evaluation, put):
    for share, shown in ((1 - 1e-7, "99.999 ± "), (1.0, "100 ± ")):
        evaluation["builds"][0]["divergence"]["same_top"] = share
        put(folder, EVALUATION, evaluation)
        assert f"| same top token | {shown}" in made(folder)


def test_fields_name_where_they_stand():
    fields = Fields({"a": {"b": [{"c": True}]}})
    (item,) = fields["a"]["b"].items()
    with pytest.raises(FieldError, match=r"a\.b\[0\]\.c is no number"):
        item.number("c")
    with pytest.raises(FieldError, match="a is no list"):
        fields["a"].items()


def test_markdown():
    assert plain("a*b_[c] <d> & |e|") == r"a\*b\_\[c\] &lt;d&gt; &amp; \|e\|"
    assert plain("x" * 400) == "x" * 300 + "..."
    assert table([("", "n"), ("a", "1")]) == "|  | n |\n| --- | ---: |\n| a | 1 |"
