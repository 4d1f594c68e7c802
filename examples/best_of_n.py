"""Best of n: several answers are drawn to one prompt, which is computed once, and the model's own likelihood says which is the best.

    python examples/best_of_n.py [--model NAME_OR_PATH] [--n N] [--max-new-tokens N]

Prints every answer behind its score (the mean log-probability of its tokens), the best one again, how many prompt tokens were reused, and
the time.
"""

import argparse
import time

import torch

import radixkv
from radixkv.demo.documents import shipped_documents
from radixkv.demo.models import load_model


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo's SmolLM2-135M-Instruct, which needs no network")
    parser.add_argument("--n", type=int, default=4, help="answers to draw")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model)
    radixkv.patch_model(model)

    document = shipped_documents()[0]
    messages = [{"role": "user", "content": f"{document.text}\n\nAnswer in one sentence: {document.questions[3]}"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(0)
    start = time.perf_counter()
    output = model.generate(
        **inputs.to(model.device),
        max_new_tokens=options.max_new_tokens,
        do_sample=True,
        temperature=0.8,
        num_return_sequences=options.n,
        return_dict_in_generate=True,
        output_scores=True,
    )
    seconds = time.perf_counter() - start

    answers = output.sequences[:, inputs["input_ids"].shape[1] :]
    log_probs = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    # What follows the end of an answer is padding.
    is_end = answers == model.generation_config.eos_token_id
    is_own = is_end.int().cumsum(1) - is_end.int() == 0
    scores = (log_probs.where(is_own, 0).sum(1) / is_own.sum(1)).tolist()
    texts = [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]
    for score, text in zip(scores, texts, strict=True):
        print(f"{score:6.2f}  {text}")
    print(f"best: {texts[scores.index(max(scores))]}")
    stats = model.radixkv.stats()
    print(f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens reused, {seconds:.2f} s")


if __name__ == "__main__":
    main()
