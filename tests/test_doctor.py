"""The doctor: all of it on this machine, and what it says of a machine where something is missing or broken."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import radixkv
from radixkv.__main__ import main
from radixkv.commands import doctor, machine, packages, proofs
from radixkv.commands.doctor import as_text
from radixkv.commands.findings import Check, Finding
from radixkv.kernels import torch_ops
from tests.blocked import run_without

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
NEEDED = {"torch", "triton", "numpy", "transformers"}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What `doctor --json` prints here, and its exit status."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main(["doctor", "--json"])
    return {"status": status, **json.loads(output.getvalue())}


def find(findings, name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def test_all_is_well_here(report):
    assert report["status"] == 0 and report["works"] is True, report
    assert report["radixkv"] == radixkv.__version__
    findings = [Finding(**finding) for finding in report["findings"]]
    assert {finding.section for finding in findings} == {"machine", "packages", "devices", "kernels", "model"}
    assert {finding.state for finding in findings} <= {"ok", "note"}
    assert NEEDED | {"python", "accelerate", "peft", "tqdm", "rich", "gguf", "backend", "cuda graphs"} <= {each.name for each in findings}
    for finding in findings:
        assert finding.detail and "\n" not in finding.detail
    assert find(findings, "torch").detail.startswith(torch.__version__)


def test_every_kernel_is_compiled_here(report):
    detail = find([Finding(**finding) for finding in report["findings"]], "compiler").detail
    for name in ("store", "rope_store", "copy", "prefill", "extend", "decode", "merge", "advance"):
        assert name in detail.partition(" compile for ")[0].split(", ")
    assert torch.cuda.is_available() or "sm_90" in detail


def test_the_list_shows_every_finding_and_the_commands_at_its_end():
    good, note = Finding("machine", "python", "ok", "3.11"), Finding("packages", "rich", "note", "not installed", "pip install 'rich'")
    assert as_text([good, note]).splitlines()[-1] == "everything that is needed works"
    bad = Finding("packages", "torch", "missing", "not installed (>=2.11)", "pip install 'torch>=2.11'")
    lines = as_text([good, note, bad]).splitlines()
    assert lines[:2] == ["machine", "  ok       python  3.11"]
    assert lines[-2:] == ["1 of 3 do not work: packages: torch", "  pip install 'torch>=2.11'"]


def test_a_machine_without_torch_is_told_so():
    """In a process of its own, where neither torch nor what needs it can be imported: every check still says something, in one line."""
    absent = ("torch", "triton", "transformers")
    result = run_without(absent, "from radixkv.__main__ import main\nsys.exit(main(['doctor']))\n")
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    lines = result.stdout.splitlines()
    for name in absent:
        assert any(line.split()[:2] == ["missing", name] for line in lines)
    end = "\n".join(lines[-4:])
    assert "-m pip install 'torch>=2.11'" in end and "-m pip install 'transformers>=4.57'" in end and "'triton<3.10,>=3.6'" in end


def test_versions_out_of_range_come_with_the_command(monkeypatch):
    wrong = {"triton": "3.10.0", "transformers": "4.40.0", "pytest": "7.0"}
    monkeypatch.setattr(packages, "package_version", lambda name: wrong.get(name, "999"))
    findings = list(packages.look_at_packages())
    for name, install in (("triton", "'triton<3.10,>=3.6'"), ("transformers", "'transformers>=4.57'")):
        finding = find(findings, name)
        assert finding.state == "failed" and wrong[name] in finding.detail and finding.fix.endswith(f"-m pip install {install}")
    assert find(findings, "pytest").state == "note"


def test_packages_that_are_not_needed_may_be_missing(monkeypatch):
    known = packages.package_version
    monkeypatch.setattr(packages, "package_version", lambda name: None if name in ("peft", "gguf") else known(name))
    findings = list(packages.look_at_packages())
    assert find(findings, "gguf").state == "note" and find(findings, "gguf").fix.endswith("-m pip install 'gguf'")
    assert "extra demo" in find(findings, "gguf").detail and "extra test" in find(findings, "peft").detail
    assert all(finding.is_good for finding in findings)


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_a_package_that_cannot_be_imported_is_said_in_one_line(name, monkeypatch):
    known = packages.import_module

    def broken(module: str) -> Any:
        if module == name:
            raise OSError("libcuda.so.1: cannot open shared object file\nmore of it")
        return known(module)

    monkeypatch.setattr(packages, "import_module", broken)
    finding = find(list(packages.look_at_packages()), name)
    assert finding.state == "failed"
    assert finding.detail.endswith("cannot be imported: OSError: libcuda.so.1: cannot open shared object file")
    assert "-m pip install --force-reinstall" in finding.fix


def test_without_packaging_versions_cannot_be_compared(monkeypatch):
    monkeypatch.setattr(packages, "can_import", lambda module: module != "packaging")
    findings = list(packages.look_at_packages())
    assert find(findings, "packaging").state == "missing" and find(findings, "packaging").fix.endswith("'packaging'")


def test_an_installed_package_knows_the_same_requirements_as_a_checkout(monkeypatch, tmp_path):
    in_checkout = packages.project()
    about = Message()
    about["Requires-Python"] = in_checkout[0]
    lines = []
    for extra, line in in_checkout[1]:
        if extra and extra not in (about.get_all("Provides-Extra") or []):
            about["Provides-Extra"] = extra
        lines.append(f'{line}; extra == "{extra}"' if extra else line)
    monkeypatch.setattr(radixkv, "__file__", str(tmp_path / "site-packages" / "radixkv" / "__init__.py"))
    monkeypatch.setattr(packages.metadata, "metadata", lambda name: about)
    monkeypatch.setattr(packages.metadata, "requires", lambda name: lines)
    installed = packages.project()
    assert installed[0] == in_checkout[0] and [extra for extra, _ in installed[1]] == [extra for extra, _ in in_checkout[1]]
    by_name = {need.requirement.name: need for need in packages.needs()}
    assert {name for name, need in by_name.items() if need.is_needed} == NEEDED
    assert by_name["gguf"].extras == ("demo",)
    assert by_name["accelerate"].extras == ("demo", "test") and by_name["transformers"].extras == ("hf", "demo")


def test_python_out_of_range(monkeypatch):
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.10.9")
    (finding,) = machine.look_at_python()
    assert finding.state == "failed" and "3.10.9" in finding.detail and ">=3.11,<3.13" in finding.fix


def test_a_gpu_is_described_and_gets_triton_and_captured_steps(monkeypatch):
    about = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 * 2**30, 139 * 2**30))
    (device,) = machine.look_at_devices()
    assert device.detail == "NVIDIA H200, capability 9.0, 132 multiprocessors, 100.0 of 139.0 GiB free"
    findings = list(machine.look_at_choices())
    assert find(findings, "backend").detail.startswith("triton (auto: the model lies on cuda:0")
    assert find(findings, "cuda graphs").state == "ok"
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert "ROCm" in find(list(machine.look_at_choices()), "cuda graphs").detail


def test_no_gpu_comes_with_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (finding,) = machine.look_at_devices()
    assert finding.detail == "none: torch is built for CUDA 13.0, but finds no such device or no driver for it"


def test_the_interpreter_is_pointed_out(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert find(list(machine.look_at_choices()), "TRITON_INTERPRET").state == "note"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET" not in {finding.name for finding in machine.look_at_choices()}


@pytest.mark.parametrize(
    ("done", "said"),
    [
        ((-11, "", ""), "ended with status -11: it said nothing"),
        ((1, "", "Traceback\nImportError: no ptxas\n"), "ended with status 1: ImportError: no ptxas"),
        (
            (0, {"decode": {"seconds": 1.0, "error": "PTXASError: no"}, "merge": {"seconds": 1.0, "error": None}}, ""),
            "1 of 2 kernels do not compile for sm_90 (this GPU): decode: PTXASError: no",
        ),
    ],
    ids=["crash", "exception", "one kernel"],
)
def test_a_compiler_that_breaks_is_said_in_one_line(done, said, monkeypatch):
    status, kernels, err = done
    output = json.dumps({"target": "sm_90", "is_here": True, "kernels": kernels}) if kernels else ""
    monkeypatch.setattr(proofs.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, status, output, err))
    (finding,) = proofs.try_compiler(debug=False)
    assert finding.state == "failed" and said in finding.detail


@pytest.mark.parametrize("name", ["store_kv", "prefill_attention", "decode_attention"])
def test_a_wrong_kernel_is_noticed(name, monkeypatch):
    right = getattr(torch_ops, name)

    def wrong(*args: Any, **options: Any) -> Any:
        if name == "store_kv":
            return right(*args[:3], args[3] * 1.01, *args[4:], **options)
        out, lse = right(*args, **options)
        return out * 1.01, lse

    monkeypatch.setattr(proofs, "best_device", lambda: CPU)
    (finding,) = proofs.try_attention()
    assert finding.state == "ok" and "backend torch in float32 on cpu" in finding.detail
    monkeypatch.setattr(torch_ops, name, wrong)
    (finding,) = proofs.try_attention()
    assert finding.state == "failed" and "beyond the 2e-05" in finding.detail


def test_other_tokens_are_noticed(monkeypatch):
    patch_model = radixkv.patch_model

    def patch_and_change(model: Any, **options: Any) -> Any:
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
        return patch_model(model, **options)

    monkeypatch.setattr(radixkv, "patch_model", patch_and_change)
    (finding,) = proofs.try_model()
    assert finding.state == "failed" and "prompt computed and reused they differ" in finding.detail


def test_a_cache_that_finds_nothing_again_is_noticed(monkeypatch):
    from radixkv.cache import PrefixCache

    store = PrefixCache.store
    monkeypatch.setattr(PrefixCache, "store", lambda self, batch, priority=None: (store(self, batch, priority), self.clear())[0])
    (finding,) = proofs.try_model()
    assert finding.state == "failed" and "0 of 40 prompt tokens were found again" in finding.detail


@pytest.mark.parametrize("debug", [False, True])
def test_a_check_that_breaks_is_a_failed_line_and_status_1(debug, monkeypatch, capsys):
    def broken() -> list[Finding]:
        raise ValueError("a new release\nwith details")

    checks = [Check("machine", "system", machine.look_at_system), Check("model", "tokens", broken)]
    monkeypatch.setattr(doctor, "all_checks", lambda debug: checks)
    assert main(["doctor", *(["--debug"] if debug else [])]) == 1
    output = capsys.readouterr()
    assert "  failed   tokens  ValueError: a new release\n" in output.out
    assert ("Traceback" in output.err) is debug
