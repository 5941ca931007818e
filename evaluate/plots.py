"""Pictures of an evaluation, from its JSON form. Needs matplotlib; without it there are none."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = Mapping[str, Any]


def has_matplotlib() -> bool:
    """Whether plots can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def write_plots(evaluation: Values, folder: Path) -> list[Path]:
    """Write the plots of the parts that ran as PNG; returns their paths."""
    if not has_matplotlib():
        return []
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawings: dict[str, tuple[str, Callable[[Values, Axes], None]]] = {
        "kl.png": ("kl", _draw_histogram),
        "kl_by_position.png": ("kl", _draw_places),
        "levels.png": ("grid", _draw_levels),
        "speed.png": ("speed", _draw_speed),
    }
    written: list[Path] = []
    for name, (part, draw) in drawings.items():
        if part not in evaluation["parts"]:
            continue
        figure = Figure(figsize=(8, 4), layout="constrained")
        with rc_context({"text.parse_math": False}):  # a name may hold two $
            draw(evaluation, figure.subplots())
            figure.savefig(folder / name, dpi=120)
        written.append(folder / name)
    return written


def _draw_histogram(evaluation: Values, axes: Axes) -> None:
    """Shares of positions by their divergence, a step line for each build."""
    for build in evaluation["builds"]:
        found = build["divergence"]["histogram"]
        positions = build["divergence"]["positions"]
        shares = [100 * count / positions for count in found["counts"]]
        edges = [10**decade for decade in found["decades"]]
        zero = f", 0 at {100 * found['zero'] / positions:.3g} %" if found["zero"] else ""
        axes.stairs(shares, edges, label=f"{build['name']}{zero}", linewidth=1.6)
    axes.set_xscale("log")
    axes.set_xlabel("KL(reference || build) at a position, nats")
    axes.set_ylabel("positions, %")
    axes.legend(fontsize="small")


def _draw_places(evaluation: Values, axes: Axes) -> None:
    """Mean divergence by place in the window; builds with none anywhere are named only."""
    for build in evaluation["builds"]:
        found = build["divergence"]["by_position"]
        points = [(x, y) for x, y in zip(found["first"], found["mean"], strict=True) if y > 0]
        label = build["name"] if points else f"{build['name']}: 0 everywhere"
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, linewidth=1.2)
    axes.set_yscale("log")
    axes.set_xlabel("place in the window, tokens")
    axes.set_ylabel("mean KL, nats")
    axes.legend(fontsize="small")


def _draw_levels(evaluation: Values, axes: Axes) -> None:
    """On which level of the stored step each group's peak falls, bars side by side."""
    builds = evaluation["builds"]
    width = 0.8 / len(builds)
    labels = [str(level) for level in range(1, 9)] + ["none"]
    for index, build in enumerate(builds):
        counts = build["grid"]["peak_levels"][1:]
        whole = max(1, sum(counts))
        places = [i + (index - (len(builds) - 1) / 2) * width for i in range(len(labels))]
        axes.bar(places, [100 * c / whole for c in counts], width, label=build["name"])
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel("level of the stored step on which a group's largest weight falls")
    axes.set_ylabel("groups, %")
    axes.legend(fontsize="small")


def _draw_speed(evaluation: Values, axes: Axes) -> None:
    """Tokens/s by batch size with the spread, bars side by side."""
    own = evaluation["reference_results"]["speed"]
    models = [("reference", own), *((b["name"], b["speed"]) for b in evaluation["builds"])]
    width = 0.8 / len(models)
    for index, (name, speed) in enumerate(models):
        rates = [run["tokens_per_second"] for run in speed]
        places = [i + (index - (len(models) - 1) / 2) * width for i in range(len(rates))]
        medians = [rate["median"] for rate in rates]
        below = [rate["median"] - rate["min"] for rate in rates]
        above = [rate["max"] - rate["median"] for rate in rates]
        axes.bar(places, medians, width, yerr=[below, above], capsize=3, label=name)
    axes.set_xticks(range(len(own)), [f"batch {run['batch']}" for run in own])
    axes.set_ylabel("tokens/s, all rows")
    axes.legend(fontsize="small")
