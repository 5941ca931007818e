"""Which files beside the weights belong to a checkpoint."""

from __future__ import annotations

from fnmatch import fnmatchcase

TEMPLATES = "additional_chat_templates"

# Settings, tokenizer, processor, templates, licence and notices: what readers and the law need,
# and nothing that a folder happens to hold besides (logs, credentials, trainer state).
_PATTERNS = (
    "config.json", "generation_config.json", "*processor_config.json",
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.model", "chat_template.json", "*.jinja", f"{TEMPLATES}/*.jinja",
    "readme.md", "licen[sc]e*", "notice*", "copying*", "use_policy*",
)  # fmt: skip


def is_sidecar(name: str) -> bool:
    """Whether this is such a file, by its path in the folder or repository; case is ignored.

    Only the top level counts, and the one subfolder that readers know: `original/`, `onnx/` and
    the like hold other builds of the same model.
    """
    lower = name.lower()
    inside = lower.count("/") == 1 and lower.startswith(f"{TEMPLATES}/")
    if "/" in lower and not inside:
        return False
    return any(fnmatchcase(lower, pattern) for pattern in _PATTERNS)
