"""The folders as transformers and compressed-tensors read them: both import torch."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from qatpack.checkpoint.folder import Checkpoint
from qatpack.checkpoint.reader import TensorReader
from qatpack.checkpoint.source import resolve_source
from qatpack.repack.job import repack
from qatpack.repack.packing import decode, unpack
from qatpack.repack.plan import Options

pytestmark = [
    # Of the libraries' own making; ours raise as everywhere.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"
BF16 = ml_dtypes.bfloat16
BUILDS = [(d, t) for t in (False, True) for d in ("bfloat16", "float16", "float32")]


@pytest.fixture(
    scope="module", params=BUILDS, ids=lambda b: f"{b[0]}-{'text' if b[1] else 'whole'}"
)
def build(request, tmp_path_factory):
    dtype, text_only = request.param
    out = tmp_path_factory.mktemp("build") / "out"
    manifest = repack(resolve_source(DEMO), out, Options(scale_dtype=dtype, text_only=text_only))
    return out, manifest, text_only


def arrays(folder):
    opened = Checkpoint.open(folder)
    with TensorReader() as reader:
        return {name: reader.read(tensor) for name, tensor in opened.tensors.items()}


def modules(tensors):
    return [n.removesuffix(".weight_packed") for n in tensors if n.endswith(".weight_packed")]


def as_transformers_decodes(tensors):
    """The dense weights that transformers computes with: scales cast to bfloat16 first."""
    dense = {n: a for n, a in tensors.items() if ".weight_" not in n}
    for module in modules(tensors):
        scale = tensors[f"{module}.weight_scale"].astype(BF16)
        dense[f"{module}.weight"] = decode(tensors[f"{module}.weight_packed"], scale)
    return dense


def load(folder, text_only):
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4ForConditionalGeneration

    cls = Gemma4ForCausalLM if text_only else Gemma4ForConditionalGeneration
    model, report = cls.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def logits(model):
    import torch

    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(3, 3 + 100)[None] * 7 % (vocabulary - 200) + 150
    with torch.no_grad():
        return model(input_ids=ids).logits


def dense_folder(folder, tensors, build_folder):
    config = json.loads((build_folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_transformers_loads_it_and_computes_what_the_dense_model_does(build, tmp_path):
    import torch

    out, _, text_only = build
    packed = logits(load(out, text_only))
    dense = dense_folder(tmp_path, as_transformers_decodes(arrays(out)), out)
    assert packed.dtype == torch.bfloat16
    assert torch.equal(packed, logits(load(dense, text_only)))


def to_torch(array):
    """A numpy array as a tensor; bfloat16 goes by its bits, which numpy and torch share."""
    import torch

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def decompressed(state):
    """compressed-tensors' own weight of one module, in the scale's dtype, as numpy."""
    import torch
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
    tensors = {f"weight_{part}": to_torch(array) for part, array in state.items()}
    weight = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    if weight.dtype == torch.bfloat16:
        return weight.view(torch.int16).numpy().view(BF16)
    return weight.numpy()


def test_compressed_tensors_decompresses_to_our_values(build):
    out, manifest, text_only = build
    tensors, reference = arrays(out), arrays(DEMO)
    assert len(modules(tensors)) == manifest["totals"]["packed_modules"]
    for module in modules(tensors):
        state = {p: tensors[f"{module}.weight_{p}"] for p in ("packed", "scale", "shape")}
        scale = state["scale"]
        steps = np.repeat(scale.astype(np.float32), 32, -1)
        product = steps * unpack(state["packed"])
        theirs = decompressed(state)
        assert theirs.tobytes() == product.astype(scale.dtype).tobytes(), module
        ours = decode(state["packed"], scale)
        assert ours.tobytes() == product.astype(BF16).tobytes(), module
        if scale.dtype == np.float32:
            name = module.replace("model.", "model.language_model.") if text_only else module
            assert theirs.astype(BF16).tobytes() == reference[f"{name}.weight"].tobytes()
