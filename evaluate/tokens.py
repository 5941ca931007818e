"""Text to token ids and back, with exactly one BOS; chats through the folder's own template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
        """One user turn, framed by the folder's chat template, ready for the model's answer."""
        template = _template(self.folder)
        names = _read(self.folder / "tokenizer_config.json")
        special = {k: v for k, v in names.items() if k.endswith("_token") and isinstance(v, str)}
        return template.render(
            messages=[{"role": "user", "content": text}], add_generation_prompt=True, **special
        )


def open_vocabulary(folder: str | Path) -> Vocabulary:
    """The tokenizer of a checkpoint folder.

    Raises ModelError: no or a damaged tokenizer.json, or a BOS that nothing names.
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
    generation, config = (_read(folder / n) for n in ("generation_config.json", "config.json"))
    text = config.get("text_config") or config
    bos = generation.get("bos_token_id", text.get("bos_token_id"))
    if bos is None:
        raise ModelError(f"{folder}: neither generation_config.json nor config.json names a BOS.")
    stop = generation.get("eos_token_id", config.get("eos_token_id", text.get("eos_token_id")))
    stop = [] if stop is None else [stop] if isinstance(stop, int) else stop
    return Vocabulary(folder, tokenizer, bos, tuple(stop))


def _template(folder: Path) -> Any:
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as e:
        raise ModelError(
            "chat templates need jinja2: pip install jinja2, or leave out --chat."
        ) from e
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else None
    source = source or _read(folder / "tokenizer_config.json").get("chat_template")
    if not isinstance(source, str):
        raise ModelError(f"{path}: not found; this checkpoint has no chat template.")
    # The settings with which transformers renders templates.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refused
    return environment.from_string(source)


def _refused(message: str) -> None:
    raise ModelError(f"the chat template refuses this chat: {message}.")


def _read(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
