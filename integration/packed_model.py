"""One packed forward of a model: the layers' attention switched to the pool, and what a decode step is captured in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from radixkv.cache import PrefixCache
from radixkv.integration.attention import STEP_ARGUMENT, packed_attention
from radixkv.integration.graphs import DecodeGraphs
from radixkv.integration.hf_cache import StepCache
from radixkv.sequence import Batch
from radixkv.step import Step


@dataclass(frozen=True)
class PackedModel:
    """How one model computes packed steps.

    Attributes:
        configs: those that its layers read. call: its class's own `forward` (or `__call__`), bound. argument: the name under which it takes
            a cache. graphs: what its decode steps are captured in, None if they run as they are.
    """

    configs: Sequence[PretrainedConfig]
    call: Callable[..., Any]
    argument: str
    graphs: DecodeGraphs | None

    def run(self, step: Step, token_ids: torch.Tensor, kept: np.ndarray | None, inputs: dict[str, Any]) -> Any:
        """The model's output for one packed step, its logits on the device of token_ids.

        Args:
            step: what to compute. token_ids: int64 [1, T]. kept: of which packed rows logits are wanted, int64; None: of all.
            inputs: what else the model is called with.
        """
        step.begin()
        with packed_attention(self.configs):
            output = self.call(
                input_ids=token_ids,
                position_ids=step.positions[None],
                # Every mask builder returns a 4-d mask untouched, and pool attention needs none.
                attention_mask=torch.empty(1, 1, 1, 1, device=token_ids.device),
                # An array is an index on any device; a tensor would be one on that of the first layer, where accelerate's hooks put it.
                logits_to_keep=0 if kept is None else kept,
                **{self.argument: StepCache(step, step.pool.num_layers), STEP_ARGUMENT: step},
                **inputs,
            )
        if not step.is_complete:
            raise RuntimeError(
                f"radixkv: {step.num_stored_layers} layers stored their K/V and {step.num_attended_layers} attended to the pool, of "
                f"{step.pool.num_layers}: the model's layers were changed, or two have the same layer_idx; unpatch the model, or patch "
                "it again"
            )
        if output.logits.device != token_ids.device:
            output.logits = output.logits.to(token_ids.device)
        return output

    def decode(
        self, cache: PrefixCache, batch: Batch, rows: list[int], token_ids: torch.Tensor, inputs: dict[str, Any]
    ) -> tuple[Any, torch.Tensor]:
        """Append a token to some rows of a batch and compute it.

        Args:
            cache, batch, rows: as for `PrefixCache.decode_step`. token_ids: int64 [rows], on the model's device.
            inputs: what else the model is called with.

        Returns:
            The model's output, and its logits [rows, vocabulary].
        """
        # What was captured computes with the weights and adapters that the namespace's first parts name.
        graphs = None if batch.is_mixed else self.graphs
        capacity = None if graphs is None else graphs.rows_for(len(rows))
        with cache.decode_step(batch, rows, token_ids.tolist(), capacity) as step:
            if graphs is None:
                output = self.run(step, token_ids[None], None, inputs)
                return output, output.logits[0]
            flags = f"{sorted(inputs.items())} {batch.namespace[:-2]}"
            logits = graphs.run(step, token_ids, lambda ids: self.run(step, ids, None, inputs).logits[0], flags)
            # Copied here, where no other thread can replay the graph, which would overwrite them.
            return CausalLMOutputWithPast(), logits[: len(rows)].clone()
