"""The cache against whole runs, and the loop that stays on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qatpack.checkpoint.errors import ModelError
from qatpack.evaluate.gemma4 import cache, generate, model
from qatpack.evaluate.gemma4.sampling import Sampling, choose

from .conftest import Reference, reference

PROMPTS = [list(range(40, 59)), [7, 8, 9, 10, 11]]  # longer and shorter than the window of 8
NEW = 14  # the short row passes the window while it decodes


HOT = Sampling(temperature=3.0)  # the random model repeats itself when greedy
NEVER = [-1, -1]  # two stop ids in every test, so that compiled functions serve them all


def run(ref: Reference, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    options = {"stop": NEVER, "max_tokens": NEW} | options
    tokens, _ = generate.generate(ref.weights, prompts, config=ref.config, **options)
    return tokens


@pytest.mark.parametrize("name", ["e2b", "31b"])
def test_prefill_and_steps_equal_one_whole_run(name: str) -> None:
    ref = reference(name)
    total = np.random.default_rng(0).integers(3, 256, (2, 33))
    counts = np.array([19, 5])
    forward = jax.jit(model.forward, static_argnames="config")
    whole, kv = forward(
        ref.weights, jnp.asarray(total), jnp.broadcast_to(jnp.arange(33), (2, 33)),
        config=ref.config,
    )  # fmt: skip
    kept = cache.fill(
        tuple(p and (p[0][:, :, :19], p[1][:, :, :19]) for p in kv), jnp.asarray(counts), 64,
        config=ref.config,
    )  # fmt: skip
    step = jax.jit(generate.step, static_argnames="config")
    for i in range(NEW):
        at = counts + i
        hidden, kept = step(
            ref.weights, kept, jnp.asarray(total[[0, 1], at]), jnp.asarray(at), config=ref.config
        )
        expected = np.asarray(whole)[[0, 1], at]
        np.testing.assert_allclose(np.asarray(hidden)[:, 0], expected, rtol=0, atol=3e-5)


def test_sliding_layers_keep_a_ring_and_shared_layers_nothing(e2b: Reference) -> None:
    state = generate.prefill(
        e2b.weights, jnp.zeros((2, 32), jnp.int32), jnp.array([32, 3]), jnp.array(NEVER),
        jax.random.key(0), HOT, config=e2b.config, cache_length=64,
    )  # fmt: skip
    sizes = [layer and layer["k"].shape[2] for layer in state.cache]
    assert sizes == [8, 64, 8, 64, None, None, None]


@pytest.mark.parametrize("name", ["e2b", "31b"])
def test_greedy_text_of_a_batch_equals_transformers_row_by_row(name: str) -> None:
    ref = reference(name)
    ours = run(ref, PROMPTS)
    for prompt, row in zip(PROMPTS, ours, strict=True):
        with torch.no_grad():
            out = ref.torch_model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
            )
        assert row == out[0, len(prompt) :].tolist()


def test_chunks_are_the_same_text_and_stop_ids_end_a_row(e2b: Reference) -> None:
    whole = run(e2b, PROMPTS, sampling=HOT)
    chunks = list(
        generate.stream(
            e2b.weights,
            PROMPTS,
            config=e2b.config,
            max_tokens=NEW,
            chunk=4,
            sampling=HOT,
            stop=NEVER,
        )
    )
    assert [c.steps for c in chunks] == [1, 4, 4, 4, 1]
    for row, text in enumerate(whole):
        assert [t for c in chunks for t in c.tokens[row]] == text
    stop = next(t for t in whole[0][4:] if t not in whole[0][:4] + whole[1])
    stopped = run(e2b, PROMPTS, sampling=HOT, stop=[stop, -1])
    assert stopped == [whole[0][: whole[0].index(stop) + 1], whole[1]]
    chunks = list(
        generate.stream(
            e2b.weights, PROMPTS, config=e2b.config, max_tokens=NEW, chunk=4, sampling=HOT,
            stop=[stop, -1],
        )
    )  # fmt: skip
    assert [[t for c in chunks for t in c.tokens[row]] for row in (0, 1)] == stopped


def test_the_loop_ends_when_all_rows_have_stopped(e2b: Reference) -> None:
    whole = run(e2b, PROMPTS, sampling=HOT)
    stop = [whole[0][2], whole[1][5]]
    rows, chunks = generate.generate(
        e2b.weights, PROMPTS, config=e2b.config, max_tokens=NEW, sampling=HOT, stop=stop
    )
    ends = [min(row.index(t) for t in stop if t in row) + 1 for row in whole]
    assert [len(row) for row in rows] == ends
    assert sum(c.steps for c in chunks) == max(ends) < NEW


def test_ten_prompts_within_one_padded_length_compile_once(
    e2b: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[int] = []
    original = model.run_layers
    monkeypatch.setattr(
        model, "run_layers", lambda *a, **k: traced.append(a[1].shape[1]) or original(*a, **k)
    )
    for count in range(3, 13):
        run(e2b, [list(range(5, 5 + count))], max_tokens=4, cache_length=64)
    assert traced == [32, 1]


def test_the_loop_keeps_no_copy_of_the_weights() -> None:
    ref = reference("e2b", torch.bfloat16)
    state = generate.prefill(
        ref.weights, jnp.zeros((1, 32), jnp.int32), jnp.array([3]), jnp.array(NEVER),
        jax.random.key(0), None, config=ref.config, cache_length=64,
    )  # fmt: skip
    program = generate.decode.lower(
        ref.weights, state, jnp.int32(4), jnp.array(NEVER), None, config=ref.config, chunk=4
    ).compile()
    weights = sum(x.nbytes for x in jax.tree.leaves(ref.weights))
    assert program.memory_analysis().temp_size_in_bytes < 0.5 * weights


@pytest.mark.parametrize("prompt", [[7, 250, 9], [7, 8, 9]])
def test_states_that_are_not_finite_are_no_text(e2b: Reference, prompt: list[int]) -> None:
    """The first prompt breaks at once; the second when the loop runs the token it chose, whose
    logit is NaN and thus the likeliest."""
    table = e2b.weights["embed_tokens"].at[250].set(jnp.nan)
    weights = e2b.weights | {"embed_tokens": table}
    with pytest.raises(ModelError, match=r"not finite; look at its weights with qatpack verify\."):
        generate.generate(
            weights, [PROMPTS[0], prompt], config=e2b.config, stop=NEVER, max_tokens=NEW
        )


def test_padded_lengths_are_few() -> None:
    lengths = {generate.padded_length(n) for n in range(1, 4097)}
    assert lengths == {32, 128, 512, 1024, 2048, 4096}


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[]], {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([[2, 3]], {"cache_length": 16}, "cache_length 16 is too short"),
    ],
)
def test_bad_requests(
    e2b: Reference, prompts: list[list[int]], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        run(e2b, prompts, **options)


LOGITS = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]] * 2000))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.79), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.5), [1, 0, 0, 0]),
        (Sampling(top_p=1e-9), [1, 0, 0, 0]),
        (Sampling(temperature=0.5), [0.6849, 0.2466, 0.0616, 0.0068]),
        (None, [1, 0, 0, 0]),
    ],
)
def test_sampling_follows_the_distribution(
    sampling: Sampling | None, expected: list[float]
) -> None:
    drawn = np.asarray(choose(LOGITS, jax.random.key(1), sampling))
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(shares, expected, atol=0.03)
    assert (shares[np.array(expected) == 0] == 0).all()


def test_sampled_text_depends_on_the_seed_only(e2b: Reference) -> None:
    texts = [run(e2b, PROMPTS, sampling=Sampling(temperature=2.0), seed=s) for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
