"""`python -m radixkv doctor`: what is here, what is missing, and whether it works."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

import radixkv
from radixkv.commands.findings import Check, Finding
from radixkv.commands.machine import look_at_choices, look_at_devices, look_at_python, look_at_system
from radixkv.commands.packages import look_at_demo_model, look_at_packages
from radixkv.commands.proofs import try_attention, try_compiler, try_model
from radixkv.progress import progress_bar


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of the doctor."""
    parser.add_argument("--json", action="store_true", help="print a JSON object, for a bug report")


def run(options: argparse.Namespace) -> int:
    """Look at everything and print what was found.

    Args:
        options: as `add_options` defines them, with `debug`.

    Returns:
        The exit status: 0 when everything that is needed works, else 1.
    """
    # Nothing here may wait for a network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    checks = all_checks(options.debug)
    findings: list[Finding] = []
    with progress_bar("doctor", len(checks), True, unit="check") as advance:
        for check in checks:
            findings += check.run(options.debug)
            advance(1)
    print(as_json(findings) if options.json else as_text(findings))
    return 0 if all(finding.is_good for finding in findings) else 1


def all_checks(debug: bool) -> list[Check]:
    """Everything that is looked at, in the order of the list."""
    return [
        Check("machine", "python", look_at_python),
        Check("machine", "system", look_at_system),
        Check("packages", "packages", look_at_packages),
        Check("packages", "demo's model", look_at_demo_model),
        Check("devices", "devices", look_at_devices),
        Check("devices", "choices", look_at_choices),
        Check("kernels", "compiler", lambda: try_compiler(debug)),
        Check("kernels", "attention", try_attention),
        Check("model", "tokens", try_model),
    ]


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as one JSON object."""
    about = {
        "radixkv": radixkv.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "works": all(finding.is_good for finding in findings),
    }
    return json.dumps({**about, "findings": [asdict(finding) for finding in findings]}, indent=1)


def as_text(findings: Sequence[Finding]) -> str:
    """The findings as a list under the names of their sections, with the commands that mend what is wrong at the end."""
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines.append(section)
        lines.append(f"  {finding.state:7}  {finding.name:{width}}  {finding.detail}")
        if finding.fix:
            lines.append(f"{'':{width + 13}}{finding.fix}")
    bad = [finding for finding in findings if not finding.is_good]
    if not bad:
        return "\n".join([*lines, "", "everything that is needed works"])
    lines += ["", f"{len(bad)} of {len(findings)} do not work: {', '.join(f'{finding.section}: {finding.name}' for finding in bad)}"]
    return "\n".join([*lines, *dict.fromkeys(f"  {finding.fix}" for finding in bad if finding.fix)])
