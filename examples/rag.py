"""Retrieval: each question is put behind the document that shares most words with it, and each document is computed once.

    python examples/rag.py [--model NAME_OR_PATH] [--questions N] [--max-new-tokens N]

Prints for every question its answer, how many tokens of its prompt were reused, and the time; in the end the sum.
"""

import argparse
import re
import time

import radixkv
from radixkv.demo.documents import shipped_documents
from radixkv.demo.models import load_model


def words(text):
    return set(re.findall(r"\w{4,}", text.lower()))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo's SmolLM2-135M-Instruct, which needs no network")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model)
    radixkv.patch_model(model)

    documents = shipped_documents()
    questions = [question for both in zip(*(document.questions for document in documents), strict=True) for question in both]
    for question in questions[: options.questions]:
        found = max(documents, key=lambda document: len(words(question) & words(document.text)))
        # The document first, the question last: only what comes before the first difference can be shared.
        messages = [{"role": "user", "content": f"{found.text}\n\nAnswer in one sentence: {question}"}]
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        before, start = model.radixkv.stats(), time.perf_counter()
        output = model.generate(**inputs.to(model.device), max_new_tokens=options.max_new_tokens, do_sample=False)
        seconds, reused = time.perf_counter() - start, model.radixkv.stats().cached_tokens - before.cached_tokens
        num_tokens = inputs["input_ids"].shape[1]
        print(f"{question} [{found.title}]\n  {tokenizer.decode(output[0, num_tokens:], skip_special_tokens=True).strip()}")
        print(f"  {reused} of {num_tokens} tokens reused, {seconds:.2f} s")
    stats = model.radixkv.stats()
    print(f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens reused, {stats.hits} of {stats.requests} prompts hit")


if __name__ == "__main__":
    main()
