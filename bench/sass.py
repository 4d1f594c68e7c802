"""Read what a GPU will execute, its loops and what they cost, from a compiled kernel on a machine without one.

Triton's wheel ships NVIDIA's disassembler. Instructions are counted as one warp issues them, predicated or not, because each
takes an issue slot. Memory traffic is that of global loads of 8 bytes or more per thread: K and V, and no block ids.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton.backends.nvidia

# One SM of sm_90. Registers are handed out to a warp in units of 256, warps to its four quarters alike, shared memory in units of
# 128 bytes with 1 KB per program for the system.
SM_REGISTERS = 64 << 10
SM_SHARED_BYTES = 228 << 10
SM_WARPS = 64
SM_CTAS = 32

_LABEL = re.compile(r"^(\.L_\w+):")
# An offset in a comment, a guard such as @!P0, the opcode with its dotted modifiers, operands.
_INSTRUCTION = re.compile(r"/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?P<guard>@\S+\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);")
_WAIT_GROUPS = re.compile(r"SB0, (0x[0-9a-f]+)")
_BRANCH_TARGET = re.compile(r"`\((\.L_\w+)\)")
# What a branch over is when it stands first among the operands, as in `BRA P0, target`.
_PREDICATE = re.compile(r"!?U?P\d")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel.

    Attributes:
        offset: bytes from the beginning of the kernel.
        guard: the predicate before it, such as "@!P0"; empty: always executed.
        opcode: with its modifiers, such as "LDGSTS.E.BYPASS.128".
        operands: the rest of the line.
    """

    offset: int
    guard: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def load_bytes(self) -> int:
        """Bytes that a warp loads from global memory, 0 for less than 8 per thread."""
        modifiers = self.opcode.split(".")[1:]
        if self.name not in ("LDGSTS", "LDG"):
            return 0
        return 32 * 16 if "128" in modifiers else 32 * 8 if "64" in modifiers else 0

    @property
    def flops(self) -> int:
        """Floating point operations that a warp has the tensor cores do; a warpgroup's HGMMA is shared out to its four warps."""
        if self.name == "HGMMA":
            rows, columns, depth = map(int, self.opcode.split(".")[1].split("x"))
            return 2 * rows * columns * depth // 4
        if self.name == "HMMA":
            return 2 * {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}[self.opcode.split(".")[1]]
        return 0


@dataclass(frozen=True)
class Loop:
    """The instructions of one loop, in order of their offsets; figures are of one trip and one warp."""

    instructions: tuple[Instruction, ...]

    @property
    def offsets(self) -> frozenset[int]:
        return frozenset(instruction.offset for instruction in self.instructions)

    @property
    def length(self) -> int:
        return len(self.instructions)

    @cached_property
    def flops(self) -> int:
        return sum(instruction.flops for instruction in self.instructions)

    @cached_property
    def load_bytes(self) -> int:
        return sum(instruction.load_bytes for instruction in self.instructions)

    def count(self, opcode: str) -> int:
        """Return how many instructions have an opcode, whatever modifiers follow."""
        return sum((instruction.opcode + ".").startswith(opcode + ".") for instruction in self.instructions)

    @property
    def is_async(self) -> bool:
        """Whether keys and values come by cp.async, which does not stop the warp that asks for them."""
        return any(instruction.name == "LDGSTS" and instruction.load_bytes for instruction in self.instructions)

    @property
    def is_serialised(self) -> bool:
        """Whether ptxas has each wgmma wait for the one before it. A dot of several wgmmas waits once if left alone."""
        return self.count("WARPGROUP.DEPBAR") > 0.75 * self.count("HGMMA") > 0

    @cached_property
    def load_overlap(self) -> float:
        """Share of the instructions issued while an asynchronous load of keys or values is under way; 0 with plain loads."""
        under_way = [in_flight > 0 for instruction, in_flight in self._steady_trip() if instruction.name not in ("LDGDEPBAR", "DEPBAR")]
        return sum(under_way) / len(under_way)

    @cached_property
    def in_flight_bytes(self) -> int:
        """Most bytes that are under way at once; with plain loads those of one trip."""
        if not self.is_async:
            return self.load_bytes
        return max(in_flight for _, in_flight in self._steady_trip())

    def _steady_trip(self) -> Iterator[tuple[Instruction, int]]:
        """Yield each instruction of a late trip with the bytes under way after it, from a group's commit to the wait for it."""
        waits = [int(found[1], 16) for found in map(_WAIT_GROUPS.search, self._operands("DEPBAR")) if found]
        groups: list[int] = []
        # Each trip that commits anything adds a group or more, so that the queue is full after as many trips as a wait leaves groups.
        for trip in range(max(waits, default=0) + 2):
            uncommitted = 0
            for instruction in self.instructions:
                if instruction.name == "LDGSTS":
                    uncommitted += instruction.load_bytes
                elif instruction.name == "LDGDEPBAR":
                    groups.append(uncommitted)
                    uncommitted = 0
                elif instruction.name == "DEPBAR" and (found := _WAIT_GROUPS.search(instruction.operands)):
                    left = int(found[1], 16)
                    groups = groups[max(0, len(groups) - left) :]
                if trip == max(waits, default=0) + 1:
                    yield instruction, sum(groups)

    def _operands(self, name: str) -> Iterator[str]:
        return (instruction.operands for instruction in self.instructions if instruction.name == name)


