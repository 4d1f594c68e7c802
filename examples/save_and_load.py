"""A document's K/V in a file: the first run computes and saves it, every later one loads it and computes the question alone.

    python examples/save_and_load.py [--model NAME_OR_PATH] [--file FILE] [--max-new-tokens N]

Run it twice. Prints what was loaded or saved, the answer, how many tokens of the prompt were reused, and the time.
"""

import argparse
import time
from pathlib import Path

import radixkv
from radixkv.demo.documents import shipped_documents
from radixkv.demo.models import load_model


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo's SmolLM2-135M-Instruct, which needs no network")
    parser.add_argument("--file", type=Path, default=Path("prefixes.safetensors"))
    parser.add_argument("--max-new-tokens", type=int, default=24)
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model)
    radixkv.patch_model(model)

    is_there = options.file.exists()
    if is_there:
        # A file of another model, dtype or tokenizer is refused, with the difference named.
        print(model.radixkv.load(options.file, tokenizer=tokenizer))

    document = shipped_documents()[0]
    question = document.questions[1 if is_there else 0]
    messages = [{"role": "user", "content": f"{document.text}\n\nAnswer in one sentence: {question}"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    start = time.perf_counter()
    output = model.generate(**inputs.to(model.device), max_new_tokens=options.max_new_tokens, do_sample=False)
    seconds = time.perf_counter() - start
    stats = model.radixkv.stats()
    print(f"{question}\n  {tokenizer.decode(output[0, stats.prompt_tokens :], skip_special_tokens=True).strip()}")
    print(f"  {stats.cached_tokens} of {stats.prompt_tokens} tokens reused, {seconds:.2f} s")

    if not is_there:
        print(model.radixkv.save(options.file, tokenizer=tokenizer))


if __name__ == "__main__":
    main()
