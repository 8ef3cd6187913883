# `make verify` and `make test` make the environment (.venv) by themselves; later runs start at once.
.DEFAULT_GOAL := help
.PHONY: verify test export lint nb bench gpu peers docs serve clean help
.DELETE_ON_ERROR:

BIN := .venv/bin
READY := .venv/.ready
PEERS := .venv-peers
# nbdev calls its own commands by name; two cores are shared by workers, so each takes one thread
ENV := PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1
ARGS ?=

verify: $(READY)  ## put every engine before the contract and write _report/verify.html (ARGS="--quick")
	@mkdir -p _report
	$(BIN)/tensorplay-attn verify --html _report/verify.html --json _report/verify.json $(ARGS)

test: $(READY)  ## every check: lint, export, site, each notebook, each test (ARGS="-k site")
	$(ENV) $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

export: $(READY)  ## write the package and README.md from the notebooks, cleaned
	$(ENV) $(BIN)/nbdev_clean
	$(ENV) $(BIN)/nbdev_export
	$(BIN)/python docs/readme.py

lint: $(READY)  ## ruff, and each module imported in a process of its own
	$(BIN)/ruff check .
	$(ENV) $(BIN)/python -m pytest -q -n 2 tests/test_frame.py -k fresh_import

nb: $(READY)  ## execute one notebook, save its outputs, clean and export it (NAME=10_softmax)
	@test -n "$(NAME)" || { echo 'which one? make nb NAME=10_softmax' >&2; exit 2; }
	$(ENV) $(BIN)/nbdev_export --path nbs/$(NAME).ipynb
	$(ENV) $(BIN)/jupyter-execute --inplace --timeout 600 --kernel_name python3 nbs/$(NAME).ipynb
	$(ENV) $(BIN)/nbdev_clean --fname nbs/$(NAME).ipynb

bench: $(READY)  ## time our engines and their peers in one process; JSON and plots in _report
	@mkdir -p _report
	$(BIN)/tensorplay-attn bench --json _report/bench.json --html _report/bench.html --svg _report/bench.svg $(ARGS)

gpu:  ## on a machine with a GPU: right? how fast? (PYTHON=python3, as it is; ARGS=--dry-run needs no GPU)
	@PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(or $(PYTHON),$(wildcard $(BIN)/python),python3) -c \
	  'import importlib.util as u, sys; lacks = [n for n in ("torch", "triton", "numpy", "rich", "click") if not u.find_spec(n)]; lacks and sys.exit("make gpu: " + sys.executable + " has no " + ", ".join(lacks)); from tensorplay_attn.evidence.gpu import gpu_command; gpu_command(prog_name="make gpu")' $(ARGS)

peers: $(PEERS)/.ready  ## other implementations, installed beside us: does page 51 still say what they do? (three minutes)
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m pytest -q tests/peers tests/test_surface.py $(ARGS)

docs: $(READY)  ## build the site: _docs/index.html
	$(ENV) $(BIN)/python docs/adapt.py _docs

serve: docs  ## build the site and show it at http://127.0.0.1:8000 (PORT=8000)
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory _docs $(or $(PORT),8000)

clean:  ## remove what was made here, the environment included
	rm -rf .venv $(PEERS) _docs _report build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

help:  ## this list
	@grep -hE '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## (.*)/make \1\t\2/' | expand -t 14

$(READY): constraints.txt pyproject.toml
	@py=; for p in $(PYTHON) python3.11 python3 python3.12 python3.13 python; do \
	  if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then py=$$p; break; fi; done; \
	if [ -z "$$py" ]; then echo 'No Python of 3.11 or later with the venv module was found; make PYTHON=/path/to/python3.11 names one.' >&2; exit 1; fi; \
	echo "making .venv with $$($$py --version), once; this takes some minutes"; $$py -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -qq -c constraints.txt -e '.[dev]'
	@touch $@

# only what .venv does not have: a file of paths makes its packages, torch and ours among them, visible there
$(PEERS)/.ready: $(READY) constraints-peers.txt
	@echo "making $(PEERS), once; this takes a minute"; $(BIN)/python -m venv $(PEERS)
	@site() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	echo "import site; site.addsitedir('$$(site $(CURDIR)/.venv)')" > "$$(site $(PEERS))/beside.pth"
	$(PEERS)/bin/python -m pip install --disable-pip-version-check -qq -c constraints.txt -c constraints-peers.txt tensorplay coreai-torch transformers
	@touch $@
