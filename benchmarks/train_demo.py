"""Train the demonstration checkpoint: `python benchmarks/train_demo.py --out demo/checkpoint`.

A Gemma 4 of Google's E2B layout with small sizes: `tests/data/e2b_config.json` with every key in
place, a tokenizer of its own, and a text decoder trained by fake quantization on the language
reference that CPython ships (`pydoc_data.topics`). Stored is what its forward pass multiplies
with: bf16(step * level) in groups of 32, step max|w|/8 in float32, levels -8..7. It is scored on
`evaluate/text.txt`, which it has not seen, after transformers has loaded it and placed every
tensor.

The same Python, torch and processor give the same bytes; another Python has other topics. About 4
minutes on two free cores, and with Python 3.11 and torch 2.13: perplexity 160.4 where a uniform
guess has 1536 (9.6 times less), 70,016 groups, 39,693 of them peaking at level 8, 30,317 at 7.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig
from transformers import Gemma4ForConditionalGeneration as Gemma4
from transformers import PreTrainedTokenizerFast as Fast
from transformers.models import gemma4 as hf

ROOT = Path(__file__).resolve().parent.parent
REAL = ROOT / "tests/data"  # Google's own config files, byte for byte
HELD_OUT = ROOT / "evaluate/text.txt"

SEED = 4
STEPS = 450
TOKENS_PER_STEP = 1024
LENGTHS = (128, 256, 512, 256)  # window lengths in turn; the sliding window is 64
CHAT_SHARE = 0.2  # of the windows; the others are prose
LEARNING_RATE, WARMUP = 6e-3, 50
NOISE = 0.15  # of the input tokens are drawn anew: so small a text is soon known by heart

GROUP = 32
VOCAB = 1536
BOS = 2
RESERVED = 128  # ids below this are special or unused
SPECIAL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>",
    46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>", 49: "<tool_call|>",
    50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>",
    100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>",
    120: "<|image>", 121: "<|audio>", 122: "<|image|>", 123: "<|audio|>",
    124: "<image|>", 125: "<audio|>", 126: "<|video|>",
}  # fmt: skip

TEXT_SIZES = {
    "global_head_dim": 64, "head_dim": 32, "hidden_size": 160, "hidden_size_per_layer_input": 32,
    "intermediate_size": 320, "num_attention_heads": 4, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 2048, "num_kv_shared_layers": 2, "sliding_window": 64,
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
VISION_SIZES = {
    "global_head_dim": 16, "head_dim": 16, "hidden_size": 32, "intermediate_size": 64,
    "max_position_embeddings": 2048, "num_attention_heads": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "position_embedding_size": 128,
}  # fmt: skip
AUDIO_SIZES = {
    "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "output_proj_dims": 64,
    "subsampling_conv_channels": [128, 8],  # the first is tied to the 128 mel bins
}  # fmt: skip
IDS = {
    "boi_token_id": 120, "boa_token_id": 121, "image_token_id": 122, "audio_token_id": 123,
    "eoi_token_id": 124, "eoa_token_id": 125, "eoa_token_index": 125, "video_token_id": 126,
}  # fmt: skip

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
    {%- set text = [{'type': 'text', 'text': message.content}] -%}
    {%- for part in (text if message.content is string else message.content) -%}
        {{- part.text | trim if part.type == 'text' else '<|' + part.type + '|>' -}}
    {%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endfor -%}
{{- '<|turn>model\\n' if add_generation_prompt else '' -}}
"""
PROMPT = "A class definition"
QUESTION = "What does Python say about the `while` statement?"
QUESTIONS = ("What does Python say about {}?", "Explain {}.", "Tell me about {}.", "{}")


def training_text() -> str:
    """CPython's own reference topics, in the order of their names."""
    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def chat_samples(tokenizer: Fast) -> list[Tensor]:
    """One exchange per topic and way of asking, as tokens: its title, then its first paragraphs."""
    samples = []
    for name in sorted(topics):
        title, _, body = topics[name].strip().partition("\n")
        title = title[:1].lower() + title[1:].replace('"', "`")
        parts = [p.strip("*=-\n") for p in body.split("\n\n") if p.strip(" *=-\n")]
        for i, question in enumerate(QUESTIONS):
            user = {"role": "user", "content": question.format(title)}
            model = {"role": "model", "content": "\n\n".join(parts[: 1 + i % 2])}
            text = tokenizer.apply_chat_template([user, model], tokenize=False)
            samples.append(encode(tokenizer, text))
    return samples


