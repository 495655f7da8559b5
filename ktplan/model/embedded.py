"""The model and the texts that come with the package.

`tiny` is a small but really trained Qwen3-MoE (4 layers of 16 experts): a specimen of routing, layout and arithmetic
that writes locally grammatical text, not a chat model. See data/tiny/README.md for how it was made.
"""

from __future__ import annotations

from pathlib import Path

from ktplan.errors import BadUsage

_DATA = Path(__file__).resolve().parent.parent / "data"

TINY = _DATA / "tiny"
PARTS = ("profile", "test")
DOMAINS = ("english", "code", "chinese", "maths")


def corpus_files(part: str) -> list[Path]:
    """The embedded documents, one jsonl file a domain; "profile" and "test" share no document.

    Raises BadUsage for another part.
    """
    if part not in PARTS:
        raise BadUsage(f"there is no embedded text 'corpus:{part}'", hint="use corpus:profile or corpus:test")
    return [_DATA / "corpus" / f"{domain}.{part}.jsonl" for domain in DOMAINS]
