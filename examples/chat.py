"""A conversation: every turn sends all of it, as chat templates do, and only what is new is computed.

    python examples/chat.py [--model NAME_OR_PATH] [--say TEXT ...] [--max-new-tokens N]

Prints both sides, and for every turn how many tokens of the prompt were reused, which grows from turn to turn, and the time.
"""

import argparse
import time

import radixkv
from radixkv.demo.models import load_model

SAY = ["Name three rivers of Europe.", "Which of them is the longest?", "Which seas do they flow into?", "Thank you!"]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo's SmolLM2-135M-Instruct, which needs no network")
    parser.add_argument("--say", nargs="+", default=SAY, metavar="TEXT", help="what the user says, turn by turn")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model)
    radixkv.patch_model(model)

    messages = [{"role": "system", "content": "You are a teacher of geography. You answer in one short sentence."}]
    for text in options.say:
        messages.append({"role": "user", "content": text})
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        before, start = model.radixkv.stats(), time.perf_counter()
        output = model.generate(**inputs.to(model.device), max_new_tokens=options.max_new_tokens, do_sample=False)
        seconds, reused = time.perf_counter() - start, model.radixkv.stats().cached_tokens - before.cached_tokens
        num_tokens = inputs["input_ids"].shape[1]
        answer = tokenizer.decode(output[0, num_tokens:], skip_special_tokens=True)
        # Answers were computed too: the next prompt reuses them, as far as their text becomes the same tokens again.
        messages.append({"role": "assistant", "content": answer})
        print(f"user: {text}\nassistant: {answer.strip()}")
        print(f"  {reused} of {num_tokens} tokens reused, {seconds:.2f} s")


if __name__ == "__main__":
    main()
