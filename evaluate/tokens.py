"""Text to token ids and back, with exactly one BOS; chats through the folder's own template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.errors import CheckpointError, ModelError
from ..checkpoint.folder import read_json
from ..checkpoint.naming import text_config

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNFRAMED = "download it again, or leave out --chat"


@dataclass(frozen=True)
class Vocabulary:
    """A folder's tokenizer: `bos` is the id that starts a text, `stop` the ids that end one."""

    folder: Path
    tokenizer: Tokenizer
    bos: int
    stop: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, BOS first, once, whether or not the text spells it.

        Gemma 4's tokenizer.json adds none, its chat template writes one. Raises `ModelError` for a
        BOS inside the text.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        while ids and ids[0] == self.bos:
            ids = ids[1:]
        if self.bos in ids:
            raise ModelError(
                f"the text has a BOS token (id {self.bos}) at place {ids.index(self.bos) + 1}; "
                "a text has exactly one, at its start."
            )
        return [self.bos, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_stream(self, chunks: Iterable[Sequence[int]]) -> Iterator[str]:
        """Text as its tokens come; a character whose bytes are incomplete waits."""
        ids: list[int] = []
        shown = 0
        for chunk in chunks:
            ids.extend(chunk)
            text = self.decode(ids)
            if not text.endswith("�"):
                yield text[shown:]
                shown = len(text)
        yield self.decode(ids)[shown:]

    def chat(self, text: str) -> str:
        """One user turn, framed by the folder's chat template, ready for the model's answer.

        Raises `ModelError`: no jinja2, no template, or one that cannot be read or run.
        """
        path, template = _template(self.folder)
        names = _read(self.folder / "tokenizer_config.json")
        special = {k: v for k, v in names.items() if k.endswith("_token") and isinstance(v, str)}
        turn = [{"role": "user", "content": text}]
        try:
            return template.render(messages=turn, add_generation_prompt=True, **special)
        except ModelError:
            raise
        except Exception as e:  # a template can fail like any program
            raise ModelError(f"{path}: the chat template fails ({e}); {_UNFRAMED}.") from e


def open_vocabulary(folder: str | Path) -> Vocabulary:
    """The tokenizer of a checkpoint folder.

    Raises `ModelError`: no or a damaged tokenizer.json, a BOS that nothing names, ids that are
    none; `CheckpointError`: another file that is no JSON object.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path}: not found; the folder needs its tokenizer to read text.")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # tokenizers raises plain Exception
        raise ModelError(f"{path}: cannot be read ({e}); download it again.") from e
    bos = _named(folder, "bos_token_id")
    if bos is None:
        raise ModelError(f"{folder}: neither generation_config.json nor config.json names a BOS.")
    if not _is_id(bos[1]):
        raise ModelError(f"{bos[0]}: bos_token_id is {bos[1]!r}, expected one token id.")
    place, stop = _named(folder, "eos_token_id") or (folder, [])
    stop = stop if isinstance(stop, list) else [stop]
    if not all(_is_id(i) for i in stop):
        raise ModelError(f"{place}: eos_token_id is {stop!r}, expected token ids.")
    return Vocabulary(folder, tokenizer, bos[1], tuple(stop))


def most_positions(config: Mapping[str, Any]) -> int | None:
    """The positions a model was made for by its config.json; None where that sets no bound."""
    most = text_config(config).get("max_position_embeddings")
    return most if isinstance(most, int) else None


def check_positions(prompt: int, tokens: int, config: Mapping[str, Any], name: str) -> None:
    """Raise `ModelError` where a prompt and its continuation take more than the model has.

    `prompt`, `tokens`: how many. The cache is made for all of them at once.
    """
    most = most_positions(config)
    if most is not None and prompt + tokens > most:
        raise ModelError(
            f"a prompt of {prompt:,} tokens and {tokens:,} new ones are more than the {most:,} "
            f"positions of {name} (max_position_embeddings in its config.json); give a shorter "
            "prompt or fewer --max-tokens."
        )


def check_ids(ids: Iterable[int], vocab: int, folder: Path) -> None:
    """Raise `ModelError` for a token id that a model of `vocab` tokens has no row for.

    XLA takes some other row for it and says nothing.
    """
    if (largest := max(ids)) >= vocab:
        raise ModelError(
            f"{folder}: its tokenizer gives the token id {largest}, and the model has {vocab:,} "
            "tokens; tokenizer and weights are not of one model, download both again."
        )


def _named(folder: Path, key: str) -> tuple[Path, Any] | None:
    """The file that gives `key`, and what it gives, by the order in which transformers looks."""
    generation, config = folder / "generation_config.json", folder / "config.json"
    top = _read(config)
    text = top.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{config}: text_config is {text!r}, expected an object.")
    places = [(generation, _read(generation)), (config, top), (config, text)]
    return next(((path, v[key]) for path, v in places if v.get(key) is not None), None)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _template(folder: Path) -> tuple[Path, Any]:
    """The compiled chat template, and the file that holds it."""
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as e:
        raise ModelError(
            "chat templates need jinja2: pip install jinja2, or leave out --chat."
        ) from e
    path, source = _template_source(folder)
    # The settings with which transformers renders templates.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refused
    try:
        return path, environment.from_string(source)
    except TemplateError as e:
        raise ModelError(f"{path}: is no chat template ({e}); {_UNFRAMED}.") from e


def _template_source(folder: Path) -> tuple[Path, str]:
    """The chat template, and the file that holds it."""
    path, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        if path.exists() and (source := path.read_text(encoding="utf-8")):
            return path, source
    except (OSError, UnicodeDecodeError) as e:
        raise ModelError(f"{path}: cannot be read ({e}); {_UNFRAMED}.") from e
    source = _read(config).get("chat_template")
    if not isinstance(source, str):
        raise ModelError(f"{path}: not found; this checkpoint has no chat template.")
    return config, source


def _refused(message: str) -> None:
    raise ModelError(f"the chat template refuses this chat: {message}.")


def _read(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.exists() else {}
