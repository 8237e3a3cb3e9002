# Two commands: make book, make test. Both make .venv first; a second run starts at once.

PYTHON ?= python3
# CI sets CONSTRAINTS=tools/locks/newest.txt to get the files that were tested together, known by their hashes.
CONSTRAINTS ?=
VENV := .venv
BIN := $(VENV)/bin
# Ten times what the slowest cell takes on a busy machine, about a minute. nbval itself ends a cell that hangs.
NBVAL := --nbval --nbval-current-env --nbval-cell-timeout=600 --timeout=0 --nbval-sanitize-with=tests/nbval_sanitize.cfg
HTML := _build/html
# _build/pages: when the site was last built without a warning.
SPHINX = $(BIN)/jupyter-book build . -W -n --keep-going --quiet && touch _build/pages || { rm -f _build/pages; exit 1; }
REPORTS := _build/reports
# The title of _config.yml as the name of a file: the-device-ladder, or book if it has no such letter
BOOK = $(or $(shell sed -n '/^title:/{s/^title:[^A-Za-z0-9]*//;s/[^A-Za-z0-9]*$$//;p;}' _config.yml | tr 'A-Z' 'a-z' | tr -cs 'a-z0-9\n' '-'),book)

# A progress bar in a notebook would be an output that differs from run to run.
export TQDM_DISABLE := 1
$(if $(findstring :,$(CURDIR)),$(error $(CURDIR): a folder with a colon cannot be in PATH. Move the clone to another))
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help book pdf zip test test-site ci quick lint notebooks package simulated test-simulated simulated-chapters coverage refresh measure record pack kaggle test-hosted test-oldest test-long test-frameworks stress bench dist lock publish venv clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

book: venv _build/pages  ## build the site; what is unchanged since the last time is kept
	$(SPHINX)
	@echo
	@echo "The book is at $$PWD/$(HTML)/index.html"
	@echo "Open that file, or serve it:  $(PYTHON) -m http.server --directory $(HTML) 8000"

# What was ordered comes first: the chapters. A part that fails keeps no other from running.
PARTS := lint notebooks package simulated

test: $(VENV)/tested  ## check the code, the outputs of every chapter, and the packages
	@failed=; for part in $(PARTS); do $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; done; \
	echo; if [ "$$failed" ]; then echo "Failed:$$failed. To run only that again: make$$failed"; exit 1; fi; \
	echo "All checks passed: $(PARTS)."

lint: $(VENV)/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --min-severity warn

_build/pages: _toc.yml _config.yml requirements.txt pyproject.toml
	rm -rf $(HTML) _build/.doctrees

pdf: $(VENV)/tested  ## write the whole book as one PDF into _build; needs Chromium
	$(BIN)/python -m tools.pdf _build/$(BOOK).pdf

zip: book  ## write the site, to read without network, as one zip file into _build
	cd _build && ln -sfn html $(BOOK) && ../$(BIN)/python -m zipfile -c $(BOOK).zip $(BOOK)
	@echo "The site is in _build/$(BOOK).zip"

# Here and below, three tests at a time, also on two cores: ranks often wait for each other.
# With a thread each: threads that wait for a busy core are very slow.
# PyTorch asks for the name of 127.0.0.1; a name server that is slow to answer costs 5 s without this.
PYTEST = RES_OPTIONS=timeout:1 OMP_NUM_THREADS=1 $(SIMULATE) $(BIN)/python -m pytest -q -n 3

quick: lint  ## check the code by the tests that take no time and build no site; less than a minute
	$(PYTEST) --dist loadfile -m "not slow and not long"

notebooks: venv
	$(PYTEST) $(NBVAL) --dist loadscope --durations=5 -p no:randomly -p no:cacheprovider --junitxml=$(REPORTS)/notebooks.xml notebooks

PART = $(PYTEST) --dist loadfile -m "not long" --durations=10 --junitxml=$(REPORTS)/$@.xml

package: $(VENV)/tested
	$(PART) $(COVERAGE) --ignore=tests/site --ignore=tests/tools

# What only a GPU runs otherwise; chapters 03, 04 and 08 simulate it themselves. Outputs there differ: --nbval-lax.
NBVAL_LAX = $(subst --nbval ,--nbval-lax ,$(NBVAL)) --dist loadscope -p no:randomly -p no:cacheprovider
simulated: SIMULATE = $(BIN)/torchclinic simulate --with-real-gpu 2
simulated: $(VENV)/tested
	$(PART) -m "(gpu or multigpu) and not long" tests
	$(PYTEST) $(NBVAL_LAX) notebooks/06_* notebooks/09_* notebooks/both_gpus.ipynb

# Apart, since pure Python takes a third more time for it.
coverage: COVERAGE := --cov --cov-report=term
coverage: package  ## measure which lines of the packages their tests run: at least 90 %