@dataclass(frozen=True)
class Program:
    """A kernel's machine code.

    Attributes:
        instructions: in order of their offsets.
        labels: index of the instruction that each label stands before.
        registers: per thread.
        num_warps, shared_bytes: of one program (CTA), as launched.
    """

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: int
    num_warps: int
    shared_bytes: int

    @property
    def spills(self) -> int:
        """Instructions that move registers to local memory or back."""
        return sum(instruction.name in ("LDL", "STL") for instruction in self.instructions)

    @property
    def ctas_per_sm(self) -> int:
        """Programs that one SM of sm_90 holds at a time."""
        warp_registers = -(-self.registers * 32 // 256) * 256
        warps = min(SM_WARPS, SM_REGISTERS // warp_registers // 4 * 4)
        shared_bytes = -(-(self.shared_bytes + 1024) // 128) * 128
        return min(SM_CTAS, warps // self.num_warps, SM_SHARED_BYTES // shared_bytes)

    @cached_property
    def loops(self) -> list[Loop]:
        """The innermost loops among those with tensor-core work, or where there are none among those that load."""
        loops = self._all_loops()
        working = [loop for loop in loops if loop.flops] or [loop for loop in loops if loop.load_bytes]
        return [loop for loop in working if not any(other.offsets < loop.offsets for other in working)]

    def _all_loops(self) -> list[Loop]:
        """Return the natural loops of the control flow.

        The edge last -> head closes a loop if every way to `last` passes `head`: if a walk backwards from `last` that stops at `head`
        never comes to the kernel's entry. What it visits is the loop.

        Source: Aho, Lam, Sethi, Ullman, Compilers, 2nd edition, section 9.6.6.
        """
        reached, stack = {0}, [0]
        predecessors: dict[int, list[int]] = {}
        while stack:
            index = stack.pop()
            for successor in self._successors(index):
                predecessors.setdefault(successor, []).append(index)
                if successor not in reached:
                    reached.add(successor)
                    stack.append(successor)
        loops = []
        for head, sources in predecessors.items():
            body: set[int] = set()
            for last in sources if head == 0 or len(sources) > 1 else ():
                visited, stack = {head, last}, [] if last == head else [last]
                while stack:
                    for source in predecessors.get(stack.pop(), ()):
                        if source not in visited:
                            visited.add(source)
                            stack.append(source)
                if head == 0 or 0 not in visited:
                    body |= visited
            if body:
                loops.append(Loop(tuple(self.instructions[index] for index in sorted(body))))
        return loops

    def _successors(self, index: int) -> list[int]:
        """Return the indices of the instructions that may follow one."""
        instruction = self.instructions[index]
        following = [index + 1] if index + 1 < len(self.instructions) else []
        if instruction.name in ("EXIT", "RET"):
            return following if instruction.guard else []
        if instruction.name in ("BRX", "BRXU", "JMX", "JMXU"):
            raise ValueError(f"_successors: jumps through a table cannot be followed, got {instruction.opcode}")
        target = _BRANCH_TARGET.search(instruction.operands)
        if instruction.name != "BRA" or target is None:
            return following
        is_conditional = instruction.guard or _PREDICATE.match(instruction.operands) or "DIV" in instruction.opcode.split(".")
        return [self.labels[target[1]], *(following if is_conditional else [])]


def parse(listing: str, usage: str, num_warps: int, shared_bytes: int) -> Program:
    """Parse what the tools print about one kernel.

    Args:
        listing: the output of `nvdisasm -c`, one function.
        usage: the output of `cuobjdump --dump-resource-usage`.
        num_warps, shared_bytes: of one program, as launched.

    Raises:
        ValueError: no instruction or no register count is found.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            guard = (found["guard"] or "").strip()
            instructions.append(Instruction(int(found["offset"], 16), guard, found["opcode"], found["operands"].strip()))
    registers = re.search(r"\bREG:(\d+)", usage)
    if not instructions or registers is None:
        raise ValueError(f"parse: the tools' output must hold a kernel, got {len(instructions)} instructions")
    return Program(tuple(instructions), labels, int(registers[1]), num_warps, shared_bytes)


def read(cubin: bytes, num_warps: int, shared_bytes: int) -> Program:
    """Take a compiled kernel apart; num_warps and shared_bytes are those of one program, as launched."""
    return parse(run_tool("nvdisasm", "-c", cubin), run_tool("cuobjdump", "--dump-resource-usage", cubin), num_warps, shared_bytes)


def run_tool(tool: str, option: str, cubin: bytes) -> str:
    """Return what one of the tools in Triton's wheel prints about a compiled kernel."""
    path = Path(triton.backends.nvidia.__file__).parent / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout
