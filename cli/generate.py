"""`qatpack generate`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..checkpoint.units import size
from .progress import byte_bar
from .text import print_json
from .verify import resolve_build

if TYPE_CHECKING:
    from ..checkpoint.folder import Checkpoint
    from ..evaluate.gemma4.generate import Chunk
    from ..evaluate.gemma4.load import Model
    from ..evaluate.gemma4.sampling import Sampling


def _finite(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Refuse NaN, which lies in every range, and infinity."""
    if not math.isfinite(value):
        raise click.BadParameter("must be a finite number.", ctx, param)
    return value


@click.command()
@click.argument("build", metavar="FOLDER")
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Frame the prompt as a user's turn (needs jinja2).")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Most tokens to write; a stop token ends it earlier.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    callback=_finite,
    default=0.0,
    show_default=True,
    help="0 (or less than 1e-6) takes the likeliest token each time.",
)
@click.option(
    "--top-k",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Sample among the k likeliest; 0 for all. Needs a --temperature.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1),
    callback=_finite,
    default=1.0,
    show_default=True,
    help="Sample within this share. Needs a --temperature.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Of the sampling.",
)
@click.option(
    "--decode",
    type=click.Choice(["exact", "fast"]),
    default="fast",
    show_default=True,
    help="Packed weights: exact rounds each weight to bfloat16 as other readers do, fast scales "
    "after the group sums.",
)
@click.option(
    "--head",
    type=click.Choice(["stored", "int4"]),
    default="stored",
    show_default=True,
    help="int4 holds the token embedding, which is also the head, on its trained 4-bit grid, in a "
    "quarter of the bytes: rows looked up are the same bits. Refused where it is not on one.",
)
@click.option(
    "--mesh",
    type=click.IntRange(1),
    help="Devices to spread the model over. By default all, if it does not fit one.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    help="Where compiled programs are kept. [default: $QATPACK_CACHE/xla or ~/.cache/qatpack/xla]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def generate(
    build: str,
    prompt: str,
    chat: bool,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    decode: Any,
    head: Any,
    mesh: int | None,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Continue a text with a Gemma 4 checkpoint or a build of it.

    FOLDER is one, or org/name on the Hub with an optional @revision. The text goes to stdout as it
    comes, times to stderr.

    \b
    Example:
      qatpack generate gemma-4-E2B-it-w4a16 "Why is the sky blue?" --chat --max-tokens 64
    """
    if not temperature and (top_k or top_p < 1):
        raise click.UsageError("--top-k and --top-p need a --temperature above 0.")
    from ..checkpoint.folder import Checkpoint
    from ..evaluate.devices import use_compile_cache
    from ..evaluate.gemma4.generate import stream, warm_up
    from ..evaluate.tokens import check_ids, check_positions, open_vocabulary

    use_compile_cache(cache_dir)
    folder = resolve_build(build).folder
    vocabulary = open_vocabulary(folder)
    ids = vocabulary.encode(vocabulary.chat(prompt) if chat else prompt)
    checkpoint = Checkpoint.open(folder)
    check_positions(len(ids), max_tokens, checkpoint.config, build)
    start = time.perf_counter()
    model = _load(checkpoint, decode, head, mesh)
    times = {"load_s": time.perf_counter() - start}
    check_ids(ids, model.config.vocab, folder)
    options: dict[str, Any] = {
        "config": model.config,
        "max_tokens": max_tokens,
        "stop": vocabulary.stop,
        "sampling": _sampling(temperature, min(top_k, model.config.vocab), top_p),
        "seed": seed,
    }
    times["compile_s"] = warm_up(model.weights, [ids], **options)
    chunks: list[Chunk] = []

    def new_tokens() -> Iterator[list[int]]:
        for chunk in stream(model.weights, [ids], **options):
            chunks.append(chunk)
            yield chunk.tokens[0]

    pieces: list[str] = []
    for piece in vocabulary.decode_stream(new_tokens()):
        pieces.append(piece)
        if not as_json:
            click.echo(piece, nl=False)
    figures = times | _speed(chunks)
    if as_json:
        tokens = [t for c in chunks for t in c.tokens[0]]
        text = {"text": "".join(pieces), "prompt_ids": ids, "ids": tokens}
        print_json(text | figures | {"decode": decode, "head": head} | _machine(model))
        return
    click.echo()
    _print_figures(figures, len(ids), model)


def _sampling(temperature: float, top_k: int, top_p: float) -> Sampling | None:
    """None for greedy: logits over a temperature near 0 overflow float32."""
    from ..evaluate.gemma4.sampling import Sampling

    return Sampling(temperature, top_k, top_p) if temperature >= 1e-6 else None


def _load(checkpoint: Checkpoint, decode: Any, head: Any, mesh: int | None) -> Model:
    from ..evaluate.devices import pick_mesh
    from ..evaluate.gemma4.load import load

    # All tensors of the folder: the towers, which are not loaded, are a small part of it.
    total = checkpoint.tensor_bytes
    with byte_bar("loading", total) as progress:
        devices = pick_mesh(total, mesh)
        return load(checkpoint.folder, decode=decode, head=head, mesh=devices, progress=progress)


def _speed(chunks: list[Chunk]) -> dict[str, float | None]:
    """Prefill ms, and the rate of the tokens after the first."""
    steps, seconds = sum(c.steps for c in chunks[1:]), sum(c.seconds for c in chunks[1:])
    return {
        "prefill_ms": 1e3 * chunks[0].seconds,
        "tokens_per_second": steps / seconds if steps else None,
    }


def _machine(model: Model) -> dict[str, Any]:
    import jax

    return {
        "weight_bytes": model.nbytes,
        "device": jax.devices()[0].device_kind,
        "dtype": str(model.weights["norm"].dtype),
        "jax": jax.__version__,
    }


def _print_figures(figures: dict[str, Any], prompt_tokens: int, model: Model) -> None:
    rate = figures["tokens_per_second"]
    click.echo(
        f"load {figures['load_s']:.2f} s ({size(model.nbytes)}), "
        f"compile {figures['compile_s']:.2f} s, "
        f"prefill {figures['prefill_ms']:.1f} ms ({prompt_tokens} tokens), "
        + (f"{rate:.1f} tokens/s" if rate else "one token"),
        err=True,
    )