# From scratch, minutes: Sphinx neither repeats an unchanged page's warnings nor removes pages that are gone.
test-site: $(VENV)/tested  ## build the site from scratch and test it, also in a browser, and the tools; needs Chromium
	rm -rf $(HTML) _build/.doctrees
	$(SPHINX)
	TORCHLADDER_SITE=$(HTML) $(PART) tests/site tests/tools

refresh: venv  ## run every chapter and store its outputs
	$(BIN)/python -m tools.refresh

measure: venv  ## measure this machine's GPUs for the book's table; minutes: make measure LINK=pcie3 PEAK=65
	$(BIN)/python -m benchmarks.measure_here --link="$(LINK)" --peak="$(PEAK)"

record: venv  ## run all on this machine and keep it for the site: make record MACHINE=1xH200
	$(BIN)/python -m tools.record "$(MACHINE)"

# PyTorch, torchvision, matplotlib and pytest have to be there. Wheels for a newer glibc might not run.
FASHION ?= /usr/share/datasets/fashion-mnist
FOR ?= --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64
pack: venv  ## put what a machine without network needs to be recorded into dist/offline
	rm -rf dist/offline && mkdir -p dist/offline/wheels
	$(BIN)/pip download --only-binary=:all: $(FOR) --dest dist/offline/wheels -r tools/offline.txt
	cp "$(FASHION)"/*.gz dist/offline
	git rev-parse HEAD > dist/offline/commit

kaggle: venv  ## write every chapter as a notebook for Kaggle and Colab, to dist/kaggle
	$(BIN)/python -m tools.hosted_notebooks

# With its versions and variables, a home and a folder of their own, and no network. Kaggle has Python 3.12, Colab 3.13:
# make test-hosted HOST=colab PYTHON=python3.13
HOST ?= kaggle
HOSTED = _build/$(or $(if $(word 2,$(HOST)),,$(filter kaggle colab,$(HOST))),$(error HOST=$(HOST): choose kaggle or colab))
test-hosted: venv  ## run them with the versions of HOST=kaggle or colab: 5 GB, a quarter of an hour; needs Debian's Fashion-MNIST
	rm -rf $(HOSTED)
	"$(PYTHON)" -m venv .venv-$(HOST)
	.venv-$(HOST)/bin/pip install --quiet -r tools/$(HOST).txt
	$(BIN)/python -m tools.hosted_notebooks $(HOSTED)
	cd $(HOSTED) && env -i HOME="$$PWD" PATH="$${PWD%/*/*}/.venv-$(HOST)/bin:/usr/bin:/bin:/usr/sbin:/sbin" LANG=C.UTF-8 \
	PYTHONPATH=/env/python COLAB_RELEASE_TAG=none $(if $(filter kaggle,$(HOST)),KAGGLE_KERNEL_RUN_TYPE=Batch) \
	TQDM_DISABLE=1 OMP_NUM_THREADS=1 unshare --map-root-user --net sh -c 'ip link set lo up; exec "$$@"' sh \
	python -m pytest -c /dev/null -p no:cacheprovider -q --nbval-lax --nbval-current-env --nbval-cell-timeout=300 $(or $(ONLY),.)

ci:  ## test and test-site with the versions that were tested together
	$(MAKE) -k CONSTRAINTS=tools/locks/newest.txt test test-site

test-oldest:  ## test and test-site on the oldest torch supported, in .venv-oldest; needs Chromium
	$(MAKE) -k VENV=.venv-oldest CONSTRAINTS=tools/locks/oldest.txt PARTS="notebooks package" test test-site

test-long: $(VENV)/tested  ## the tests that take minutes: two hosts cut off and slowed (as root), Ray, the PDF
	$(BIN)/pip install --quiet -e ".[ray]"
	$(PYTEST) -m long --timeout=3600 --durations=0 tests

# In an environment of its own. DeepSpeed alone has no wheel: the setuptools of release.txt builds it.
FRAMEWORKS := .venv-frameworks
test-frameworks: $(FRAMEWORKS)/installed  ## what Transformers, DeepSpeed, Lightning and others write is read right: 7 GB
	OMP_NUM_THREADS=1 PYTHONPATH=src $(FRAMEWORKS)/bin/python -m pytest -q -n 2 --durations=5 -k "$(ONLY)" tests/frameworks

$(FRAMEWORKS)/installed: tools/locks/frameworks.txt
	"$(PYTHON)" -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet $(BY_HASH) tools/locks/release.txt
	$(FRAMEWORKS)/bin/pip install --quiet --no-build-isolation $(BY_HASH) $< --no-binary deepspeed
	@touch $@

# Also on the oldest torch: make test-simulated VENV=.venv-oldest CONSTRAINTS=tools/locks/oldest.txt
GPUS ?= 1 2 4
test-simulated: SIMULATE = $(BIN)/torchclinic simulate --with-real-gpu $(or $(N),4)
test-simulated: simulated  ## run all that wants GPUs on simulated ones: the tests, programs and chapters, on 1, 2 and 4
	$(PYTEST) --dist loadfile tests/test_gpt.py tests/test_rungs.py tests/test_gpus.py tests/test_training.py
	for n in $(GPUS); do $(MAKE) --no-print-directory simulated-chapters N=$$n || exit 1; done

