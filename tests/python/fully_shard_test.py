"""The Python face on ranks that are processes over Gloo.

Run with `python tests/python/main.py fully_shard_test`; RANKS_VERBOSE=1 shows the time of every check.
"""

import unittest

import accumulation_checks
import argument_checks
import backward_checks
import behind_checks
import case_checks
import case_state_checks
import compile_checks
import exit_checks
import feature_checks
import gathered_checks
import gradient_checks
import huggingface_checks
import memory_checks
import method_checks
import mistake_checks
import parity_checks
import ranks
import tensor_parallel_checks
import tensor_parallel_state_checks
import tensor_parallel_tensor_checks
import training_checks
import unit_checks
import unshard_checks


FACE = (accumulation_checks, argument_checks, backward_checks, behind_checks, case_checks, case_state_checks,
        exit_checks, feature_checks, gathered_checks, gradient_checks, memory_checks, method_checks, mistake_checks,
        training_checks, unit_checks, unshard_checks)
TENSOR_PARALLEL = (tensor_parallel_checks, tensor_parallel_state_checks, tensor_parallel_tensor_checks)


class Parity(ranks.Checks):
    """With torch's own fully_shard."""

    def test_one_rank(self):
        self.on(1, parity_checks, huggingface_checks)

    def test_two_ranks(self):
        self.on(2, parity_checks, huggingface_checks)

    def test_four_ranks(self):
        self.on(4, parity_checks, huggingface_checks)


class Face(ranks.Checks):
    def test_two_ranks(self):
        self.on(2, *FACE, compile_checks)

    def test_four_ranks(self):
        self.on(4, *FACE)


class TensorParallel(ranks.Checks):
    """Two ranks: on meshes of one data-parallel or one tensor-parallel rank."""

    def test_two_ranks(self):
        self.on(2, *TENSOR_PARALLEL)

    def test_four_ranks(self):
        self.on(4, *TENSOR_PARALLEL)


if __name__ == "__main__":
    unittest.main()
