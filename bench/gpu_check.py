"""Everything that only a GPU can show, in one command of at most eight minutes; nothing is downloaded.

    python bench/gpu_check.py [--dry-run] [--out FOLDER] [--seed N] [--stages NAME ...]

Checks every kernel against float64 on fresh random inputs, replays a captured graph at other lengths, measures the card's copy and matrix
rates, and times decode, tree decode, prefill, short extension and whole models against what else the machine has. Every stage is a
process of its own with a time limit, so that a crash or a hang loses no other stage. The table goes to the terminal and, with
all figures as JSON, into the folder: $OUT, else bench/results. The exit status is 1 if a correctness check failed or a stage broke.
--dry-run runs it all on a CPU, in Triton's interpreter, on tiny shapes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script, from anywhere and without an installation.
    sys.path.insert(0, str(ROOT))

from radixkv.bench.gpu_report import Report, Row, all_ok, complete, goals, read_rows, table  # noqa: E402

# Name: module and function, and seconds; a stage may also use what those before it left. 445 in all.
STAGES = {
    "rates": ("radixkv.bench.gpu_speed", "measure_rates", 25),
    "kernels": ("radixkv.bench.gpu_checks", "check_kernels", 100),
    "graph": ("radixkv.bench.gpu_checks", "check_graph", 25),
    "decode": ("radixkv.bench.gpu_speed", "measure_decode", 85),
    "tree": ("radixkv.bench.gpu_speed", "measure_tree", 35),
    "extension": ("radixkv.bench.gpu_speed", "measure_extension", 45),
    "prefill": ("radixkv.bench.gpu_speed", "measure_prefill", 45),
    "model": ("radixkv.bench.gpu_model", "check_and_measure_model", 85),
}
# Seconds by which a stage stops by itself before it is stopped.
_GRACE = 8.0
PACKAGES = ("torch", "triton", "transformers", "numpy", "flash-attn", "flashinfer-python", "sglang", "vllm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages and report; return the exit status."""
    options = _parse(arguments)
    if options.rows:
        return _run_here(options)
    folder = Path(options.out or os.environ.get("OUT") or ROOT / "bench" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory() as scratch:
        rows_path = Path(scratch) / "rows.jsonl"
        _run_apart(options, seed, rows_path)
        rows = complete(read_rows(rows_path))
    about = _about(seed, options.dry_run, rows)
    text = "\n".join([", ".join(f"{name}: {value}" for name, value in about.items()), table(rows)])
    name = f"gpu_check_{'dry_' if options.dry_run else ''}{about['date'].replace(':', '').replace('-', '')}"
    (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    document = {"about": about, "goals": dict(goals(rows)), "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(text)
    return 0 if all_ok(rows) else 1


def _run_apart(options: argparse.Namespace, seed: int, rows_path: Path) -> None:
    """Run the stages one after the other, each in a process; a dry run, which cannot hang a GPU, in one for all."""
    groups = [options.stages] if options.dry_run else [[name] for name in options.stages]
    begin, allowed = time.monotonic(), 0.0
    for names in groups:
        allowed += sum(STAGES[name][2] for name in names)
        limit = allowed - (time.monotonic() - begin)
        command = [sys.executable, __file__, "--rows", str(rows_path), "--seed", str(seed), "--seconds", f"{limit - _GRACE}"]
        command += [*(["--dry-run"] if options.dry_run else []), "--stages", *names]
        # A session of its own, so that what hangs is stopped with the processes that it started.
        process = subprocess.Popen(command, start_new_session=True)
        try:
            if process.wait(limit):
                Report(rows_path, names[0]).broken(f"the process ended with status {process.returncode}")
        except subprocess.TimeoutExpired:
            Report(rows_path, names[0]).broken(f"stopped after {limit:.0f} s")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _run_here(options: argparse.Namespace) -> int:
    """Run stages in this process; their errors are rows."""
    if options.dry_run:
        # Read when Triton is imported.
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in options.stages:
        begin = time.monotonic()
        module, function, _ = STAGES[name]
        report = Report(Path(options.rows), name)
        try:
            deadline = import_module("radixkv.bench.gpu_timing").Deadline(options.seconds)
            if not options.dry_run:
                properties = import_module("torch").cuda.get_device_properties(0)
                report.about({"device": properties.name, "multiprocessors": properties.multi_processor_count})
            getattr(import_module(module), function)(report, deadline, seed=options.seed, dry=options.dry_run)
        except Exception as error:
            traceback.print_exc()
            report.broken(f"{type(error).__name__}: {error}"[:500])
        print(f"{name}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    return 0


def _about(seed: int, dry_run: bool, rows: Sequence[Row]) -> dict[str, Any]:
    """Where the figures come from."""
    device = next((row["device"] for row in rows if row["kind"] == "about"), platform.machine())
    about = {
        "device": device,
        "dry_run": dry_run,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "commit": _commit(),
        "seed": seed,
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            about[package] = "-"
    return about


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and measure the kernels on a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, in Triton's interpreter, on tiny shapes")
    parser.add_argument("--out", help="folder for the results (default: $OUT, else bench/results)")
    parser.add_argument("--seed", type=int, help="of all inputs (default: a new one each time, printed)")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES), help="only these")
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