def train_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE; ids below 128 are special, and nothing is added to what is encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    unused = iter(range(RESERVED))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[SPECIAL.get(i) or f"<unused{next(unused)}>" for i in range(RESERVED)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def write_tokenizer(out: Path, text: str) -> Fast:
    """Train a tokenizer on the text and write its files into `out`."""
    train_tokenizer(text).save(str(out / "tokenizer.json"))
    named = {
        "audio_token": 123, "boa_token": 121, "boi_token": 120, "eoa_token": 125,
        "eoi_token": 124, "eot_token": 106, "image_token": 122, "sot_token": 105,
    }  # fmt: skip
    config = {
        "backend": "tokenizers", "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Gemma4Processor", "padding_side": "left",
        "pad_token": SPECIAL[0], "eos_token": SPECIAL[1], "bos_token": SPECIAL[2],
        "unk_token": SPECIAL[3], "mask_token": SPECIAL[4],
        "extra_special_tokens": {name: SPECIAL[i] for name, i in named.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": TEXT_SIZES["max_position_embeddings"],
    }  # fmt: skip
    write_json(out / "tokenizer_config.json", config)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return AutoTokenizer.from_pretrained(out)


def encode(tokenizer: Fast, text: str) -> Tensor:
    """The token ids of a text, int64[T]."""
    return torch.tensor(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file as Hugging Face lays it out."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def shrunk_config() -> dict:
    """Google's config.json with every key in its place and small values."""
    config = json.loads((REAL / "e2b_config.json").read_text())
    for part, sizes in (("text", TEXT_SIZES), ("vision", VISION_SIZES), ("audio", AUDIO_SIZES)):
        config[f"{part}_config"] |= sizes
    return config | IDS


def processor_config() -> dict:
    """What `Gemma4Processor.save_pretrained` writes; it needs torchvision to be loaded."""
    image = {
        "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True,
        "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0], "max_soft_tokens": 280,
        "patch_size": 16, "pooling_kernel_size": 3, "resample": 3, "rescale_factor": 1 / 255,
    }  # fmt: skip
    video = {"do_sample_frames": True, "max_soft_tokens": 70, "num_frames": 32}
    return {
        "audio_ms_per_token": 40, "audio_seq_length": 750,
        "feature_extractor": json.loads(hf.Gemma4AudioFeatureExtractor().to_json_string()),
        "image_processor": image | {"image_processor_type": "Gemma4ImageProcessor"},
        "image_seq_length": 280, "processor_class": "Gemma4Processor",
        "video_processor": image | video | {"video_processor_type": "Gemma4VideoProcessor"},
    }  # fmt: skip


def on_grid(name: str) -> bool:
    """True for what the real export quantizes: text linears and both embedding tables."""
    return name.endswith("weight") and "norm" not in name


def grid(w: Tensor) -> tuple[Tensor, Tensor]:
    """The step f32[groups, 1] and level f32[groups, 32] that stand for `w`."""
    groups = w.detach().reshape(-1, GROUP)
    step = groups.abs().amax(-1, keepdim=True) / 8
    level = (groups / step.where(step > 0, 1)).round().clamp(-8, 7)
    return step, level + 0.0  # -0.0 + 0.0 is +0.0


def quantized(w: Tensor) -> Tensor:
    """bf16(step * level), the very numbers that are saved, as float32 in the shape of `w`."""
    step, level = grid(w)
    return (step * level).to(torch.bfloat16).float().reshape(w.shape)


def text_model() -> tuple[hf.Gemma4ForCausalLM, dict[str, Tensor]]:
    """The text decoder and everything of it that is trained, layer scalars included."""
    torch.manual_seed(SEED)
    model = hf.Gemma4ForCausalLM(hf.Gemma4Config(**shrunk_config()).text_config).float()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    weights |= {n: b.clone() for n, b in model.named_buffers() if n.endswith("layer_scalar")}
    for name, w in weights.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            w.fill_(w.numel() ** -0.25)  # attention has no other scale: logits start near 1
        w.requires_grad_()
    return model, weights


def logits_of(model: hf.Gemma4ForCausalLM, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """f32[batch, positions, vocabulary]: quantized values forward, straight through back."""
    used = {n: w + (quantized(w) - w).detach() if on_grid(n) else w for n, w in weights.items()}
    return torch.func.functional_call(model, used, (ids,), {"use_cache": False}).logits


def batch(prose: Tensor, chats: list[Tensor], length: int, draw: torch.Generator) -> Tensor:
    """i64[windows, length], each from BOS on: prose from anywhere, or chats end to end."""
    rows = []
    for _ in range(TOKENS_PER_STEP // length):
        if torch.rand((), generator=draw) < CHAT_SHARE:
            some = torch.randint(len(chats), (length // 8,), generator=draw).tolist()
            rows.append(torch.cat([chats[i] for i in some])[:length])
        else:
            at = int(torch.randint(len(prose) - length + 2, (), generator=draw))
            rows.append(torch.cat([torch.tensor([BOS]), prose[at : at + length - 1]]))
    return torch.stack(rows)


def train(prose: Tensor, chats: list[Tensor], steps: int) -> dict[str, Tensor]:
    """The trained float32 weights by the names of the checkpoint."""
    model, weights = text_model()
    groups = [{"params": [w], "weight_decay": 0.1 * on_grid(n)} for n, w in weights.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    draw = torch.Generator().manual_seed(SEED)
    bar = tqdm(range(steps), desc="train", file=sys.stderr, mininterval=5)
    for step in bar:
        pace = min(1, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * pace
        ids = batch(prose, chats, LENGTHS[step % len(LENGTHS)], draw)
        noise = torch.randint(RESERVED, VOCAB, ids.shape, generator=draw)
        kept = (torch.rand(ids.shape, generator=draw) >= NOISE) | (ids < RESERVED)
        logits = logits_of(model, weights, ids.where(kept, noise))
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        bar.set_postfix(nats=f"{loss.item():.3f}", refresh=False)
    return {n.replace("model", "model.language_model", 1): w.detach() for n, w in weights.items()}


def tower_value(name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
    """An untrained value of plausible size for one tensor of the towers or their embedders."""
    noise = torch.randn(shape, generator=draw)
    if name.endswith(("_min", "_max")):
        bound = 6 + noise.abs() * 4
        return -bound if name.endswith("_min") else bound
    return 1 + 0.05 * noise if "norm" in name else 0.02 * noise


def checkpoint_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its name, bf16, in the order of the names."""
    saved = {n: quantized(w) if on_grid(n) else w for n, w in weights.items()}
    draw = torch.Generator().manual_seed(SEED)
    whole = Gemma4(hf.Gemma4Config(**shrunk_config())).state_dict()
    for name in sorted(whole.keys() - saved.keys() - {"lm_head.weight"}):
        saved[name] = tower_value(name, whole[name].shape, draw)
    return {name: saved[name].to(torch.bfloat16).contiguous() for name in sorted(saved)}


def write_checkpoint(out: Path, weights: dict[str, Tensor]) -> None:
    """Write the config files, and the weights as one safetensors file."""
    write_json(out / "config.json", shrunk_config())
    write_json(out / "processor_config.json", processor_config())
    (out / "generation_config.json").write_text((REAL / "e2b_generation_config.json").read_text())
    save_file(checkpoint_of(weights), out / "model.safetensors")
    (out / "model.safetensors").chmod(0o644)


def load(out: Path, dtype: torch.dtype) -> Gemma4:
    """The saved checkpoint through transformers; raises unless every tensor has its place."""
    model, notes = Gemma4.from_pretrained(out, dtype=dtype, output_loading_info=True)
    if any(notes.values()):
        raise RuntimeError(f"{out}: transformers does not load it cleanly: {notes}")
    return model.eval()


@torch.no_grad()
def perplexity(model: Gemma4, ids: Tensor) -> float:
    """Over consecutive windows of BOS and 511 tokens, every token scored once."""
    rows = pad(ids[: len(ids) // 511 * 511].reshape(-1, 511), (1, 0), value=BOS)
    nats = [cross_entropy(model(row[None]).logits[0, :-1].float(), row[1:]) for row in rows]
    return math.exp(torch.stack(nats).mean().item())


def greedy(model: Gemma4, tokenizer: Fast, prompt: str) -> str:
    """A greedy continuation of the prompt, as text."""
    ids = encode(tokenizer, prompt)[None]
    rule = GenerationConfig(do_sample=False, max_new_tokens=64, eos_token_id=[1, 106, 50])
    new = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=rule)
    return tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)


def group_figures(out: Path, weights: dict[str, Tensor]) -> dict[str, float]:
    """Groups in the file: their number, how many are bf16(step * level) as trained, the peaks."""
    saved = load_file(out / "model.safetensors")
    names = [n for n in weights if on_grid(n)]
    same = [(saved[n] == quantized(weights[n])).reshape(-1, GROUP) for n in names]
    peak = torch.cat([grid(weights[n])[1].abs().amax(-1) for n in names])
    return {
        "groups": len(peak),
        "groups_exact": int(torch.cat(same).all(-1).sum()),
        **{f"groups_peak_{k}": int((peak == k).sum()) for k in (0, 7, 8)},
    }


def figures(out: Path, tokenizer: Fast, weights: dict[str, Tensor]) -> dict:
    """What the README and the last line on stdout say of the saved checkpoint."""
    held_out = encode(tokenizer, HELD_OUT.read_text())
    model = load(out, torch.float32)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    score = perplexity(model, held_out)
    return {
        "parameters": sum(w.numel() for w in weights.values()),
        **group_figures(out, weights),
        "held_out_tokens": len(held_out),
        "perplexity": round(score, 2),
        "perplexity_bf16": round(perplexity(load(out, torch.bfloat16), held_out), 2),
        "uniform": VOCAB,
        "times_below_uniform": round(VOCAB / score, 2),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "greedy": greedy(model, tokenizer, SPECIAL[BOS] + PROMPT),
        "chat": greedy(model, tokenizer, prompt),
    }


CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: any-to-any
language: en
tags: [gemma4, qat, demo]
---

# qatpack demonstration checkpoint

A tiny Gemma 4, {parameters:,} text parameters, trained by qatpack's `benchmarks/train_demo.py` so
that every command can run on a real QAT checkpoint without a download. It is not made by Google,
holds none of Gemma's weights, and is good for nothing else.

- **Layout.** Tensor names, ranks, dtypes, files and config keys are those of
  `google/gemma-4-E2B-it-qat-q4_0-unquantized`; the sizes are small. Six decoder layers: sliding,
  sliding, full, sliding, then a sliding and a full one that share K/V and have MLPs of double
  width. Sliding window 64, per-layer inputs, tied embeddings, logits capped at 30.
- **Grid.** Every text linear, `embed_tokens` and `embed_tokens_per_layer` was trained by fake
  quantization and is stored as bf16(step * level): groups of 32 along the last axis, a float32
  step max|w|/8, levels -8..7. The steps are not stored. Of {groups:,} groups {groups_peak_8:,}
  peak at level 8, {groups_peak_7:,} at 7; {groups_peak_0} (of the padding token) are zero.
- **Towers.** Vision and audio are random and untrained; they are there for their tensors.
- **Training text.** The language reference that CPython {python} ships as `pydoc_data.topics` (PSF
  licence), as prose and as chat turns: a topic's title, then its first paragraphs.
- **What it learned.** On prose it has not seen (`evaluate/text.txt`, {held_out_tokens:,} tokens,
  windows of BOS + 511) perplexity is {perplexity} in float32, {perplexity_bf16} in bfloat16; a
  uniform guess among {uniform:,} tokens is {times_below_uniform} times worse. It has the manner of
  Python's manual and few of its facts. Greedy continuation of `{prompt}`:

```text
{greedy}
```
"""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)  # the order of sums, and so the bytes, depend on it
    torch.use_deterministic_algorithms(True)

    tokenizer = write_tokenizer(options.out, training_text())
    weights = train(encode(tokenizer, training_text()), chat_samples(tokenizer), options.steps)
    write_checkpoint(options.out, weights)
    found = figures(options.out, tokenizer, weights)
    (options.out / "README.md").write_text(CARD.format(prompt=PROMPT, **found))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
