"""Text to token ids with the tokenizer's special tokens told apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from ktplan.profile.recorder import Encode, Encoded


def text_encoder(tokenizer: Any) -> Encode:
    """A function from text to `Encoded`: special tokens before the text, and the text's own tokens int64 [n].

    A beginning-of-text token stays in front of every stretch that a text is cut into, as the model was trained;
    special tokens after the end are dropped.
    """

    def encode(text: str) -> Encoded:
        encoded = tokenizer(text, return_special_tokens_mask=True, verbose=False)
        ids = np.asarray(encoded["input_ids"], dtype=np.int64)
        own = np.flatnonzero(np.asarray(encoded["special_tokens_mask"]) == 0)
        if not len(own):
            return Encoded((), ids[:0])
        return Encoded(tuple(ids[: own[0]].tolist()), ids[own[0] : own[-1] + 1])

    return encode
