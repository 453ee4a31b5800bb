# Every target but gpu-check first makes .venv from requirements.lock with a Python 3.12 or 3.13 that it finds by itself.
# PYTHON=/path/to/python names one. After the first time no network is needed. Only test-torch has its own environment.

CONFIG ?= config/marin_moe_nano.yaml
ARGS ?=
CORPUS_ARGS ?=
PYTEST_ARGS ?=
SLOW_TEST_TIMEOUT := 900

BIN := .venv/bin
PYTHON_FOLDERS := $(wildcard src tests tests_torch benchmarks examples)

.PHONY: train stages test test-slow test-torch lint format corpus install lock gpu-check

# Train on the corpus under runs/corpus, which is built from Python's own source if there is none.
# make train CONFIG=config/other.yaml ARGS="--trainer.num_train_steps 100"
train: install
	@test -d runs/corpus || $(BIN)/levanter-marin corpus
	$(BIN)/levanter-marin train $(CONFIG) $(ARGS)

# Train at 256, then 1024, then 4096 tokens of context. The same command continues a run that was stopped.
STAGES_CONFIG ?= config/stages/marin_moe_nano.yaml

stages: install
	@test -d runs/corpus || $(BIN)/levanter-marin corpus
	$(BIN)/levanter-marin stages $(STAGES_CONFIG) $(ARGS)

# make corpus CORPUS_ARGS="--input my_texts/ --output runs/my_corpus"
corpus: install
	$(BIN)/levanter-marin corpus $(CORPUS_ARGS)

# Two processes, for two cores: most of a test is compilation. A file stays in one, with the results its tests share.
TEST_PROCESSES ?= 2

test: install
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

# Exit code 5 says that no test is marked slow.
test-slow: install
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m slow -o timeout=$(SLOW_TEST_TIMEOUT) $(PYTEST_ARGS) || test $$? -eq 5

# The PyTorch file of exports, in an environment of its own: .venv-torch, with a Python 3.11.
test-torch:
	@scripts/install_torch.sh
	.venv-torch/bin/python -m pytest -c tests_torch/pytest.ini tests_torch $(PYTEST_ARGS)

# All three run, so that one call shows everything there is to mend.
lint: install
	@failed=0; set -x; \
	$(BIN)/ruff check --output-format concise . || failed=1; \
	$(BIN)/black --check $(PYTHON_FOLDERS) || failed=1; \
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/pyrefly check --output-format min-text || failed=1; \
	{ set +x; } 2>/dev/null; exit $$failed

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/black --quiet $(PYTHON_FOLDERS)

install:
	@scripts/install.sh $(MAKECMDGOALS)

lock:
	scripts/lock.sh

# The MoE layer on one GPU: right, and how fast. Makes no .venv: PYTHON=/path/to/python names an interpreter with JAX for
# that GPU, WHEELS=folder the wheels it lacks (64 MiB at most). make gpu-check GPU_CHECK_ARGS=--small runs on a CPU.
gpu-check:
	@scripts/gpu_check.sh $(GPU_CHECK_ARGS)
