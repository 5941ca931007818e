"""An evaluation as text, from its JSON form: the side-by-side table and its conventions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..checkpoint.units import percent, share, size

Row = tuple[str, ...]
Values = Mapping[str, Any]
MOST = 4  # builds beside the reference in 100 columns
ROOM = 14  # characters of a build's name over its column


def tables(evaluation: Values) -> Iterator[list[Row]]:
    """The table, for up to `MOST` builds at a time; the reference stands in each."""
    builds = evaluation["builds"]
    for start in range(0, len(builds), MOST):
        yield rows(evaluation, builds[start : start + MOST])


def rows(evaluation: Values, builds: Sequence[Values]) -> list[Row]:
    """A column for the reference and one for each of `builds`."""
    parts = evaluation["parts"]
    names = columns([b["name"] for b in evaluation["builds"]])
    own = {**evaluation["reference"], **evaluation["reference_results"]}
    found: list[Row] = [
        ("", "reference", *(names[b["name"]] for b in builds)),
        ("scales", own["dtype"], *(", ".join(b["scale_dtypes"]) or "-" for b in builds)),
        ("disk", *(size(m["disk_bytes"]) for m in (own, *builds))),
        ("weights loaded", *(_size(m["weight_bytes"]) for m in (own, *builds))),
    ]
    sections: dict[str, Callable[[Values, Sequence[Values]], list[Row]]] = {
        "grid": _grid, "kl": _divergence, "greedy": _greedy, "speed": _speed,
    }  # fmt: skip
    for part, section in sections.items():
        if part in parts:
            found += section(own, builds)
    return found


def _grid(_: Values, builds: Sequence[Values]) -> list[Row]:
    grids = [b["grid"] for b in builds]
    return [
        ("relative error", "-", *(percent(g["relative_error"]) for g in grids)),
        ("values identical", "-", *(share(g["identical"], g["values"]) for g in grids)),
    ]


def _divergence(own: Values, builds: Sequence[Values]) -> list[Row]:
    found = [b["divergence"] for b in builds]
    return [
        ("mean KL, nats", nats(own["self_check"]["mean"]), *(nats(d["mean"]) for d in found)),
        ("  standard error", "", *(nats(d["standard_error"]) for d in found)),
        ("  99 % below", "", *(nats(d["p99"]) for d in found)),
        ("  largest", nats(own["self_check"]["max"]), *(nats(d["max"]) for d in found)),
        ("same top token", "-", *(_share(d["same_top"]) for d in found)),
        ("perplexity", _digits(own["perplexity"]), *(_digits(d["perplexity"]) for d in found)),
        ("  ratio", "-", *(_ratio(d["perplexity_ratio"]) for d in found)),
    ]


def _greedy(own: Values, builds: Sequence[Values]) -> list[Row]:
    found = [own["greedy"]["floor"], *(b["greedy"] for b in builds)]
    return [("equal greedy start", *(f"{g['equal_before']} of {g['tokens']}" for g in found))]


def _speed(own: Values, builds: Sequence[Values]) -> list[Row]:
    found: list[Row] = []
    for index, first in enumerate(own["speed"]):
        runs = [first, *(b["speed"][index] for b in builds)]
        rates = [run["tokens_per_second"] for run in runs]
        label = f"tokens/s, batch {first['batch']}"
        found.append((label, *(_digits(rate["median"]) for rate in rates)))
        spread = (f"{_digits(rate['min'])}..{_digits(rate['max'])}" for rate in rates)
        found.append(("  min..max", *spread))
    runs = [own["speed"][0], *(b["speed"][0] for b in builds)]
    found.append(("  first token, ms", *(_digits(run["ttft_ms"]) for run in runs)))
    if any(run["bandwidth_share"] is not None for run in runs):
        found.append(("  of the bandwidth", *(_share(run["bandwidth_share"]) for run in runs)))
    return found


def speed_rows(evaluation: Values) -> list[Row]:
    """Every figure of the speed part, a line for each model and batch size."""
    found: list[Row] = [
        ("", "batch", "load, s", "prefill, ms", "first token, ms", "tokens/s", "min..max",
         "read a step", "of the bandwidth", "device memory")
    ]  # fmt: skip
    models = [("reference", evaluation["reference_results"]["speed"])]
    models += [(build["name"], build["speed"]) for build in evaluation["builds"]]
    for name, runs in models:
        for run in runs:
            rate = run["tokens_per_second"]
            found.append((
                name, str(run["batch"]), _digits(run["load_s"]), _digits(run["prefill_ms"]),
                _digits(run["ttft_ms"]), _digits(rate["median"]),
                f"{_digits(rate['min'])}..{_digits(rate['max'])}", size(run["bytes_per_step"]),
                _share(run["bandwidth_share"]), _size(run["device_bytes"]),
            ))  # fmt: skip
    return found


def notes(evaluation: Values) -> list[str]:
    """Every convention behind the table, a line each."""
    used, parts = evaluation["conventions"], evaluation["parts"]
    found: list[str] = []
    if "grid" in parts:
        found.append(
            "error, identical: decoded as bf16(f32(scale) * level), against the reference's values."
        )
    if "kl" in parts:
        found += _text_notes(used)
        found.append(
            f"{used['direction']} in {used['unit']}, {used['arithmetic']}; {used['dtype']} "
            f"activations, {used['fidelity_decode']} decode; the reference's column: against a "
            f"second run of itself, one window{_recorded(evaluation)}."
        )
    if "greedy" in parts:
        found.append(
            f"greedy: {used['new_tokens']} tokens after {used['prompt']!r}, equal before the "
            f"first difference; {used['fidelity_decode']} decode, one row; the reference's column: "
            "against itself with a longer cache."
        )
    if "speed" in parts:
        found.append(
            f"tokens/s: steady decode of {used['new_tokens']} tokens after "
            f"{used['prompt_tokens']}, all rows together, {used['speed_decode']} decode; median of "
            f"{used['repeats']} runs a visit in the order {used['order']}, after a compilation and "
            "an untimed run."
        )
    found.append(machine_line(evaluation))
    return found


def _recorded(evaluation: Values) -> str:
    check = evaluation["reference_results"]["self_check"]
    return ", as recorded by an earlier evaluation" if check["recorded"] else ""


def _text_notes(used: Values) -> Iterator[str]:
    text = used["text"]
    at = f" at {text['revision'][:12]}" if text["revision"] else ""
    frame = ", framed as a model's turn" if used["chat"] else ""
    yield (
        f"text: {text['name']}{at}, {text['tokens']:,} tokens, sha256 {text['sha256'][:12]}; "
        f"{used['protocol']}{frame}: {used['windows']} windows of {used['length']} tokens with one "
        f"BOS, {used['positions']:,} positions, {used['targets']:,} losses; first ids "
        f"{' '.join(map(str, used['first_ids']))}."
    )


def machine_line(evaluation: Values) -> str:
    """Device and versions in a line."""
    m, tool = evaluation["machine"], evaluation["tool"]
    device = f"{m['count']} x {m['device']}" if m["platform"] != "cpu" else f"CPU, {m['cpu']}"
    return (
        f"on {device}; {m['cores']} cores, {_size(m['memory_bytes'])}; jax {m['jax']}, "
        f"python {m['python']}, {tool['name']} {tool['version']}."
    )


def findings(evaluation: Values) -> list[str]:
    """A sentence for each build, and one for each pair of them."""
    found: list[str] = []
    for build in evaluation["builds"]:
        said = [
            *([build["grid"]["verdict"]["text"]] if build["grid"] else []),
            *([_parted(build["greedy"])] if build["greedy"] else []),
            *_ratios(build["speed"], "the reference"),
        ]
        if said:
            found.append(f"{build['name']}: {'; '.join(said)}.")
    return found + [s for pair in evaluation["comparisons"] if (s := _pair(pair))]


def _parted(greedy: Values) -> str:
    if greedy["first_difference"] is None:
        return "the reference's greedy answer, token for token"
    floor = greedy["floor"]["equal_before"]
    return (
        f"greedy answers part at token {greedy['first_difference'] + 1}, where the reference's "
        f"first two are {greedy['margin']:.2g} apart (the reference itself holds for {floor})"
    )


def _ratios(speed: Sequence[Values], than: str) -> list[str]:
    said = [f"{run['ratio']:.2f}x (batch {run['batch']})" for run in speed]
    return [f"decodes at {', '.join(said)} the speed of {than}"] if said else []


def _pair(pair: Values) -> str | None:
    a, b, said = pair["a"], pair["b"], list[str]()
    if pair["a_closer"] is not None:
        said.append(
            f"closer to the reference at {_share(pair['b_closer'])} of positions, farther at "
            f"{_share(pair['a_closer'])}{_times(pair['mean_ratio'])}"
        )
    said += _ratios(pair["speed"], a)
    return f"{b} against {a}: {'; '.join(said)}." if said else None


def _times(ratio: float | None) -> str:
    """How the mean divergences relate; nothing where one of them is 0."""
    if not ratio:
        return ""
    factor, word = (ratio, "larger") if ratio > 1 else (1 / ratio, "smaller")
    return f", mean KL {factor:.3g} times {word}"


def nats(value: float) -> str:
    """Three digits, and 0 only for 0."""
    if value == 0:
        return "0"
    return f"{value:.2e}" if value < 1e-4 else f"{value:.3g}"


def _ratio(value: float) -> str:
    return f"{value:.4f}" if value < 1e4 else f"{value:.3g}"


def _digits(value: float) -> str:
    if value >= 1e9:
        return f"{value:.3g}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _share(value: float | None) -> str:
    """Four digits; 100 only where it is."""
    if value is None:
        return "-"
    if 0.9999 < value < 1:  # four digits would say 100
        return share(value, 1)
    return f"{100 * value:.4g} %"


def _size(nbytes: int | None) -> str:
    return size(nbytes) if nbytes else "-"


def columns(names: Sequence[str]) -> dict[str, str]:
    """A short name for each, of its own: those that shorten alike are numbered."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        short, number = _short(name), 1
        while short in found.values():
            number += 1
            short = f"{_short(name, ROOM - len(f' {number}'))} {number}"
        found[name] = short
    return found


def _short(name: str, room: int = ROOM) -> str:
    """A name's last part, cut in the middle where it is long."""
    name = name.rpartition("/")[2]
    half = room // 2 - 1
    return name if len(name) <= room else f"{name[:half]}..{name[-half:]}"
