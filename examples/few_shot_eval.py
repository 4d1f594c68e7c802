"""A few-shot evaluation: all queries begin with the same twelve worked examples, which `generate_many` computes once.

    python examples/few_shot_eval.py [--model NAME_OR_PATH] [--queries N] [--max-new-tokens N]

Prints every answer with its verdict, then the accuracy, how many prompt tokens were reused, and the time.
"""

import argparse
import time

from transformers import GenerationConfig

import radixkv
from radixkv.demo.models import load_model

EXAMPLES = (
    *(("Japan", "Tokyo"), ("Kenya", "Nairobi"), ("Norway", "Oslo"), ("Peru", "Lima"), ("Cuba", "Havana"), ("Iraq", "Baghdad")),
    *(("Canada", "Ottawa"), ("Chile", "Santiago"), ("Ghana", "Accra"), ("Austria", "Vienna"), ("Nepal", "Kathmandu"), ("Latvia", "Riga")),
)
QUERIES = (
    *(("France", "Paris"), ("Egypt", "Cairo"), ("Spain", "Madrid"), ("Greece", "Athens"), ("Italy", "Rome"), ("Sweden", "Stockholm")),
    *(("Poland", "Warsaw"), ("Russia", "Moscow"), ("Cyprus", "Nicosia"), ("Libya", "Tripoli"), ("China", "Beijing"), ("Fiji", "Suva")),
)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo's SmolLM2-135M-Instruct, which needs no network")
    parser.add_argument("--queries", type=int, default=len(QUERIES))
    parser.add_argument("--max-new-tokens", type=int, default=6)
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model)
    radixkv.patch_model(model).radixkv.tokenizer = tokenizer

    shots = "The capitals of countries.\n" + "".join(f"Country: {country}\nCapital: {capital}\n" for country, capital in EXAMPLES)
    queries = QUERIES[: options.queries]
    config = GenerationConfig(do_sample=False, max_new_tokens=options.max_new_tokens, stop_strings=["\n"])
    start = time.perf_counter()
    answers = model.radixkv.generate_many([f"{shots}Country: {country}\nCapital:" for country, _ in queries], generation_config=config)
    seconds = time.perf_counter() - start

    num_right = 0
    for (country, capital), answer in zip(queries, answers, strict=True):
        is_right = answer.text.strip() == capital
        num_right += is_right
        print(f"{country}: {answer.text.strip()} ({'right' if is_right else f'wrong, it is {capital}'})")
    stats = model.radixkv.stats()
    print(f"{num_right} of {len(queries)} right; {stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens reused, {seconds:.2f} s")


if __name__ == "__main__":
    main()
