"""Logits along given tokens, in any way of decoding: what is compared where rounding may change the tokens themselves."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList


class Force(LogitsProcessor):
    """Makes generate() return given tokens [rows, steps], whatever the logits; of beams or sequences each row has several."""

    def __init__(self, tokens: torch.Tensor, prompt_len: int):
        self._tokens, self._prompt_len = tokens, prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self._prompt_len
        tokens = self._tokens.repeat_interleave(len(scores) // len(self._tokens), 0)
        return torch.full_like(scores, float("-inf")).scatter(1, tokens[:, step : step + 1], 0.0)


def forced_logits(model: Any, inputs: dict[str, torch.Tensor], tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Logits float32 [steps, rows, vocabulary] along `tokens` [rows, steps]; the first of several sequences or beams of a row."""
    output = model.generate(
        **inputs,
        logits_processor=LogitsProcessorList([Force(tokens, inputs["input_ids"].shape[1])]),
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, "max_new_tokens": tokens.shape[1], **arguments},
    )
    logits = torch.stack(output.logits).float()
    return logits[:, :: logits.shape[1] // len(tokens)]