# Left out: chapter 07, which measures how much faster a GPU gets, and cells on torch.compile, which does nothing there.
simulated-chapters: SIMULATE = $(BIN)/torchclinic simulate --with-real-gpu $(N)
simulated-chapters:
	$(PYTEST) $(NBVAL_LAX) $(foreach cell,45 46 47,--deselect "notebooks/errors_imports.ipynb::Cell $(cell)") \
	  $(filter-out notebooks/07_%,$(if $(filter 1,$(N)),$(shell grep -L "two_gpus()" notebooks/*.ipynb),$(wildcard notebooks/*.ipynb)))

ROUNDS ?= 5
stress: $(VENV)/tested  ## run chapters and tests again and again on a machine that is kept busy, and say what fell how often: hours
	@trap 'kill $$busy' EXIT; trap 'exit 130' HUP INT TERM; busy=; \
	for _ in $$(seq "$$(getconf _NPROCESSORS_ONLN)"); do while :; do :; done & busy="$$busy $$!"; done; \
	fell=$$(for _ in $$(seq $(ROUNDS)); do make -k notebooks package || echo "FAILED round"; done | \
	grep -Eo '^(FAILED|ERROR) [^ ]+' | sort | uniq -c); echo "$$fell"; test -z "$$fell"

bench: $(VENV)/tested  ## measure the book's tools against their peers: half an hour, or GROUPS="loop kills"; on a quiet machine
	RES_OPTIONS=timeout:1 OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.run $(GROUPS)

# In an environment of its own, which needs no PyTorch.
dist:  ## build and check the wheel and the sdist, in dist
	"$(PYTHON)" -m venv .venv-dist
	.venv-dist/bin/pip install --quiet $(BY_HASH) tools/locks/release.txt
	rm -rf dist/torchladder-*
	.venv-dist/bin/python -m build --no-isolation --outdir dist
	.venv-dist/bin/twine check --strict dist/torchladder-*

# For all Pythons from 3.11 on, on Linux and macOS. What a file has already stays, unless UPGRADE=--upgrade.
LOCK = uv pip compile --quiet $(UPGRADE) --universal --python-version 3.11 --fork-strategy fewest --generate-hashes \
	--no-annotate --no-emit-package torchladder --custom-compile-command "make lock"
lock:  ## renew tools/locks: the versions and hashes for CI; needs uv
	$(LOCK) --extra test pyproject.toml requirements.txt -o tools/locks/newest.txt
	$(LOCK) --extra test pyproject.toml requirements.txt --group oldest -o tools/locks/oldest.txt
	$(LOCK) --group release -o tools/locks/release.txt
	$(LOCK) tests/frameworks/requirements.txt -o tools/locks/frameworks.txt

# As one commit without a history, since what was published before is not worth its space.
publish:  ## push the site that make book has built to the branch gh-pages, from which Kaggle and Colab fetch notebooks
	@test -f $(HTML)/index.html || { echo "There is no site in $(HTML): run make book first."; exit 1; }
	touch $(HTML)/.nojekyll
	repository=$$(git rev-parse --absolute-git-dir) && GIT_INDEX_FILE=$$(mktemp -u) && export GIT_INDEX_FILE && \
	git -C $(HTML) --git-dir="$$repository" --work-tree=. add --all --force . && \
	commit=$$(git commit-tree "$$(git write-tree)" -m "The site of $$(git rev-parse --short HEAD)") && \
	rm "$$GIT_INDEX_FILE" && git push --force origin "$$commit:refs/heads/gh-pages"

venv: $(VENV)/installed  ## make .venv and install requirements.txt

# Such a file lists all that is needed. Without --no-deps pip looks at newer releases of what is
# asked for with an extra, as coverage[toml] is, and ends since these have no hash there.
BY_HASH := --require-hashes --no-deps --only-binary=:all: -r
# With CONSTRAINTS everything is there by then, or it is an error: nothing else is fetched.
INSTALL = $(BIN)/pip install $(if $(CONSTRAINTS),--quiet --no-index --no-build-isolation)

$(VENV)/installed: requirements.txt pyproject.toml $(CONSTRAINTS)
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or later is needed; this is {v[0]}.{v[1]}. Use: make PYTHON=/path/to/python3.11")'
	@echo "Installing what requirements.txt lists into $(VENV): at first several minutes, and on Linux about 6 GB of disk."
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/pip install --quiet $(if $(CONSTRAINTS),$(BY_HASH) $(CONSTRAINTS),--upgrade pip)
	$(INSTALL) -r requirements.txt
	@touch $@

# What only the tests need, such as the libraries that they compare with.
$(VENV)/tested: $(VENV)/installed
	$(INSTALL) -e ".[test]"
	@touch $@

clean:  ## remove what was built; .venv stays
	rm -rf _build dist conf.py
