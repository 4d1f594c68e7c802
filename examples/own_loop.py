"""A loop of one's own: a prompt is computed once, continued from its two likeliest next tokens, and what was found is kept.

    python examples/own_loop.py [--model NAME_OR_PATH] [--max-new-tokens N]

Prints both continuations, then how many tokens a generate() that goes on from the first one reuses, and the times.
"""

import argparse
import copy
import time

import torch

import radixkv
from radixkv.demo.models import load_model


@torch.no_grad()
def continue_from(model, token, cache, num_tokens):
    """Greedy decoding from one token on; the tokens, that one included."""
    tokens = [token]
    while len(tokens) < num_tokens:
        # The cache knows what came before, so only the new token is passed. From transformers 5.23 on it may be called cache=.
        logits = model(torch.tensor([tokens[-1:]], device=model.device), past_key_values=cache).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo's SmolLM2-135M-Instruct, which needs no network")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model)
    radixkv.patch_model(model)

    prompt = tokenizer("The three things that matter most in a good garden are", return_tensors="pt")["input_ids"].to(model.device)
    start = time.perf_counter()
    cache = model.radixkv.new_cache()
    with torch.no_grad():
        logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits
    firsts = logits[0, -1].topk(2).indices.tolist()
    caches = [cache, copy.deepcopy(cache)]  # in the same blocks, until one of them writes
    ways = [continue_from(model, first, each, options.max_new_tokens) for first, each in zip(firsts, caches, strict=True)]
    for way in ways:
        print(f"...{tokenizer.decode(way)!r}")
    print(f"  a prompt of {prompt.shape[1]} tokens, continued in {len(ways)} ways, {time.perf_counter() - start:.2f} s")

    cache.store()
    caches[1].close()  # not worth keeping
    start, before = time.perf_counter(), model.radixkv.stats().cached_tokens
    longer = torch.cat([prompt, torch.tensor([ways[0]], device=model.device)], dim=1)
    model.generate(longer, attention_mask=torch.ones_like(longer), max_new_tokens=8, do_sample=False)
    reused = model.radixkv.stats().cached_tokens - before
    print(f"  {reused} of {longer.shape[1]} tokens reused, {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
