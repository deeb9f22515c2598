# `make help` lists the targets. Everything else is in tools/.
SHELL := /bin/bash
CONFIG ?= configs/default.toml
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup build train test python soak bench asan tsan clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10
	@echo
	@echo "make train CONFIG=configs/zero1.toml ARGS='--set train.steps=100' trains another configuration"

setup:  ## install what is missing (Debian packages as root, .venv with the pinned torch)
	@tools/setup

build: setup  ## build everything into build/
	@tools/build

train: setup  ## train the default configuration on real text; leaves runs/NAME with report.html
	@tools/build dovetail
	@build/bin/dovetail train $(CONFIG) $(ARGS)

test: setup  ## build and run every test
	@tools/build
	@tools/test build

python: setup  ## build the Python package in place: PYTHONPATH=python .venv/bin/python -c 'import dovetail'
	@tools/build dovetail_python

soak: setup  ## kill or stop a rank at 200 random moments; the others must name it in time
	@tools/build test_comm
	@DOVETAIL_SOAK=$${SOAK:-200} build/bin/test_comm --gtest_filter='PeerProcesses.*'

bench: setup  ## the comparison with FSDP2 and DDP (tools/bench NAME runs the other benchmarks)
	@tools/build
	@tools/bench

asan: setup  ## build with the address sanitizer and run the tests
	@SANITIZE=address tools/build
	@ASAN_OPTIONS=detect_leaks=0 tools/test build-address

tsan: setup  ## build with the thread sanitizer and run the tests
	@SANITIZE=thread tools/build
	@TSAN_OPTIONS="suppressions=$(CURDIR)/tests/tsan.supp" tools/test build-thread

clean:  ## remove build folders (not runs, not .venv)
	@rm -rf build build-address build-thread
